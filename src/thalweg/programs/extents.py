"""Kinds of values by their extent, where a rule keeps rows and columns: which is as large as what.

A tensor is seen as matrices over two axes, the row axis before the column axis, one matrix for each place along its
other axes. A value may be one for each element, for each row or column of each matrix, for each matrix, or for each
tensor; or a number of the host. In a tensor of two axes, which is one matrix, what holds for it is a tensor's, unless
the same code is to serve tensors of more axes (``MatrixKinds``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from thalweg.arrays import Shape
from thalweg.errors import RuleError
from thalweg.programs.graph import Extent, Value, needed_by
from thalweg.programs.trace import PARAMETER, Program
from thalweg.rules.entries import Entry, Spread

ELEMENT, ROW, COLUMN, MATRIX, TENSOR, HOST = "element", "row", "column", "matrix", "tensor", "host"
#: Of what is computed between passes: smaller than a parameter, but not one for each tensor.
SMALL = (ROW, COLUMN, MATRIX)


@dataclass(frozen=True)
class Kinds:
    """The kinds of a program's values."""

    every: frozenset[int]
    #: Stacked axes: each place along them is a tensor.
    stacked: frozenset[int]
    #: The row axis and the column axis; None: nothing is kept for rows or columns.
    axes: tuple[int, int] | None

    def find(self, value: Any) -> str:
        """The kind of a value or a number; "" if it is of none of them."""
        return self.of_extent(value.extent) if isinstance(value, Value) else HOST

    def of_extent(self, extent: Extent) -> str:
        if extent is None:
            return HOST
        if extent == self.every:
            return ELEMENT
        if extent <= self.stacked:
            return TENSOR
        if self.axes is None:
            return ""
        row, column = self.axes
        missing = tuple(sorted(self.every - extent))
        return {(column,): ROW, (row,): COLUMN, (row, column): MATRIX}.get(missing, "")


@dataclass(frozen=True)
class MatrixKinds(Kinds):
    """What follows from rows and columns holds for their matrix, also where a tensor is one matrix."""

    known: dict[Value, bool] = field(default_factory=dict, compare=False)

    def find(self, value: Any) -> str:
        kind = super().find(value)
        return MATRIX if kind == TENSOR and self.is_of_matrix(value) else kind

    def is_of_matrix(self, value: Value) -> bool:
        if value not in self.known:
            self.known[value] = value.extent == self.every - set(self.axes or ()) and (
                self.find(value.args[0]) in (ROW, COLUMN)
                or any(self.is_part(rows, value) for rows in value.graph.values)
                if value.is_reduction
                else any(self.find(arg) == MATRIX for arg in value.values)
            )
        return self.known[value]

    def is_part(self, rows: Value, value: Value) -> bool:
        """Whether sums of rows, added up, are another sum."""
        return (
            rows.is_reduction
            and rows.is_squared == value.is_squared
            and rows.args[0] is value.args[0]
            and self.of_extent(rows.extent) == ROW
            and value.axes == self.axes
        )


def spread_shapes(entries: Mapping[str, Entry], shape: Shape) -> dict[str, Shape]:
    """The shapes of entries that are laid out like a parameter."""
    over = {key: {axis % len(shape) for axis in entry.over} for key, entry in entries.items() if is_spread(entry)}
    return {key: tuple(1 if axis in ones else size for axis, size in enumerate(shape)) for key, ones in over.items()}


def is_spread(entry: Entry) -> TypeGuard[Spread]:
    return isinstance(entry, Spread)


def matrix_kinds_of(program: Program, stacked_axes: int) -> MatrixKinds:
    """The kinds of a program that can be seen as matrices; a RuleError says why it cannot."""
    kinds = kinds_of(program, stacked_axes)
    check_seen(program, kinds)
    # sums from which the numbers of a tensor are made hold for it, also where its only matrix has the same
    sums = (value for value in needed_by(program.state[key] for key in program.scalars) if value.is_reduction)
    of_tensors = [value for value in sums if (kinds.find(value.args[0]), kinds.find(value)) == (ELEMENT, TENSOR)]
    return MatrixKinds(kinds.every, kinds.stacked, kinds.axes, dict.fromkeys(of_tensors, False))


def kinds_of(program: Program, stacked_axes: int) -> Kinds:
    """The kinds of a program's values; rows and columns lie along the axes along which some value does not vary."""
    all_axes = program.memory[PARAMETER] or frozenset()
    stacked = frozenset(range(stacked_axes))
    extents = {value.extent for value in program.needed} | set(program.memory.values())
    partial = [extent for extent in extents if extent is not None and extent != all_axes and not extent <= stacked]
    missing = sorted(frozenset().union(*(all_axes - extent for extent in partial)))
    if not missing:
        return Kinds(all_axes, stacked, None)
    if len(missing) == 1:  # the other one may be any: its neighbour
        (axis,) = missing
        other = axis - 1 if axis - 1 >= stacked_axes else axis + 1
        missing = sorted((axis, other))
    return Kinds(all_axes, stacked, (missing[0], missing[1]))


def check_seen(program: Program, kinds: Kinds) -> None:
    """Raise a RuleError if a program cannot be seen as matrices."""
    name = program.rule_name
    for value in program.needed:
        if not kinds.find(value):
            what = f"{value.op} over axes {value.axes}" if value.is_reduction else f"values along axes {value.extent}"
            raise RuleError(f"{name} needs {what}, and kernels are made for rows and columns of two axes")
        if value.op == "amax":
            raise RuleError(f"{name} needs amax over axes {value.axes}, and kernels are made for sums and means")
    for key, extent in program.memory.items():
        kind = kinds.of_extent(extent)
        if kind not in (ELEMENT, ROW, COLUMN, TENSOR):
            raise RuleError(
                f"{name} keeps {key!r}, and kernels are made for state of elements, rows, columns and tensors"
            )
        if kind != ELEMENT and kinds.find(program.state[key]) != kind:
            raise RuleError(f"{name} makes {key!r} of fewer axes than it has")
    if kinds.axes is not None and not any(value.is_reduction for value in program.needed):
        raise RuleError(f"{name} keeps rows or columns and sums nothing")
