"""Whole steps inside ``jax.shard_map``, where every device sees its own part of a parameter; and by native code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sharded_jax import (
    DTYPE,
    OPTIMIZERS,
    SMALL,
    STEPS,
    Cases,
    P,
    Shapes,
    check_equal,
    mesh,
    messages,
    numbers,
    placed,
    primitives,
    specs_of,
    step_of,
    stepped_alone,
)
from tolerances import FUSED

import thalweg.optax
from thalweg.errors import OptionError, ParameterError

FEW: Shapes = {key: SMALL[key] for key in ("rows", "both", "whole")}
#: Independent layers along the first axis, divided like stages of a pipeline; and within the layers besides.
STAGES: Shapes = {
    "stages": ((8, 6, 4), P("x")),
    "parted": ((8, 4, 6), P("x", "y")),
    "within": ((3, 8, 4), P(None, "x")),
}
#: One message for each of six divided parameters (of Kron two) and each round: norms; averages of rows, columns and
#: both of them, over the mesh axes of each, then the size of the step. Kron gathers parameter, gradient and momentum.
MOST = {"lars": 6, "lamb": 6, "unfactored": 12, "adafactor": 16, "kron": 6}


@dataclass(frozen=True)
class Run:
    before: Any
    alone: Any
    parted: Any
    #: One step as it is traced, and how many programs were compiled for all.
    step: Any
    programs: int


def differ(one: Any, other: Any, shapes: Shapes, dtype: str = DTYPE) -> bool:
    """Whether two optimizers go different ways on one device: else a case with one of them could not fail."""
    before, *draws = (numbers(shapes, seed, dtype) for seed in range(STEPS + 1))
    first, second = (stepped_alone(solver, before, draws) for solver in (one, other))
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return not all(np.array_equal(x, y) for x, y in pairs)


def run(
    make: Callable[..., Any],
    shapes: Shapes,
    *,
    check_vma: bool = True,
    bad: str = "",
    steps: int = STEPS,
    dtype: str = DTYPE,
    **options: Any,
) -> Run:
    """Some steps on parts, init included, and the same on one device; bad: what has a NaN in the second gradient."""
    whole, solver = make(), make(specs=specs_of(shapes))
    before, *draws = (numbers(shapes, seed, dtype) for seed in range(steps + 1))
    if bad:
        draws[1][bad] = draws[1][bad].at[(-1,) * draws[1][bad].ndim].set(jnp.nan)
    alone = stepped_alone(whole, before, draws)
    specs = specs_of(shapes)
    states = thalweg.optax.state_specs(jax.eval_shape(whole.init, before), before, specs)
    mapped = partial(jax.shard_map, mesh=mesh(), check_vma=check_vma, **options)
    step = jax.jit(mapped(step_of(solver), in_specs=(specs, states, specs), out_specs=(specs, states)))
    start = placed(shapes, before, mesh())
    parted = start, jax.jit(mapped(solver.init, in_specs=(specs,), out_specs=states))(start)
    for g in draws:
        parted = step(*parted, placed(shapes, g, mesh()))
    return Run(before, alone, parted, step.trace(*parted, placed(shapes, draws[0], mesh())), step._cache_size())


def check_numbers(found: Run) -> None:
    check_equal(found.parted[0], found.alone[0], found.before)
    check_equal(found.parted[1], found.alone[1])


def steps_on_parts(name: str, check_vma: bool = True) -> None:
    """The numbers of one device by one program, with few messages, which are sums."""
    shapes = {key: SMALL[key] for key in ("rows", "both")} if name == "kron" else SMALL
    found = run(OPTIMIZERS[name], shapes, check_vma=check_vma)
    check_numbers(found)
    assert found.programs == 1, f"{found.programs} programs"
    kinds = Counter(kind for kind, _ in messages(found.step.lower().compile().as_text()))
    assert set(kinds) == {"all-reduce"}, f"sent are {dict(kinds)}"
    assert kinds["all-reduce"] <= MOST[name], f"{kinds['all-reduce']} messages for sums, more than {MOST[name]}"


def stages(name: str, check_vma: bool = True) -> None:
    check_numbers(run(partial(OPTIMIZERS[name], stacked_axes=1), STAGES, check_vma=check_vma))
    assert name == "kron" or differ(OPTIMIZERS[name](), OPTIMIZERS[name](stacked_axes=1), {"within": STAGES["within"]})


def large_twins(name: str) -> None:
    """Of so many elements on each device that only what has to be whole is stacked."""
    twin = ((8, 66000), P("x"))
    check_numbers(run(OPTIMIZERS[name], {"first": twin, "second": twin}, steps=2))


def refused_without_specs(name: str) -> None:
    solver, start = OPTIMIZERS[name](), placed(SMALL, numbers(SMALL, 0), mesh())
    part = {"layer": {"rows": start["rows"]}}

    def step(part: Any) -> Any:
        return solver.update(part, jax.tree.map(jnp.zeros_like, jax.eval_shape(solver.init, part)), part)

    def outside(function: Any) -> Any:
        return jax.shard_map(lambda own: (function(own), jnp.ones(()))[1], mesh=mesh(), in_specs=P("x"), out_specs=P())

    for function in (solver.init, step):
        try:
            outside(function)(part)
            message = "norms of parts were taken for norms of parameters"
        except ParameterError as error:
            message = str(error)
        assert re.search(r"'layer\.rows'.*specs", message), message


def joint_norm(name: str) -> None:
    """The limit is far below the norm of any part, so that a norm of parts would show."""
    make = partial(OPTIMIZERS[name], max_grad_norm=0.5)
    check_numbers(run(make, FEW))
    assert differ(make(), OPTIMIZERS[name](), FEW)


def skipped_by_all(name: str, shapes: Shapes, bad: str, check_vma: bool = True, **options: Any) -> None:
    """One number on one device keeps all of them from stepping."""
    make = partial(OPTIMIZERS[name], on_nonfinite="skip", **options)
    found = run(make, shapes, bad=bad, check_vma=check_vma)
    check_numbers(found)
    assert (int(found.parted[1].skipped), int(found.parted[1].count)) == (1, STEPS - 1)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(found.parted))


def mixed() -> None:
    """One norm and one decision for parameters of two rules, which the devices agree on."""

    def make(specs: Any = None, **options: Any) -> Any:
        entries = [("rows", OPTIMIZERS["lamb"](specs=specs)), ("*", OPTIMIZERS["adafactor"](specs=specs))]
        given = {"max_grad_norm": 0.5, "on_nonfinite": "skip", **options}
        return thalweg.optax.mixture(entries, specs=specs, **given)

    found = run(make, FEW, bad="both")
    check_numbers(found)
    assert int(found.parted[1].skipped) == 1
    assert differ(make(), make(max_grad_norm=None), FEW)


def rounded_alike() -> None:
    """Without ratios nothing is summed, and every bit depends on the draw alone."""
    shapes = {key: SMALL[key] for key in ("rows", "columns", "pair", "cube")}
    make = partial(thalweg.optax.lars, 0.003, trust_ratio_mask=False)
    found = run(partial(make, rounding="stochastic"), shapes, dtype="bfloat16")
    for key in shapes:
        x, y = (np.asarray(result[0][key], np.float32) for result in (found.parted, found.alone))
        assert np.array_equal(x, y), f"{key}: {np.mean(x != y):.0%} of the numbers are rounded otherwise"
    assert differ(make(), make(rounding="stochastic"), shapes, "bfloat16")


def noise_counts() -> None:
    """Else Kron's numbers would not show where its noise comes from."""
    assert differ(OPTIMIZERS["kron"](seed=1), OPTIMIZERS["kron"](seed=2), {"both": SMALL["both"]})


