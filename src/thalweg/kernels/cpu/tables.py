"""A whole model laid out for native code: tables of addresses that are kept until something moves."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from thalweg.arrays import Shape
from thalweg.boundary import ROUNDING_STREAM, state_streams
from thalweg.codecs import bytes_of, grouping
from thalweg.kernels.cpu import structs
from thalweg.kernels.cpu.compiled import Compiled, compiled, kind_of
from thalweg.kernels.cpu.library import load
from thalweg.rules import Rule
from thalweg.rules.entries import Spread
from thalweg.rules.noise import stream_key, tensor_id
from thalweg.rules.rule import structure_of
from thalweg.settings import Handling
from thalweg.storage import arithmetic

#: Stages: passes that measure, from 0 on; a look at what would be written; the last pass; the end.
MEASURE, REHEARSE, WRITE, END = 0, 8, 9, 10


class Operand(NamedTuple):
    """One parameter: where it, its gradient and its state lie, and how they are stored."""

    name: str | int
    shape: Shape
    p: int
    g: int
    state: tuple[int, ...]
    #: Of p, g and the entries of the state, in the rule's order.
    dtypes: tuple[str, ...]
    #: Which of the options hold.
    group: int
    #: Where this is a shard: the place of its first element in the whole parameter, and the shape of that.
    position: int = 0
    whole: Shape | None = None
    #: Where the scales of entries lie that are codes, and the record of what rounding has cost; 0: there is none.
    scales: tuple[int, ...] = ()
    record: int = 0

    def fits(self, other: Operand) -> bool:
        """Whether it can take the place of another: that it has moved is all that may have changed."""
        return self is other or self.described == other.described

    @property
    def described(self) -> Any:
        return self.name, self.shape, self.dtypes, self.group, self.position, self.whole, bool(self.record)

    @property
    def is_exact(self) -> bool:
        """Whether all of its state is stored as it is computed."""
        return all(dtype == arithmetic(self.dtypes[0]) for dtype in self.dtypes[2:])


class Options(NamedTuple):
    """What holds for some parameters in one step."""

    rule: Rule
    handling: Handling
    t: int
    lr: float | None
    lr_scale: float
    grad_scale: float | None = None
    #: The rule that says what is kept, if it is not the rule of this step.
    declared: Rule | None = None

    @property
    def layout(self) -> Any:
        """What decides how tensors are laid out and which code steps them."""
        return structure_of(self.rule), self.handling.seed, self.is_guarded, self.lr is None

    @property
    def is_guarded(self) -> bool:
        return self.handling.on_nonfinite != "propagate"

    @property
    def gradient_scale(self) -> float:
        scale = 1.0 if self.grad_scale is None else self.grad_scale
        return -scale if self.handling.maximize else scale

    def code_for(self, operand: Operand) -> Compiled:
        return compiled(
            kind_of(
                self.rule,
                operand.shape if operand.whole is None else operand.whole,
                has_lr=self.lr is not None,
                exact=operand.is_exact,
                guarded=self.is_guarded,
                complete=operand.whole is not None,
                declared=self.declared,
            )
        )


class Tables:
    """The tables of one optimizer."""

    def __init__(self) -> None:
        self.operands: list[Operand] = []
        self.layout: list[Any] = []
        #: Rows of the table that belong to each operand: one, or one for each stacked slice.
        self.spans: list[range] = []
        self.stacks: list[Shape | None] = []
        #: By place in the options that native code sees: the group that they are of, and the code for it.
        self.used: list[tuple[int, Compiled]] = []
        self.codes: list[int] = []
        self.tensors: Any = None
        self.options: Any = None
        self.registers: Any = None
        self.outcomes: Any = None
        self.scratch: Any = None
        self.threads = 0

    def prepare(self, operands: list[Operand], options: Sequence[Options], threads: int) -> None:
        """Lay out a step: rows of the tables are made anew only if something moved, the numbers at every step."""
        layout = [each.layout for each in options]
        if layout != self.layout or not self.moved(operands, options):
            self.lay_out(operands, options)
            self.layout, self.threads = layout, 0
        self.operands = operands
        self.numbers = [
            code.numbers_of(
                options[group].rule,
                options[group].t,
                options[group].lr,
                options[group].lr_scale,
                options[group].gradient_scale,
            )
            for group, code in self.used
        ]
        for own, numbers, (group, _) in zip(self.options, self.numbers, self.used, strict=True):
            own.numbers, own.count = ctypes.addressof(numbers), len(numbers)
            own.t = options[group].t & 0xFFFFFFFF
            own.stochastic = options[group].handling.rounding == "stochastic"
            own.guarded = options[group].is_guarded
            own.state_stochastic = options[group].handling.state_rounding == "stochastic"
        if threads != self.threads:
            bytes_needed = load().thalweg_layout(self.options, self.tensors, len(self.tensors), threads)
            self.scratch, self.threads = ctypes.create_string_buffer(bytes_needed), threads
        self.outcomes = (structs.Outcome * len(self.tensors))()
        self.registers = (ctypes.c_double * (len(self.tensors) * self.width))()

    def lay_out(self, operands: Sequence[Operand], options: Sequence[Options]) -> None:
        places: dict[tuple[int, int], int] = {}
        self.used, self.codes = [], []
        for operand in operands:
            code = options[operand.group].code_for(operand)
            key = operand.group, id(code)
            if key not in places:
                places[key] = len(self.used)
                self.used.append((operand.group, code))
            self.codes.append(places[key])
        self.options = (structs.Options * len(self.used))()
        for own, (_, code) in zip(self.options, self.used, strict=True):
            own.program = ctypes.addressof(code.native)
        self.width = max((code.registers for _, code in self.used), default=0)
        rows = [
            self.rows_of(operand, options[operand.group], place)
            for operand, place in zip(operands, self.codes, strict=True)
        ]
        ends = list(itertools.accumulate(map(len, rows)))
        self.spans = [range(end - len(own), end) for end, own in zip(ends, rows, strict=True)]
        self.stacks = [
            operand.shape[: options[operand.group].rule.stacked_axes] if len(span) != 1 else None
            for operand, span in zip(operands, self.spans, strict=True)
        ]
        self.tensors = (structs.Tensor * sum(map(len, rows)))(*itertools.chain(*rows))

    def moved(self, operands: Sequence[Operand], options: Sequence[Options]) -> bool:
        """Follow what has moved since the last step; whether these are still the same operands."""
        if len(operands) != len(self.operands) or not all(map(Operand.fits, operands, self.operands)):
            return False
        for new, old, span, place in zip(operands, self.operands, self.spans, self.codes, strict=True):
            if new is old or new == old:
                continue
            for row, values in zip(span, self.rows_of(new, options[new.group], place), strict=True):
                values.scratch = self.tensors[row].scratch
                self.tensors[row] = values
        return True

    def rows_of(self, operand: Operand, options: Options, place: int) -> list[structs.Tensor]:
        """The rows of one operand: one for each stacked slice, which are tensors by themselves."""
        rule, axes = options.rule, self.used[place][1].axes
        stacked = rule.stacked_axes
        own = operand.shape[stacked:]
        size = math.prod(own)
        seen = (0,) * 5 if axes is None else seen_as(own, *(axis - stacked for axis in axes))
        entries = entries_of(options.declared or rule, operand.shape)
        lengths = [size, size, *(length_of(entry, operand.shape, stacked) for entry in entries.values())]
        addresses = (operand.p, operand.g, *operand.state)
        codes = [structs.DTYPES[dtype] for dtype in operand.dtypes]
        steps = [length * bytes_of(dtype) for length, dtype in zip(lengths, operand.dtypes, strict=True)]
        groups = grouping(operand.shape if operand.whole is None else operand.whole, stacked)
        in_group = groups.size if groups is not None else 1
        drawn = state_streams(list(entries))
        streams = [(ROUNDING_STREAM, 0), (ROUNDING_STREAM, 0), *(drawn[key] for key in entries)]
        keys = [stream_key(options.handling.seed, tensor_id(operand.name), stream) for stream, _ in streams]

        def row(index: int) -> structs.Tensor:
            made = structs.Tensor(
                size=size,
                whole=size if operand.whole is None else math.prod(operand.whole),
                seen_as=(ctypes.c_int64 * 5)(*seen),
                position=operand.position + index * size,
                options=place,
                group=in_group,
                is_slice=stacked > 0,
                high=sum(half << which for which, (_, half) in enumerate(streams)),
            )
            made.key[: len(keys)] = keys
            made.scales[2 : 2 + len(operand.scales)] = [
                first and first + index * size // in_group * 4 for first in operand.scales
            ]
            made.record = operand.record and operand.record + index * size
            made.dtype[: len(codes)] = codes
            made.operand[: len(addresses)] = [
                address + index * step for address, step in zip(addresses, steps, strict=True)
            ]
            return made

        return [row(index) for index in range(math.prod(operand.shape[:stacked]))]

    def run(self, first: int, last: int) -> None:
        count = len(self.tensors)
        load().thalweg_run(
            *(self.options, self.tensors, self.registers, self.width),
            *(self.outcomes, count, self.scratch),
            *(first, last, self.threads),
        )

    @property
    def rounds(self) -> int:
        """How many passes have sums that must be complete before the last one."""
        return max((len(code.sums) - 1 for _, code in self.used), default=0)

    def sums(self, operand: int, number: int) -> list[float]:
        """What a pass has added up of an operand."""
        (row,) = self.spans[operand]
        return [self.registers[row * self.width + place] for place in self.places_of_sums(operand, number)]

    def places_of_sums(self, operand: int, number: int) -> list[int]:
        code = self.used[self.codes[operand]][1]
        return code.sums[number] if number < len(code.sums) - 1 else []

    def decide(self, sums: Mapping[int, Sequence[float]], number: int) -> None:
        """Go on from these sums of a pass, by operand, instead of those that were found here."""
        for operand, values in sums.items():
            (row,) = self.spans[operand]
            for place, value in zip(self.places_of_sums(operand, number), values, strict=True):
                self.registers[row * self.width + place] = value
        count = len(self.tensors)
        load().thalweg_decide(self.options, self.tensors, self.registers, self.width, self.outcomes, count, number)

    def finite(self) -> list[bool]:
        """For each operand whether all of its step is finite."""
        return [all(self.outcomes[row].finite for row in span) for span in self.spans]

    def skip(self, which: Sequence[bool]) -> None:
        """Leave some operands as they are in the stage that writes."""
        for span, skipped in zip(self.spans, which, strict=True):
            for row in span:
                self.outcomes[row].skip = skipped

    def figures(self) -> Figures:
        stats = [self.used[place][1].stats for place in self.codes]
        return Figures(stats, self.spans, self.stacks, bytes(self.registers), self.width)


class Figures(NamedTuple):
    """What a step computed on its way, read when stats() is called."""

    #: Of each operand: the registers of its figures, by name.
    stats: list[dict[str, int]]
    spans: list[range]
    #: The shape of each stack of slices, None for tensors that stand alone.
    stacks: list[Shape | None]
    registers: bytes
    width: int

    def of(self, index: int, stacked: Callable[[list[float], Shape], Any]) -> dict[str, Any]:
        """The figures of an operand: numbers, or for stacked slices what ``stacked`` makes of a list and a shape."""
        stack, rows = self.stacks[index], self.spans[index]
        registers = memoryview(self.registers).cast("d")
        found = {key: [registers[row * self.width + place] for row in rows] for key, place in self.stats[index].items()}
        return {key: values[0] if stack is None else stacked(values, stack) for key, values in found.items()}


def entries_of(rule: Rule, shape: Shape) -> dict[str, Spread]:
    return {key: entry for key, entry in rule.entries(shape).items() if isinstance(entry, Spread)}


def length_of(entry: Spread, shape: Shape, stacked: int) -> int:
    """How many numbers an entry has for one slice of a stack."""
    return math.prod(1 if axis in entry.over else size for axis, size in enumerate(shape) if axis >= stacked)


def seen_as(shape: Shape, row: int, column: int) -> tuple[int, int, int, int, int]:
    """(before, rows, between, columns, after): all axes but the two that are factored, taken together."""
    return (
        math.prod(shape[:row]),
        shape[row],
        math.prod(shape[row + 1 : column]),
        shape[column],
        math.prod(shape[column + 1 :]),
    )


def sums_of_squares(arrays: Sequence[tuple[int, str, int]], threads: int) -> list[float]:
    """Of each array, given as (address, dtype, size), in double precision."""
    tensors = (structs.Tensor * len(arrays))()
    for own, (address, dtype, size) in zip(tensors, arrays, strict=True):
        own.operand[1], own.dtype[1], own.size = address, structs.DTYPES[dtype], size
    sums = (ctypes.c_double * len(arrays))()
    load().thalweg_squares(tensors, len(arrays), sums, threads)
    return list(sums)
