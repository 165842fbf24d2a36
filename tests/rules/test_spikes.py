"""Spikes: norms beside those before them, by a plain loop; and in numpy, what becomes of steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from spiked import KINDS, STEPS, draw, factors_by_hand
from tolerances import FLOAT64

import thalweg.numpy
from thalweg import OptionError, Spikes, StateError
from thalweg.rules.spikes import judge
from thalweg.spaces import numpy as xp


def judge_all(norms: Any, spikes: Spikes) -> tuple[list[float | None], Any]:
    """What a loop by hand answers, and what is kept in the end."""
    kept, factors = np.zeros(spikes.kept_shape), []
    for norm in norms:
        judgement = judge(xp, spikes, np.array([norm]), kept)
        is_skipped = spikes.action == "skip" and judgement.is_spike.item()
        factors.append(None if is_skipped else judgement.scale.item() if spikes.action != "skip" else 1.0)
        kept = judgement.kept
    return factors, kept


@pytest.mark.parametrize(
    ("spikes", "most"), [(Spikes(), 8), (Spikes(z=4.0), 12), (Spikes(quantile=0.99), 20), (Spikes(quantile=0.9), 80)]
)
def test_a_rise_that_lasts_is_accepted_after_a_bounded_number_of_steps(spikes: Spikes, most: int) -> None:
    usual = np.abs(1 + 0.1 * np.random.default_rng(1).normal(size=600))
    norms = np.concatenate([usual[:300], 10 * usual[300:]])
    factors, _ = judge_all(norms, spikes)
    skipped = [step for step, factor in enumerate(factors[300:]) if factor is None]
    assert skipped[0] == 0
    in_a_row = next(i for i, step in enumerate([*skipped, 10**6]) if step != i)
    assert in_a_row <= most
    # a quantile leaves its share of steps above it in any case
    assert len(skipped) - in_a_row <= (0 if spikes.quantile is None else 300 * (1 - spikes.quantile) * 3)


def test_one_spike_hides_no_other() -> None:
    norms = np.abs(1 + 0.1 * np.random.default_rng(1).normal(size=300))
    norms[[200, 210]] = 1e9, 10.0
    assert [step for step, factor in enumerate(judge_all(norms, Spikes())[0]) if factor is None] == [200, 210]


def test_what_is_no_number_or_zero_is_not_remembered() -> None:
    for norm in (np.nan, np.inf, 0.0):
        with np.errstate(all="ignore"):
            _, kept = judge_all([1.0, 1.1, norm, 0.9], Spikes(window=4))
        assert kept[0] == (norm == np.inf)
        assert sorted(kept[1:]) == [0.0, 0.9, 1.0, 1.1]


# ---- in numpy


def train(engine: Any, steps: range, optimizer: Any = None, params: Any = None, **options: Any) -> tuple[Any, Any]:
    optimizer = optimizer or thalweg.numpy.AdamW(lr=0.1, engine=engine, **options)
    params = params or draw(0)
    for t in steps:
        optimizer.step(params, draw(t))
    return optimizer, params


def train_by_hand(spikes: Spikes) -> tuple[Any, Any]:
    """The same without the option: gradients are multiplied, and steps left out."""
    optimizer, params = thalweg.numpy.AdamW(lr=0.1, engine="reference"), draw(0)
    for t, factor in enumerate(factors_by_hand(spikes), 1):
        if factor is not None:
            optimizer.step(params, {name: g * factor for name, g in draw(t).items()})
    return optimizer, params


@pytest.mark.parametrize("engine", ["reference", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_a_plain_loop(kind: str, engine: str) -> None:
    optimizer, params = train(engine, range(1, STEPS + 1), spikes=KINDS[kind])
    wanted, by_hand = train_by_hand(KINDS[kind])
    factors = factors_by_hand(KINDS[kind])
    assert optimizer.stats()["a"]["spikes"] == sum(factor != 1.0 for factor in factors) > 1
    assert optimizer.skipped == dict.fromkeys("ab", factors.count(None))
    for name, p in params.items():
        assert np.max(np.abs(p - by_hand[name])) < FLOAT64
        assert optimizer.state[name]["step"] == wanted.state[name]["step"] == STEPS - factors.count(None)


def test_the_smaller_of_two_limits_holds() -> None:
    spikes = KINDS["clip"]
    optimizer, params = train("auto", range(1, STEPS + 1), spikes=spikes, max_grad_norm=2.0)
    _, clipped = train("auto", range(1, STEPS + 1), max_grad_norm=2.0)
    assert all(np.max(np.abs(p - clipped[name])) < FLOAT64 for name, p in params.items())
    assert optimizer.stats()["a"]["spikes"] > 0


def test_a_file_has_the_norms(tmp_path: Any) -> None:
    whole, params = train("auto", range(1, STEPS + 1), spikes=KINDS["skip"])
    first, own = train("auto", range(1, 9), spikes=KINDS["skip"])
    first.save(tmp_path / "state.npz")
    second = thalweg.numpy.AdamW(lr=0.1, spikes=KINDS["skip"])
    second.load(tmp_path / "state.npz")
    train("auto", range(9, STEPS + 1), second, own)
    assert all(np.array_equal(p, own[name]) for name, p in params.items())
    assert np.array_equal(whole.state["a"]["spikes"], second.state["b"]["spikes"])
    with pytest.raises(StateError, match="spikes has window=16, and the norms of 8 steps are kept"):
        train("auto", range(1, 2), second.with_spikes(Spikes(window=16)), own)


def test_an_error_is_not_remembered() -> None:
    optimizer, params = train("auto", range(1, 9), spikes=KINDS["clip"], on_nonfinite="raise")
    before = optimizer.state["a"]["spikes"].copy()
    with pytest.raises(thalweg.NonFiniteError), np.errstate(all="ignore"):
        optimizer.step(params, {"a": np.full((4, 3), np.inf), "b": np.ones(5)})
    assert np.array_equal(optimizer.state["a"]["spikes"], before)


def test_what_is_refused() -> None:
    for spikes in ("skip", 6.0):
        with pytest.raises(OptionError, match=r"spikes must be True, False or thalweg\.Spikes"):
            thalweg.numpy.AdamW(lr=0.1, spikes=spikes)
    for option, value in dict(window=1, z=0.0, quantile=1.0, action="drop").items():
        with pytest.raises(OptionError, match=option):
            Spikes(**{option: value})
    with pytest.raises(OptionError, match="spikes needs all gradients of a step at once"):
        thalweg.numpy.AdamW(lr=0.1, spikes=True).update("a", np.ones(3), np.ones(3))
