"""Steps that write in place: by native code inside compiled programs, beside XLA's code for the same."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from lanes import one_in
from optax_runs import falling, problem
from own_rules import Layerwise, Turned

import thalweg
from thalweg.kernels.cpu.xla import TARGET
from thalweg.optax import (
    adafactor,
    adamw,
    explain,
    export_state,
    import_state,
    lamb,
    lars,
    lion,
    make_step,
    mixture,
    muon,
    muon_adamw,
    on_gpu,
    sgd,
    stats,
    transformation,
    with_stats,
)
from thalweg.optax.engines import reason_against_all
from thalweg.optax.on_cpu import handler
from thalweg.optax.trees import parameters

pytestmark = pytest.mark.slow  # many small programs are compiled

#: One to factor, a vector, a number.
SHAPES = {"deep": (3, 10, 12), "bias": (40,), "gain": ()}
adafactor = partial(adafactor, min_dim_size_to_factor=8)
night = partial(pytest.param, marks=pytest.mark.nightly)


@pytest.fixture(autouse=True)
def needs_native_code() -> None:
    if reason := reason_against_all("auto"):
        pytest.skip(reason)


def given(dtype: Any = np.float32, steps: int = 3) -> tuple[Any, Any]:
    params, gradients = problem(SHAPES, steps=steps, dtype=dtype)
    return jax.tree.map(jnp.asarray, params), jax.tree.map(jnp.asarray, gradients)


def program(solver: Any, params: Any) -> str:
    """What a step is compiled from."""
    return str(jax.jit(make_step(solver)).lower(params, solver.init(params), params).as_text())


def run(solver: Any, params: Any, gradients: Any, around: Callable[..., Any] = jax.jit) -> tuple[Any, Any]:
    step, state = around(make_step(solver)), solver.init(params)
    for index in range(len(jax.tree.leaves(gradients)[0])):
        params, state = step(params, state, jax.tree.map(lambda g, index=index: g[index], gradients))
    return params, state


def assert_same_size(found: Any, expected: Any, tolerance: float) -> None:
    """Errors relative to the size of each array."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


def assert_same_bits(found: Any, expected: Any) -> None:
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True))


OWN = partial(transformation, Layerwise)
CASES = [
    night(partial(adamw, 0.1, weight_decay=0.1), id="adamw"),
    night(partial(sgd, 0.1, momentum=0.9, nesterov=True), id="sgd"),
    night(partial(lion, 0.1), id="lion"),
    night(partial(lars, 0.1, weight_decay=0.1, trust_coefficient=0.1), id="lars"),
    pytest.param(
        partial(lamb, falling, b1=lambda count: 0.9 - 0.1 / (count + 1), max_grad_norm=1.0, maximize=True),
        id="lamb, schedules, max_grad_norm",
    ),
    night(
        partial(lamb, 0.1, stacked_axes=1, overrides=[("gain", dict(stacked_axes=0, lr_scale=0.5))]), id="lamb, stacks"
    ),
    pytest.param(partial(adafactor, 0.1, momentum=0.9), id="adafactor"),
    night(partial(adafactor, None, relative_step=True), id="adafactor without lr"),
    pytest.param(partial(OWN, 0.1, weight_decay=0.1), id="a rule of one's own"),
]


@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.nightly)])
def test_native_code_and_xla_step_alike(make: Callable[..., Any], dtype: Any) -> None:
    params, gradients = given(dtype)
    native, xla = (run(make(engine=engine), params, gradients) for engine in ("native", "xla"))
    assert_same_size(native, xla, tolerances.FUSED[np.dtype(dtype).name])


def test_programs_have_one_call_for_all_parameters() -> None:
    params, _ = given(steps=1)
    assert program(lamb(0.1), params).count(f"@{TARGET}(") == 1
    assert TARGET not in program(lamb(0.1, engine="xla"), params)


