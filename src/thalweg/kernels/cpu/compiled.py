"""A rule as native code runs it: traced, scheduled, its passes found among those compiled, its numbers in registers."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thalweg.arrays import Shape
from thalweg.errors import FallbackWarning, RuleError, asked_once, warn
from thalweg.kernels.cpu import structs
from thalweg.kernels.cpu.bounds import COUNT, LARGEST, bound_step
from thalweg.kernels.cpu.compiler import Uncompiled
from thalweg.kernels.cpu.emit import Emitted, emit
from thalweg.kernels.cpu.library import functions_of, is_here
from thalweg.kernels.cpu.lines import index_of
from thalweg.kernels.cpu.structs import FIRST_NUMBER, SCALE
from thalweg.programs.extents import HOST, TENSOR, MatrixKinds, is_spread, matrix_kinds_of, spread_shapes
from thalweg.programs.graph import Value
from thalweg.programs.host import function_of, options_of
from thalweg.programs.operations import OPERATIONS
from thalweg.programs.schedule import Schedule, schedule
from thalweg.programs.trace import Program, example_of, trace
from thalweg.rules import Rule
from thalweg.rules.entries import Entry
from thalweg.rules.rule import stand_in
from thalweg.settings import ParameterOptions
from thalweg.storage import arithmetic, describe_state

#: Operations of registers by their numbers in native/scalars.h.
CODES = tuple(OPERATIONS)
#: Registers that Python and native code fill, by the names of the inputs.
FILLED = {COUNT: structs.COUNT, LARGEST: structs.LARGEST}


@dataclass(frozen=True)
class Kind:
    """What decides which code steps a tensor. Numbers of the rule and sizes do not."""

    #: One that stands for all of its structure.
    rule: Rule
    #: A shape that stands for all of its kind.
    shape: Shape
    #: What is kept for a parameter: an option that is 0 in one step may have made an entry all the same.
    entries: tuple[tuple[str, Entry], ...]
    #: Whether the learning rate is given, whether all of the state is stored as it is computed, and whether nothing
    #: may be written before all is known to be finite.
    has_lr: bool
    exact: bool
    guarded: bool
    #: Whether all sums are complete before anything of the last pass is written, as shards of a tensor need it.
    complete: bool = False


@functools.lru_cache(maxsize=1024)
def compile_kind(kind: Kind) -> Compiled:
    return Compiled(emit_kind(kind))


def schedule_kind(kind: Kind) -> Schedule:
    rule, shape, entries = kind.rule, kind.shape, dict(kind.entries)
    if not all(is_spread(entry) for entry in entries.values()):
        raise RuleError(f"{type(rule).__name__} keeps entries of a shape of their own, of which no native code is made")
    program = trace(rule, shape, spread_shapes(entries, shape), lr=1.0 if kind.has_lr else None, simplified=False)
    size = dict.fromkeys(program.memory, 4)
    return schedule(
        program,
        size,
        exact=list(entries) if kind.exact else (),
        guarded=kind.guarded,
        complete=kind.guarded or kind.complete,
    )


@functools.lru_cache(maxsize=1024)
def emit_kind(kind: Kind) -> Emitted:
    schedule = schedule_kind(kind)
    return emit(schedule, matrix_kinds_of(schedule.program, kind.rule.stacked_axes))


def kind_of(
    rule: Rule,
    shape: Shape,
    *,
    has_lr: bool = True,
    exact: bool = True,
    guarded: bool = False,
    complete: bool = False,
    declared: Rule | None = None,
) -> Kind:
    """declared: the rule that says what is kept, if it is not the rule of this step."""
    example = example_of(rule, shape)
    entries = (declared or rule).entries(example)
    return Kind(stand_in(rule), example, tuple(entries.items()), has_lr, exact, guarded, complete)


@functools.cache
def warn_slow(reason: str) -> None:
    warn(f"{reason}. Until then its steps on the CPU run without it, several times slower", FallbackWarning)


@asked_once
def check_kind(kind: Kind) -> None:
    """Raise Refused if no native code steps parameters of this kind. Without a library, that is what engines say."""
    try:
        compile_kind(kind) if is_here() else emit_kind(kind)
    except Uncompiled as error:
        warn_slow(str(error))
        raise


def source_of(setting: ParameterOptions, shape: Shape, dtype: str, *, has_lr: bool = True) -> str:
    """The C++ that steps parameters of this kind, or why there is none."""
    rule, numerics = setting.rule_at(1), setting.numerics
    if rule.needs_whole:
        return f"// {type(rule).__name__} is computed by its own formulas\n"
    exact = all(stored == arithmetic(dtype) for _, stored in describe_state(rule, numerics, shape, dtype).values())
    guarded = numerics.on_nonfinite != "propagate"
    try:
        emitted = emit_kind(kind_of(rule, shape, has_lr=has_lr, exact=exact, guarded=guarded, declared=setting.rule))
    except RuleError as error:
        return f"// {error}\n"
    return "\n".join(function.source for function in emitted.functions)


@dataclass
class Registers:
    """The numbers of one program: where each is, and the instructions that compute those that follow from sums."""

    program: Program
    kinds: MatrixKinds
    sums: Sequence[Value]
    #: Of each sum: the pass that makes it.
    made_by: Mapping[Value, int]
    passes: int
    #: The entries of the state that are one number for each tensor.
    scalars: Sequence[str]
    numbers: dict[Any, int] = field(default_factory=dict)
    results: dict[Value, int] = field(default_factory=dict)
    #: Before the first pass, and after each.
    code: list[list[tuple[str, Any, list[Any]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.code = [[] for _ in range(1 + self.passes)]

    def need(self, operand: Any) -> Any:
        """A handle of the register that will hold an operand: resolved by ``place`` when all are known."""
        if isinstance(operand, str):  # the scale of the gradient
            return "filled", SCALE
        if not isinstance(operand, Value):
            return "number", self.numbers.setdefault(("literal", float(operand)), len(self.numbers))
        if operand.op == "input" and operand.name in FILLED:
            return "filled", FILLED[operand.name]
        if operand.op == "input" and operand.name in self.scalars:
            return "scalar", self.scalars.index(operand.name)
        if operand.is_reduction and operand in self.made_by:
            if not operand.is_mean:
                return "sum", index_of(self.sums, operand)
            if operand not in self.results:
                args = [("sum", index_of(self.sums, operand)), ("filled", structs.COUNT), ("filled", SCALE)]
                self.compute(operand, "div", args, self.made_by[operand])
            return "result", self.results[operand]
        if self.is_host(operand):
            return "number", self.numbers.setdefault(operand, len(self.numbers))
        if self.kinds.find(operand) not in (HOST, TENSOR):
            raise RuleError(
                f"{self.program.rule_name}: {operand!r} must be one number for each tensor, and is one for each matrix"
            )
        if operand not in self.results:
            args = [self.need(arg) for arg in operand.args]
            args += [("filled", SCALE)] * (3 - len(args))
            self.compute(operand, operand.op, args, self.known_after(operand))
        return "result", self.results[operand]

    def compute(self, value: Value, op: str, args: list[Any], after: int) -> None:
        self.results[value] = len(self.results)
        self.code[1 + after].append((op, ("result", self.results[value]), args))

    def is_host(self, value: Value) -> bool:
        """Whether a value follows from options and the step alone."""
        if value.op == "input":
            return value.name not in FILLED and value.name not in self.scalars
        return (
            self.kinds.find(value) in (HOST, TENSOR) and not value.is_reduction and all(map(self.is_host, value.values))
        )

    def known_after(self, value: Value) -> int:
        """The pass after which a value can be computed; -1: before all of them."""
        if value.is_reduction:
            return self.made_by[value]
        return max((self.known_after(arg) for arg in value.values), default=-1)

    def place(self, handle: Any) -> int:
        kind, index = handle
        first = {
            "filled": 0,
            "number": FIRST_NUMBER,
            "sum": FIRST_NUMBER + len(self.numbers),
            "scalar": FIRST_NUMBER + len(self.numbers) + len(self.sums),
            "result": FIRST_NUMBER + len(self.numbers) + len(self.sums) + len(self.scalars),
        }
        return int(first[kind] + index)

    @property
    def count(self) -> int:
        return self.place(("result", len(self.results)))


class Compiled:
    """A program in the form that native code takes, and the function that computes its numbers of a step."""

    def __init__(self, emitted: Emitted) -> None:
        program, kinds = emitted.schedule.program, emitted.kinds
        self.emitted, self.schedule, self.axes = emitted, emitted.schedule, kinds.axes
        sums = [value for pass_ in emitted.passes for value in pass_.sums]
        made_by = {value: number for number, pass_ in enumerate(emitted.passes) for value in pass_.sums}
        registers = Registers(program, kinds, sums, made_by, len(emitted.passes), list(emitted.scalars))
        passes = [*emitted.passes, *([emitted.short] if emitted.short is not None else [])]
        numbers = [[registers.need(number) for number in pass_.numbers] for pass_ in passes]
        between = [] if emitted.between is None else [registers.need(number) for number in emitted.between.numbers]
        stats = {name: registers.need(value) for name, value in program.stats.items()}
        scalars = [
            (place, registers.need(program.inputs[key]), registers.need(program.state[key]))
            for key, place in emitted.scalars.items()
        ]
        finite = None if program.finite is True else registers.need(program.finite)
        limit = bound_step(program, kinds)
        bound = None if limit is None else registers.need(limit)
        place = registers.place
        self.registers = registers.count
        self.stats = {name: place(handle) for name, handle in stats.items()}
        #: What the numbers of a step are: values of the program, and plain numbers.
        self.literals = [key[1] if isinstance(key, tuple) else key for key in registers.numbers]
        self.numbers = function_of(self.literals)
        self.sums = [[place(("sum", index_of(sums, value))) for value in pass_.sums] for pass_ in emitted.passes]
        code = [
            structs.Instruction(CODES.index(op), place(to), *map(place, args))
            for stage in registers.code
            for op, to, args in stage
        ]
        #: The rule of the last step, with its options by name.
        self.latest: tuple[Rule, dict[str, Any]] | None = None
        #: What the structures below point to.
        self.arrays: list[Any] = []
        library = functions_of(emitted.functions, program.rule_name)
        self.passes = (structs.Pass * len(passes))()
        for pass_, handles, target in zip(passes, numbers, self.passes, strict=True):
            target.index, target.functions = library[pass_.function.name]
            target.operands, target.numbers = len(pass_.operands), len(handles)
            target.sums, target.kept = len(pass_.sums), len(pass_.kept)
            target.written = sum(1 << k for k, written in enumerate(pass_.written) if written)
            target.operand[: len(pass_.operands)] = pass_.operands
            target.rows, target.columns = len(pass_.rows), len(pass_.columns)
            target.row_sums, target.column_sums = len(pass_.row_sums), len(pass_.column_sums)
            target.row[: len(pass_.rows)] = [index_of(emitted.rows, value) for value in pass_.rows]
            target.column[: len(pass_.columns)] = [index_of(emitted.columns, value) for value in pass_.columns]
            every_sum = pass_.every_sum
            target.squared = sum(1 << k for k, value in enumerate(every_sum) if value.is_squared)
            target.summed[: len(every_sum)] = pass_.summed
            target.registers = self.address(ctypes.c_int32, list(map(place, handles)))
        self.between = structs.Between(after_pass=-1)
        if emitted.between is not None:
            middle, own_between = emitted.between, self.between
            own_between.index, own_between.functions = library[middle.function.name]
            own_between.after_pass, own_between.numbers = middle.after_pass, len(between)
            own_between.rows, own_between.columns = len(middle.row_state), len(middle.column_state)
            own_between.row_state[: len(middle.row_state)] = middle.row_state
            own_between.column_state[: len(middle.column_state)] = middle.column_state
            own_between.registers = self.address(ctypes.c_int32, list(map(place, between)))
        begin, *ends = itertools.accumulate(map(len, registers.code))
        firsts = [place(("sum", sum(map(len, self.sums[:n])))) for n in range(len(emitted.passes))]
        self.code = (structs.Instruction * len(code))(*code)
        self.native = structs.Program(
            passes=ctypes.addressof(self.passes),
            between=ctypes.addressof(self.between),
            code=ctypes.addressof(self.code),
            is_mean=self.address(ctypes.c_uint8, [value.is_mean for value in sums] or [0]),
            kept=self.address(ctypes.c_int32, [x for key, *handles in scalars for x in (key, *map(place, handles))]),
            count=len(emitted.passes),
            kept_count=len(scalars),
            code_begin=begin,
            has_short=emitted.short is not None,
            finite=-1 if finite is None else place(finite),
            bounded=-1 if bound is None else place(bound),
        )
        self.native.code_end[: len(ends)] = ends
        self.native.first_sum[: len(firsts)] = firsts

    def address(self, kind: Any, values: list[Any]) -> int:
        array = (kind * max(1, len(values)))(*values)
        self.arrays.append(array)
        return ctypes.addressof(array)

    def numbers_of(self, rule: Rule, t: int, lr: float | None, lr_scale: float, gradient_scale: float) -> Any:
        """The registers with which every tensor begins a step."""
        if self.latest is None or self.latest[0] is not rule:
            self.latest = rule, options_of(rule)
        inputs: dict[str, Any] = {**self.latest[1], "t": float(t), "lr": lr, "lr_scale": lr_scale}
        numbers = self.numbers(inputs)
        return (ctypes.c_double * (FIRST_NUMBER + len(numbers)))(gradient_scale, 1.0, 1.0, *numbers)
