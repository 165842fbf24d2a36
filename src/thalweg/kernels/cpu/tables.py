"""A whole model laid out for native code: tables of addresses, made once, in which gradients move at every step."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from thalweg.arrays import Shape
from thalweg.boundary import ROUNDING_STREAM, state_streams
from thalweg.codecs import bytes_of, grouping
from thalweg.kernels.cpu import structs
from thalweg.kernels.cpu.compiled import Compiled, compile_kind, kind_of
from thalweg.kernels.cpu.library import load
from thalweg.rules import Rule
from thalweg.rules.entries import Spread
from thalweg.rules.noise import stream_key, tensor_id
from thalweg.rules.rule import structure_of
from thalweg.settings import Numerics
from thalweg.storage import arithmetic

#: Stages: passes that measure, from 0 on; a look at what would be written; the last pass; the end.
MEASURE, REHEARSE, WRITE, END = 0, 8, 9, 10
ZERO = array("d", [0.0])


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

    @property
    def is_exact(self) -> bool:
        """Whether all of its state is stored as it is computed."""
        return all(dtype == arithmetic(self.dtypes[0]) for dtype in self.dtypes[2:])


class Options(NamedTuple):
    """What holds for some parameters in one step."""

    rule: Rule
    numerics: Numerics
    t: int
    lr: float | None
    lr_scale: float
    grad_scale: float | None = None
    #: The rule that says what is kept, if it is not the rule of this step.
    declared: Rule | None = None

    @property
    def layout(self) -> Any:
        """What decides how tensors are laid out and which code steps them."""
        return structure_of(self.rule), self.numerics.seed, self.is_guarded, self.lr is None

    @property
    def is_guarded(self) -> bool:
        return self.numerics.on_nonfinite != "propagate"

    @property
    def gradient_scale(self) -> float:
        scale = 1.0 if self.grad_scale is None else self.grad_scale
        return -scale if self.numerics.maximize else scale

    def code_for(self, operand: Operand) -> Compiled:
        return compile_kind(
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


class Rows(NamedTuple):
    """What is equal in the rows of operands of one kind: all but addresses, names and positions."""

    #: The row, as bytes.
    template: bytes
    #: How many there are, one for each stacked slice, and the shape of the stack.
    slices: int
    stack: Shape
    #: Elements of a slice, and those of it that share a scale.
    size: int
    group: int
    #: Bytes from one slice to the next: of p, g and the entries of the state.
    strides: list[int]
    #: Of p, g and the entries: the streams of their random bits; empty where nothing is random.
    streams: list[int]

    @classmethod
    def lay_out(cls, operand: Operand, options: Options, code: Compiled, place: int) -> Rows:
        rule, stacked = options.rule, options.rule.stacked_axes
        slice_shape, whole = operand.shape[stacked:], operand.shape if operand.whole is None else operand.whole
        entries = entries_of(options.declared or rule, operand.shape)
        size = math.prod(slice_shape)
        lengths = [size, size, *(length_of(entry, operand.shape, stacked) for entry in entries.values())]
        groups = grouping(whole, stacked)
        drawn = state_streams(list(entries))
        streams = [(ROUNDING_STREAM, 0), (ROUNDING_STREAM, 0), *(drawn[key] for key in entries)]
        seen = (0,) * 5 if code.axes is None else seen_as(slice_shape, *(axis - stacked for axis in code.axes))
        row = structs.Tensor(
            size=size,
            whole=size if operand.whole is None else math.prod(operand.whole),
            seen_as=(ctypes.c_int64 * 5)(*seen),
            options=place,
            group=groups.size if groups is not None else 1,
            is_slice=stacked > 0,
            high=sum(half << which for which, (_, half) in enumerate(streams)),
        )
        row.dtype[: len(operand.dtypes)] = [structs.DTYPES[dtype] for dtype in operand.dtypes]
        return cls(
            bytes(row),
            math.prod(operand.shape[:stacked]),
            operand.shape[:stacked],
            size,
            row.group,
            [length * bytes_of(dtype) for length, dtype in zip(lengths, operand.dtypes, strict=True)],
            [stream for stream, _ in streams] if options.numerics.is_random else [],
        )

    def write(self, table: Any, first: int, operand: Operand, seed: int) -> None:
        """Write the rows of an operand into a table."""
        keys = [stream_key(seed, tensor_id(operand.name), stream) for stream in self.streams]
        bases = operand.p, operand.g, *operand.state
        for index in range(self.slices):
            begin = (first + index) * len(self.template)
            addresses = [base + index * stride for base, stride in zip(bases, self.strides, strict=True)]
            scales = [base and base + index * self.size // self.group * 4 for base in operand.scales]
            record = operand.record and operand.record + index * self.size
            nothing = [0] * (structs.OPERANDS - len(addresses))
            places = [*addresses, *nothing, 0, 0, *scales, *[0] * (structs.OPERANDS - 2 - len(scales)), record]
            memoryview(table).cast("B")[begin : begin + len(self.template)] = self.template
            struct.pack_into(f"{len(places)}Q", table, begin, *places)
            struct.pack_into("q", table, begin + structs.Tensor.position.offset, operand.position + index * self.size)
            if keys:
                struct.pack_into(f"{len(keys)}I", table, begin + structs.Tensor.key.offset, *keys)


class Tables:
    """Some operands laid out for native code, once. Gradients and the numbers of options are new at every step."""

    def __init__(self, operands: Sequence[Operand], options: Sequence[Options]) -> None:
        #: By place in the options that native code sees: the group that they are of, and the code for it.
        self.used: list[tuple[int, Compiled]] = []
        #: Of each operand: its place there, its rows in the table, and the shape of their stack if they are slices.
        self.codes: list[int] = []
        self.spans: list[range] = []
        self.stacks: list[Shape | None] = []
        by_kind: dict[Any, tuple[int, Rows]] = {}
        rows = []
        for operand in operands:
            kind = operand.group, operand.shape, operand.whole, operand.dtypes
            if kind not in by_kind:
                place = self.place_of(operand.group, options[operand.group].code_for(operand))
                by_kind[kind] = place, Rows.lay_out(operand, options[operand.group], self.used[place][1], place)
            place, shared = by_kind[kind]
            first = self.spans[-1].stop if self.spans else 0
            self.codes.append(place)
            self.spans.append(range(first, first + shared.slices))
            self.stacks.append(shared.stack if shared.slices != 1 else None)
            rows.append(shared)
        self.count = self.spans[-1].stop if self.spans else 0
        self.tensors = (structs.Tensor * self.count)()
        for operand, shared, span in zip(operands, rows, self.spans, strict=True):
            shared.write(self.tensors, span.start, operand, options[operand.group].numerics.seed)
        self.options = (structs.Options * len(self.used))()
        for option, (_, code) in zip(self.options, self.used, strict=True):
            option.program = ctypes.addressof(code.native)
        self.width = max((code.registers for _, code in self.used), default=0)
        self.stats = [self.used[place][1].stats for place in self.codes]
        self.threads, self.scratch = 0, ctypes.create_string_buffer(0)
        #: Of each row: whose it is, and how far behind the beginning of its gradient it begins.
        self.owners = array("q", [i for i, span in enumerate(self.spans) for _ in span])
        self.offsets = array("q", [i * shared.strides[1] for shared in rows for i in range(shared.slices)])
        arguments = self.tensors, self.count, address_of(self.owners), address_of(self.offsets)
        self.set_gradients = functools.partial(load().thalweg_point, *arguments)
        self.run_stages = load().thalweg_run
        self.new_outcomes = structs.Outcome * self.count

    def place_of(self, group: int, code: Compiled) -> int:
        for place, (its_group, its_code) in enumerate(self.used):
            if its_group == group and its_code is code:
                return place
        self.used.append((group, code))
        return len(self.used) - 1

    def point(self, bases: array[int]) -> None:
        """Take the addresses of the gradients as they are now, in the order of the operands."""
        self.set_gradients(bases.buffer_info()[0])

    def fill(self, options: Sequence[Options], threads: int) -> None:
        """Take the numbers of a step, for so many threads."""
        #: By group and the function that computes them.
        self.numbers: dict[Any, Any] = {}
        for target, (group, code) in zip(self.options, self.used, strict=True):
            given = options[group]
            numerics, t = given.numerics, given.t
            numbers = self.numbers.get((group, code.numbers))
            if numbers is None:
                numbers = code.numbers_of(given.rule, t, given.lr, given.lr_scale, given.gradient_scale)
                self.numbers[group, code.numbers] = numbers
            target.numbers, target.count, target.t = ctypes.addressof(numbers), len(numbers), t & 0xFFFFFFFF
            target.stochastic = numerics.rounding == "stochastic"
            target.guarded = given.is_guarded
            target.state_stochastic = numerics.state_rounding == "stochastic"
        if threads != self.threads:
            self.scratch = ctypes.create_string_buffer(self.scratch_bytes(threads))
            self.threads = threads
        # new for each step: what the last one has found may be asked for after this one has failed
        self.outcomes, self.registers = self.new_outcomes(), ZERO * (self.count * self.width)

    def scratch_bytes(self, threads: int) -> int:
        """Bytes of scratch memory for so many threads, for which native code lays it out."""
        needed: int = load().thalweg_layout(self.options, self.tensors, self.count, threads)
        return needed

    def run(self, first: int, last: int) -> None:
        registers, _ = self.registers.buffer_info()
        arguments = self.options, self.tensors, registers, self.width, self.outcomes, self.count, self.scratch
        self.run_stages(*arguments, first, last, self.threads)

    @property
    def rounds(self) -> int:
        """How many passes have sums that must be complete before the last one."""
        return max((len(code.sums) - 1 for _, code in self.used), default=0)

    def places_of_sums(self, operand: int, number: int) -> list[int]:
        """The registers in which a pass leaves what it has added up of an operand, and from which stages go on."""
        code = self.used[self.codes[operand]][1]
        return code.sums[number] if number < len(code.sums) - 1 else []

    def finite(self) -> list[bool]:
        """For each operand whether all of its step is finite."""
        flags = array("i", bytes(self.outcomes))[::2]
        broken = {owner for owner, fine in zip(self.owners, flags, strict=True) if not fine}
        return [owner not in broken for owner in range(len(self.spans))]

    def skip(self, which: Sequence[bool]) -> None:
        """Leave some operands as they are in the stage that writes."""
        for span, skipped in zip(self.spans, which, strict=True):
            for row in span:
                self.outcomes[row].skip = skipped

    def figures(self) -> Figures:
        """The statistics of the last step."""
        return Figures(self.stats, self.spans, self.stacks, self.registers, self.width)


class Figures(NamedTuple):
    """The statistics of a step, read when stats() is called."""

    #: Of each operand: the registers of its figures, by name; its rows; the shape of its stack.
    stats: list[dict[str, int]]
    spans: list[range]
    stacks: list[Shape | None]
    registers: array[float]
    width: int

    def read(self, operand: int, stacked: Callable[[list[float], Shape], Any]) -> dict[str, Any]:
        """The figures of an operand: numbers, or for stacked slices what ``stacked`` makes of a list and a shape."""
        stack, rows = self.stacks[operand], [row * self.width for row in self.spans[operand]]
        figures = {key: [self.registers[row + place] for row in rows] for key, place in self.stats[operand].items()}
        return {key: values[0] if stack is None else stacked(values, stack) for key, values in figures.items()}


class Counts:
    """Numbers of steps, each a float32 at an address of its own."""

    def __init__(self, addresses: Iterable[int]) -> None:
        self.addresses, self.number = array("Q", addresses), ctypes.c_float()
        arguments = self.addresses.buffer_info()
        self.compare = functools.partial(load().thalweg_counts, *arguments, ctypes.byref(self.number))
        self.count = functools.partial(load().thalweg_count, *arguments)

    def read(self) -> float | None:
        """The number that all counts have; None if they differ."""
        return self.number.value if self.compare() else None

    def advance(self, chosen: Sequence[bool] | None = None) -> None:
        """Count a step, of all or of the chosen ones."""
        self.count(None if chosen is None else bytes(chosen))


def address_of(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


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


class GradientSquares:
    """Sums of squares of gradients, which may move, in double precision."""

    def __init__(self, gradients: Sequence[tuple[str, int]]) -> None:
        """gradients: the dtype and the size of each."""
        self.count, self.sums = len(gradients), array("d", bytes(8 * len(gradients)))
        self.tensors = (structs.Tensor * self.count)()
        for tensor, (dtype, size) in zip(self.tensors, gradients, strict=True):
            tensor.dtype[1], tensor.size = structs.DTYPES[dtype], size
        self.owners, self.offsets = array("q", range(self.count)), array("q", bytes(8 * self.count))

    def measure(self, addresses: array[int], threads: int) -> array[float]:
        """The sums of squares of gradients at these addresses."""
        places = address_of(self.owners), address_of(self.offsets), address_of(addresses)
        load().thalweg_point(self.tensors, self.count, *places)
        load().thalweg_squares(self.tensors, self.count, address_of(self.sums), threads)
        return self.sums
