"""Passes that are broken on purpose, and truths where numbers belong: each check says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from programs import program_of

from thalweg.errors import RuleError
from thalweg.programs.schedule import Pass, Schedule, schedule
from thalweg.programs.verify import verify_schedule
from thalweg.rules import LAMB, Rule, Update
from thalweg.rules.entries import Moment

SHAPE = (6, 5)


# ---- passes


def passes_of(rule: Rule, **how: Any) -> Schedule:
    program = program_of(rule, SHAPE)
    return schedule(program, dict.fromkeys(program.memory, 4), exact=program.entries, **how)


def with_pass(found: Schedule, number: int, **changes: Any) -> Schedule:
    passes: list[Pass] = list(found.passes)
    passes[number] = replace(passes[number], **changes)
    return replace(found, passes=tuple(passes))


#: Damages of LAMB's passes: read p, g and both averages, write the averages; read p and the averages, write p.
PASSES: dict[str, tuple[Callable[[Schedule], Schedule], str]] = {
    "too little is read": (
        lambda found: with_pass(found, 0, reads=("p", "g", "exp_avg")),
        r"LAMB, pass 1 \(read p, g, exp_avg and write .*\) needs exp_avg_sq, and does not read it",
    ),
    "p is written unread": (
        lambda found: with_pass(found, 1, reads=("exp_avg", "exp_avg_sq")),
        r"pass 2 .* writes p, and must read it",
    ),
    "a result is not written": (
        lambda found: with_pass(found, 0, writes=("exp_avg",)),
        r"LAMB: its passes write 'exp_avg_sq' 0 times, and must once",
    ),
    "the gradient is written": (
        lambda found: with_pass(found, 0, writes=(*found.passes[0].writes, "g")),
        r"LAMB: its passes write 'g' 1 times, and must not: nothing needs it",
    ),
    "a sum is not made": (
        lambda found: with_pass(found, 0, sums=found.passes[0].sums[1:]),
        r"LAMB: its passes make v\d+ = sum_squares\(v\d+\) 0 times, and must once",
    ),
    "a sum comes too late": (
        lambda found: with_pass(
            with_pass(found, 0, sums=found.passes[0].sums[1:]), 1, sums=(found.passes[0].sums[0], *found.passes[1].sums)
        ),
        r"LAMB, pass 2 .* needs v\d+ = sum_squares\(v\d+\) before it is complete",
    ),
}


@pytest.mark.parametrize("damage", PASSES)
def test_broken_passes_are_found(damage: str) -> None:
    found = passes_of(LAMB())
    exact, broken, message = found.program.entries, *PASSES[damage]
    verify_schedule(found, exact, guarded=False, complete=False)
    with pytest.raises(RuleError, match=message):
        verify_schedule(broken(found), exact, guarded=False, complete=False)


def test_what_was_rounded_is_not_read_back() -> None:
    with pytest.raises(RuleError, match=r"pass 2 .* reads exp_avg, which an earlier pass has written and rounded"):
        verify_schedule(passes_of(LAMB()), (), guarded=False, complete=False)


def test_nothing_is_written_unguarded() -> None:
    found = passes_of(LAMB())
    with pytest.raises(RuleError, match=r"pass 1 .* needs v\d+ = sum_squares\(v\d+\) before it is complete"):
        verify_schedule(found, found.program.entries, guarded=True, complete=False)
    guarded = passes_of(LAMB(), guarded=True)
    verify_schedule(guarded, guarded.program.entries, guarded=True, complete=False)


def test_all_sums_are_complete_before_the_last_pass_where_that_is_asked_for() -> None:
    found = passes_of(LAMB(trust=False))
    with pytest.raises(RuleError, match=r"makes .*, which must be complete before the last pass"):
        verify_schedule(found, found.program.entries, guarded=False, complete=True)
    passes_of(LAMB(trust=False), complete=True)


# ---- a rule of one's own is checked when it is traced


@dataclass(frozen=True, kw_only=True)
class Counting(Rule):
    """Which operations of truths it does is left to each test."""

    way: str = "where"

    def entries(self, shape: Any) -> Any:
        return {"signs": Moment()}

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **_: Any) -> Update:
        up, down = g > 0, p > 0
        (mean,) = xp.means((up if self.way == "mean" else g, None))
        ways = {
            "where": lambda: xp.where(up & down, 1.0, 0.0),
            "times": lambda: up * g,
            "add": lambda: up + down,
            "and": lambda: xp.where(up & g, 1.0, 0.0),
            "choice": lambda: xp.where(g, 1.0, 0.0),
            "root": lambda: xp.sqrt(up),
            "mean": lambda: mean * g,
        }
        delta = up if self.way == "delta" else ways.get(self.way, lambda: g)() * -lr
        finite = mean if self.way == "finite" else None
        return Update(delta, {"signs": up if self.way == "state" else g}, finite)


@pytest.mark.parametrize("way", ["where", "times"])
def test_truths_may_choose_and_count_among_numbers(way: str) -> None:
    program_of(Counting(way=way), SHAPE)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("add", r"Counting: v\d+ = add\(v\d+, v\d+\) is arithmetic of truth values alone"),
        ("and", r"Counting: v\d+ = and\(v\d+, v\d+\) needs a truth value as operand 2, and has a number"),
        ("choice", r"= where\(v\d+, 1.0, 0.0\) needs a truth value as operand 1, and has a number: write a comparison"),
        ("root", r"= sqrt\(v\d+\) is arithmetic of truth values alone.*: write xp.where\(condition, 1.0, 0.0\)"),
        ("mean", r"Counting: v\d+ = mean\(v\d+\) combines truth values"),
        ("state", "Counting.update makes a state 'signs' of truth values: write xp.where"),
        ("delta", "Counting.update makes a delta of truth values: write xp.where"),
        ("finite", r"Counting.update: finite must be a truth value, such as xp.isfinite\(x\), got a number"),
    ],
)
def test_what_libraries_do_in_different_ways_is_refused(way: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        program_of(Counting(way=way), SHAPE)
