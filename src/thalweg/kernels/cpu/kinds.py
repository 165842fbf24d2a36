"""Of what size the values of a program are: elements, rows, columns, one for each matrix, one for each tensor."""

from __future__ import annotations

from typing import Any

from thalweg.errors import RuleError
from thalweg.programs.extents import COLUMN, ELEMENT, HOST, MATRIX, ROW, TENSOR
from thalweg.programs.graph import Value
from thalweg.programs.trace import PARAMETER, Program


class Kinds:
    """Kinds of the values of one program.

    Rows and columns belong to two axes: a row value varies along all axes but the second of them, a column value along
    all but the first. What varies along neither is one number for each matrix, of which there are many where a
    parameter has other axes too.
    """

    def __init__(self, program: Program, stacked_axes: int) -> None:
        self.program, self.large = program, program.memory[PARAMETER]
        assert self.large is not None
        self.own = frozenset(range(stacked_axes))
        wanted = [value for value in program.graph.values if value.extent is not None]
        parted = {self.large - value.extent for value in wanted if value.extent is not None}
        axes = sorted({axis for left in parted if len(left) == 1 for axis in left})
        self.axes: tuple[int, int] | None = None
        small = len(self.large - self.own) == 1  # of a vector, what lacks its only axis is one for each tensor
        if axes and not small:
            if len(axes) != 2:
                raise RuleError(
                    f"{program.rule_name} keeps statistics along {len(axes)} axes; native code is made for rows and "
                    "columns together"
                )
            self.axes = axes[0], axes[1]
        self.known: dict[Value, str] = {}
        for value in program.graph.values:
            self.of(value)

    @property
    def is_factored(self) -> bool:
        return self.axes is not None

    def of(self, operand: Any) -> str:
        if not isinstance(operand, Value):
            return HOST
        if operand not in self.known:
            self.known[operand] = self.found(operand)
        return self.known[operand]

    def found(self, value: Value) -> str:
        extent = value.extent
        of_host = not extent and not value.is_reduction and all(self.of(arg) == HOST for arg in value.values)
        if extent is None or of_host:
            return HOST
        if extent == self.large:
            return ELEMENT
        if self.axes is not None and self.large is not None:
            row, column = self.axes
            if extent == self.large - {column}:
                return ROW
            if extent == self.large - {row}:
                return COLUMN
            if extent <= self.large - {row, column} and self.belongs_to_matrix(value):
                return MATRIX
        if extent <= self.own:
            if value.op == "amax":
                raise RuleError(f"{self.program.rule_name} needs amax, of which no native code is made")
            return TENSOR
        raise RuleError(f"{self.program.rule_name} computes values of which no native code is made: {value!r}")

    def belongs_to_matrix(self, value: Value) -> bool:
        if not value.is_reduction:
            return any(self.of(arg) == MATRIX for arg in value.values)
        (arg,) = value.values
        if self.of(arg) in (ROW, COLUMN):
            return True
        return any(self.is_part(other, value) for other in self.program.graph.values)

    def is_part(self, rows: Value, value: Value) -> bool:
        """Whether sums of rows, added up, are another sum."""
        assert self.axes is not None
        assert self.large is not None
        squares = rows.op.endswith("squares") == value.op.endswith("squares")
        return (
            rows.is_reduction
            and squares
            and rows.args[0] is value.args[0]
            and rows.extent == self.large - {self.axes[1]}
            and value.axes == self.axes
        )