def test_a_step_is_what_update_and_apply_updates_do() -> None:
    solver = lamb(0.1)
    updates, state = jax.jit(solver.update)(GRADS, solver.init(PARAMS), PARAMS)
    found = jax.jit(make_step(solver))(PARAMS, solver.init(PARAMS), GRADS)
    assert_same_size(found, (optax.apply_updates(PARAMS, updates), state), tolerances.FUSED["float32"])


@pytest.mark.parametrize("dtype", ["bfloat16", night("float16")])
@pytest.mark.parametrize(
    "options",
    [
        night({}, id="nearest"),
        night(dict(rounding="stochastic"), id="stochastic"),
        pytest.param(dict(rounding="compensated", state_dtype="int8"), id="compensated, eight bits"),
        night(dict(state_dtype="bfloat16", state_rounding="stochastic"), id="stochastic state"),
    ],
)
def test_few_bits_are_rounded_once_by_both(options: dict[str, Any], dtype: str) -> None:
    params, gradients = given(steps=2)
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    found, expected = (run(lamb(0.01, engine=engine, **options), params, gradients) for engine in ("native", "xla"))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if a.dtype.itemsize <= 2:
            assert (np.asarray(a) != np.asarray(b)).mean() <= tolerances.FLIPPED
        else:
            assert np.allclose(a, b, rtol=1e-2, atol=0)


def test_every_run_has_the_same_bits_whatever_the_threads() -> None:
    params = {"w": jnp.cos(jnp.arange(300_000, dtype=jnp.float32)).reshape(600, 500)}
    gradients = jax.tree.map(lambda p: jnp.stack([p * 0.1, p**2]), params)
    results = []
    try:
        for threads in (1, 2, 2):
            thalweg.set_num_threads(threads)
            results.append(run(lamb(0.1), params, gradients))
    finally:
        thalweg.set_num_threads(None)
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_numbers_of_a_step_are_no_part_of_its_program() -> None:
    params, gradients = given(steps=4)
    traced = []

    @jax.jit
    def step(params: Any, state: Any, gradients: Any, rate: Any, decay: Any) -> Any:
        traced.append(rate)
        return make_step(adamw(rate, weight_decay=decay))(params, state, gradients)

    found = expected = params
    state = other = adamw(0.1).init(params)
    for index in range(4):
        g = jax.tree.map(lambda g, index=index: g[index], gradients)
        rate, decay = 0.1 / (index + 1), 0.01 * index
        found, state = step(found, state, g, rate, decay)
        expected, other = jax.jit(make_step(adamw(rate, weight_decay=decay, engine="xla")))(expected, other, g)
    assert len(traced) == 1
    assert_same_size((found, state), (expected, other), tolerances.FUSED["float32"])


def test_parameters_of_the_same_code_have_numbers_of_their_own() -> None:
    found = {}
    for overrides in ((), [("b", dict(lr_scale=0.5))]):
        for engine in ("native", "xla"):
            solver = lamb(0.1, exempt="vectors", overrides=overrides, engine=engine)
            found[engine] = jax.jit(make_step(solver))(PARAMS, solver.init(PARAMS), GRADS)
        assert_same_size(found["native"], found["xla"], tolerances.FUSED["float32"])


def test_donated_arrays_are_written_in_place_and_others_stay_as_they_were() -> None:
    params, gradients = given(steps=1)
    gradients = jax.tree.map(lambda g: g[0], gradients)
    solver = lamb(0.1)
    state = solver.init(params)
    kept = jax.tree.map(np.array, (params, state, gradients))
    jax.block_until_ready(jax.jit(make_step(solver))(params, state, gradients))
    assert_same_bits((params, state, gradients), kept)
    step = jax.jit(make_step(solver), donate_argnums=(0, 1))
    compiled = step.lower(params, state, gradients).compile()
    assert TARGET in compiled.as_text()
    assert " copy(" not in compiled.as_text()
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, state.exp_avg))]
    new, after = compiled(params, state, gradients)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))
    assert before == [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((new, after.exp_avg))]


