"""Parameters divided over a mesh under ``jax.jit``, where the compiler sees whole arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import optax
from sharded_jax import (
    DEVICES,
    LARGE,
    LIMIT,
    OPTIMIZERS,
    SMALL,
    STEPS,
    Cases,
    P,
    check_equal,
    check_shardings,
    dtype,
    mesh,
    messages,
    numbers,
    placed,
    specs_of,
    state_specs,
)

ALL = {**SMALL, **LIMIT, **LARGE}
#: For what takes long to compile.
FEW = {name: ALL[name] for name in ("rows", "columns", "both", "cube", "large_rows")}


#: The compiler joins sums of all parameters over the same devices: x, y, both, both in the other order. What depends on
#: sums of rows it joins within a parameter, of which 13 are divided: at most two messages for each.
SUMS = {"lars": 4, "lamb": 4, "unfactored": 4, "adafactor": 26}


@dataclass(frozen=True)
class Run:
    """Some steps over devices, and the same on one."""

    shapes: Mapping[str, Any]
    before: Any
    #: The state by a plain call of init and by a compiled one; parameters and state after the steps that follow each.
    firsts: dict[str, Any]
    lasts: dict[str, Any]
    #: After each of these how many programs had been compiled.
    programs: dict[str, int]
    alone: Any
    #: The step as it was compiled.
    step: Any


def run(solver: Any, shapes: Mapping[str, Any], steps: int = STEPS) -> Run:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = solver.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    before = numbers(shapes, 0, dtype())
    grads = [numbers(shapes, seed, dtype()) for seed in range(1, steps + 1)]
    params, state, alone = before, solver.init(before), jax.jit(step)
    for g in grads:
        params, state = alone(params, state, g)
    start, parts = placed(shapes, before, mesh()), [placed(shapes, g, mesh()) for g in grads]
    firsts = {"init": solver.init(start), "jit(init)": jax.jit(solver.init)(start)}
    lasts, programs, compiled = {}, {}, jax.jit(lambda *arguments: step(*arguments))
    for way, first in firsts.items():
        last = start, first
        for g in parts:
            last = compiled(*last, g)
        lasts[way], programs[way] = last, compiled._cache_size()
    lowered = compiled.lower(*lasts["init"], parts[0])
    return Run(shapes, before, firsts, lasts, programs, (params, state), lowered)


@cache
def run_of(name: str) -> Run:
    return run(OPTIMIZERS[name](), FEW if name == "kron" or jax.device_count() < max(DEVICES) else ALL)


@cache
def sent(name: str) -> list[tuple[str, int]]:
    return messages(run_of(name).step.compile().as_text())


def same_numbers(name: str, way: str) -> None:
    found = run_of(name)
    check_equal(found.lasts[way][0], found.alone[0], found.before)
    check_equal(found.lasts[way][1], found.alone[1])


def first_state_follows(name: str, way: str) -> None:
    found = run_of(name)
    check_shardings(found.firsts[way], state_specs(found.firsts[way], found.shapes), mesh())


def last_state_follows(name: str, way: str) -> None:
    found = run_of(name)
    check_shardings(found.lasts[way][1], state_specs(found.firsts[way], found.shapes), mesh())


def parameters_stay(name: str, way: str) -> None:
    found = run_of(name)
    check_shardings(found.lasts[way][0], specs_of(found.shapes), mesh())


def one_program(name: str) -> None:
    found = run_of(name).programs
    assert found == {"init": 1, "jit(init)": 1}, f"programs compiled so far, after the steps from each: {found}"


def nothing_large_is_sent(name: str) -> None:
    large = [(kind, size) for kind, size in sent(name) if size >= 2**16]
    assert not large, f"whole parameters are sent: {large}"


def only_sums_are_sent(name: str) -> None:
    kinds = Counter(kind for kind, _ in sent(name))
    assert set(kinds) == {"all-reduce"}, f"sent are {dict(kinds)}"


def few_sums(name: str, most: int) -> None:
    sums = sum(kind == "all-reduce" for kind, _ in sent(name))
    assert 0 < sums <= most, f"{sums} messages for sums, more than {most}"


def nothing_sent_for_copies(name: str) -> None:
    whole = {key: (shape, P()) for key, (shape, _) in FEW.items()}
    solver, params = OPTIMIZERS[name](), placed(whole, numbers(whole, 0, dtype()), mesh())
    found = messages(jax.jit(solver.update).lower(params, jax.jit(solver.init)(params), params).compile().as_text())
    assert not found, f"copies need nothing of each other, but sent are {found}"


def plain_calls(name: str) -> None:
    """A step that nobody compiles."""
    shapes = {key: ALL[key] for key in ("rows", "columns")}
    solver, before, g = OPTIMIZERS[name](), numbers(shapes, 0, dtype()), numbers(shapes, 1, dtype())
    wanted, wanted_state = solver.update(g, solver.init(before), before)
    start = placed(shapes, before, mesh())
    updates, state = solver.update(placed(shapes, g, mesh()), solver.init(start), start)
    check_equal(updates, wanted)
    check_equal(state, wanted_state)
    check_shardings(updates, specs_of(shapes), mesh())
    check_shardings(state, state_specs(state, shapes), mesh())


def stack_stays_divided(way: str) -> None:
    """Factors of stacked layers are where their layers are, from the first state on."""
    solver, over = OPTIMIZERS["kron"](stacked_axes=1), mesh()
    params = {"w": jax.device_put(jax.numpy.ones((8, 6, 4), dtype()), jax.sharding.NamedSharding(over, P("x")))}
    state = solver.init(params) if way == "init" else jax.jit(solver.init)(params)
    update = jax.jit(solver.update)
    for _ in range(3):
        for factor in (*state.Q["w"], *state.L["w"]):
            assert factor.sharding.spec == P("x"), f"a factor is laid out as {factor.sharding.spec}"
        _, state = update(params, state, params)
    assert update._cache_size() == 1


def wrapped(solver: Any, shapes: Mapping[str, Any]) -> None:
    """Same numbers, and moments that follow their parameters."""
    found = run(solver, shapes, steps=4)
    for way in ("init", "jit(init)"):
        check_equal(found.lasts[way][0], found.alone[0], found.before)
        check_shardings(found.lasts[way][0], specs_of(shapes), mesh())
        check_shardings(found.lasts[way][1], state_specs(found.lasts[way][1], shapes), mesh())


def wrappers() -> Cases:
    matrices = {name: ALL[name] for name in ("rows", "both", "vector")}
    lamb, adafactor = OPTIMIZERS["lamb"], OPTIMIZERS["adafactor"]
    masked = optax.masked(adafactor(), {name: name != "both" for name in matrices})
    return {
        "optax.masked": partial(wrapped, masked, matrices),
        "optax.MultiSteps": partial(wrapped, optax.MultiSteps(lamb(), every_k_schedule=2), matrices),
        "optax.chain": partial(wrapped, optax.chain(optax.clip_by_global_norm(1.0), adafactor()), matrices),
        "max_grad_norm and skip": partial(wrapped, lamb(max_grad_norm=1.0, on_nonfinite="skip"), matrices),
    }


def cases(devices: int) -> Cases:
    """All of them on most devices, on fewer the numbers and places."""
    found: Cases = {}
    most = devices == max(DEVICES)
    for name in OPTIMIZERS if most else ("lars", "adafactor", "kron"):
        for way in ("init", "jit(init)"):
            found[f"{name}: same numbers after {way}"] = partial(same_numbers, name, way)
            found[f"{name}: state follows parameters after {way}"] = partial(first_state_follows, name, way)
            found[f"{name}: state follows parameters after steps from {way}"] = partial(last_state_follows, name, way)
            found[f"{name}: parameters stay where they are from {way}"] = partial(parameters_stay, name, way)
        found[f"{name}: one program"] = partial(one_program, name)
        if most:
            found[f"{name}: copies send nothing"] = partial(nothing_sent_for_copies, name)
        if most and name != "kron":
            found[f"{name}: no whole parameter is sent"] = partial(nothing_large_is_sent, name)
            found[f"{name}: only sums are sent"] = partial(only_sums_are_sent, name)
    if most:
        for name, sums in SUMS.items():
            found[f"{name}: few sums"] = partial(few_sums, name, sums)
        for name in ("adafactor", "kron"):
            found[f"{name}: without jit"] = partial(plain_calls, name)
        for way in ("init", "jit(init)"):
            found[f"kron: layers of a stack stay divided from {way}"] = partial(stack_stays_divided, way)
        found |= wrappers()
    return found
