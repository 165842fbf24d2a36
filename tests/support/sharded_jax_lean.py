"""State in eight bits over devices: groups are of places in the whole array, so that no code depends on the layout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from sharded_jax import DEVICES, STEPS, Cases, P, mesh, numbers, placed, specs_of
from sharded_jax_map import step_of, stepped_alone
from tolerances import FLIPPED_CODES, SHARDED

import thalweg.optax
from thalweg.errors import ParameterError

#: Parameters that no layout over parts cuts within a group, and one without codes.
SHAPES: Mapping[str, Any] = {
    "rows": ((64, 128), P("x")),
    "columns": ((64, 128), P(None, "y")),
    "both": ((64, 128), P("x", "y")),
    "filter": ((8, 64, 8, 8), P(("x", "y"))),
    "vector": ((64,), P("x")),
}
#: Columns in parts of 24, groups of 64; and parts of 16 of groups that are smaller for the last axis alone.
CUT: Mapping[str, Any] = {"thin": ((64, 192), P(None, ("x", "y"))), "filter": ((64, 16, 4, 4), P(None, ("x", "y")))}
LEAN: dict[str, Any] = dict(state_dtype="int8", state_rounding="stochastic", seed=3)
#: What is computed without sums over devices.
SOLVERS = {
    "adamw": partial(thalweg.optax.adamw, 0.01, **LEAN),
    "sgd": partial(thalweg.optax.sgd, 0.01, momentum=0.9, rounding="compensated", **LEAN),
}


def draws(shapes: Mapping[str, Any], dtype: str) -> list[Any]:
    return [numbers(shapes, seed, dtype) for seed in range(STEPS + 1)]


def check_codes(found: Any, wanted: Any, before: Any) -> None:
    """Parameters and state up to rounding, but for the few numbers that a code has rounded to its other neighbour.

    Compilers round once or twice for a product and a sum. Groups of other places, or other chances for a place, would
    change most codes.
    """
    wrong, start = [], (before, jax.tree.map(np.zeros_like, wanted[1]))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(wanted)]
    for path, *leaves in zip(paths, *map(jax.tree.leaves, (found, wanted, start)), strict=True):
        x, y, first = (np.asarray(leaf, np.float64) for leaf in leaves)
        share = np.mean(np.abs(x - y) > SHARDED["float32"] * np.max(np.abs(y - first)))
        if share > FLIPPED_CODES:
            wrong.append(f"{jax.tree_util.keystr(path)} in {share:.1%}")
    assert not wrong, f"differ by more than rounding: {'; '.join(wrong)}"
    assert {"int8", "float32"} <= {x.dtype.name for x in jax.tree.leaves(wanted[1])}


def same_codes_on_parts(name: str, dtype: str) -> None:
    make, (before, *grads), specs = SOLVERS[name], draws(SHAPES, dtype), specs_of(SHAPES)
    states = thalweg.optax.state_specs(jax.eval_shape(make().init, before), before, specs)
    solver, mapped = make(specs=specs), partial(jax.shard_map, mesh=mesh())
    step = jax.jit(mapped(step_of(solver), in_specs=(specs, states, specs), out_specs=(specs, states)))
    start = placed(SHAPES, before, mesh())
    parted = start, jax.jit(mapped(solver.init, in_specs=(specs,), out_specs=states))(start)
    for g in grads:
        parted = step(*parted, placed(SHAPES, g, mesh()))
    check_codes(parted, stepped_alone(make(), before, grads), before)


def same_codes_under_jit(name: str, dtype: str) -> None:
    """The compiler sees whole arrays: there a layout may cut groups."""
    shapes = {"both": SHAPES["both"], **CUT}
    solver, (before, *grads) = SOLVERS[name](), draws(shapes, dtype)
    step, start = jax.jit(step_of(solver)), placed(shapes, before, mesh())
    parted = start, jax.jit(solver.init)(start)
    for g in grads:
        parted = step(*parted, placed(shapes, g, mesh()))
    check_codes(parted, stepped_alone(solver, before, grads), before)


def cut_groups_are_refused(name: str) -> None:
    for key, (shape, spec) in CUT.items():
        solver = SOLVERS[name](specs={key: spec})
        try:
            jax.eval_shape(
                jax.shard_map(solver.init, mesh=mesh(), in_specs=({key: spec},), out_specs=P(), check_vma=False),
                {key: jax.ShapeDtypeStruct(shape, "float32")},
            )
            told = "nothing was refused"
        except ParameterError as error:
            told = str(error)
        wanted = f"parameter {key!r} of shape {shape} is sharded so that groups of 64"
        assert wanted in told, told
        assert "shard it along its first axis" in told
        assert "state_dtype='bfloat16'" in told


def cases(devices: int) -> Cases:
    if devices < max(DEVICES):
        return {}
    dtypes = {"adamw": "float32", "sgd": "bfloat16"}
    found: Cases = {}
    for name, dtype in dtypes.items():
        found[f"{name}: same codes on parts"] = partial(same_codes_on_parts, name, dtype)
        found[f"{name}: same codes under jit"] = partial(same_codes_under_jit, name, dtype)
    found["adamw: cut groups are refused"] = partial(cut_groups_are_refused, "adamw")
    return found
