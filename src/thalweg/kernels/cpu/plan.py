"""A whole model laid out for native code: tables of addresses that are kept until something moves."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from thalweg.arrays import Shape
from thalweg.boundary import ROUNDING_STREAM
from thalweg.dtypes import DTYPES
from thalweg.kernels.cpu import structs
from thalweg.kernels.cpu.library import load
from thalweg.kernels.cpu.options import READS, STATS, TRANSLATED
from thalweg.kernels.shown import reason_unread
from thalweg.rules import Adafactor, Kron, Rule
from thalweg.rules.noise import stream_key, tensor_id
from thalweg.settings import Handling

#: How many elements may lie behind a factored column: what native code has room for.
MOST_BEHIND = 128

MEASURE, REHEARSE, WRITE, END = 0, 1, 2, 3  # stages
#: How many sums of the first stage decide what follows, where parts of a tensor may be elsewhere.
SUMS = {"LARS": 2, "LAMB": 3}


class Operand(NamedTuple):
    """One parameter: where it, its gradient and its state lie (0: there is none), and how they are stored."""

    name: str | int
    shape: Shape
    p: int
    g: int
    state: tuple[int, ...]
    dtypes: tuple[str, ...]
    #: Which of the options hold.
    group: int
    #: Of the first element in the whole parameter, where this is a part of it.
    position: int = 0

    def fits(self, other: Operand) -> bool:
        """Whether it can take the place of another: that it has moved is all that may have changed."""
        return self is other or (self.name, self.shape, self.dtypes) == (other.name, other.shape, other.dtypes)


class Options(NamedTuple):
    """What holds for some parameters in one step."""

    rule: Rule
    handling: Handling
    t: int
    lr: float | None
    lr_scale: float
    grad_scale: float | None = None


def reason_unserved(rule: Rule, shape: Shape) -> str | None:
    """Why native code cannot step such a tensor, or None if it can."""
    if isinstance(rule, Kron):  # which is computed by its own formulas, of native noise
        return None
    if (reason := reason_unread(rule, READS)) is not None:
        return reason
    axes = rule.factored_axes(shape) if isinstance(rule, Adafactor) else None
    if axes is None:
        return None
    if math.prod(shape) == 0:
        return f"shape {shape} is empty"
    behind = math.prod(shape[axes[1] + 1 :])
    if behind > MOST_BEHIND:
        return f"shape {shape} has {behind} elements behind axis {axes[1]}, and {MOST_BEHIND} can be served"
    return None


class Plan:
    """Tables for one optimizer."""

    def __init__(self, rule_name: str) -> None:
        self.rule_name = rule_name
        self.operands: list[Operand] = []
        self.layout: list[Layout] = []
        #: Rows of the table that belong to each operand: one, or one for each stacked slice.
        self.spans: list[range] = []
        self.tensors: Any = None
        self.outcomes: Any = None
        self.scratch: Any = None
        self.threads = 0

    def prepare(self, operands: list[Operand], options: Sequence[Options], threads: int) -> None:
        """Lay out a step: rows of the tables are made anew only if something moved, the numbers at every step."""
        library, code = load(), structs.RULES[self.rule_name]
        layouts = [layout_of(each) for each in options]
        layout = [layouts[operand.group] for operand in operands]
        if layout != self.layout or not self.moved(operands, options):
            self.lay_out(operands, options)
            self.layout, self.threads = layout, 0
        self.operands = operands
        if threads != self.threads:
            bytes_needed = library.thalweg_layout(code, self.tensors, len(self.tensors), threads)
            self.scratch, self.threads = ctypes.create_string_buffer(bytes_needed), threads
        self.outcomes = (structs.Outcome * len(self.tensors))()
        translated = [TRANSLATED[type(each.rule)](*each) for each in options]
        self.options = (type(translated[0]) * len(translated))(*translated)

    def lay_out(self, operands: Sequence[Operand], options: Sequence[Options]) -> None:
        rows = [rows_of(operand, options[operand.group]) for operand in operands]
        ends = list(itertools.accumulate(map(len, rows)))
        self.spans = [range(end - len(own), end) for end, own in zip(ends, rows, strict=True)]
        self.tensors = (structs.Tensor * sum(map(len, rows)))(*itertools.chain(*rows))

    def moved(self, operands: Sequence[Operand], options: Sequence[Options]) -> bool:
        """Follow what has moved since the last step; whether these are still the same operands."""
        if len(operands) != len(self.operands) or not all(map(Operand.fits, operands, self.operands)):
            return False
        for new, old, span in zip(operands, self.operands, self.spans, strict=True):
            if new is old or new == old:
                continue
            for place, row in zip(span, rows_of(new, options[new.group]), strict=True):
                row.scratch = self.tensors[place].scratch
                self.tensors[place] = row
        return True

    def run(self, first: int, last: int) -> None:
        load().thalweg_run(
            structs.RULES[self.rule_name],
            self.options,
            self.tensors,
            self.outcomes,
            len(self.tensors),
            self.scratch,
            first,
            last,
            self.threads,
        )

    def sums(self, operand: int) -> list[float]:
        """What the first stage has added up of an operand."""
        (row,) = self.spans[operand]
        return list(self.outcomes[row].sums[: SUMS[self.rule_name]])

    def decide(self, sums: Mapping[int, Sequence[float]]) -> None:
        """Go on from these sums, by operand, instead of those that were found here."""
        for operand, values in sums.items():
            (row,) = self.spans[operand]
            self.outcomes[row].sums[: len(values)] = values
        code = structs.RULES[self.rule_name]
        load().thalweg_decide(code, self.options, self.tensors, self.outcomes, len(self.tensors))

    def finite(self) -> list[bool]:
        """For each operand whether all of its step is finite."""
        return [all(self.outcomes[row].finite for row in span) for span in self.spans]

    def skip(self, which: Sequence[bool]) -> None:
        """Leave some operands as they are in the stage that writes."""
        for span, skipped in zip(self.spans, which, strict=True):
            for row in span:
                self.outcomes[row].skip = skipped

    def figures(self) -> Figures:
        stacks = [
            operand.shape[: layout.stacked_axes] if len(span) != 1 else None
            for operand, layout, span in zip(self.operands, self.layout, self.spans, strict=True)
        ]
        return Figures(self.rule_name, self.spans, stacks, bytes(self.outcomes))


class Figures(NamedTuple):
    """What a step computed on its way, read when somebody asks."""

    rule_name: str
    spans: list[range]
    #: The shape of each stack of slices, None for tensors that stand alone.
    stacks: list[Shape | None]
    outcomes: bytes

    def of(self, index: int, stacked: Callable[[list[float], Shape], Any]) -> dict[str, Any]:
        """The figures of an operand: numbers, or for stacked slices what ``stacked`` makes of a list and a shape."""
        stack, size = self.stacks[index], ctypes.sizeof(structs.Outcome)
        stats = [structs.Outcome.from_buffer_copy(self.outcomes, row * size).stats for row in self.spans[index]]
        return {
            key: stats[0][k] if stack is None else stacked([own[k] for own in stats], stack)
            for k, key in enumerate(STATS[self.rule_name])
        }


class Layout(NamedTuple):
    """The options that decide how tensors are laid out."""

    seed: int
    stacked_axes: int
    factoring: Any


def layout_of(options: Options) -> Layout:
    rule = options.rule
    factoring = None
    if isinstance(rule, Adafactor):
        factoring = rule.factored, rule.min_dim_size_to_factor, rule.factor_dims, rule.only_2d
    return Layout(options.handling.seed, rule.stacked_axes, factoring)


def rows_of(operand: Operand, options: Options) -> list[structs.Tensor]:
    """The rows of one operand: one for each stacked slice, which are tensors by themselves."""
    rule, handling = options.rule, options.handling
    own = operand.shape[rule.stacked_axes :]
    size = math.prod(own)
    axes = rule.factored_axes(operand.shape) if isinstance(rule, Adafactor) else None
    seen = (0,) * 5 if axes is None else seen_as(own, *(axis - rule.stacked_axes for axis in axes))
    before, rows, between, columns, after = seen
    lengths = (
        [size] * 3 if axes is None else [before * rows * between * after, before * between * columns * after, size]
    )
    p_dtype, g_dtype, *state_dtypes = operand.dtypes
    codes = (structs.DTYPES.get(dtype, 0) for dtype in (*state_dtypes, "", "", ""))
    table = (ctypes.c_uint8 * 3)(*(code for code, _ in zip(codes, range(3), strict=False)))
    key = stream_key(handling.seed, tensor_id(operand.name), ROUNDING_STREAM)

    def row(index: int) -> structs.Tensor:
        state = [
            address + index * length * DTYPES[dtype].bytes if address else None
            for address, length, dtype in zip(operand.state, lengths, state_dtypes, strict=False)
        ]
        return structs.Tensor(
            p=operand.p + index * size * DTYPES[p_dtype].bytes,
            g=operand.g + index * size * DTYPES[g_dtype].bytes,
            state=(ctypes.c_void_p * 3)(*state),
            size=size,
            seen_as=(ctypes.c_int64 * 5)(*seen),
            position=operand.position + index * size,
            options=operand.group,
            key=key,
            p_dtype=structs.DTYPES[p_dtype],
            g_dtype=structs.DTYPES[g_dtype],
            state_dtype=table,
            is_slice=rule.stacked_axes > 0,
        )

    return [row(index) for index in range(math.prod(operand.shape[: rule.stacked_axes]))]


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
    library = load()
    tensors = (structs.Tensor * len(arrays))(
        *(structs.Tensor(g=address, g_dtype=structs.DTYPES[dtype], size=size) for address, dtype, size in arrays)
    )
    outcomes = (structs.Outcome * len(arrays))()
    options = (structs.Handling * 1)()
    scratch = ctypes.create_string_buffer(library.thalweg_layout(structs.SQUARES, tensors, len(arrays), threads))
    library.thalweg_run(structs.SQUARES, options, tensors, outcomes, len(arrays), scratch, MEASURE, WRITE, threads)
    return [outcome.sums[0] for outcome in outcomes]