def copies(name: str) -> None:
    """Parameters on every device, gradients summed over them: as usual, and without specs."""
    shapes = {key: (SMALL[key][0], P()) for key in ("rows", "both", "vector")}
    solver, before = OPTIMIZERS[name](), numbers(shapes, 0)
    draws = {key: jnp.stack([g] * 2) for key, g in numbers(shapes, 1).items()}
    draws = {key: g * jnp.asarray([0.5, 1.5], g.dtype).reshape(2, *[1] * (g.ndim - 1)) for key, g in draws.items()}

    def step(params: Any, state: Any, own: Any) -> Any:
        g = jax.tree.map(lambda x: jax.lax.pmean(jnp.squeeze(x, 0), "y"), own)
        updates, state = solver.update(g, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=(P(), P(), P("y")), out_specs=(P(), P())))
    params, state = mapped(before, solver.init(before), draws)
    updates, wanted = jax.jit(solver.update)(numbers(shapes, 1), solver.init(before), before)
    check_equal(params, optax.apply_updates(before, updates), before)
    check_equal(state, wanted)
    sent = sum(n for kind, n in primitives(mapped.trace(params, state, draws).jaxpr.jaxpr).items() if "psum" in kind)
    assert sent == len(shapes), f"{sent} sums, of which {len(shapes)} are the gradients'"


def one_axis_by_hand(name: str) -> None:
    """Only x is mapped over; y is the compiler's, and no affair of specs."""
    shapes = {key: (SMALL[key][0], P("x")) for key in ("rows", "both", "vector")}
    check_numbers(run(OPTIMIZERS[name], shapes, axis_names={"x"}))


NATIVE: Shapes = {
    "w": ((4, 15), P("x")),
    "v": ((2, 12), P(None, "y")),
    "b": ((3,), P()),
    "cube": ((2, 8, 5), P("y", "x")),
}


def map_parts(make: Callable[..., Any], params: Any, specs: Any) -> Any:
    states = thalweg.optax.state_specs(make().init(params), params, specs)
    parts: Any = dict(mesh=mesh(), in_specs=(specs, states, specs), out_specs=(specs, states))
    return jax.shard_map(thalweg.optax.make_step(make(specs=specs)), **parts)


