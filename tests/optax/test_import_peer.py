"""Runs that optax's own optimizers have started: five steps there and ten here are fifteen there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import tolerances
from optax_runs import error, problem, take_step, train

import thalweg.optax as ours
from thalweg import StateError

#: A matrix that is taller than wide, three axes of which the last is the longest, a vector.
SHAPES: dict[str, Any] = {"tall": (6, 4), "block": [(2, 5, 6), (4,)]}
BEFORE, IN_ALL = 5, 15
#: Powers of two: in float32, in which optax computes schedules, each of these rates is exact in any order.
RATE = optax.linear_schedule(2.0**-5, 2.0**-7, 16)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def adafactor_in_float64() -> optax.GradientTransformation:
    """optax.adafactor, but for its decay of squares, which it computes in float32 whatever the parameters are."""
    return optax.chain(
        optax.scale_by_factored_rms(
            min_dim_size_to_factor=4, decay_rate_fn=lambda count, exponent: 1.0 - (count + 1.0) ** -exponent
        ),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_learning_rate(RATE, flip_sign=False),
        optax.scale_by_param_block_rms(),
        optax.ema(0.9, debias=False),
        optax.scale(-1),
    )


#: Theirs and ours, in the middle of a schedule.
CASES: dict[str, tuple[Any, Any]] = {
    "adafactor": (
        adafactor_in_float64(),
        ours.adafactor(RATE, min_dim_size_to_factor=4, momentum=0.9, dtype_momentum=jnp.float64),
    ),
    "lamb": (optax.lamb(RATE, weight_decay=0.1, mask=matrices), ours.lamb(RATE, weight_decay=0.1, mask=matrices)),
    "adamw with nesterov": (optax.adamw(RATE, nesterov=True), ours.adamw(RATE, nesterov=True)),
    "adam": (optax.adam(RATE), ours.adamw(RATE, weight_decay=0.0)),
    "sgd": (optax.sgd(RATE, 0.9, nesterov=True), ours.sgd(RATE, 0.9, nesterov=True)),
    "sgd without momentum": (optax.sgd(RATE), ours.sgd(RATE)),
    "after clipping": (
        optax.named_chain(("clip", optax.clip_by_global_norm(1.0)), ("rest", optax.adamw(RATE))),
        optax.chain(optax.clip_by_global_norm(1.0), ours.adamw(RATE)),
    ),
}


@pytest.mark.slow  # each case compiles three programs
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_continued(case: str) -> None:
    theirs, mine = CASES[case]
    start, noise = problem(SHAPES, steps=IN_ALL)
    first, second = (jax.tree.map(lambda x, part=part: x[part], noise) for part in (slice(BEFORE), slice(BEFORE, None)))
    params, their_state = train(theirs, start, first)
    expected, _ = train(theirs, params, second, start=lambda _: their_state)
    state = ours.import_peer(mine, params, their_state)
    found, _ = train(mine, params, second, start=lambda _: state)
    assert error(found, expected, start) <= tolerances.CONTINUED["float64"]


PARAMS: dict[str, Any] = {"w": jnp.arange(1.0, 13.0).reshape(4, 3), "b": jnp.ones(3)}


def kept_by(solver: Any, params: Any = PARAMS) -> Any:
    """A state after one step."""
    return take_step(solver, params, params)[1]


def test_state_of_16_bits_is_widened_and_not_changed() -> None:
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    their_state = kept_by(optax.lamb(0.1), params)
    for options, dtype in (({}, jnp.float32), (dict(state_dtype="bfloat16"), jnp.bfloat16)):
        kept = ours.import_peer(ours.lamb(0.1, **options), params, their_state).exp_avg_sq["w"]
        assert kept.dtype == dtype
        assert (kept == their_state[0].nu["w"]).all()


def test_parameters_may_be_masked() -> None:
    mask = {"w": True, "b": False}
    their_state = kept_by(optax.masked(optax.adamw(0.1), mask))
    state = ours.import_peer(ours.adamw(0.1), {"w": PARAMS["w"]}, their_state)
    masked = ours.import_peer(optax.masked(ours.adamw(0.1), mask), PARAMS, their_state).inner_state
    for found in (state, masked):
        assert (found.exp_avg_sq["w"] == their_state.inner_state[0].nu["w"]).all()


def test_a_chain_put_together_by_hand_is_named() -> None:
    theirs = optax.chain(
        optax.scale_by_adam(), optax.add_decayed_weights(1e-4), optax.scale_by_schedule(RATE), optax.scale(-1)
    )
    their_state = kept_by(theirs)
    with pytest.raises(StateError, match=r"AdamW cannot continue a run of optax\.lamb: LAMB can"):
        ours.import_peer(ours.adamw(0.1), PARAMS, their_state)
    state = ours.import_peer(ours.adamw(0.1), PARAMS, their_state, "optax.adamw")
    assert (state.exp_avg["w"] == their_state[0].mu["w"]).all()
    assert state.count == 1


def test_without_a_count_one_step_was_taken() -> None:
    """As in torch: no formula of SGD depends on it."""
    for momentum in (None, 0.9):
        theirs, mine = optax.sgd(0.1, momentum), ours.sgd(0.1, momentum or 0.0)
        assert ours.import_peer(mine, PARAMS, theirs.init(PARAMS)).count == 1


FACTORED = {"min_dim_size_to_factor": 2}
UNKNOWN = (
    r"no state of an optimizer that is known: known are optax\.adam, optax\.adamw, optax\.lamb, optax\.sgd, "
    r"optax\.sgd, optax\.adafactor; of a checkpoint or of a wrapper, pass the state that is in it"
)
CANNOT = r"{} cannot continue a run of optax\.{}: {} can"
UNLIKE = "the state of '{}' does not fit"
#: Their solver, ours, and what is wrong.
REFUSED: list[tuple[Any, Any, str]] = [
    (optax.rmsprop(0.1), ours.lamb(0.1), UNKNOWN),
    (optax.amsgrad(0.1), ours.adamw(0.1, amsgrad=True), UNKNOWN),
    (optax.inject_hyperparams(optax.lamb)(0.1), ours.lamb(0.1), UNKNOWN),
    (optax.lars(0.1), ours.lars(0.1), UNKNOWN),
    (optax.chain(optax.adam(0.1), optax.adam(0.1)), ours.adamw(0.1), UNKNOWN),
    (optax.adam(0.1), ours.sgd(0.1, 0.9), CANNOT.format("SGD", "adam", "AdamW")),
    (optax.lamb(0.1), ours.adamw(0.1), CANNOT.format("AdamW", "lamb", "LAMB")),
    (optax.clip(1.0), ours.lamb(0.1), CANNOT.format("LAMB", "sgd", "SGD")),
    (optax.adam(0.1), ours.adamw(0.1), r"what is weight_decay=0\.0 here, and this solver has"),
    (optax.lamb(0.1), ours.lamb(0.1, grad_averaging=False), "construct it with grad_averaging=True"),
    (optax.sgd(RATE, 0.9), ours.sgd(0.1, 0.9, dampening=0.5), r"construct it with dampening=0\.0"),
    (optax.adafactor(0.1), ours.adafactor(0.1, **FACTORED), UNLIKE.format("w")),
    (optax.adafactor(0.1, **FACTORED), ours.adafactor(0.1), UNLIKE.format("w")),
    (optax.adafactor(0.1), ours.adafactor(0.1, momentum=0.9), UNLIKE.format("b")),
    (optax.adafactor(0.1, momentum=0.9), ours.adafactor(0.1), UNLIKE.format("b")),
    (optax.sgd(RATE, 0.9), ours.sgd(0.1), "the state of 'b' does not fit|a parameter 'b' that is not here"),
    (optax.sgd(RATE), ours.sgd(0.1, 0.9), r"momentum=0\.0 here"),
    (optax.adamw(0.1), ours.mixture([("w", ours.sgd(0.1)), ("*", ours.adamw(0.1))]), "must be one transformation"),
    (optax.adamw(0.1), optax.inject_hyperparams(ours.adamw)(0.1), "import into it alone, and put the state where"),
    (optax.adamw(0.1), optax.chain(ours.adamw(0.1), optax.scale_by_schedule(RATE)), "in a chain at most with others"),
    (optax.adamw(0.1), optax.adamw(0.1), "must be the state of an optimizer of thalweg.optax"),
]


@pytest.mark.parametrize(("theirs", "mine", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_continued_is_refused(theirs: Any, mine: Any, said: str) -> None:
    with pytest.raises(StateError, match=said):
        ours.import_peer(mine, PARAMS, theirs.init(PARAMS))


def test_names_and_counts_that_do_not_match_are_refused() -> None:
    their_state = adam, decay, schedule = optax.adamw(RATE).init(PARAMS)
    with pytest.raises(StateError, match="a parameter 'w' that is not here: here are b, x"):
        ours.import_peer(ours.adamw(0.1), {"x": PARAMS["w"], "b": PARAMS["b"]}, their_state)
    with pytest.raises(StateError, match="no entry for parameter 'x'"):
        ours.import_peer(ours.adamw(0.1), {**PARAMS, "x": PARAMS["w"]}, their_state)
    with pytest.raises(StateError, match=r"no state of optax\.sgd: known are"):
        ours.import_peer(ours.sgd(0.1), PARAMS, their_state, "optax.sgd")
    with pytest.raises(StateError, match=r"different numbers of steps were taken, \[0, 7\]"):
        ours.import_peer(ours.adamw(RATE), PARAMS, (adam, decay, schedule._replace(count=jnp.asarray(7))))
