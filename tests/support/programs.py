"""Programs of rules, taken pass by pass with numpy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from thalweg.programs.graph import Value
from thalweg.programs.host import options_of
from thalweg.programs.operations import OPERATIONS
from thalweg.programs.schedule import Schedule, schedule
from thalweg.programs.trace import PARAMETER, Program, example_of, trace
from thalweg.rules import Rule

REDUCE = {"sum": np.sum, "mean": np.mean, "amax": np.max}


class Step(NamedTuple):
    """What a program has made of a parameter."""

    p: Any
    state: dict[str, Any]
    finite: Any
    stats: dict[str, Any]


def program_of(rule: Rule, shape: tuple[int, ...], lr: float | None = 0.1) -> Program:
    """The program for parameters of the same kind as one of this shape."""
    example = example_of(rule, shape)
    state = {key: entry.shape(example, rule.stacked_axes) for key, entry in rule.entries(example).items()}
    return trace(rule, example, state, lr=lr)


def run_program(
    program: Program,
    rule: Rule,
    p: Any,
    g: Any,
    state: dict[str, Any],
    *,
    exact: Iterable[str] = (),
    guarded: bool = False,
    **numbers: Any,
) -> Step:
    """One step by the passes of a program, which changes nothing that it is given."""
    found = schedule(program, dict.fromkeys(program.memory, 8), exact=exact, guarded=guarded)
    arrays = {"p": p, "g": g, **state}
    before = {name: np.copy(x) for name, x in arrays.items()}
    with np.errstate(all="ignore"):
        made = Passes(found, arrays, {**options_of(rule), **numbers}).take()
    for name, x in arrays.items():
        np.testing.assert_array_equal(before[name], x)
    return made


class Passes:
    """One step: each pass knows what it reads, and of those before it what they have summed and written."""

    def __init__(self, found: Schedule, arrays: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
        self.schedule, self.program, self.numbers = found, found.program, numbers
        self.every = self.program.memory[PARAMETER]
        self.memory = dict(arrays)
        self.small: dict[Value, Any] = {}
        self.large: dict[Value, Any] = {}

    def take(self) -> Step:
        program = self.program
        for number, each in enumerate(self.schedule.passes):
            self.large = {value: self.memory[key] for key, value in self.schedule.loads(number).items()}
            self.small.update({value: self.reduce(value) for value in each.sums})
            written = {key: self.find(program.results[key]) for key in each.writes}
            if PARAMETER in written:
                written[PARAMETER] = self.find(self.program.inputs[PARAMETER]) + written[PARAMETER]
            self.memory.update(written)
        self.large = {}  # what is as large as a parameter has been written
        small = {key: self.find(program.state[key]) for key in self.schedule.small}
        state = {key: small[key] if key in small else self.memory[key] for key in program.state}
        stats = {key: self.find(value) for key, value in program.stats.items()}
        return Step(self.memory[PARAMETER], state, self.find(program.finite), stats)

    def reduce(self, value: Value) -> Any:
        x = self.find(value.args[0])
        own = REDUCE[value.op.removesuffix("_squares")]
        x = np.square(x) if value.is_squared else x
        return own(x) if len(value.axes) == len(self.every or ()) else own(x, axis=value.axes, keepdims=True)

    def find(self, operand: Any) -> Any:
        """The value of an operand, computed where it is needed first: in this pass, or once and for all."""
        if not isinstance(operand, Value):
            return operand
        known = self.large if operand.extent == self.every else self.small
        if operand not in known:
            known[operand] = self.compute(operand)
        return known[operand]

    def compute(self, value: Value) -> Any:
        assert not value.is_reduction, f"{value} is needed before its pass"
        if value.op == "input":
            assert value.extent != self.every, f"a pass needs {value.name}, which it does not read"
            return {**self.memory, **self.numbers}[value.name]
        operation, args = OPERATIONS[value.op], [self.find(arg) for arg in value.args]
        return getattr(np, value.op)(*args) if operation.is_function else operation.compute(*args)
