"""Meshes of explicit axes, where the type of an array says how it is divided."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec
from sharded_jax import (
    DEVICES,
    OPTIMIZERS,
    SMALL,
    STEPS,
    Cases,
    check_equal,
    check_shardings,
    dtype,
    mesh,
    numbers,
    placed,
    specs_of,
    state_specs,
)

#: For what takes long to compile.
FEW = ("rows", "columns", "both")
over = partial(mesh, jax.sharding.AxisType.Explicit)
SHAPES = {key: SMALL[key] for key in ("rows", "columns", "whole", "both", "pair", "vector", "cube")}
#: Of layers, which are divided.
STACK = {"layers": ((8, 6, 4), PartitionSpec("x", "y"))}


def spec_of(x: Any) -> Any:
    """What the type of an array says, axis by axis."""
    return tuple(jax.typeof(x).sharding.spec)


@cache
def run(name: str) -> dict[str, Any]:
    stacked, shapes = int(name == "kron of stacks"), SHAPES
    if name.startswith("kron"):
        shapes = STACK if stacked else {key: SHAPES[key] for key in FEW}
    solver, before = OPTIMIZERS[name.partition(" of ")[0]](stacked_axes=stacked), numbers(shapes, 0, dtype())
    grads = [numbers(shapes, seed, dtype()) for seed in range(1, STEPS + 1)]
    seen: dict[str, Any] = {}

    def step(params: Any, state: Any, g: Any) -> Any:
        updates, after = solver.update(g, state, params)
        for key in shapes:
            seen[key] = spec_of(updates[key]), spec_of(params[key])
        return optax.apply_updates(params, updates), after

    alone = before, solver.init(before)
    one = jax.jit(lambda *arguments: step(*arguments))
    for g in grads:
        alone = one(*alone, g)
    with jax.set_mesh(over()):
        start = placed(shapes, before, over())
        parted, made, compiled = (start, solver.init(start)), jax.jit(solver.init)(start), jax.jit(step)
        for g in grads:
            parted = compiled(*parted, placed(shapes, g, over()))
    return {
        "shapes": shapes,
        "stacked": stacked,
        "before": before,
        "alone": alone,
        "parted": parted,
        "made": made,
        "types": seen,
    }


def same_numbers(name: str) -> None:
    found = run(name)
    check_equal(found["parted"][0], found["alone"][0], found["before"])
    check_equal(found["parted"][1], found["alone"][1])


def types_stay(name: str) -> None:
    found = run(name)
    wrong = {key: got for key, got in found["types"].items() if got[0] != got[1]}
    assert not wrong, f"types of updates beside those of their parameters: {wrong}"
    check_shardings(found["parted"][0], specs_of(found["shapes"]), over())
    for state in (found["made"], found["parted"][1]):
        check_shardings(state, state_specs(state, found["shapes"], found["stacked"]), over())


def cases(devices: int) -> Cases:
    found: Cases = {}
    for name in (*OPTIMIZERS, "kron of stacks") if devices == max(DEVICES) else ("lars", "adafactor"):
        found[f"{name}: same numbers"] = partial(same_numbers, name)
        found[f"{name}: types stay"] = partial(types_stay, name)
    return found
