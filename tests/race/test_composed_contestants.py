"""Rules that race with something around them: adamw+cautious+averaged."""

from __future__ import annotations

import pytest

from thalweg.errors import CommandError
from thalweg.race import race
from thalweg.race.contestants import CONTESTANTS, enter
from thalweg.race.run import execute
from thalweg.race.tasks import resolve

(DIGITS,) = resolve("digits")


def test_names_stand_for_options() -> None:
    name = enter("adamw+cautious+averaged")
    assert name == "AdamW+cautious+averaged"
    contestant = CONTESTANTS[name]
    assert (contestant.rule, contestant.like) == ("AdamW", "AdamW")
    added = {"cautious": True, "averaged": 0.999, "averaged_warmup": True}
    assert contestant.options == {**CONTESTANTS["AdamW"].options, **added}
    assert CONTESTANTS[enter("sgd+schedule_free")].options == {"momentum": 0.0, "schedule_free": True}
    assert CONTESTANTS[enter("lion+schedule_free")].options["betas"] == (0.0, 0.99)
    assert name not in list(CONTESTANTS), "it races only where it is asked for"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("adamv+cautious", "there is no rule 'adamv': did you mean 'AdamW'?"),
        ("adamw+averagd", "'averagd' does not go around a rule: did you mean 'averaged'?"),
    ],
)
def test_names_that_stand_for_nothing(name: str, told: str) -> None:
    with pytest.raises(CommandError) as error:
        enter(name)
    assert told in str(error.value)


def test_averages_are_what_is_measured() -> None:
    """The same training, measured at other parameters."""
    ready = race(DIGITS, optimizers=["AdamW", enter("adamw+averaged")], steps=4, seeds=1, rates={"": [0.01]})
    plain, averaged = (execute(DIGITS, CONTESTANTS[run.contestant], run) for run in ready.programme.courses[0].runs)
    assert plain.loss[0] == averaged.loss[0]
    assert plain.loss[-1] != averaged.loss[-1]
    assert averaged.state_bytes == pytest.approx(1.5 * plain.state_bytes, rel=0.01)
