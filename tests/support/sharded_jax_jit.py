"""Parameters divided over a mesh under ``jax.jit``: the compiler divides, or types say how arrays are divided."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
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
    specs_of,
    stepped_alone,
)

ALL: Shapes = {
    **SMALL,
    # of 2**16 elements: the largest that are stacked with others of their shape
    "limit_rows": ((256, 256), P("x")),
    "limit_columns": ((256, 256), P(None, "y")),
    "large_rows": ((264, 256), P("x")),
    "large_columns": ((264, 256), P(None, "x")),
    "large_both": ((264, 256), P("x", "y")),
    "large_whole": ((264, 256), P()),
    "large_cube": ((2, 264, 128), P(None, "y", "x")),
    "large_vector": ((67584,), P(("x", "y"))),
}
#: For what takes long to compile.
FEW: Shapes = {name: ALL[name] for name in ("rows", "columns", "both", "cube", "large_rows")}
TYPED: Shapes = {key: SMALL[key] for key in ("rows", "columns", "whole", "both", "pair", "vector", "cube")}
#: The compiler joins sums of all parameters over the same devices: x, y, both, both in the other order. What depends on
#: sums of rows it joins within a parameter, of which 13 are divided: at most two messages for each.
SUMS = {"lars": 4, "lamb": 4, "unfactored": 4, "adafactor": 26}


def state_specs(state: Any, shapes: Shapes, stacked_axes: int = 0) -> Any:
    """As the parameter along axes that it shares with it; scalars and the factors of Kron whole, one for each layer."""

    def own(path: Any, x: Any) -> PartitionSpec:
        name = next((part.key for part in path if isinstance(part, jax.tree_util.DictKey)), None)
        kept = {part.name for part in path if isinstance(part, jax.tree_util.GetAttrKey)}
        if name is None or "refresh" in kept:
            return P()
        shape, spec = shapes[name]
        parts = [*spec, *[None] * (len(shape) - len(spec))]
        if kept & {"Q", "L"}:
            return P(*parts[:stacked_axes])
        return P(*[part if n == m else None for n, m, part in zip(x.shape, shape, parts, strict=True)])

    return jax.tree_util.tree_map_with_path(own, state)


def check_shardings(tree: Any, specs: Any, over: jax.sharding.Mesh) -> None:
    wrong = []
    wanted = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    for (path, x), spec in zip(jax.tree_util.tree_flatten_with_path(tree)[0], wanted, strict=True):
        fits = x.sharding.is_equivalent_to(NamedSharding(over, spec), x.ndim)
        if not (fits or (x.ndim == 0 and x.sharding.is_fully_replicated)):
            got = getattr(x.sharding, "spec", x.sharding)
            wrong.append(f"{jax.tree_util.keystr(path)}: {got} instead of {spec}")
    assert not wrong, f"{len(wrong)} of {len(wanted)} are divided otherwise: " + "; ".join(wrong)


@dataclass(frozen=True)
class Run:
    """Some steps over devices, and the same on one."""

    before: Any
    alone: Any
    #: The state by a plain call of init and by a compiled one; parameters and state after the steps that follow each.
    firsts: list[Any]
    lasts: list[Any]
    #: What the types of updates and of their parameters say, by name.
    types: dict[str, tuple[Any, Any]]
    #: How many programs were compiled, and the step as it was.
    programs: int
    step: Any


def run(solver: Any, shapes: Shapes, kind: Any = AxisType.Auto, steps: int = STEPS, dtype: str = DTYPE) -> Run:
    types = {}

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = solver.update(grads, state, params)
        for key in shapes:
            types[key] = tuple(tuple(jax.typeof(x[key]).sharding.spec) for x in (updates, params))
        return optax.apply_updates(params, updates), state

    before, *grads = (numbers(shapes, seed, dtype) for seed in range(steps + 1))
    alone = stepped_alone(solver, before, grads)
    with nullcontext() if kind == AxisType.Auto else jax.set_mesh(mesh(kind)):
        start, *parts = (placed(shapes, tree, mesh(kind)) for tree in (before, *grads))
        firsts, lasts, compiled = [solver.init(start), jax.jit(solver.init)(start)], [], jax.jit(step)
        for first in firsts:
            last = start, first
            for g in parts:
                last = compiled(*last, g)
            lasts.append(last)
        lowered = compiled.lower(*lasts[0], parts[0])
    return Run(before, alone, firsts, lasts, types, compiled._cache_size(), lowered)


def steps(
    solver: Any, shapes: Shapes, kind: Any = AxisType.Auto, *, stacked_axes: int = 0, wrapped: bool = False
) -> Run:
    """Numbers are those of one device, and everything stays where its parameter is.

    wrapped: the first state is optax's.
    """
    found = run(solver, shapes, kind, 4 if wrapped else STEPS)
    for first, (params, state) in zip(found.firsts, found.lasts, strict=True):
        check_equal(params, found.alone[0], found.before)
        check_equal(state, found.alone[1])
        check_shardings(params, specs_of(shapes), mesh(kind))
        for own in (state,) if wrapped else (first, state):
            check_shardings(own, state_specs(own, shapes, stacked_axes), mesh(kind))
    assert found.programs == 1 or wrapped or kind == AxisType.Explicit, f"{found.programs} programs"
    assert all(update == param for update, param in found.types.values()), f"types of updates: {found.types}"
    return found


def divided_by_the_compiler(name: str) -> None:
    """What is sent are sums alone, few of them, and no whole parameter."""
    found = steps(OPTIMIZERS[name](), FEW if name == "kron" else ALL)
    if name != "kron":
        sent = messages(found.step.compile().as_text())
        kinds = Counter(kind for kind, _ in sent)
        assert set(kinds) == {"all-reduce"}, f"sent are {dict(kinds)}"
        assert 0 < kinds["all-reduce"] <= SUMS[name], f"{kinds['all-reduce']} messages for sums, more than {SUMS[name]}"
        assert all(size < 2**16 for _, size in sent), f"whole parameters are sent: {sent}"


def nothing_sent_for_copies(name: str) -> None:
    whole = {key: (shape, P()) for key, (shape, _) in FEW.items()}
    solver, params = OPTIMIZERS[name](), placed(whole, numbers(whole, 0), mesh())
    found = messages(jax.jit(solver.update).lower(params, jax.jit(solver.init)(params), params).compile().as_text())
    assert not found, f"copies need nothing of each other, but sent are {found}"


def plain_calls(name: str) -> None:
    """A step that nobody compiles."""
    shapes = {key: ALL[key] for key in ("rows", "columns")}
    solver, before, g = OPTIMIZERS[name](), numbers(shapes, 0), numbers(shapes, 1)
    wanted, wanted_state = solver.update(g, solver.init(before), before)
    start = placed(shapes, before, mesh())
    updates, state = solver.update(placed(shapes, g, mesh()), solver.init(start), start)
    check_equal(updates, wanted)
    check_equal(state, wanted_state)
    check_shardings(updates, specs_of(shapes), mesh())
    check_shardings(state, state_specs(state, shapes), mesh())


def list_cases() -> Cases:
    found: Cases = {}
    for name, make in OPTIMIZERS.items():
        shapes = {key: TYPED[key] for key in ("rows", "columns", "both")} if name in ("lars", "kron") else TYPED
        found[f"{name}: divided by the compiler"] = partial(divided_by_the_compiler, name)
        found[f"{name}: copies send nothing"] = partial(nothing_sent_for_copies, name)
        found[f"{name}: explicit axes"] = lambda make=make, shapes=shapes: steps(make(), shapes, AxisType.Explicit)
    for name in ("adafactor", "kron"):
        found[f"{name}: without jit"] = partial(plain_calls, name)
    kron, lamb, adafactor = (OPTIMIZERS[name] for name in ("kron", "lamb", "adafactor"))
    few: Shapes = {name: ALL[name] for name in ("rows", "both", "vector")}
    # factors of stacked layers are where their layers are
    for kind, spec in ((AxisType.Auto, P("x")), (AxisType.Explicit, P("x", "y"))):
        stack = partial(steps, kron(stacked_axes=1), {"layers": ((8, 6, 4), spec)}, kind, stacked_axes=1)
        found[f"kron: layers of a stack, {kind.name} axes"] = stack
    for text, solver in {
        "optax.masked": optax.masked(adafactor(), {name: name != "both" for name in few}),
        "optax.MultiSteps": optax.MultiSteps(lamb(), every_k_schedule=2),
        "optax.chain": optax.chain(optax.clip_by_global_norm(1.0), adafactor()),
        "max_grad_norm and skip": lamb(max_grad_norm=1.0, on_nonfinite="skip"),
    }.items():
        found[text] = partial(steps, solver, few, wrapped=True)
    return found


CASES = list_cases()
DAY = {"lars: explicit axes"}
