"""How large a new parameter can become, from the norms that a rule measures: a guard that costs no look at it."""

from __future__ import annotations

from typing import Any

from thalweg.programs.extents import ELEMENT, HOST, TENSOR, Kinds
from thalweg.programs.graph import Value
from thalweg.programs.schedule import reductions_of
from thalweg.programs.trace import PARAMETER, Program

#: Inputs that native code knows: how many elements a tensor has, and what the largest is that it can keep.
COUNT, LARGEST = "count of elements", "largest number"


def bound_step(program: Program, kinds: Kinds) -> Any:
    """Whether every element of p + delta, and all on the way to it, is surely finite; None if norms cannot tell."""
    graph = program.graph
    largest, count = graph.input(LARGEST, frozenset()), graph.input(COUNT, frozenset())
    norms: dict[Value, Any] = {}
    for value in reductions_of(program):
        if value.is_squared and kinds.find(value) == TENSOR:
            total = graph.apply("mul", value, count) if value.is_mean else value
            norms[value.args[0]] = graph.apply("sqrt", total)
    limits: list[Any] = []

    def bound(operand: Any) -> Any:
        """A value that no element of the operand exceeds in size; None: none follows from norms."""
        most = None
        if kinds.find(operand) in (HOST, TENSOR):
            most = graph.apply("abs", operand) if isinstance(operand, Value) else abs(operand)
        elif kinds.find(operand) != ELEMENT:
            return None
        elif operand in norms:
            return norms[operand]
        elif operand.op in ("add", "sub", "mul"):
            a, b = map(bound, operand.args)
            if a is not None and b is not None:
                most = graph.apply("mul" if operand.op == "mul" else "add", a, b)
        elif operand.op == "neg":
            return bound(operand.args[0])
        if isinstance(most, Value):
            limits.append(graph.apply("lt", most, largest))
        return most

    sizes = bound(program.inputs[PARAMETER]), bound(program.delta)
    if any(size is None for size in sizes):
        return None
    condition = graph.apply("lt", graph.apply("add", *sizes), largest)
    for limit in limits:
        condition = graph.apply("and", condition, limit)
    return condition
