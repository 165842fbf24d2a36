"""C++ between passes: from sums of rows and columns, and their state, to what passes need of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.errors import RuleError
from thalweg.kernels.cpu.lines import Function, Lines, Names, Numbers, function, index_of
from thalweg.kernels.text import indented
from thalweg.programs.extents import COLUMN, ELEMENT, HOST, MATRIX, ROW, TENSOR, MatrixKinds
from thalweg.programs.graph import Value

#: Of rows and columns: the letter that counts them, what arrays of them are called, and how far two lie apart.
WORDS = {ROW: ("r", "row", "matrix.row_stride"), COLUMN: ("c", "column", "matrix.after")}
#: How many a mean combines, by what it is the mean of: for a row or a column, and for a matrix.
ALONG = {ROW: "matrix.columns", COLUMN: "matrix.rows"}
COUNTS = {ROW: "matrix.rows", COLUMN: "matrix.columns", ELEMENT: "matrix.rows * matrix.columns"}


@dataclass
class EmittedBetween:
    function: Function
    after_pass: int
    numbers: list[Any]
    #: Slots: the operand that is read into it and written from it, or -1.
    row_state: list[int]
    column_state: list[int]


class Between:
    """The code between the passes of one schedule.

    sums: those that a pass makes of rows and of columns. slots: where rows and columns are kept, by value. states: the
    entries of the state among them, which come first.
    """

    def __init__(
        self,
        kinds: MatrixKinds,
        sums: Mapping[str, Sequence[Value]],
        slots: Mapping[str, Mapping[Any, int]],
        states: Mapping[str, Sequence[str]],
    ) -> None:
        self.kinds, self.sums, self.slots, self.states = kinds, sums, slots, states
        self.names = Names()
        self.numbers = Numbers(self.names)
        #: What holds for matrices, and the totals that it is computed from.
        self.matrices: dict[Any, str] = {}
        self.totals: dict[Value, str] = {}

    def lines(self, kind: str) -> Lines:
        """Statements for rows, columns or matrices."""
        return Lines(self.kinds, self.names, lambda operand: self.leaf(kind, operand))

    def leaf(self, kind: str, operand: Any) -> str | None:
        operand_kind = self.kinds.find(operand)
        if operand_kind in (HOST, TENSOR):
            return self.numbers.add(operand)
        if operand_kind == MATRIX and kind != MATRIX:
            return f"{self.matrices.setdefault(operand, self.names.new(operand))}[k]"
        if operand_kind == MATRIX:
            if not operand.is_reduction:
                return None
            name = self.totals.setdefault(operand, self.names.new(operand))
            return f"T({name}[k]{divisor(operand, COUNTS[self.kinds.find(operand.args[0])])})"
        if operand_kind != kind:
            raise RuleError(f"{operand.graph.rule_name} computes rows from columns or elements")
        letter, array, stride = WORDS[kind]
        if operand.op == "input":
            return f"matrix.{array}[{self.states[kind].index(operand.name)}][{letter} * {stride} + k]"
        if operand.is_reduction:
            place = f"matrix.{array}_sums[{index_of(self.sums[kind], operand)}][{letter} * matrix.after + k]"
            return f"T({place}{divisor(operand, ALONG[kind])})"
        return None

    def emit(self, after_pass: int, places: Mapping[str, int]) -> EmittedBetween:
        """The function between passes. places: of the entries of the state among a tensor's operands."""
        loops = []
        for kind in (ROW, COLUMN):
            letter, array, stride = WORDS[kind]
            lines = self.lines(kind)
            stores = [
                f"matrix.{array}[{slot}][{letter} * {stride} + k] = {lines.number(value)};"
                for value, slot in self.slots[kind].items()
            ]
            loops += loop_over(kind, [*lines.lines, *stores])
        lines = self.lines(MATRIX)
        stores = [f"{name}[k] = {lines.number(value)};" for value, name in list(self.matrices.items())]
        head = [f"T {name}[MOST_AFTER];" for name in self.matrices.values()]
        adding = []
        for value, name in self.totals.items():
            head.append(f"double {name}[MOST_AFTER] = {{}};")
            adding += self.add_up(value, name)
        decided = ["for (int64_t k = 0; k < matrix.after; k++) {", *indented([*lines.lines, *stores], 4), "}"]
        text = "\n".join(
            [
                "    const Matrix<T>& matrix = *static_cast<const Matrix<T>*>(given);",
                "    using X = T;",
                *indented([*self.numbers.fetch("matrix"), *head, *adding, *decided, *loops], 4),
            ]
        )
        row_state, column_state = (
            [places[key] for key in self.states[kind]] + [-1] * (len(self.slots[kind]) - len(self.states[kind]))
            for kind in (ROW, COLUMN)
        )
        emitted = function("between", text, self.names, "from sums of rows and columns to what passes need of them")
        return EmittedBetween(emitted, after_pass, self.numbers.values, row_state, column_state)

    def add_up(self, value: Value, name: str) -> list[str]:
        """Loops that sum a value over the rows or columns of a matrix."""
        kind = self.kinds.find(value.args[0])
        if kind == ELEMENT:
            same = next((i for i, rows in enumerate(self.sums[ROW]) if self.kinds.is_part(rows, value)), None)
            if same is None:
                raise RuleError(f"{value.graph.rule_name} sums matrices whose rows it does not sum")
            return loop_over(ROW, [f"{name}[k] += matrix.row_sums[{same}][r * matrix.after + k];"])
        lines = self.lines(kind)
        x = lines.number(value.args[0])
        term = f"double({x}) * double({x})" if value.is_squared else f"double({x})"
        return loop_over(kind, [*lines.lines, f"{name}[k] += {term};"])


def divisor(value: Value, count: str) -> str:
    return f" / double({count})" if value.is_mean else ""


def loop_over(kind: str, lines: Iterable[str]) -> list[str]:
    """Statements for every row, or column, of a matrix and every place behind it."""
    letter, array, _ = WORDS[kind]
    return [
        f"for (int64_t {letter} = 0; {letter} < matrix.{array}s; {letter}++)",
        "    for (int64_t k = 0; k < matrix.after; k++) {",
        *indented(lines, 8),
        "    }",
    ]
