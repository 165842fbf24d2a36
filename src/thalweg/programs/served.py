"""Of which rules kernels can be made; told without loading Triton."""

from __future__ import annotations

import functools

from thalweg.arrays import Shape
from thalweg.errors import RuleError
from thalweg.programs.trace import example_of, trace
from thalweg.rules import Rule
from thalweg.rules.entries import Spread

#: State entries that the tables of kernels have room for.
ROOM = 3


def reason_underived(rule: Rule, shape: Shape) -> str:
    """Why no kernels can be made of a rule for parameters of this kind, "" if they can."""
    return reason_against_example(rule, example_of(rule, shape))


@functools.lru_cache(maxsize=256)
def reason_against_example(rule: Rule, shape: Shape) -> str:
    name, entries = type(rule).__name__, rule.entries(shape)
    if len(entries) > ROOM:
        return f"{name} keeps {len(entries)} entries for a parameter, and fused kernels have room for {ROOM}"
    if not all(isinstance(entry, Spread) and not entry.over for entry in entries.values()):
        return f"{name} keeps entries of another size than the parameter, for which no kernels are made yet"
    try:
        program = trace(rule, shape, dict.fromkeys(entries, shape))
    except RuleError as error:
        return str(error)
    own = frozenset(range(rule.stacked_axes))
    for value in program.graph.values:
        if value.is_reduction and (value.op == "amax" or value.extent != own):
            return (
                f"{name} needs {value.op} over axes {value.axes}, and kernels are made for sums and means over whole "
                "tensors"
            )
    return ""
