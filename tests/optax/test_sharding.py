"""Parameters divided over a mesh: steps are those of one device, under ``jax.jit`` and inside ``jax.shard_map``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from day import BY_DAY
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax_runs import compiled as jit
from tolerances import FLIPPED_CODES, FUSED, SHARDED

from thalweg.errors import OptionError, ParameterError, refusal
from thalweg.optax import adafactor, adamw, kron, lamb, lars, make_step, mixture, muon, sgd, state_specs, with_stats
from thalweg.optax.engines import check_native

pytestmark = pytest.mark.slow  # each case compiles a program for one device and one for eight

Shapes = Mapping[str, tuple[tuple[int, ...], P]]
#: Parameters by name: shape, and how it is divided over a mesh with the axes x and y. Three are of one shape.
SHAPES: Shapes = {
    "rows": ((16, 12), P("x")),
    "columns": ((16, 12), P(None, "y")),
    "whole": ((16, 12), P()),
    "both": ((8, 16), P("x", "y")),
    "vector": ((24,), P(("x", "y"))),
    "cube": ((2, 8, 16), P(None, "x", "y")),
}
FEW: Shapes = {name: SHAPES[name] for name in ("rows", "columns", "both")}
TWINS: Shapes = {"rows": SHAPES["rows"], "twin": SHAPES["rows"]}
COPIES: Shapes = {name: (shape, P()) for name, (shape, _) in FEW.items()}
#: Of more elements than parameters that are stacked with others of their shape.
LARGE: Shapes = {"rows": ((264, 256), P("x")), "both": ((264, 256), P("x", "y"))}
#: Independent layers along the first axis, divided like stages of a pipeline; and within the layers besides.
STAGES: Shapes = {
    "stages": ((8, 6, 4), P("x")),
    "parted": ((8, 4, 6), P("x", "y")),
    "within": ((3, 8, 4), P(None, "x")),
}
#: Stepped in place.
NATIVE: Shapes = {
    "w": ((4, 15), P("x")),
    "v": ((2, 12), P(None, "y")),
    "b": ((3,), P()),
    "cube": ((2, 8, 5), P("y", "x")),
}
#: Step sizes are such that parameters move by some of their size.
SOLVERS: Mapping[str, Callable[..., Any]] = {
    "lars": partial(lars, 100.0, weight_decay=0.01),
    "lamb": partial(lamb, 0.05, weight_decay=0.01),
    "adafactor": partial(adafactor, 0.05, min_dim_size_to_factor=4, momentum=0.9, weight_decay_rate=0.01),
    "kron": partial(kron, 0.05, damping=0.1, weight_decay=0.01, seed=3),
    "muon": partial(muon, 0.05, layout="torch", weight_decay=0.01),
}


@cache
def mesh(kind: Any = AxisType.Auto) -> jax.sharding.Mesh:
    """Of 4 x 2, so that its axes cannot be taken for one another."""
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)


def numbers(shapes: Shapes, seed: int, dtype: str = "float64") -> Any:
    """A tree on one device."""
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, (shape, _) in shapes.items()}


def place(shapes: Shapes, tree: Any, over: Any = None) -> Any:
    return {name: jax.device_put(x, NamedSharding(over or mesh(), shapes[name][1])) for name, x in tree.items()}


def specs_of(shapes: Shapes) -> dict[str, P]:
    return {name: spec for name, (_, spec) in shapes.items()}


def step_of(solver: Any) -> Any:
    def step(params: Any, state: Any, g: Any) -> Any:
        updates, state = solver.update(g, state, params)
        return optax.apply_updates(params, updates), state

    return step


class Found(NamedTuple):
    before: Any
    #: Parameters and state after some steps on one device, and on all.
    alone: Any
    parted: Any
    #: The program of a step.
    text: str


MESSAGE = re.compile(r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(")


def find_messages(text: str) -> list[tuple[str, int]]:
    found = []
    for result, kind in MESSAGE.findall(text):
        shapes = re.findall(r"\w+\[([\d,]*)\]", result)
        found.append((kind, max(int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes)))
    return found


def run(
    make: Callable[..., Any],
    shapes: Shapes,
    how: str = "jit",
    *,
    bad: str = "",
    dtype: str = "float64",
    as_step: Callable[[Any], Any] = step_of,
    **mapping: Any,
) -> Found:
    """Steps on one device and on all, by one program, where state is divided as ``state_specs`` says.

    how: "jit", "explicit" (types tell how arrays are divided), "map" or "map unchecked" (inside shard_map). bad: what
    has a NaN in its second gradient. mapping: options of shard_map.
    """
    specs, over = specs_of(shapes), mesh(AxisType.Explicit if how == "explicit" else AxisType.Auto)
    before, *draws = (numbers(shapes, seed, dtype) for seed in range(3))
    if bad:
        draws[1][bad] = draws[1][bad].at[(-1,) * draws[1][bad].ndim].set(jnp.nan)
    solver = make()
    state = jit(solver.init)(before)
    states, alone, step = state_specs(state, before, specs), (before, state), jit(as_step(solver))
    for g in draws:
        alone = step(*alone, g)
    init, step = solver.init, as_step(solver)
    if how.startswith("map"):
        own = make(specs=specs)
        mapped = partial(jax.shard_map, mesh=over, check_vma=how == "map", **mapping)
        init = mapped(own.init, in_specs=(specs,), out_specs=states)
        step = mapped(as_step(own), in_specs=(specs, states, specs), out_specs=(specs, states))
    with jax.set_mesh(over) if how == "explicit" else nullcontext():
        start, *parts = (place(shapes, tree, over) for tree in (before, *draws))
        first = parted = start, jit(init)(start)
        compiled = jit(step).lower(*parted, parts[0]).compile()
        for g in parts:
            parted = compiled(*parted, g)  # which takes only what is laid out as it was told
        for tree in (first, parted):
            check_places(tree, (specs, states), over)
    return Found(before, alone, parted, compiled.as_text())


def check_places(tree: Any, specs: Any, over: Any) -> None:
    wanted = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    for (path, x), spec in zip(jax.tree_util.tree_flatten_with_path(tree)[0], wanted, strict=True):
        fits = x.sharding.is_equivalent_to(NamedSharding(over, spec), x.ndim)
        assert fits or (x.ndim == 0 and x.sharding.is_fully_replicated), f"{path}: {x.sharding} instead of {spec}"


def check_equal(tree: Any, wanted: Any, before: Any = None, tolerance: float = SHARDED["float64"]) -> None:
    """before: what differences are measured from, zero unless told."""
    before = jax.tree.map(np.zeros_like, wanted) if before is None else before
    assert jax.tree.structure(tree) == jax.tree.structure(wanted)
    for (path, y), x, start in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(tree), jax.tree.leaves(before), strict=True
    ):
        x, y, start = (np.asarray(leaf, np.float64) for leaf in (x, y, start))
        error, size = np.abs(x - y).max(initial=0), np.abs(y - start).max(initial=0)
        assert error <= tolerance * size, f"{path} differs by {error:.1e} of {size:.1e}"


def check_numbers(found: Found, tolerance: float = SHARDED["float64"]) -> None:
    check_equal(found.parted[0], found.alone[0], found.before, tolerance)
    check_equal(found.parted[1], found.alone[1], None, tolerance)


def make_mixture(specs: Any = None) -> Any:
    entries = [("rows", sgd(0.05, 0.9, specs=specs)), ("*", SOLVERS["adafactor"](specs=specs))]
    return mixture(entries, specs=specs, max_grad_norm=0.5, on_nonfinite="skip")


#: Without ratios nothing is summed, and every bit depends on the draw alone.
RANDOM = partial(lars, 0.003, trust_ratio_mask=False, rounding="stochastic")


def make_telling(**own: Any) -> Any:
    return with_stats(adamw(0.1, **own))


#: What is run, and how many messages a step sends at most, all of them sums; None: also others.
#: The compiler joins sums over the same devices: x, y, both; inside shard_map each parameter and round has its own.
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], int | None]] = {
    "the compiler divides": ((SOLVERS["lamb"], {**SHAPES, **LARGE}), {}, 4),
    "the compiler divides rows and columns": ((SOLVERS["adafactor"], FEW), {}, 6),
    "the compiler divides matrices": ((SOLVERS["kron"], TWINS), {}, None),
    "copies send nothing": ((SOLVERS["lamb"], COPIES), {}, 0),
    "types tell": ((SOLVERS["lars"], SHAPES, "explicit"), {}, None),
    "types tell of rows and columns": ((SOLVERS["adafactor"], FEW, "explicit"), {}, None),
    "types tell of layers": (
        (partial(SOLVERS["kron"], stacked_axes=1), {"layers": ((8, 6, 4), P("x", "y"))}, "explicit"),
        {},
        None,
    ),
    "parts": ((SOLVERS["lars"], SHAPES, "map"), {}, 5),
    "parts of rows and columns": ((SOLVERS["adafactor"], SHAPES, "map"), {}, 14),
    "parts of matrices": ((SOLVERS["kron"], TWINS, "map"), {}, 6),
    "parts, unchecked": ((SOLVERS["lamb"], FEW, "map unchecked"), {}, 3),
    "layers": ((partial(SOLVERS["adafactor"], stacked_axes=1), STAGES, "map"), {}, None),
    "layers of matrices": ((partial(SOLVERS["muon"], stacked_axes=1), STAGES, "map unchecked"), {}, None),
    "one axis by hand": (
        (SOLVERS["adafactor"], {"rows": FEW["rows"], "both": ((8, 16), P("x"))}, "map"),
        dict(axis_names={"x"}),
        None,
    ),
    "one norm, under a limit": ((partial(sgd, 0.1, 0.9, max_grad_norm=0.5), FEW, "map"), {}, 3),
    "a mixture": ((make_mixture, FEW, "map"), {}, None),
    "rounded by chance": ((RANDOM, FEW, "map"), dict(dtype="bfloat16"), 0),
    "figures, in place": ((make_telling, NATIVE, "map"), dict(as_step=make_step), None),
}


#: By day left out: of each way to divide and each kind of rule another case has one, and each layout.
TOGETHER = ("the compiler divides rows and columns", "types tell of rows and columns", "types tell of layers")
TOGETHER += ("parts of matrices", "parts, unchecked", "layers of matrices")
TRIED = [case for case in CASES if not (BY_DAY and case in TOGETHER)]


@pytest.mark.parametrize("case", TRIED)
def test_steps_are_those_of_one_device(case: str) -> None:
    """And few messages are sent for them, none of which is a whole parameter."""
    arguments, options, most = CASES[case]
    found = run(*arguments, **options)
    check_numbers(found)
    if most is not None:
        messages = find_messages(found.text)
        assert {kind for kind, _ in messages} <= {"all-reduce"}, messages
        assert len(messages) <= most, messages
        assert all(size < 2**16 for _, size in messages), messages


BAD: dict[str, tuple[Any, Shapes, str, Any]] = {
    "parts": (partial(SOLVERS["lars"], on_nonfinite="skip"), FEW, "both", step_of),
    "layers": (partial(SOLVERS["lamb"], on_nonfinite="skip", stacked_axes=1), STAGES, "stages", step_of),
    "a mixture": (make_mixture, FEW, "columns", step_of),
    "in place": (partial(adamw, 0.1, on_nonfinite="skip"), NATIVE, "w", make_step),
}


@pytest.mark.parametrize("case", BAD)
def test_one_number_on_one_device_keeps_all_of_them_from_stepping(case: str) -> None:
    make, shapes, bad, as_step = BAD[case]
    found = run(make, shapes, "map", bad=bad, as_step=as_step)
    check_numbers(found)
    assert int(found.parted[1].skipped) == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found.parted))


def test_a_step_that_nobody_compiles() -> None:
    solver, shapes = SOLVERS["lars"](), {"rows": FEW["rows"]}
    before, g = numbers(shapes, 0), numbers(shapes, 1)
    start = place(shapes, before)
    found = solver.update(place(shapes, g), solver.init(start), start)
    check_equal(found, solver.update(g, solver.init(before), before))
    assert found[0]["rows"].sharding.is_equivalent_to(start["rows"].sharding, 2)


@pytest.mark.parametrize("name", ["lars", "kron"])
def test_parts_without_specs_are_refused(name: str) -> None:
    solver, part = SOLVERS[name](), {"layer": {"rows": place(SHAPES, numbers(SHAPES, 0))["rows"]}}

    def step(part: Any) -> Any:
        return solver.update(part, jax.tree.map(jnp.zeros_like, jax.eval_shape(solver.init, part)), part)

    for function in (solver.init, step):
        mapped = jax.shard_map(lambda x, f=function: (f(x), 1.0)[1], mesh=mesh(), in_specs=P("x"), out_specs=P())
        with pytest.raises(ParameterError, match=r"'layer\.rows'.*specs"):
            mapped(part)


def test_copies_on_all_devices_need_no_specs_and_send_gradients_alone() -> None:
    solver, before, g = SOLVERS["lars"](), numbers(COPIES, 0), numbers(COPIES, 1)
    halves = jax.tree.map(lambda g: jnp.stack([0.5 * g, 1.5 * g]), g)

    def step(params: Any, state: Any, own: Any) -> Any:
        return step_of(solver)(params, state, jax.tree.map(lambda x: jax.lax.pmean(jnp.squeeze(x, 0), "y"), own))

    mapped = jax.shard_map(step, mesh=mesh(), in_specs=(P(), P(), P("y")), out_specs=(P(), P()))
    found = jit(mapped)(before, solver.init(before), halves)
    wanted = jit(step_of(solver))(before, solver.init(before), g)
    check_equal(found[0], wanted[0], before)
    check_equal(found[1], wanted[1])
    assert str(jax.make_jaxpr(mapped)(before, solver.init(before), halves)).count("psum") == len(COPIES)


# ---- state in eight bits: groups are of places in the whole array, so that no code depends on the layout

#: Parameters that no layout over parts cuts within a group; and two that are cut.
CODED: Shapes = {
    "rows": ((64, 128), P("x")),
    "columns": ((64, 128), P(None, "y")),
    "both": ((64, 128), P("x", "y")),
    "filter": ((8, 64, 8, 8), P(("x", "y"))),
    "vector": ((64,), P("x")),
}
CUT: Shapes = {"thin": ((64, 192), P(None, ("x", "y"))), "filter": ((64, 16, 4, 4), P(None, ("x", "y")))}
LEAN: dict[str, Any] = dict(state_dtype="int8", state_rounding="stochastic", seed=3)


@pytest.mark.parametrize("dtype", ["bfloat16"] if BY_DAY else ["bfloat16", "float32"])
def test_codes_do_not_depend_on_the_layout(dtype: str) -> None:
    """Up to the few that a chance rounds to the other neighbour: groups of other places would change most codes."""
    recorded: Any = dict(rounding="compensated") if dtype == "bfloat16" else {}
    found = run(partial(adamw, 0.01, **LEAN, **recorded), CODED, "map", dtype=dtype)
    start = found.before, jax.tree.map(np.zeros_like, found.alone[1])
    for x, y, first in zip(*map(jax.tree.leaves, (found.parted, found.alone, start)), strict=True):
        x, y, first = (np.asarray(leaf, np.float64) for leaf in (x, y, first))
        assert np.mean(np.abs(x - y) > SHARDED["float32"] * np.max(np.abs(y - first))) <= FLIPPED_CODES
    assert {"int8", "float32"} <= {x.dtype.name for x in jax.tree.leaves(found.alone[1])}


@pytest.mark.parametrize("name", CUT)
def test_groups_that_are_cut_are_refused(name: str) -> None:
    (shape, spec) = CUT[name]
    init = adamw(0.01, specs={name: spec}, **LEAN).init
    mapped = jax.shard_map(init, mesh=mesh(), in_specs=({name: spec},), out_specs=P(), check_vma=False)
    with pytest.raises(ParameterError, match=f"parameter {name!r} .* is sharded so that groups of 64") as caught:
        jax.eval_shape(mapped, {name: jax.ShapeDtypeStruct(shape, "float32")})
    assert "shard it along its first axis" in str(caught.value)
    assert "state_dtype='bfloat16'" in str(caught.value)


# ---- native code on each device


@pytest.mark.parametrize(
    ("make", "how", "is_native"),
    [(adamw, "jit", True), (adamw, "map", True), (lamb, "jit", False), (lamb, "map", True)],
)
def test_each_device_steps_its_parts_by_native_code_where_no_sum_goes_over_them(
    make: Any, how: str, is_native: bool
) -> None:
    if reason := refusal(check_native, "auto"):
        pytest.skip(reason)
    found = run(partial(make, 0.1), NATIVE, how, as_step=make_step)
    assert ("thalweg_step" in found.text) == is_native  # b is whole everywhere
    assert {kind for kind, _ in find_messages(found.text)} == (set() if make is adamw else {"all-reduce"})
    check_numbers(found, 0.0 if make is adamw else FUSED["float64"])


def test_native_code_alone_is_refused_over_devices() -> None:
    if reason := refusal(check_native, "auto"):
        pytest.skip(reason)
    solver, over = lamb(0.1, engine="native"), place(NATIVE, numbers(NATIVE, 0))
    with pytest.raises(OptionError, match="several devices"):
        jax.jit(make_step(solver))(over, solver.init(over), over)
