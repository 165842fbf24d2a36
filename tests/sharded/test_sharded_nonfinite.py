"""A number that is not finite, on one rank: all ranks decide alike, and as one process would."""

from __future__ import annotations

import math

import pytest
from lanes import by_turns

pytest.importorskip("torch")

from world import world
from world_steps import TYPICAL, Run, cases_for, differences, skipped_steps, stepped_errors

from thalweg import Spikes

pytestmark = pytest.mark.slow


@by_turns()
@cases_for()
@pytest.mark.parametrize("policy", ["skip", "raise", "propagate"])
@pytest.mark.parametrize(
    ("size", "layout", "number"),
    [
        (2, "first axis", math.nan),
        (2, "last axis", math.nan),
        (2, "mixed", math.inf),
        (4, "two axes", math.inf),
        (4, "meshes", math.nan),
    ],
)
def test_gradients_that_are_not_finite(rule: str, size: int, layout: str, policy: str, number: float) -> None:
    options = dict(TYPICAL[rule], on_nonfinite=policy)
    run = Run(rule, options=options, spoilt=((1, "matrix", number), (2, "vector", number), (2, "large", number)))
    assert world(size).run(differences, run, layout) == [[]] * size


@by_turns()
@cases_for()
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_squares_that_overflow_in_the_sum_of_all_ranks_alone(rule: str, policy: str) -> None:
    """Each rank can still square what it has."""
    options = dict(TYPICAL[rule], on_nonfinite=policy, max_grad_norm=1.0)
    run = Run(rule, "float32", options=options, names=("even", "vector"), huge=(1, "even", 8e18))
    assert world(2).run(differences, run, "first axis") == [[]] * 2


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_parameters_that_overflow_on_one_rank(policy: str) -> None:
    """The gradient is finite everywhere, and what would be written is not: float16 ends at 65504."""
    options = dict(trust=False, momentum=0.0, on_nonfinite=policy)
    run = Run("LARS", "float16", options=options, spoilt=((1, "matrix", 60000.0),), names=("matrix", "even"))
    assert world(2).run(differences, run, "first axis", tolerance=0.0) == [[]] * 2


@cases_for()
def test_the_guilty_are_named_on_every_rank(rule: str) -> None:
    run = Run(rule, options=dict(TYPICAL[rule], on_nonfinite="raise"), spoilt=((0, "matrix", math.nan),))
    first, second = world(2).run(stepped_errors, run, "first axis")
    assert first == second
    assert first[0] == "NonFiniteError: the gradient or the update is not finite: 'matrix'"
    assert not any(first[1:])


@pytest.mark.parametrize("action", ["skip", "clip"])
@pytest.mark.parametrize(("rule", "layout"), [("LAMB", "mixed"), ("Muon", "first axis")])
def test_spikes_on_one_rank(rule: str, layout: str, action: str) -> None:
    """What is large is on one rank, and all of them skip or clip."""
    spikes = Spikes(window=4, z=3.0, action=action)  # type: ignore[arg-type]
    run = Run(rule, options=dict(TYPICAL[rule], spikes=spikes), rates=(1.0,) * 5, spoilt=((3, "matrix", 1e4),))
    assert world(2).run(differences, run, layout) == [[]] * 2
    assert world(2).run(skipped_steps, run, layout) == [1 if action == "skip" else 0] * 2
