"""State in eight bits over devices: groups are of places in the whole array, so that no code depends on the layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import sharded_jax_jit
import sharded_jax_map
from sharded_jax import Cases, P, Shapes, mesh
from tolerances import FLIPPED_CODES, SHARDED

import thalweg.optax
from thalweg.errors import ParameterError

#: Parameters that no layout over parts cuts within a group, and one without codes.
SHAPES: Shapes = {
    "rows": ((64, 128), P("x")),
    "columns": ((64, 128), P(None, "y")),
    "both": ((64, 128), P("x", "y")),
    "filter": ((8, 64, 8, 8), P(("x", "y"))),
    "vector": ((64,), P("x")),
}
#: Columns in parts of 24, groups of 64; and parts of 16 of groups that are smaller for the last axis alone.
CUT: Shapes = {"thin": ((64, 192), P(None, ("x", "y"))), "filter": ((64, 16, 4, 4), P(None, ("x", "y")))}
LEAN: dict[str, Any] = dict(state_dtype="int8", state_rounding="stochastic", seed=3)
#: What is computed without sums over devices; and the dtype of parameters.
SOLVERS = {
    "adamw": (partial(thalweg.optax.adamw, 0.01, **LEAN), "float32"),
    "sgd": (partial(thalweg.optax.sgd, 0.01, momentum=0.9, rounding="compensated", **LEAN), "bfloat16"),
}


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


def same_codes_on_parts(name: str) -> None:
    make, dtype = SOLVERS[name]
    found = sharded_jax_map.run(make, SHAPES, dtype=dtype)
    check_codes(found.parted, found.alone, found.before)


def same_codes_under_jit(name: str) -> None:
    """The compiler sees whole arrays: there a layout may cut groups."""
    make, dtype = SOLVERS[name]
    found = sharded_jax_jit.run(make(), {"both": SHAPES["both"], **CUT}, dtype=dtype)
    check_codes(found.lasts[1], found.alone, found.before)


def cut_groups_are_refused() -> None:
    for key, (shape, spec) in CUT.items():
        solver = SOLVERS["adamw"][0](specs={key: spec})
        told = "nothing was refused"
        try:
            jax.eval_shape(
                jax.shard_map(solver.init, mesh=mesh(), in_specs=({key: spec},), out_specs=P(), check_vma=False),
                {key: jax.ShapeDtypeStruct(shape, "float32")},
            )
        except ParameterError as error:
            told = str(error)
        assert f"parameter {key!r} of shape {shape} is sharded so that groups of 64" in told, told
        assert "shard it along its first axis" in told
        assert "state_dtype='bfloat16'" in told


CASES: Cases = {"cut groups are refused": cut_groups_are_refused}
for each in SOLVERS:
    CASES[f"{each}: same codes on parts"] = partial(same_codes_on_parts, each)
    CASES[f"{each}: same codes under jit"] = partial(same_codes_under_jit, each)
DAY: set[str] = set()