SHARED: dict[str, Callable[..., Any]] = {
    "the gradient": lambda step: lambda p, s: step(p, s, p),
    "the state": lambda step: lambda p, s: step(p, s._replace(exp_avg=p), p),
    "another step": lambda step: lambda p, s: (step(p, s, p), step(p, s, jax.tree.map(jnp.negative, p))),
    "a later result": lambda step: lambda p, s: (step(p, s, jax.tree.map(jnp.sin, p)), p),
    "constants": lambda step: lambda p, s: step(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), p), s, p),
}


@pytest.mark.parametrize("name", one_in(2, SHARED))
def test_arrays_that_are_also_used_elsewhere_are_copied_first(name: str) -> None:
    results = []
    for engine in ("native", "xla"):
        solver, params = adamw(0.01, engine=engine), jax.tree.map(jnp.copy, PARAMS)
        step = jax.jit(SHARED[name](make_step(solver)), donate_argnums=(0, 1))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            results.append(step(params, solver.init(params)))
    assert_same_size(*results, tolerances.FUSED["float32"])


@pytest.mark.parametrize("bad", [np.nan, night(np.inf)])
def test_a_step_that_is_not_finite_is_left_out_as_a_whole(bad: float) -> None:
    params, gradients = given()
    gradients["gain"] = gradients["gain"].at[1].set(bad)
    make = partial(lamb, 0.1, on_nonfinite="skip")
    native, xla = (run(make(engine=engine), params, gradients) for engine in ("native", "xla"))
    assert (native[1].skipped, native[1].count) == (1, 2)
    assert_same_size(native, xla, tolerances.FUSED["float32"])


def test_a_guarded_step_that_native_code_cannot_take_whole_is_xlas() -> None:
    params, _ = given(steps=1)
    assert TARGET not in program(lamb(0.1, on_nonfinite="skip"), {**params, "empty": jnp.zeros((0, 3))})
    assert TARGET in program(lamb(0.1), {**params, "empty": jnp.zeros((0, 3))})


def test_figures_are_those_of_the_step() -> None:
    params, gradients = given(steps=2)
    options = dict(stacked_axes=1, overrides=[("gain", dict(stacked_axes=0))])
    found, expected = (
        run(with_stats(lamb(0.1, engine=engine, **options)), params, gradients)[1] for engine in ("native", "xla")
    )
    assert stats(found)["deep"]["trust_ratio"].shape == (3,)
    assert_same_size(found.stats, expected.stats, tolerances.FUSED["float32"])


# ---- transformations of JAX


PARAMS = {"w": jnp.arange(12.0, dtype=jnp.float32).reshape(4, 3) / 7, "b": jnp.ones(3, jnp.float32)}
GRADS = jax.tree.map(lambda p: 0.3 * p + 0.1, PARAMS)


def double(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x, x]), tree)


def one_step(engine: Any, around: Callable[..., Any]) -> Any:
    solver = lamb(0.1, engine=engine)
    return around(make_step(solver))(PARAMS, solver.init(PARAMS), GRADS)


def summed(step: Callable[..., Any]) -> Callable[..., Any]:
    def total(*args: Any) -> Any:
        return sum(jnp.sum(x * x) for x in jax.tree.leaves(step(*args)[0]))

    return total


AROUND: dict[str, Callable[..., Any]] = {
    "vmap": lambda step: lambda *args: jax.jit(jax.vmap(step))(*map(double, args)),
    "vmap of jit": lambda step: lambda p, s, g: jax.vmap(jax.jit(step), in_axes=(None, None, 0))(p, s, double(g)),
    "grad": lambda step: jax.jit(jax.grad(summed(step))),
    "grad of jit": lambda step: jax.grad(jax.jit(summed(step)), argnums=2),
    "jvp": lambda step: lambda p, s, g: jax.jvp(lambda p: jax.jit(step)(p, s, g)[0], (p,), (p,)),
    "checkpoint": lambda step: jax.jit(jax.grad(jax.checkpoint(summed(step)))),
    "no jit": lambda step: step,
}


@pytest.mark.parametrize("name", one_in(4, AROUND))
def test_xla_serves_what_native_code_does_not(name: str) -> None:
    found, expected = (one_step(engine, AROUND[name]) for engine in ("auto", "xla"))
    assert_same_size(found, expected, tolerances.FUSED["float32"])
    with pytest.raises(thalweg.OptionError, match="engine='native' cannot"):
        one_step("native", AROUND[name])


