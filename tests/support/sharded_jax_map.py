"""Whole steps inside ``jax.shard_map``, where every device sees its own part of a parameter."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sharded_jax import (
    DEVICES,
    OPTIMIZERS,
    SMALL,
    STEPS,
    Cases,
    P,
    check_equal,
    dtype,
    mesh,
    messages,
    numbers,
    placed,
    primitives,
    specs_of,
    state_specs,
)

from thalweg.errors import ParameterError
from thalweg.optax import lars, mixture

#: Independent layers along the first axis, divided like stages of a pipeline; and within the layers besides.
STAGES = {"stages": ((8, 6, 4), P("x")), "parted": ((8, 4, 6), P("x", "y")), "within": ((3, 8, 4), P(None, "x"))}


#: One message for each of six divided parameters (of Kron four) and each round: norms; averages of rows, columns and
#: both of them, over the mesh axes of each, then the size of the step. Kron gathers parameter, gradient and momentum.
MOST = {"lars": 6, "lamb": 6, "unfactored": 12, "adafactor": 16, "kron": 12}


@dataclass(frozen=True)
class Run:
    before: Any
    alone: Any
    parted: Any
    #: One step as it is traced.
    step: Any
    #: Programs compiled for all steps.
    programs: int


def step_of(solver: Any) -> Any:
    def step(params: Any, state: Any, g: Any) -> Any:
        updates, state = solver.update(g, state, params)
        return optax.apply_updates(params, updates), state

    return step


def stepped_alone(solver: Any, before: Any, draws: Sequence[Any]) -> Any:
    """Parameters and state after some steps on one device."""
    result, compiled = (before, solver.init(before)), jax.jit(step_of(solver))
    for g in draws:
        result = compiled(*result, g)
    return result


def differ(one: Any, other: Any, shapes: Mapping[str, Any], of: str | None = None) -> bool:
    """Whether two optimizers go different ways on one device: else a case with one of them could not fail."""
    draws = [numbers(shapes, seed, of or dtype()) for seed in range(STEPS + 1)]
    first, second = (stepped_alone(solver, draws[0], draws[1:]) for solver in (one, other))
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return not all(np.array_equal(x, y) for x, y in pairs)


def run(
    make: Callable[..., Any],
    shapes: Mapping[str, Any],
    *,
    check_vma: bool = True,
    grads: Callable[[int], Any] | None = None,
    steps: int = STEPS,
    of: str | None = None,
    stacked_axes: int = 0,
    **options: Any,
) -> Run:
    """Some steps on parts, init included, and the same on one device."""
    make = partial(make, stacked_axes=stacked_axes)
    whole, solver = make(), make(specs=specs_of(shapes))
    before = numbers(shapes, 0, of or dtype())
    draws = [grads(seed) if grads else numbers(shapes, seed, of or dtype()) for seed in range(1, steps + 1)]
    alone = stepped_alone(whole, before, draws)
    specs, states = specs_of(shapes), state_specs(jax.eval_shape(whole.init, before), shapes, stacked_axes)
    mapped = partial(jax.shard_map, mesh=mesh(), check_vma=check_vma, **options)
    step = jax.jit(mapped(step_of(solver), in_specs=(specs, states, specs), out_specs=(specs, states)))
    start = placed(shapes, before, mesh())
    parted = start, jax.jit(mapped(solver.init, in_specs=(specs,), out_specs=states))(start)
    for g in draws:
        parted = step(*parted, placed(shapes, g, mesh()))
    programs = step._cache_size()
    return Run(before, alone, parted, step.trace(*parted, placed(shapes, draws[0], mesh())), programs)


@cache
def run_of(name: str, check_vma: bool) -> Run:
    few = ("rows", "columns", "both", "pair") if name == "kron" else tuple(SMALL)
    return run(OPTIMIZERS[name], {key: SMALL[key] for key in few}, check_vma=check_vma)


def check_numbers(found: Run) -> None:
    check_equal(found.parted[0], found.alone[0], found.before)
    check_equal(found.parted[1], found.alone[1])


def same_numbers(name: str, check_vma: bool) -> None:
    check_numbers(run_of(name, check_vma))


def few_messages(name: str, check_vma: bool, most: int) -> None:
    """One for each round of sums and set of mesh axes, and nothing but sums."""
    kinds = Counter(kind for kind, _ in messages(run_of(name, check_vma).step.lower().compile().as_text()))
    assert set(kinds) == {"all-reduce"}, f"sent are {dict(kinds)}"
    assert kinds["all-reduce"] <= most, f"{kinds['all-reduce']} messages for sums, more than {most}"


def one_program(name: str) -> None:
    assert run_of(name, True).programs == 1, f"{run_of(name, True).programs} programs"


def stages(name: str, check_vma: bool) -> None:
    check_numbers(run(OPTIMIZERS[name], STAGES, stacked_axes=1, check_vma=check_vma))
    assert name == "kron" or differ(OPTIMIZERS[name](), OPTIMIZERS[name](stacked_axes=1), {"within": STAGES["within"]})


def large_twins(name: str) -> None:
    """Of so many elements on each device that only what has to be whole is stacked."""
    twin = ((8, 66000), P("x"))
    check_numbers(run(OPTIMIZERS[name], {"first": twin, "second": twin}, steps=2))


def refused_without_specs(name: str) -> None:
    solver, start = OPTIMIZERS[name](), placed(SMALL, numbers(SMALL, 0, dtype()), mesh())
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
    make, shapes = partial(OPTIMIZERS[name], max_grad_norm=0.5), {key: SMALL[key] for key in ("rows", "both", "whole")}
    check_numbers(run(make, shapes))
    assert differ(make(), OPTIMIZERS[name](), shapes)


def skipped_by_all(name: str, check_vma: bool) -> None:
    """One number on one device keeps all of them from stepping."""
    shapes = {key: SMALL[key] for key in ("rows", "both", "whole")}

    def grads(seed: int) -> Any:
        draw = numbers(shapes, seed, dtype())
        return {**draw, "both": draw["both"].at[-1, -1].set(jnp.nan)} if seed == 2 else draw

    found = run(partial(OPTIMIZERS[name], on_nonfinite="skip"), shapes, grads=grads, check_vma=check_vma)
    check_numbers(found)
    assert (int(found.parted[1].skipped), int(found.parted[1].count)) == (1, STEPS - 1)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(found.parted))


def mixed() -> None:
    """One norm and one decision for parameters of two rules, which the devices agree on."""
    shapes = {key: SMALL[key] for key in ("rows", "both", "whole")}

    def make(stacked_axes: int = 0, specs: Any = None, **options: Any) -> Any:
        entries = [("rows", OPTIMIZERS["lamb"](specs=specs)), ("*", OPTIMIZERS["adafactor"](specs=specs))]
        return mixture(entries, specs=specs, **{"max_grad_norm": 0.5, "on_nonfinite": "skip", **options})

    def grads(seed: int) -> Any:
        draw = numbers(shapes, seed, dtype())
        return {**draw, "both": draw["both"].at[-1, -1].set(jnp.nan)} if seed == 2 else draw

    found = run(make, shapes, grads=grads)
    check_numbers(found)
    assert int(found.parted[1].skipped) == 1
    assert differ(make(), make(max_grad_norm=None), shapes)


def skipped_by_all_layers(name: str) -> None:
    """One number in a layer of one device keeps all of them from stepping."""

    def grads(seed: int) -> Any:
        draw = numbers(STAGES, seed, dtype())
        return {**draw, "stages": draw["stages"].at[-1, -1, -1].set(jnp.nan)} if seed == 2 else draw

    found = run(partial(OPTIMIZERS[name], on_nonfinite="skip"), STAGES, stacked_axes=1, grads=grads)
    check_numbers(found)
    assert (int(found.parted[1].skipped), int(found.parted[1].count)) == (1, STEPS - 1)


def rounded_alike(check_vma: bool) -> None:
    """Without ratios nothing is summed, and every bit depends on the draw alone."""
    shapes = {key: SMALL[key] for key in ("rows", "columns", "pair", "cube")}
    make = partial(lars, 0.003, trust_ratio_mask=False)
    found = run(partial(make, rounding="stochastic"), shapes, of="bfloat16", check_vma=check_vma)
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
    solver, before = OPTIMIZERS[name](), numbers(shapes, 0, dtype())
    draws = {key: jnp.stack([g] * 2) for key, g in numbers(shapes, 1, dtype()).items()}
    draws = {key: g * jnp.asarray([0.5, 1.5], g.dtype).reshape(2, *[1] * (g.ndim - 1)) for key, g in draws.items()}

    def step(params: Any, state: Any, own: Any) -> Any:
        g = jax.tree.map(lambda x: jax.lax.pmean(jnp.squeeze(x, 0), "y"), own)
        updates, state = solver.update(g, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=(P(), P(), P("y")), out_specs=(P(), P())))
    params, state = mapped(before, solver.init(before), draws)
    updates, wanted = jax.jit(solver.update)(numbers(shapes, 1, dtype()), solver.init(before), before)
    check_equal(params, optax.apply_updates(before, updates), before)
    check_equal(state, wanted)
    sent = sum(n for kind, n in primitives(mapped.trace(params, state, draws).jaxpr.jaxpr).items() if "psum" in kind)
    assert sent == len(shapes), f"{sent} sums, of which {len(shapes)} are the gradients'"


def one_axis_by_hand(name: str) -> None:
    """Only x is mapped over; y is the compiler's, and no affair of specs."""
    shapes = {key: (SMALL[key][0], P("x")) for key in ("rows", "both", "vector")}
    check_numbers(run(OPTIMIZERS[name], shapes, axis_names={"x"}))


