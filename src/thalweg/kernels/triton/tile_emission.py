"""What all kernels of one schedule over tiles share while they are written: what is kept where, and for whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from thalweg.kernels.triton.emission import Emission
from thalweg.programs.extents import COLUMN, ELEMENT, MATRIX, ROW, TENSOR, Kinds
from thalweg.programs.graph import Value
from thalweg.programs.schedule import Pass

#: How many a mean combines, by what is averaged and what for.
COUNTS = {
    (ELEMENT, ROW): "columns_of_whole",
    (ELEMENT, COLUMN): "rows_of_whole",
    (ELEMENT, MATRIX): "rows_of_whole * columns_of_whole",
    (ELEMENT, TENSOR): "elements_of_whole",
    (ROW, MATRIX): "rows_of_whole",
    (ROW, TENSOR): "elements_of_whole / columns_of_whole",
    (COLUMN, MATRIX): "columns_of_whole",
    (COLUMN, TENSOR): "elements_of_whole / rows_of_whole",
    (MATRIX, TENSOR): "elements_of_whole / (rows_of_whole * columns_of_whole)",
}


@dataclass
class TileEmission(Emission):
    FIRST, INDEX = "0", "offset"

    kinds: Kinds = field(kw_only=True)
    guarded: bool = field(kw_only=True)
    #: What is kept between passes, by value: its statistic. Of it and of figures: the first pass that reads it.
    lasting: dict[Value, int] = field(default_factory=dict)
    first_use: dict[Value, int] = field(default_factory=dict)
    #: After which pass nothing is computed any more of what rows and columns had before the step.
    settled: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        #: Sums that are statistics, and all others, each with its place.
        self.gathered: dict[Value, int] = {}
        self.totals: dict[Value, int] = {}
        for pass_ in self.schedule.passes:
            home = self.gathered if self.gathers(pass_) else self.totals
            for value in pass_.sums:
                home[value] = len(home)

    @property
    def last(self) -> int:
        return len(self.schedule.passes) - 1

    def gathers(self, pass_: Pass) -> bool:
        """Whether a pass makes sums for rows or columns, or of them."""
        return not all(self.source(value) == ELEMENT and self.kinds.find(value) == TENSOR for value in pass_.sums)

    def source(self, value: Value) -> str:
        return self.kinds.find(value.args[0])

    def keep(self, value: Value, number: int) -> int:
        """The statistic that keeps a value for a pass."""
        self.first_use[value] = min(number, self.first_use.get(value, number))
        return len(self.gathered) + self.lasting.setdefault(value, len(self.lasting))

    def use(self, value: Value, number: int) -> str:
        """A value in a pass, from the figure that keeps it."""
        self.first_use[value] = min(number, self.first_use.get(value, number))
        return self.read_figure(value)

    def counted(self, value: Value, total: str) -> str:
        if not value.is_mean:
            return total
        return f"{total} / ({COUNTS[self.source(value), self.kinds.find(value)]})"


def inherited_by(emission: TileEmission) -> dict[Value, int]:
    """For values kept between passes, the sums whose memory they take over because nothing reads these afterwards."""
    stages = [(value, emission.first_use[value] - 1) for value in emission.lasting]
    readers = [*stages, *((emission.program.state[key], emission.settled) for key in emission.small)]
    last_read: dict[Value, int] = {}
    for value, stage in readers:
        for read in sums_below(value):
            last_read[read] = max(stage, last_read.get(read, stage))
    free, inherited = dict(emission.gathered), {}
    for value, stage in stages:
        kind = emission.kinds.find(value)
        fitting = (sum_ for sum_ in free if emission.kinds.find(sum_) == kind and last_read.get(sum_, -1) == stage)
        # what holds for a matrix is read beside it, for rows and columns
        if kind in (ROW, COLUMN) and (chosen := next(fitting, None)) is not None:
            inherited[value] = free.pop(chosen)
    return inherited


def sums_below(value: Value) -> set[Value]:
    """The sums that a value is computed from directly, not by way of another sum."""
    sums: set[Value] = set()
    waiting, seen = [value], {value}
    while waiting:
        below = waiting.pop()
        if below.is_reduction:
            sums.add(below)
        else:
            waiting += [arg for arg in below.values if arg not in seen]
            seen.update(below.values)
    return sums


def entry_kind(emission: TileEmission, key: str) -> str:
    return emission.kinds.of_extent(emission.program.memory[key])


def filled(template: str, emission: Emission, **given: Any) -> str:
    dtypes = "".join(f" S{i}_DTYPE: tl.constexpr," for i in range(len(emission.entries)))
    return template.format(dtypes=dtypes, **given)


def base_of(emission: Emission, key: str) -> str:
    """Where what is kept for rows or columns begins."""
    return emission.memory.base(key).replace("ALIGNED", "False")
