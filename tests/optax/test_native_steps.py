"""Steps that write in place, by native code inside compiled programs.

tests/engines/test_agree.py has numbers, tests/kernels/test_same_bits.py that the number of threads does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from optax_runs import GRADS, PARAMS, assert_alike, compiled, same_bits
from own_rules import Turned
from spiked import KINDS

import thalweg.optax
from thalweg.errors import refusal
from thalweg.optax import adafactor, adamw, explain, lamb, make_step, mixture, sgd, stats, with_stats
from thalweg.optax.engines import check_native

pytestmark = pytest.mark.slow  # many small programs are compiled

#: How native code is called in the text of a program.
CALL = "thalweg_step"
NEAR = tolerances.FUSED["float32"]
EMPTY = {**PARAMS, "empty": jnp.zeros((0, 3), jnp.float32)}
HALF = {**EMPTY, "half": jnp.ones(3, jnp.float16)}


@pytest.fixture(autouse=True)
def needs_native_code() -> None:
    if reason := refusal(check_native, "auto"):
        pytest.skip(reason)


def program(solver: Any, params: Any = PARAMS) -> str:
    """What a step is compiled from."""
    return str(jax.jit(make_step(solver)).lower(params, solver.init(params), params).as_text())


def take_steps(solver: Any, grads: Any = GRADS, params: Any = PARAMS, steps: int = 2) -> tuple[Any, Any]:
    step, state = compiled(make_step(solver)), solver.init(params)
    for _ in range(steps):
        params, state = step(params, state, grads)
    return params, state


def test_programs_have_one_call_a_pass_for_all_parameters_that_native_code_can_take() -> None:
    assert program(adamw(0.1)).count(f"@{CALL}(") == 1
    assert program(lamb(0.1)).count(f"@{CALL}(") == 2
    assert program(lamb(0.1, on_nonfinite="skip")).count(f"@{CALL}(") == 3  # and a look at what would be written
    assert CALL not in program(lamb(0.1, engine="xla"))
    assert CALL in program(lamb(0.1), EMPTY)
    assert CALL in program(lamb(0.1, on_nonfinite="skip"))
    assert CALL not in program(lamb(0.1, on_nonfinite="skip"), EMPTY)  # which has to take all of a guarded step


def test_what_is_computed_between_passes_does_not_grow_with_parameters_of_one_shape() -> None:
    few, many = ({f"w{i}": jnp.ones((6, 4), jnp.float32) for i in range(members)} for members in (2, 9))
    texts = [program(adafactor(0.1, min_dim_size_to_factor=2), params) for params in (few, many)]
    assert len({text.count("= stablehlo.") for text in texts}) == 1


def test_numbers_of_a_step_are_no_part_of_its_program() -> None:
    def step(engine: str) -> Any:
        return compiled(
            lambda params, state, rate, decay: make_step(adamw(rate, weight_decay=decay, engine=engine))(
                params, state, GRADS
            )
        )

    native, xla = step("native"), step("xla")
    found = expected = PARAMS, adamw(0.1).init(PARAMS)
    for index in range(3):
        numbers = 0.1 / (index + 1), 0.01 * index
        found, expected = native(*found, *numbers), xla(*expected, *numbers)
    assert native._cache_size() == 1
    assert_alike(found, expected, NEAR)


def test_donated_arrays_are_written_in_place_and_others_stay_as_they_were() -> None:
    params, solver = jax.tree.map(jnp.copy, PARAMS), lamb(0.1)
    state = solver.init(params)
    kept = jax.tree.map(np.array, (params, state, GRADS))
    jax.block_until_ready(jax.jit(make_step(solver))(params, state, GRADS))
    assert same_bits((params, state, GRADS), kept)
    step = jax.jit(make_step(solver), donate_argnums=(0, 1))
    compiled = step.lower(params, state, GRADS).compile()
    assert CALL in compiled.as_text()
    assert not re.search(r"= f32\S* copy\(", compiled.as_text())  # tables of numbers are f64
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, state.exp_avg))]
    new, after = compiled(params, state, GRADS)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))
    assert before == [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((new, after.exp_avg))]


def test_figures_are_those_of_the_step() -> None:
    options: Any = dict(overrides=[("w", dict(stacked_axes=1))])
    found, expected = (take_steps(with_stats(lamb(0.1, engine=own, **options)))[1] for own in ("native", "xla"))
    assert stats(found)["w"]["trust_ratio"].shape == (4,)
    assert_alike(found.stats, expected.stats, NEAR)


# ---- what is around a step

START = {"w": jnp.arange(12.0, dtype=jnp.float32).reshape(4, 3) / 7, "b": jnp.ones(3, jnp.float32)}
SLOPES = jax.tree.map(lambda p: 0.3 * p + 0.1, START)


def double(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x, x]), tree)


def one_step(engine: str, within: Callable[..., Any]) -> Any:
    solver, start = lamb(0.1, engine=engine), jax.tree.map(jnp.copy, START)
    return within(make_step(solver))(start, solver.init(start), SLOPES)


def donated(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda p, s, g: compiled(function, donate_argnums=(0, 1))(p, s)


def summed(step: Callable[..., Any]) -> Callable[..., Any]:
    def total(*args: Any) -> Any:
        return sum(jnp.sum(x * x) for x in jax.tree.leaves(step(*args)[0]))

    return total


#: Transformations of jax, and programs that use its arrays elsewhere too; and whether native code runs within them.
WITHIN: dict[str, tuple[Callable[..., Any], bool]] = {
    "vmap": (lambda step: lambda *args: jax.jit(jax.vmap(step))(*map(double, args)), False),
    "vmap of jit": (
        lambda step: lambda p, s, g: jax.vmap(jax.jit(step), in_axes=(None, None, 0))(p, s, double(g)),
        False,
    ),
    "grad of jit": (lambda step: jax.grad(jax.jit(summed(step))), False),
    "jvp": (lambda step: lambda p, s, g: jax.jvp(lambda p: jax.jit(step)(p, s, g)[0], (p,), (p,)), False),
    "grad of checkpoint": (lambda step: jax.jit(jax.grad(jax.checkpoint(summed(step)))), False),
    "no jit": (lambda step: step, False),
    "checkpoint": (lambda step: jax.jit(jax.checkpoint(step)), True),
    "parameters as gradients": (lambda step: donated(lambda p, s: step(p, s, p)), True),
    "parameters as state": (lambda step: donated(lambda p, s: step(p, s._replace(exp_avg=p), p)), True),
    "two steps": (lambda step: donated(lambda p, s: (step(p, s, p), step(p, s, jax.tree.map(jnp.cos, p)))), True),
    "a later result": (lambda step: donated(lambda p, s: (step(p, s, jax.tree.map(jnp.sin, p)), p)), True),
    "constants": (lambda step: donated(lambda p, s: step(jax.tree.map(jnp.ones_like, p), s, p)), True),
    "scan": (
        lambda step: jax.jit(lambda p, s, g: jax.lax.scan(lambda own, _: (step(*own, g), None), (p, s), length=2)[0]),
        True,
    ),
    "cond": (
        lambda step: jax.jit(lambda p, s, g: jax.lax.cond(p["b"][0] > 0, lambda: step(p, s, g), lambda: (p, s))),
        True,
    ),
}


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_native_code_runs_within_or_xla_serves(name: str) -> None:
    within, is_native = WITHIN[name]
    found, expected = (one_step(engine, within) for engine in ("native" if is_native else "auto", "xla"))
    assert_alike(found, expected, NEAR)
    if not is_native:
        with pytest.raises(thalweg.OptionError, match="engine='native' cannot"):
            one_step("native", within)


def test_exported_programs_have_no_native_code() -> None:
    export = pytest.importorskip("jax.export")
    solver = lamb(0.1)
    exported = export.export(jax.jit(make_step(solver)))(START, solver.init(START), SLOPES)
    assert CALL not in str(exported.mlir_module())
    assert_alike(exported.call(START, solver.init(START), SLOPES), one_step("xla", jax.jit), NEAR)
    with pytest.raises(thalweg.OptionError, match="exported program"):
        one_step("native", lambda step: export.export(jax.jit(step)))


def test_a_program_of_another_process_is_refused() -> None:
    one_step("native", jax.jit)
    call = jax.ffi.ffi_call(CALL, [jax.ShapeDtypeStruct((2,), "float32")])
    with pytest.raises(Exception, match="compiled in another process"):
        jax.block_until_ready(jax.jit(lambda x: call(x, key="unknown"))(jnp.ones(2, jnp.float32)))


# ---- wrappers and mixtures

WRAPPED: dict[str, Any] = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), lamb(0.1)),
    "inject_hyperparams": optax.inject_hyperparams(lamb)(learning_rate=lambda count: 0.1 / (count + 1)),
    "optax": optax.adamw(0.1),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_solvers_step_as_they_update(name: str) -> None:
    solver = WRAPPED[name]

    def by_update(params: Any, state: Any) -> Any:
        updates, state = solver.update(GRADS, state, params)
        return optax.apply_updates(params, updates), state

    found = take_steps(solver, steps=1)
    assert same_bits(found, compiled(by_update)(PARAMS, solver.init(PARAMS)))


PARTS = [("w", lamb(0.1)), ("out", optax.sgd(0.1)), ("*", adamw(0.1))]
#: A mixture, and whether native code takes a part of it.
MIXTURES: dict[str, tuple[Any, bool]] = {
    "a mixture": (mixture(PARTS, max_grad_norm=1.0, spikes=KINDS["clip"]), True),
    "a mixture that skips": (mixture(PARTS, on_nonfinite="skip"), False),
    "muon_adamw": (thalweg.optax.muon_adamw(0.1, layout="torch", other=["out"]), True),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_step_as_they_update(name: str) -> None:
    params, grads = ({**own, "out": own["w"].T} for own in (PARAMS, GRADS))
    solver, is_native = MIXTURES[name]
    assert (CALL in program(solver, params)) == is_native
    found, expected = (take_steps(own, grads, params) for own in (solver, optax.chain(solver)))
    assert_alike(found, (expected[0], expected[1][0]), NEAR)


# ---- which code, and why

BOTH = [("w", optax.chain(lamb(0.1))), ("*", lamb(0.1))]
#: A solver and a parameter, and how what is told of its engine begins.
TOLD: list[tuple[Any, str, str]] = [
    (lamb(0.1), "empty", "xla: shape (0, 3) is empty"),
    (lamb(0.1), "w", "native"),
    (lamb(0.1, engine="xla"), "w", "xla: engine='xla'"),
    (lamb(0.1), "half", "xla: .*numbers of float16 below"),
    (sgd(0.1), "w", "xla: it has no state, and XLA's code is as fast"),
    (sgd(0.1, engine="native"), "w", "native"),
    (optax.chain(lamb(0.1)), "w", "xla: what is around its transformation calls update()"),
    (lamb(0.1, on_nonfinite="skip"), "w", "xla: on_nonfinite='skip' takes one code for all parameters"),
    (mixture(BOTH), "b", "native"),
    (mixture(BOTH), "w", "xla: what is around its transformation calls update()"),
    (mixture(BOTH, on_nonfinite="skip"), "b", "xla: what is around its transformation calls update()"),
    (thalweg.optax.transformation(Turned), "w", "xla: .*swapaxes"),
    (adafactor(0.1, overrides=[("deep", dict(min_dim_size_to_factor=2))]), "deep", "xla: .*129 elements behind"),
]


@pytest.mark.parametrize(("solver", "name", "said"), TOLD, ids=range(len(TOLD)))
def test_explain_tells_which_code_runs_and_why(solver: Any, name: str, said: str) -> None:
    params = {**HALF, "deep": jnp.zeros((300, 200, 129), jnp.float32)} if name == "deep" else HALF
    (engine,) = [row.engine for row in explain(solver, params).rows if row.name == name]
    assert engine == said or (".*" in said and said.split(".*")[1] in engine)
    assert "matrix products" in explain(thalweg.optax.muon(0.1), {"w": PARAMS["w"]}).rows[0].engine


def test_native_code_that_cannot_be_is_refused() -> None:
    with pytest.raises(thalweg.OptionError, match="engine must be one of 'auto', 'xla', 'native', got 'fast'"):
        lamb(0.1, engine="fast")
    with pytest.raises(thalweg.OptionError, match="engine='native' cannot run Muon"):
        thalweg.optax.muon(0.1, engine="native")
    solver, own = lamb(0.1, engine="native"), thalweg.optax.transformation(Turned, engine="native")
    state = solver.init(PARAMS)
    with pytest.raises(thalweg.OptionError, match="make_step"):
        solver.update(GRADS, state, PARAMS)
    with pytest.raises(thalweg.OptionError, match=r"cannot step parameter 'b': .*swapaxes"):
        jax.jit(make_step(own))(PARAMS, own.init(PARAMS), GRADS)
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), state.exp_avg)
    with pytest.raises(thalweg.OptionError, match="another dtype"):
        jax.jit(make_step(solver))(PARAMS, state._replace(exp_avg=narrow), GRADS)