def steps_by_native_code(make: Callable[..., Any], names: str, *, exact: bool = False, native: bool = True) -> None:
    """Each device steps its parts by native code where no sum goes over them; else the step is XLA's."""
    shapes = {name: NATIVE[name] for name in names.split()}
    params, grads = (numbers(shapes, seed) for seed in (0, 1))
    solver = make()

    def step_thrice(step: Any, params: Any, state: Any, grads: Any) -> tuple[str, Any]:
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads).compile()
        for _ in range(3):
            params, state = compiled(params, state, grads)
        return compiled.as_text(), (params, state)

    copied = jax.tree.map(jnp.copy, params)
    text, expected = step_thrice(thalweg.optax.make_step(solver), copied, solver.init(params), grads)
    assert ("thalweg_step" in text) == native
    mapped = map_parts(make, params, specs_of(shapes))
    for step in (thalweg.optax.make_step(solver), mapped):
        start = placed(shapes, jax.tree.map(jnp.copy, params), mesh())
        text, found = step_thrice(step, start, solver.init(start), placed(shapes, grads, mesh()))
        assert ("thalweg_step" in text) == (exact or (step is mapped and native))  # b is whole everywhere
        if native:
            assert "all-gather" not in text
            assert ("all-reduce" in text) == (not exact)
        assert found[0]["w"].sharding.spec[0] == "x"
        check_equal(found, expected, tolerance=0.0 if exact else FUSED[DTYPE])


def found_together_by_xla() -> None:
    """Figures, and whether a step is finite."""
    params, grads = (numbers(NATIVE, seed, "float32") for seed in (0, 1))
    bad = {**grads, "w": grads["w"].at[3, 7].set(jnp.inf)}

    def with_stats(**own: Any) -> Any:
        return thalweg.optax.with_stats(thalweg.optax.adamw(0.1, **own))

    for make in (with_stats, partial(thalweg.optax.adamw, 0.1, on_nonfinite="skip")):
        mapped, alone = map_parts(make, params, specs_of(NATIVE)), thalweg.optax.make_step(make())
        found, expected = (jax.jit(step)(params, make().init(params), bad) for step in (mapped, alone))
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert jnp.allclose(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert make is with_stats or (found[0]["w"] == params["w"]).all()
    solver, over = thalweg.optax.lamb(0.1, engine="native"), placed(NATIVE, params, mesh())
    told = "nothing was refused"
    try:
        jax.jit(thalweg.optax.make_step(solver))(over, solver.init(over), placed(NATIVE, grads, mesh()))
    except OptionError as error:
        told = str(error)
    assert "several devices" in told, told


def list_cases() -> Cases:
    found: Cases = {}
    for name in OPTIMIZERS:
        found[f"{name}: steps on parts"] = partial(steps_on_parts, name)
        found[f"{name}: steps on parts, unchecked"] = partial(steps_on_parts, name, False)
        found[f"{name}: layers divided over devices"] = partial(stages, name)
        found[f"{name}: refused without specs"] = partial(refused_without_specs, name)
    for name in ("lars", "kron"):
        found[f"{name}: copies without specs"] = partial(copies, name)
    for name in ("lars", "adafactor"):
        found[f"{name}: one norm of all gradients"] = partial(joint_norm, name)
        found[f"{name}: skipped by all devices"] = partial(skipped_by_all, name, FEW, "both", name != "lars")
    for name in ("lamb", "kron"):
        found[f"{name}: skipped by all layers"] = partial(skipped_by_all, name, STAGES, "stages", stacked_axes=1)
    found["adafactor: only one axis of the mesh by hand"] = partial(one_axis_by_hand, "adafactor")
    found["lamb: layers divided over devices, unchecked"] = partial(stages, "lamb", False)
    found["stochastic rounding is the same on parts"] = rounded_alike
    found["kron: large parameters of one shape"] = partial(large_twins, "kron")
    found["kron: noise counts"] = noise_counts
    found["two rules: one norm and one decision"] = mixed
    adafactor = partial(thalweg.optax.adafactor, 0.1, min_dim_size_to_factor=4)
    kron = partial(thalweg.optax.kron, 0.1, precond_update_probability=1.0)
    native = steps_by_native_code
    found["adamw: native code"] = partial(native, partial(thalweg.optax.adamw, 0.1), "w v b cube", exact=True)
    found["lamb: native code"] = partial(native, partial(thalweg.optax.lamb, 0.1), "w v b cube")
    found["adafactor: native code"] = partial(native, adafactor, "w v b")
    found["muon: no native code"] = partial(native, partial(thalweg.optax.muon, 0.1), "w v", native=False)
    found["kron: no native code"] = partial(native, kron, "w v b", native=False)
    found["what devices find together is XLA's"] = found_together_by_xla
    return found


CASES = list_cases()
DAY = {
    "lars: steps on parts",
    "lars: refused without specs",
    "two rules: one norm and one decision",
    "adamw: native code",
    "lamb: native code",
}