SERVED: dict[str, Callable[..., Any]] = {
    "checkpoint": lambda step: jax.jit(jax.checkpoint(step)),
    "scan": lambda step: jax.jit(
        lambda p, s, g: jax.lax.scan(lambda own, _: (step(*own, g), None), (p, s), length=2)[0]
    ),
    "cond": lambda step: jax.jit(lambda p, s, g: jax.lax.cond(p["b"][0] > 0, lambda: step(p, s, g), lambda: (p, s))),
    "ahead of time": lambda step: lambda *args: jax.jit(step).lower(*args).compile()(*args),
}


@pytest.mark.parametrize("name", one_in(4, SERVED, first=1))
def test_native_code_runs_within(name: str) -> None:
    found, expected = (one_step(engine, SERVED[name]) for engine in ("native", "xla"))
    assert_same_size(found, expected, tolerances.FUSED["float32"])


def test_exported_programs_have_no_native_code() -> None:
    export = pytest.importorskip("jax.export")
    solver = lamb(0.1)
    exported = export.export(jax.jit(make_step(solver)))(PARAMS, solver.init(PARAMS), GRADS)
    assert TARGET not in str(exported.mlir_module())
    assert_same_size(
        exported.call(PARAMS, solver.init(PARAMS), GRADS), one_step("xla", jax.jit), tolerances.FUSED["float32"]
    )
    with pytest.raises(thalweg.OptionError, match="exported program"):
        one_step("native", lambda step: export.export(jax.jit(step)))


def test_a_program_of_another_process_is_refused() -> None:
    handler()
    call = jax.ffi.ffi_call(TARGET, [jax.ShapeDtypeStruct((2,), "float32")])
    with pytest.raises(Exception, match="compiled in another process"):
        jax.block_until_ready(jax.jit(lambda x: call(x, key="unknown"))(jnp.ones(2, jnp.float32)))


# ---- wrappers, mixtures, other front ends


WRAPPED: dict[str, Callable[[], optax.GradientTransformation]] = {
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), lamb(0.1)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(lamb)(learning_rate=falling, weight_decay=0.1),
    "MultiSteps": lambda: optax.MultiSteps(lamb(0.1), 2).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(lamb(0.1), 3),
    "optax": lambda: optax.adamw(0.1),
}


