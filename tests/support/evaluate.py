"""A program run in the numpy space, value by value: what its rule would have computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from thalweg.arrays import Squares
from thalweg.programs.graph import OPERATORS, Value
from thalweg.programs.schedule import Schedule
from thalweg.programs.trace import Program
from thalweg.rules import Rule
from thalweg.spaces import numpy as xp


def numbers_of(rule: Rule) -> dict[str, Any]:
    """The options of a rule under the names that a trace gives them."""
    found: dict[str, Any] = {}
    for name, value in vars(rule).items():
        found.update(
            {f"{name}[{i}]": each for i, each in enumerate(value)} if isinstance(value, tuple) else {name: value}
        )
    return found


def computed(value: Value, args: list[Any], inputs: Mapping[str, Any]) -> Any:
    """A value, from those that it is computed from."""
    if value.is_reduction:
        axes = None if len(value.axes) == np.ndim(inputs["p"]) else value.axes
        if value.op == "amax":
            return xp.amax(args[0], axes)
        term = Squares(args[0], axes) if value.op.endswith("_squares") else (args[0], axes)
        return (xp.sums if value.op.startswith("sum") else xp.means)(term)[0]
    if value.op in OPERATORS and value.op != "abs":
        return OPERATORS[value.op](*args)
    return getattr(xp, value.op)(*args)


def evaluate(program: Program, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """delta, the state, finite and the figures of a program."""
    known: dict[Value, Any] = {}

    def of(operand: Any) -> Any:
        return known[operand] if isinstance(operand, Value) else operand

    for value in program.graph.values:
        args = [of(arg) for arg in value.args]
        known[value] = inputs[value.name] if value.op == "input" else computed(value, args, inputs)
    return {
        "delta": of(program.delta),
        **{key: of(entry) for key, entry in program.state.items()},
        "finite": of(program.finite),
        **{key: of(figure) for key, figure in program.stats.items()},
    }


def simulate(found: Schedule, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What memory holds after the passes of a schedule, each of which sees nothing but what it reads."""
    program = found.program
    memory = {name: inputs[name] for name in program.memory}
    large = program.memory["p"]
    sums: dict[Value, Any] = {}
    written: set[str] = set()
    for each in found.passes:
        loaded = {
            (
                program.state[name] if name in written else next(v for v in program.graph.values if v.name == name)
            ): memory[name]
            for name in each.reads
        }
        known: dict[Any, Any] = dict(loaded)

        def of(operand: Any, known: dict[Any, Any] = known) -> Any:
            if not isinstance(operand, Value):
                return operand
            if operand not in known:
                if operand.is_reduction:
                    known[operand] = sums[operand]
                elif operand.op == "input":
                    assert operand.extent != large, f"{operand.name} is not read in this pass"
                    known[operand] = inputs[operand.name]
                else:
                    known[operand] = computed(operand, [of(arg) for arg in operand.args], inputs)
            return known[operand]

        done = {value: computed(value, [of(arg) for arg in value.args], inputs) for value in each.sums}
        results = {name: of(program.results[name]) for name in each.writes}
        sums.update(done)
        for name, value in results.items():
            memory[name] = memory[name] + value if name == "p" else value
        written |= set(each.writes)
    return memory
