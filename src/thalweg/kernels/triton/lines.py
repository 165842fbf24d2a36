"""Values of a graph as lines of Triton: their names, their numbers, and how each operation is spelled."""

from __future__ import annotations

import math
from typing import Any

from thalweg.kernels.text import ARITHMETIC, functions_in
from thalweg.programs.graph import Value

#: Operations as Triton has them.
TEXTS = {
    **ARITHMETIC,
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "and": "{0} & {1}",
    "abs": "tl.abs({0})",
    "sqrt": "tl.sqrt({0})",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "cos": "tl.cos({0})",
    "floor": "tl.floor({0})",
    "expm1": "expm1({0})",
    "pow": "power({0}, {1})",
    "isfinite": "is_finite({0})",
    "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})",
    "where": "tl.where({0}, {1}, {2})",
}
#: Names that kernels have for other things.
NAMES = """
after allowed along begin behind between block blocks chunk chunk_count chunks column_entry columns_of_whole count
counts down elements_of_whole end entry factor failed failures figures first g_base g_place grad_scale gradients groups
groups_mask i index inside is_first kind left line lr lr_scale mask matrix matrix_entry matrix_mask new nothing
now numbers offset origin p_base p_place p_scales partials piece place position record_base record_place row row_entry
row_mask rows rows_of_whole run stored sums tensor tensors tile tile_count tiles tl totals which
as_stored by_neighbours decoded failures_in gradient_factor is_allowed is_idle kept loaded number_kept number_of
step_number
"""
RESERVED = frozenset((*NAMES.split(), *functions_in(TEXTS.values())))


class Statements:
    """Lines of Triton that compute values of a graph, and the names that they have there."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.known: dict[Value, str] = {}
        self.used: set[str] = set()

    def name(self, value: Value) -> str:
        base = value.graph.names.get(value, "x").replace("[", "_").replace("]", "")
        name, i = base if base != "x" else f"x{value.index}", 1
        while name in self.used or name in RESERVED:
            name, i = f"{base}_{i}", i + 1
        self.used.add(name)
        return name

    def let(self, value: Value, text: str) -> str:
        self.known[value] = name = self.name(value)
        self.lines.append(f"{name} = {text}")
        return name

    def write(self, operand: Any) -> str:
        """The text of a value or a number, after the lines that compute it."""
        if not isinstance(operand, Value):
            return literal(operand)
        if operand not in self.known:
            self.let(operand, self.number_text(operand) if operand.extent is None else self.text(operand))
        return self.known[operand]

    def number_text(self, value: Value) -> str:
        """Where a number of the host is found."""
        raise NotImplementedError

    def text(self, value: Value) -> str:
        raise NotImplementedError

    def operation(self, value: Value, **other: str) -> str:
        args = [self.write(arg) for arg in value.args]
        if value.op == "where" and isinstance(value.args[0], Value) and value.args[0].extent is None:
            args[0] = f"({args[0]} != 0)"
        return other.get(value.op, TEXTS[value.op]).format(*args)


def literal(number: Any) -> str:
    if isinstance(number, bool):
        return repr(number)
    return repr(float(number)) if math.isfinite(number) else f'float("{number}")'