@pytest.mark.parametrize("name", one_in(5, WRAPPED))
def test_wrapped_solvers_step_as_they_update(name: str) -> None:
    solver = WRAPPED[name]()

    def by_update(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = solver.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    found = jax.jit(make_step(solver))(PARAMS, solver.init(PARAMS), GRADS)
    expected = jax.jit(by_update)(PARAMS, solver.init(PARAMS), GRADS)
    assert_same_bits(found, expected)


MIXTURES: dict[str, Callable[..., Any]] = {
    "mixture": lambda **options: mixture(
        [("deep", lamb(0.1)), ("gain", optax.sgd(0.1)), ("*", adamw(0.1))], max_grad_norm=1.0, **options
    ),
    "muon_adamw": lambda **options: muon_adamw(0.1, layout="torch", **options),
}


@pytest.mark.parametrize("name", one_in(2, MIXTURES))
@pytest.mark.parametrize("options", [{}, night(dict(on_nonfinite="skip"))], ids=["", "guarded"])
def test_mixtures_step_as_they_update(name: str, options: dict[str, Any]) -> None:
    params, gradients = given(steps=2)
    solver = MIXTURES[name](**options)
    assert (TARGET in program(solver, params)) == (not options)
    found = run(solver, params, gradients)
    expected = run(optax.chain(solver), params, gradients)
    assert_same_size(found, (expected[0], expected[1][0]), tolerances.FUSED["float32"])


def test_a_run_that_is_saved_or_exported_goes_on_with_the_same_bits() -> None:
    solver = lamb(0.1, engine="native")
    step = jax.jit(make_step(solver))
    params, state = step(PARAMS, solver.init(PARAMS), GRADS)
    expected = step(params, state, GRADS)
    saved = jax.tree.map(jnp.asarray, pickle.loads(pickle.dumps(jax.tree.map(np.asarray, state))))
    for again in (saved, import_state(solver.init(params), params, export_state(state, params))):
        assert_same_bits(step(params, again, GRADS), expected)


# ---- which code, and why


def engines(solver: Any, params: Any) -> dict[str, str]:
    return {row.name: row.engine for row in explain(solver, params).rows}


def test_explain_tells_which_code_runs_and_why() -> None:
    params = {"w": jnp.ones((4, 3)), "empty": jnp.zeros((0, 3))}
    assert engines(lamb(0.1), params) == {"empty": "xla: shape (0, 3) is empty", "w": "native"}
    assert engines(lamb(0.1, engine="xla"), {"w": params["w"]}) == {"w": "xla: engine='xla'"}
    assert engines(sgd(0.1), {"w": params["w"]}) == {"w": "xla: it has no state, and XLA's code is as fast"}
    assert "calls update()" in engines(optax.chain(lamb(0.1)), {"w": params["w"]})["w"]
    assert "one code" in engines(lamb(0.1, on_nonfinite="skip"), params)["w"]
    both = [("w", optax.chain(lamb(0.1))), ("*", lamb(0.1))]
    assert engines(mixture(both), PARAMS) == {
        "b": "native",
        "w": "xla: what is around its transformation calls update()",
    }
    assert "calls update()" in engines(mixture(both, on_nonfinite="skip"), PARAMS)["b"]
    assert engines(sgd(0.1, engine="native"), {"w": params["w"]}) == {"w": "native"}
    assert "matrix products" in engines(muon(0.1), {"w": params["w"]})["w"]
    assert "swapaxes" in engines(transformation(Turned), {"w": params["w"]})["w"]
    deep = adafactor(0.1, overrides=[("w", dict(min_dim_size_to_factor=2))])
    assert "129 elements behind" in engines(deep, {"w": jnp.zeros((300, 200, 129))})["w"]


def test_native_code_that_cannot_be_is_refused() -> None:
    with pytest.raises(thalweg.OptionError, match="engine must be one of 'auto', 'xla', 'native', got 'fast'"):
        lamb(0.1, engine="fast")
    with pytest.raises(thalweg.OptionError, match="engine='native' cannot run Muon"):
        muon(0.1, engine="native")
    solver = lamb(0.1, engine="native")
    state = solver.init(PARAMS)
    with pytest.raises(thalweg.OptionError, match="make_step"):
        solver.update(GRADS, state, PARAMS)
    own = transformation(Turned, engine="native")
    with pytest.raises(thalweg.OptionError, match=r"cannot step parameter 'b': .*swapaxes"):
        jax.jit(make_step(own))(PARAMS, own.init(PARAMS), GRADS)
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), state.exp_avg)
    with pytest.raises(thalweg.OptionError, match="another dtype"):
        jax.jit(make_step(solver))(PARAMS, state._replace(exp_avg=narrow), GRADS)


def test_what_kernels_of_gpus_serve() -> None:
    """Told without a GPU: why they do not step a parameter."""

    def told(solver: Any, dtype: str = "float32") -> str:
        params = {"w": jnp.ones((16, 12), dtype)}
        (leaf,) = solver.update.__self__.leaves(params, parameters(params))
        return on_gpu.reason_against(leaf)

    for solver in (adamw(0.1), lamb(0.1), lars(0.1), lion(0.1), sgd(0.1, momentum=0.9), adafactor(0.1)):
        assert told(solver) == told(solver, "bfloat16") == ""
    for options in (dict(state_dtype="int8"), dict(rounding="stochastic"), dict(on_nonfinite="skip")):
        assert told(lamb(0.1, **options)) == told(lamb(0.1, **options), "float16") == ""
    assert "float64" in told(lamb(0.1), "float64")
    assert "swapaxes" in told(transformation(Turned))
