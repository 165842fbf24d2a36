"""Programs of rules, written as Python and run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from thalweg.programs.host import options_of
from thalweg.programs.schedule import schedule
from thalweg.programs.text import write_program
from thalweg.programs.trace import Program, example_of, trace
from thalweg.rules import Rule


class Step(NamedTuple):
    """What the source of a program returns."""

    p: Any
    state: dict[str, Any]
    finite: Any
    stats: dict[str, Any]
    source: str


def program_of(rule: Rule, shape: tuple[int, ...], lr: float | None = 0.1) -> Program:
    """The program for parameters of the same kind as one of this shape."""
    example = example_of(rule, shape)
    state = {key: entry.shape(example, rule.stacked_axes) for key, entry in rule.entries(example).items()}
    return trace(rule, example, state, lr=lr)


def run_source(source: str, p: Any, g: Any, state: dict[str, Any], **numbers: Any) -> Step:
    """Call ``step`` of a program's source, which has numpy alone and changes nothing that it is given."""
    names: dict[str, Any] = {}
    exec(compile(source, "<program>", "exec"), names)
    before = [np.copy(x) for x in (p, g, *state.values())]
    found = Step(*names["step"](p, g, **state, **numbers), source)
    for old, now in zip(before, (p, g, *state.values()), strict=True):
        np.testing.assert_array_equal(old, now)
    return found


def run_program(
    program: Program,
    rule: Rule,
    p: Any,
    g: Any,
    state: dict[str, Any],
    *,
    exact: Iterable[str] = (),
    guarded: bool = False,
    lr: float | None = None,
    **numbers: Any,
) -> Step:
    """One step by the passes of a program."""
    found = schedule(program, dict.fromkeys(program.memory, 8), exact=exact, guarded=guarded)
    source = write_program(found, options_of(rule))
    return run_source(source, p, g, state, **({} if lr is None else {"lr": lr}), **numbers)
