"""Runs that optax's own optimizers have started: five steps there and five here are ten there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from lanes import by_turns
from optax_runs import SOON, compiled, error, leaves, matrices, problem

import thalweg.optax as ours
from thalweg import StateError

#: A matrix that is taller than wide, three axes of which the last is the longest, a vector.
SHAPES: dict[str, Any] = {"tall": (6, 4), "block": [(2, 5, 6), (4,)]}
STEPS, HALF = 10, 5
#: Powers of two: in float32, in which optax computes schedules, each of these rates is exact in any order.
RATE = optax.linear_schedule(2.0**-5, 2.0**-7, 16)


def kind_of(params: Any) -> Any:
    return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "other", params)


def decay_in_float64(count: Any, exponent: Any) -> Any:
    return 1.0 - (count + 1.0) ** -exponent


def adafactor_in_float64() -> optax.GradientTransformation:
    """optax.adafactor, but for its decay of squares, which it computes in float32 whatever the parameters are."""
    return optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=4, decay_rate_fn=decay_in_float64),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_learning_rate(RATE, flip_sign=False),
        optax.scale_by_param_block_rms(),
        optax.ema(0.9, debias=False),
        optax.scale(-1),
    )


def mixed_adamw() -> Any:
    return ours.adamw(RATE, weight_decay=0.0, nesterov=True)


def in_two_mini_steps(solver: Any) -> Any:
    """Gradients are added up in float64: in float32, the default, two runs may round to different neighbours."""
    return optax.MultiSteps(solver, 2, accumulator_dtype=jnp.float64).gradient_transformation()


#: Theirs and ours, in the middle of a schedule.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "adafactor": (
        adafactor_in_float64,
        lambda: ours.adafactor(RATE, min_dim_size_to_factor=4, momentum=0.9, dtype_momentum=jnp.float64),
    ),
    "lamb": (
        lambda: optax.lamb(RATE, weight_decay=0.1, mask=matrices),
        lambda: ours.lamb(RATE, weight_decay=0.1, mask=matrices),
    ),
    "lars": (
        lambda: optax.lars(RATE, 0.1, trust_ratio_mask=matrices, trust_coefficient=0.1, nesterov=True),
        lambda: ours.lars(RATE, 0.1, trust_ratio_mask=matrices, trust_coefficient=0.1, nesterov=True),
    ),
    "adamw": (lambda: optax.adamw(RATE), lambda: ours.adamw(RATE)),
    "adam": (lambda: optax.adam(RATE), lambda: ours.adamw(RATE, weight_decay=0.0)),
    "sgd": (lambda: optax.sgd(RATE, 0.9), lambda: ours.sgd(RATE, 0.9)),
    "sgd without momentum": (lambda: optax.sgd(RATE), lambda: ours.sgd(RATE)),
    "lion": (lambda: optax.lion(RATE), lambda: ours.lion(RATE)),
    "muon as a mixture": (
        lambda: optax.contrib.muon(RATE),
        lambda: ours.mixture([(lambda _, p: p.ndim == 2, ours.muon(RATE)), ("*", mixed_adamw())]),
    ),
    "muon as a partition": (
        lambda: optax.contrib.muon(RATE),
        lambda: optax.partition({"matrix": ours.muon(RATE), "other": mixed_adamw()}, kind_of),
    ),
    "after clipping": (
        lambda: optax.named_chain(("clip", optax.clip_by_global_norm(1.0)), ("rest", optax.adamw(RATE))),
        lambda: optax.chain(optax.clip_by_global_norm(1.0), ours.with_stats(ours.adamw(RATE))),
    ),
    "injected, both": (
        lambda: optax.inject_hyperparams(optax.lamb)(RATE),
        lambda: optax.inject_hyperparams(ours.lamb)(RATE),
    ),
    "injected there": (lambda: optax.inject_hyperparams(optax.sgd)(RATE, 0.9), lambda: ours.sgd(RATE, 0.9)),
    "injected here": (lambda: optax.lamb(RATE), lambda: optax.inject_hyperparams(ours.lamb)(RATE)),
    "between two mini-steps": (
        lambda: in_two_mini_steps(optax.lamb(RATE)),
        lambda: in_two_mini_steps(ours.lamb(RATE)),
    ),
    "if finite": (
        lambda: optax.apply_if_finite(optax.lamb(RATE), 3),
        lambda: optax.apply_if_finite(ours.lamb(RATE), 3),
    ),
}


def halves(noise: Any) -> tuple[Any, Any]:
    return jax.tree.map(lambda x: x[:HALF], noise), jax.tree.map(lambda x: x[HALF:], noise)


@by_turns("dtype")
@pytest.mark.slow  # many small programs are compiled
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_five_steps_there_and_five_here_are_ten_there(case: str, dtype: str) -> None:
    theirs, mine = (make() for make in CASES[case])
    start, noise = problem(SHAPES, steps=STEPS, dtype=dtype)
    first, second = halves(noise)
    params, their_state = compiled(theirs, start, first)
    expected, _ = compiled(theirs, params, second, start=lambda _: their_state)
    state, report = ours.import_peer(mine, params, their_state)
    found, _ = compiled(mine, params, second, start=lambda _: state)
    assert report.steps == HALF // 2 if case == "between two mini-steps" else report.steps == HALF
    apart = error(found, expected, start) if dtype == "float64" else largest(found, expected) / largest(expected)
    assert apart <= tolerances.CONTINUED[dtype]


def largest(tree: Any, other: Any = None) -> float:
    """The largest number of a tree, or the largest difference to another."""
    others = leaves(tree if other is None else other)
    return max(float(np.abs(a if other is None else a - b).max()) for a, b in zip(leaves(tree), others, strict=True))


def kept_by(solver: Any, params: Any) -> Any:
    """A state after one step."""
    return jax.jit(solver.update, compiler_options=SOON)(params, solver.init(params), params)[1]


PARAMS: dict[str, Any] = {"w": jnp.arange(1.0, 13.0).reshape(4, 3), "b": jnp.ones(3)}


def test_state_of_16_bits_is_widened_and_not_changed() -> None:
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    their_state = kept_by(optax.lamb(0.1), params)
    state, _ = ours.import_peer(ours.lamb(0.1), params, their_state)
    assert state.exp_avg["w"].dtype == jnp.float32
    assert (state.exp_avg["w"] == their_state[0].mu["w"]).all()
    narrow, _ = ours.import_peer(ours.lamb(0.1, state_dtype="bfloat16"), params, their_state)
    assert narrow.exp_avg_sq["w"].dtype == jnp.bfloat16
    assert (narrow.exp_avg_sq["w"] == their_state[0].nu["w"]).all()


def test_parameters_may_have_other_paths_and_some_may_be_masked() -> None:
    their_state = kept_by(optax.masked(optax.adamw(0.1), {"w": True, "b": False}), PARAMS)
    params = {"net": {"kernel": PARAMS["w"]}}
    state, report = ours.import_peer(ours.adamw(0.1), params, their_state, rename={"w": "net.kernel"})
    moments = their_state.inner_state[0]
    assert (state.exp_avg["net"]["kernel"] == moments.mu["w"]).all()
    assert (report.source, report.rule, report.parameters, report.steps) == ("optax.adamw", "AdamW", 1, 1)
    assert report.taken == {"ScaleByAdamState.mu": "exp_avg", "ScaleByAdamState.nu": "exp_avg_sq"}
    assert report.untold["betas"] == (0.9, 0.999)


def test_steps_that_a_state_does_not_count_are_asked_for() -> None:
    their_state = optax.sgd(0.1, 0.9).init(PARAMS)
    with pytest.raises(StateError, match="pass them as step="):
        ours.import_peer(ours.sgd(0.1, 0.9), PARAMS, their_state)
    state, _ = ours.import_peer(ours.sgd(0.1, 0.9), PARAMS, their_state, step=2)
    assert state.count == 2
    with pytest.raises(StateError, match="has taken 0 steps, and step=2"):
        ours.import_peer(ours.lamb(0.1), PARAMS, optax.lamb(0.1).init(PARAMS), step=2)


def test_injected_hyperparameters_go_on_as_the_state_has_them() -> None:
    their_state = optax.inject_hyperparams(optax.lamb)(0.1).init(PARAMS)
    their_state.hyperparams["learning_rate"] = jnp.asarray(0.025)
    state, _ = ours.import_peer(optax.inject_hyperparams(ours.lamb)(0.1), PARAMS, their_state)
    assert float(state.hyperparams["learning_rate"]) == 0.025


FACTORED = {"min_dim_size_to_factor": 2}
#: Their solver, ours, and what is wrong.
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "an optimizer that has no equal": (optax.rmsprop(0.1), ours.lamb(0.1), "a ScaleByRmsState, which cannot be"),
    "another rule": (optax.adam(0.1), ours.sgd(0.1, 0.9), "'b' has ScaleByAdamState, which SGD cannot continue"),
    "a rule without equal": (optax.adam(0.1), ours.kron(0.1), "'b' has ScaleByAdamState, which Kron cannot continue"),
    "nothing of a rule": (optax.clip(1.0), ours.lamb(0.1), "the source lacks 'b', 'w'"),
    "two optimizers": (
        optax.chain(optax.adam(0.1), optax.adam(0.1)),
        ours.adamw(0.1),
        "two ScaleByAdamState for parameter 'b'",
    ),
    "Adam and a trace": (optax.chain(optax.adam(0.1), optax.trace(0.9)), ours.lamb(0.1), "ScaleByAdamState, Trace"),
    "a trace of steps": (optax.lars(RATE), ours.sgd(0.1, 0.9), "is one of steps, as that of optax.lars"),
    "a trace of gradients": (optax.sgd(RATE, 0.9), ours.lars(0.1), "momentum_mode='lr_outside' here"),
    "another meaning": (optax.lamb(0.1), ours.lamb(0.1, grad_averaging=False), "construct the solver with grad_av"),
    "other coefficients": (
        optax.contrib.muon(0.1, ns_coeffs="dion"),
        ours.mixture([("w", ours.muon(0.1)), ("b", ours.adamw(0.1))]),
        "'w' with what is ns_coefficients=",
    ),
    "all squares there": (optax.adafactor(0.1), ours.adafactor(0.1, **FACTORED), r"v_col of .* has shape \(1,\)"),
    "all squares here": (optax.adafactor(0.1, **FACTORED), ours.adafactor(0.1), r"v of .* has shape \(1,\)"),
    "no momentum there": (optax.adafactor(0.1), ours.adafactor(0.1, momentum=0.9), "keeps 'exp_avg' of 'b'"),
    "no momentum here": (optax.sgd(RATE, 0.9), ours.sgd(0.1), "TraceState of 'b' would be lost"),
    "no average here": (optax.adafactor(0.1, momentum=0.9), ours.adafactor(0.1), "EmaState of 'b' would be lost"),
    "a solver that is not all ours": (
        optax.partition({"w": optax.adam(0.1), "b": optax.adam(0.1)}, {"w": "w", "b": "b"}),
        optax.partition({"w": ours.adamw(0.1), "b": optax.adam(0.1)}, {"w": "w", "b": "b"}),
        "steps 'b' in this solver: import its parts apart",
    ),
    "another largest square": (optax.adam(0.1), ours.adamw(0.1, amsgrad=True), "keeps 'max_exp_avg_sq' of 'b'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_continued_is_refused(what: str) -> None:
    theirs, mine, message = REFUSED[what]
    with pytest.raises(StateError, match=message):
        ours.import_peer(mine, PARAMS, theirs.init(PARAMS))


def test_gradients_that_are_added_up_are_not_lost() -> None:
    between = optax.MultiSteps(optax.lamb(0.1), 3).init(PARAMS)._replace(mini_step=jnp.asarray(2))
    with pytest.raises(StateError, match=r"gradients of 2 mini-steps of optax.MultiSteps, which would be lost"):
        ours.import_peer(ours.lamb(0.1), PARAMS, between)


def test_counts_that_differ_are_refused() -> None:
    adam, schedule = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(RATE)).init(PARAMS)
    with pytest.raises(StateError, match=r"different numbers of steps, \[0, 7\]"):
        ours.import_peer(ours.adamw(RATE), PARAMS, (adam, schedule._replace(count=jnp.asarray(7))))
