"""Programs that are broken on purpose: each check says which operation is wrong and what would be right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from cases import FUSED_OPTIONS
from programs import program_of

from thalweg.errors import RuleError
from thalweg.programs.graph import Value
from thalweg.programs.schedule import Pass, Schedule, schedule
from thalweg.programs.trace import Program
from thalweg.programs.verify import verify, verify_schedule
from thalweg.rules import LAMB, Adafactor, Rule, Update
from thalweg.rules.entries import Moment
from thalweg.settings import Settings

SHAPE = (6, 5)
FACTORED = Adafactor(min_dim_size_to_factor=2)


@pytest.mark.parametrize(("case", "options"), FUSED_OPTIONS)
def test_programs_of_the_package_pass(case: Any, options: dict[str, Any]) -> None:
    given = {key: value for key, value in options.items() if key not in ("variant", "lr")}
    rule = Settings(case.rule, given, options.get("variant")).base.rule_at(3)
    verify(program_of(rule, (4, 6, 5), options.get("lr", 0.1)))


# ---- values


def value_of(program: Program, op: str) -> Value:
    return next(value for value in program.graph.values if value.op == op)


def change(which: str, /, **attributes: Any) -> Callable[[Program], None]:
    """Damage the first value of an operation."""

    def damage(program: Program) -> None:
        value = value_of(program, which)
        for name, new in attributes.items():
            setattr(value, name, new(program, value) if callable(new) else new)

    return damage


#: For each check a damage, and what is said of it.
VALUES: dict[str, tuple[Callable[[Program], None], str]] = {
    "an operation that nobody knows": (
        change("sqrt", op="cbrt"),
        r"LAMB: v\d+ = cbrt\(v\d+\) is no operation of programs, which are add, .*, amax",
    ),
    "too many operands": (
        change("mul", args=lambda program, value: (*value.args, 1.0)),
        r"= mul\(.*\) has 3 operands, and mul takes 2",
    ),
    "too many operands of a sum": (
        change("sum_squares", args=lambda program, value: value.args * 2),
        r"= sum_squares\(.*\) has 2 operands, and sum_squares takes 1",
    ),
    "an operand that comes later": (
        change("mul", args=lambda program, value: (program.graph.values[-1], 1.0)),
        r"= mul\(v\d+, 1.0\) needs v\d+, which is not computed before it",
    ),
    "an operand of another program": (
        change("add", args=lambda program, value: (program_of(LAMB(), SHAPE).inputs["g"], 1.0)),
        r"= add\(v\d+, 1.0\) needs v\d+, which is not computed before it in the same program",
    ),
    "an operand that is no number": (
        change("mul", args=lambda program, value: (value.args[0], "2")),
        r"computes with a str: operands are values and Python numbers",
    ),
    "arithmetic of truths": (
        change("sqrt", args=lambda program, value: (program.graph.apply("gt", program.inputs["g"], 0.0),), index=10**6),
        r"= sqrt\(v\d+\) is arithmetic of truth values alone.*: write xp.where\(condition, 1.0, 0.0\)",
    ),
    "a choice by numbers": (
        change("where", args=lambda program, value: (program.inputs["lr"], *value.args[1:])),
        r"= where\(.*\) needs a truth value as operand 1, and has a number: write a comparison, such as x > 0",
    ),
    "axes of what is no reduction": (change("sqrt", axes=(0,)), r"= sqrt\(v\d+\) has the axes \(0,\), and is no red"),
    "an extent that operands do not have": (
        change("sqrt", extent=frozenset({0})),
        r"= sqrt\(v\d+\) varies along axes \[0\], and its operands along axes \[0, 1\]",
    ),
    "a sum of one number": (
        change("sum_squares", args=lambda program, value: (2.0,)),
        r"= sum_squares\(2.0\) combines what is one number already",
    ),
    "a sum of truths": (
        change(
            "sum_squares",
            args=lambda program, value: (program.graph.apply("gt", program.inputs["g"], 0.0),),
            index=10**6,
        ),
        r"= sum_squares\(v\d+\) combines truth values",
    ),
    "axes that are not there": (
        change("sum_squares", axes=(0, 2)),
        r"= sum_squares\(v\d+\) has the axes \(0, 2\): they must be some of axes \[0, 1\], each once and in order",
    ),
    "axes twice": (change("sum_squares", axes=(0, 0, 1)), r"has the axes \(0, 0, 1\): they must be some of"),
    "a sum that keeps its axes": (
        change("sum_squares", extent=frozenset({0})),
        r"= sum_squares\(v\d+\) varies along axes \[0\], and must along no axis: its axes are gone",
    ),
    "an input of operands": (change("input", args=(1.0,)), "is an input, which has a name, no operands and no axes"),
    "a second input of one name": (
        change("input", name="g"),
        "is a second input of the name 'g'",
    ),
    "an input of another extent": (
        change("input", extent=frozenset({1})),
        r"= input\(p\) varies along axes \[1\], and must along axes \[0, 1\]",
    ),
    "a number that varies": (
        lambda program: setattr(program.inputs["lr"], "extent", frozenset({0})),
        r"= input\(lr\) varies along axes \[0\], and must be one number for all elements",
    ),
}


@pytest.mark.parametrize("damage", VALUES)
def test_a_broken_value_is_found(damage: str) -> None:
    program = program_of(LAMB(), SHAPE)
    verify(program)
    broken, message = VALUES[damage]
    broken(program)
    program.__dict__.pop("inputs", None)  # as if it had been traced so
    with pytest.raises(RuleError, match=message):
        verify(program)


RESULTS: dict[str, tuple[Callable[[Program], Program], str]] = {
    "a state of more axes": (
        lambda program: replace(program, state={**program.state, "row_var": program.inputs["g"]}),
        r"Adafactor.update makes a state 'row_var' of more axes than the one that it was given",
    ),
    "a state of truths": (
        lambda program: replace(program, state={**program.state, "row_var": program.finite}),
        r"Adafactor.update makes a state 'row_var' of truth values: write xp.where",
    ),
    "a delta of truths": (
        lambda program: replace(program, delta=True),
        r"Adafactor.update makes a delta of truth values: write xp.where",
    ),
    "a figure for each element": (
        lambda program: replace(program, stats={"size": program.inputs["g"]}),
        r"Adafactor.update: size must be one number for each tensor",
    ),
    "finite for each element": (
        lambda program: replace(program, finite=program.graph.apply("isfinite", program.inputs["g"])),
        r"Adafactor.update: finite must be one number for each tensor",
    ),
    "finite that is a number": (
        lambda program: replace(program, finite=program.inputs["lr"]),
        r"Adafactor.update: finite must be a truth value, such as xp.isfinite\(x\), got a number",
    ),
}


@pytest.mark.parametrize("damage", RESULTS)
def test_a_wrong_result_is_found(damage: str) -> None:
    program = program_of(FACTORED, SHAPE)
    broken, message = RESULTS[damage]
    with pytest.raises(RuleError, match=message):
        verify(broken(program))


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
    "a result is written twice": (
        lambda found: with_pass(found, 1, writes=("p", "exp_avg")),
        r"LAMB: its passes write 'exp_avg' 2 times, and must once",
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
            "mean": lambda: mean * g,
            "state": lambda: g,
        }
        return Update(ways[self.way]() * -lr, {"signs": up if self.way == "state" else g})


@pytest.mark.parametrize("way", ["where", "times"])
def test_truths_may_choose_and_count_among_numbers(way: str) -> None:
    program_of(Counting(way=way), SHAPE)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("add", r"Counting: v\d+ = add\(v\d+, v\d+\) is arithmetic of truth values alone"),
        ("and", r"Counting: v\d+ = and\(v\d+, v\d+\) needs a truth value as operand 2, and has a number"),
        ("mean", r"Counting: v\d+ = mean\(v\d+\) combines truth values"),
        ("state", "Counting.update makes a state 'signs' of truth values"),
    ],
)
def test_what_libraries_do_in_different_ways_is_refused(way: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        program_of(Counting(way=way), SHAPE)