def cases(devices: int) -> Cases:
    """All of them on most devices, on fewer the numbers."""
    found: Cases = {}
    for name in OPTIMIZERS:
        found[f"{name}: same numbers"] = partial(same_numbers, name, True)
    if devices < max(DEVICES):
        return found
    for name in OPTIMIZERS:
        found[f"{name}: same numbers, unchecked"] = partial(same_numbers, name, False)
        found[f"{name}: few messages"] = partial(few_messages, name, True, MOST[name])
        found[f"{name}: one program"] = partial(one_program, name)
        found[f"{name}: layers divided over devices"] = partial(stages, name, True)
        found[f"{name}: refused without specs"] = partial(refused_without_specs, name)
    for name in ("lars", "kron"):
        found[f"{name}: copies without specs"] = partial(copies, name)
    for name in ("lars", "adafactor"):
        found[f"{name}: one norm of all gradients"] = partial(joint_norm, name)
        found[f"{name}: a step is skipped by all devices"] = partial(skipped_by_all, name, name != "lars")
    for name in ("lamb", "kron"):
        found[f"{name}: a step is skipped by all layers"] = partial(skipped_by_all_layers, name)
    found["adafactor: only one axis of the mesh by hand"] = partial(one_axis_by_hand, "adafactor")
    found["lamb: layers divided over devices, unchecked"] = partial(stages, "lamb", False)
    found["stochastic rounding is the same on parts"] = partial(rounded_alike, True)
    found["kron: large parameters of one shape"] = partial(large_twins, "kron")
    found["kron: noise counts"] = noise_counts
    found["two rules: one norm and one decision"] = mixed
    return found
