"""Native code on CPUs: the core's passes over all parameters, each in one call, and what XLA computes between them."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from thalweg.arrays import Shape
from thalweg.codecs import scale_key
from thalweg.dtypes import DTYPES
from thalweg.errors import Refused
from thalweg.kernels.cpu import admission, structs
from thalweg.kernels.cpu.bounds import COUNT, LARGEST
from thalweg.kernels.cpu.operands import operand_of
from thalweg.kernels.cpu.tables import REHEARSE, WRITE, Operand, Options, entries_of
from thalweg.kernels.cpu.xla import MOVE, TARGET, Layout, Numbered, compile_handler, place_of, register_moves
from thalweg.kernels.threads import num_threads, of_machine
from thalweg.optax.batches import Job, Leaf
from thalweg.optax.native.moves import stack_all, take_apart
from thalweg.optax.native.step import NativeStep
from thalweg.optax.steps import Outcome
from thalweg.programs.evaluate import apply
from thalweg.programs.extents import ELEMENT
from thalweg.programs.graph import Value
from thalweg.programs.host import options_of
from thalweg.programs.trace import GRADIENT, PARAMETER
from thalweg.rules.rule import stand_in
from thalweg.spaces import jax as space
from thalweg.storage import RECORD, arithmetic, describe_state


@functools.cache
def handler() -> Any:
    """The library of native code for XLA, or why there is none."""
    library = compile_handler(jax.ffi.include_dir())
    if not isinstance(library, str):
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.thalweg_step), platform="cpu")
        jax.ffi.register_ffi_target(MOVE, jax.ffi.pycapsule(library.thalweg_move), platform="cpu")
    return library


def admit(leaf: Leaf) -> None:
    """Raise Refused if this code cannot step a parameter that is whole and has elements."""
    setting, shape, dtype = leaf.setting, leaf.p.shape, leaf.p.dtype.name
    described = describe_state(setting.stored_rule, setting.numerics, shape, dtype)
    if "float16" in (dtype, getattr(leaf, "g", leaf.p).dtype.name, *(stored for _, stored in described.values())):
        raise Refused("XLA's threads take numbers of float16 below 2**-14 for 0 where native code reads them")
    admission.admit(stand_in(setting.rule_at(1)), setting.numerics, shape, dtype)


def admit_sums(leaf: Leaf) -> None:
    """Refuse: this code cannot sum over parts of a parameter that are on other devices."""
    raise Refused(f"native code sums over whole arrays, as {type(leaf.setting.rule).__name__} does")


def move(arrays: Sequence[Any], results: Sequence[Any], moves: Sequence[int]) -> list[Any]:
    """What is copied from arrays to results, in one call. moves: of each copy two places, and how many bytes."""
    return list(jax.ffi.ffi_call(MOVE, results)(*arrays, key=register_moves(handler(), moves)))


class Native(NativeStep):
    """Jobs as buffers that native code writes, and a table of where each lies among them."""

    def lay_out(self) -> None:
        jobs, step = self.jobs, self.step
        settings = {id(job.setting): job.setting for job in jobs}
        lr = None if step.lr is None else 1.0
        options = [
            Options(self.rules[key], setting.numerics, 1, lr, 1.0, declared=setting.rule)
            for key, setting in settings.items()
        ]
        places = {key: place for place, key in enumerate(settings)}
        by_kind: dict[Any, list[int]] = defaultdict(list)
        by_shape: dict[Any, list[int]] = defaultdict(list)
        for index, (job, operand) in enumerate(zip(jobs, operands_of(jobs, places), strict=True)):
            kind = operand.group, id(options[operand.group].code_for(operand))
            by_kind[kind].append(index)
            by_shape[kind, job.p.dtype, job.p.shape].append(index)
        self.groups = list(by_kind.values())
        ordered = [jobs[index] for members in by_shape.values() for index in members]
        self.layout = Layout(handler(), operands_of(ordered, places), options, threads=num_threads(of_machine))
        tables, kinds, first = self.layout.tables, list(by_kind), 0
        #: Jobs of one shape, one stack after the other in the tables.
        self.stacks: list[Stack] = []
        #: What native code reads and writes, but for gradients.
        self.arrays: list[Any] = []
        for (kind, *_), members in by_shape.items():
            end = first + len(members)
            rows = range(tables.spans[first].start, tables.spans[end - 1].stop)
            code = self.layout.codes[tables.codes[first]]
            stacked = [jobs[index] for index in members]
            self.stacks.append(Stack(code, stacked, members, kinds.index(kind), rows, self.arrays))
            first = end
        self.gradients = [job.g for job in ordered]

    def numbers(self) -> list[Any]:
        """The count, and of each group the scale of gradients and options."""
        step, numbers = self.step, [jnp.asarray(self.step.t, "int32")]
        by_group = {stack.group: stack for stack in self.stacks}
        with jax.enable_x64(True):
            for stack in map(by_group.__getitem__, range(len(by_group))):
                setting = stack.jobs[0].setting
                given = options_of(setting.rule_at(step.t)) | {"t": step.t, "lr": step.lr, "lr_scale": setting.lr_scale}
                scale = jnp.asarray(1.0 if step.grad_scale is None else step.grad_scale, "float64")
                inputs = [jnp.asarray(given[name], "float64") for name in stack.code.inputs]
                numbers.append(jnp.stack([-scale if setting.numerics.maximize else scale, *inputs]))
        return numbers

    def take(self, numbers: Sequence[Any]) -> tuple[dict[int, Outcome], Any]:
        count, *by_group = numbers
        stacks, fine = self.stacks, None
        with jax.enable_x64(True):  # numbers of tensors are computed in double precision
            small = [[job.state[key] for job in stack.jobs] for stack in stacks for key in stack.small]
            before = iter(stack_all(move, small))
            for stack in stacks:
                stack.begin(by_group[stack.group], {key: next(before) for key in stack.small})
            for stage in range(max(len(stack.code.numbers) for stack in stacks) - 1):
                self.call(stage, count)
            if self.step.guarded:
                looked = self.call(REHEARSE, count)
                fine = jnp.all(jnp.stack([jnp.all(looked != 0), *(jnp.all(stack.finite()) for stack in stacks)]))
            self.call(WRITE, count, fine)
            after = iter(take_apart(move, [stack.new_state(key, fine) for stack in stacks for key in stack.small]))
            by_place: dict[int, Outcome] = {}
            for stack in stacks:
                news = {key: next(after) for key in stack.small}
                figures = stack.figures() if any(self.figures) else {}
                for index, (place, buffers) in enumerate(zip(stack.members, stack.buffers, strict=True)):
                    state = {
                        key: news[key][index] if key in news else self.arrays[buffers[key]]
                        for key in self.jobs[place].state
                    }
                    shown = {name: values[index] for name, values in figures.items()}
                    by_place[place] = Outcome(self.arrays[buffers[PARAMETER]], state, shown)
        return by_place, fine

    def call(self, stage: int, count: Any, allowed: Any = None) -> Any:
        """Take all tensors through a stage, and note sums. The answer: whether each is finite, if it was looked at."""
        arrays, gathered, given = [*self.arrays, *self.gradients], list[Stack](), list[Any]()
        written: list[int] = []
        small: dict[int, int] = {}
        for stack in self.stacks:
            number = stack.pass_of(stage)
            if number is None:
                continue
            if stage != REHEARSE:
                written += stack.written(number)
            if stack.code.gathers == number:
                gathered.append(stack)
            elif stack.reads_small(number):
                given.append(stack.small_values(number))
                small |= stack.place_rows(place_of(len(arrays) + len(given) - 1))
        registers = jnp.concatenate([stack.registers(stage, self.layout.width) for stack in self.stacks])
        allowed = jnp.ones((), "int32") if allowed is None else allowed.astype("int32")
        arguments = [*arrays, *given, registers, count, allowed]
        results = [like(arrays[buffer]) for buffer in written]
        aliases = {buffer: place for place, buffer in enumerate(written)}
        aliases[len(arguments) - 3] = len(results)
        results.append(like(registers))
        for stack in gathered:
            small |= stack.place_rows(place_of(len(arguments) + len(results)))
            results.append(jax.ShapeDtypeStruct(stack.small_shape, stack.precision))
        results.append(jax.ShapeDtypeStruct((len(registers),), "int32"))
        results.append(jax.ShapeDtypeStruct((self.layout.workspace_bytes,), "uint8"))
        key = self.layout.register(stage, written, small)
        news = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)(*arguments, key=key)
        for buffer, new in zip(written, news, strict=False):
            self.arrays[buffer] = new
        registers, *means, finite, _ = news[len(written) :]
        for stack, mean in zip(gathered, means, strict=True):
            stack.take_means(mean)
        for stack in self.stacks:
            stack.take_sums(stage, registers)
        return finite


def like(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def operands_of(jobs: Sequence[Job], groups: Mapping[int, int]) -> list[Operand]:
    """Jobs with places of buffers for addresses: of each p and its state, then all gradients.

    groups: which of the options hold, by the id of a setting.
    """
    buffers = itertools.count()
    operands = []
    for job in jobs:
        small = {id(job.state[key]) for key in small_keys(job)}

        def place(x: Any, small: set[int] = small) -> tuple[int, str]:
            return 0 if id(x) in small else place_of(next(buffers)), x.dtype.name

        shown = job.name, job.p.shape, job.p, job.g.dtype.name, job.state
        operands.append(operand_of(job.setting.rule, *shown, place, groups[id(job.setting)]))
    return [operand._replace(g=place_of(next(buffers))) for operand in operands]


def small_keys(job: Job) -> list[str]:
    """The entries that are smaller than the parameter: XLA computes them."""
    return [key for key, entry in entries_of(job.setting.rule, job.p.shape).items() if entry.over]


def large_keys(job: Job) -> list[str]:
    """The keys of what native code reads and writes of a job's state, in its order."""
    entries, small = list(job.setting.rule.entries(job.p.shape)), small_keys(job)
    keys = (*entries, *map(scale_key, entries), RECORD)
    return [key for key in keys if key in job.state and key not in small]


class Stack:
    """What holds for the tensors, rows and columns of jobs of one shape, by value, in double precision.

    Arrays have the axes of a parameter behind that of the jobs, and size 1 along axes along which they do not vary.
    """

    def __init__(
        self, code: Numbered, jobs: Sequence[Job], members: Sequence[int], group: int, rows: range, arrays: list[Any]
    ) -> None:
        """members: places of the jobs among all. rows: of their tensors in the tables. arrays: theirs are added."""
        self.code, self.jobs, self.members, self.group, self.rows = code, jobs, members, group, rows
        self.emitted, self.program = code.code.emitted, code.code.emitted.schedule.program
        self.precision = arithmetic(jobs[0].p.dtype.name)
        #: Of each job: the buffers of p and of its state, by key, among all.
        self.buffers: list[dict[str, int]] = []
        for job in jobs:
            keys = large_keys(job)
            self.buffers.append({key: len(arrays) + place for place, key in enumerate((PARAMETER, *keys))})
            arrays += [job.p, *(job.state[key] for key in keys)]
        shape, stacked = jobs[0].p.shape, self.program.stacked_axes
        #: The shape of arrays that have one number for each tensor; and the elements of each.
        self.shape = len(jobs), *shape[:stacked], *[1] * (len(shape) - stacked)
        self.size = math.prod(shape[stacked:])
        #: The shapes of one row, or one column, for each tensor; and how many numbers these are.
        row, column = self.emitted.kinds.axes or (0, 0)
        lines = [[1 if axis == other else n for axis, n in enumerate(shape)] for other in (column, row)]
        self.lines = [(len(jobs), *line) for line in lines]
        self.lengths = [math.prod(line[stacked:]) for line in lines]
        #: The keys of entries that are smaller than the parameter.
        self.small = self.emitted.schedule.small

    def begin(self, given: Any, before: Mapping[str, Any]) -> None:
        """given: the scale of gradients, and options. before: stacks of entries that are smaller than the parameter."""
        self.before = before
        self.scale, *numbers = jnp.unstack(given)
        self.known = {self.program.inputs[name]: x for name, x in zip(self.code.inputs, numbers, strict=True)}

    # ---- values

    def find(self, operand: Any) -> Any:
        if not isinstance(operand, Value):
            return self.scale if isinstance(operand, str) else operand
        if operand not in self.known:
            self.known[operand] = self.compute(operand)
        return self.known[operand]

    def compute(self, value: Value) -> Any:
        if value.op == "input":
            return self.read(value.name)
        if value.is_reduction:
            return self.reduce(value)
        return apply(space, value.op, [self.find(arg) for arg in value.args])

    def read(self, name: str) -> Any:
        if name == COUNT:
            return float(self.size)
        if name == LARGEST:
            return DTYPES[self.precision].trusted
        return self.before[name].astype("float64")

    def reduce(self, value: Value) -> Any:
        """A sum or mean of what there is for rows, columns or matrices."""
        (x,) = value.args
        axes = tuple(1 + axis for axis in value.axes)
        if self.emitted.kinds.find(x) == ELEMENT:  # whose sums are known by row
            made = self.emitted.passes[self.code.gathers].row_sums
            rows = next(rows for rows in made if self.emitted.kinds.is_part(rows, value))
            columns = self.jobs[0].p.shape[rows.axes[0]]
            total = self.find(rows) * (columns if rows.is_mean else 1)
            return total.sum(axes, keepdims=True) / (columns * total.shape[axes[0]] if value.is_mean else 1)
        array = self.find(x)
        array = array * array if value.is_squared else array
        return (jnp.mean if value.is_mean else jnp.sum)(array, axes, keepdims=True)

    def spread(self, operand: Any, shape: Shape) -> Any:
        """A value as an array of this shape."""
        return jnp.broadcast_to(jnp.asarray(self.find(operand), "float64"), shape)

    def by_tensor(self, operand: Any) -> Any:
        """One number for each tensor, as a vector."""
        return self.spread(operand, self.shape).ravel()

    # ---- passes

    def pass_of(self, stage: int) -> int | None:
        """The pass of a stage, if these tensors have one."""
        last = len(self.code.numbers) - 1
        return last if stage >= REHEARSE else stage if stage < last else None

    def written(self, number: int) -> list[int]:
        """The buffers that a pass writes: p and its record, and state with its scales."""
        pass_, entries = self.emitted.passes[number], self.jobs[0].setting.rule.entries(self.jobs[0].p.shape)
        operands = (PARAMETER, GRADIENT, *entries)
        keys = [operands[place] for place, written in zip(pass_.operands, pass_.written, strict=True) if written]
        keys += [scale_key(key) if key != PARAMETER else RECORD for key in keys]
        return [buffers[key] for buffers in self.buffers for key in keys if key in buffers]

    def registers(self, stage: int, width: int) -> Any:
        """What native code is given of each tensor: the size, numbers of the pass, and whether it is surely finite."""
        code, number = self.code, self.pass_of(stage)
        columns = dict.fromkeys(range(width), jnp.zeros(len(self.rows)))
        if number is not None:
            if code.sums[number] and self.program.stacked_axes:  # sums of slices must fit the precision
                columns[structs.COUNT] = self.by_tensor(float(self.size))
            columns.update(enumerate(map(self.by_tensor, code.numbers[number]), code.first_number))
        if stage == REHEARSE and code.bound is not None:
            columns[code.bounded] = self.by_tensor(code.bound)
        return jnp.stack(list(columns.values()), axis=1)

    def take_sums(self, stage: int, registers: Any) -> None:
        number = self.pass_of(stage)
        if number is None or stage == REHEARSE:
            return
        first = self.code.first_sum(number)
        for place, value in enumerate(self.code.sums[number]):
            total = registers[self.rows.start : self.rows.stop, first + place].reshape(self.shape)
            self.known[value] = total / self.size if value.is_mean else total

    # ---- rows and columns

    @property
    def small_shape(self) -> Shape:
        """Of what native code is given, and tells, of rows and columns: slots of rows, then slots of columns."""
        pairs = zip(self.code.slots, self.lengths, strict=True)
        return len(self.rows), sum(slots * length for slots, length in pairs)

    def reads_small(self, number: int) -> bool:
        pass_ = self.emitted.passes[number]
        return bool(pass_.rows or pass_.columns)

    def small_values(self, number: int) -> Any:
        """What a pass reads of rows and columns, in their slots."""
        pass_, parts = self.emitted.passes[number], list[Any]()
        by_kind = (self.emitted.rows, {*pass_.rows}), (self.emitted.columns, {*pass_.columns})
        for (values, read), slots, line in zip(by_kind, self.code.slots, self.lines, strict=True):
            for slot in range(slots):
                value = values[slot] if slot < len(values) and values[slot] in read else 0.0
                parts.append(self.spread(value, line).reshape(len(self.rows), -1).astype(self.precision))
        return jnp.concatenate(parts, axis=1)

    def place_rows(self, buffer: int) -> dict[int, int]:
        """Where the rows and columns of each tensor are, of a buffer at this place."""
        size = self.small_shape[1] * jnp.dtype(self.precision).itemsize
        return {row: buffer + place * size for place, row in enumerate(self.rows)}

    def take_means(self, means: Any) -> None:
        """Note the sums of a pass over rows and columns, of which native code tells means."""
        pass_, first = self.emitted.passes[self.code.gathers], 0
        told = zip((pass_.row_sums, pass_.column_sums), self.code.slots, self.lines, self.lengths, strict=True)
        for values, slots, line, length in told:
            for slot, value in enumerate(values):
                begin = first + slot * length
                mean = means[:, begin : begin + length].astype("float64").reshape(line)
                (along,) = value.axes
                self.known[value] = mean if value.is_mean else mean * self.jobs[0].p.shape[along]
            first += slots * length

    # ---- results

    def finite(self) -> Any:
        return self.by_tensor(self.program.finite) != 0

    def new_state(self, key: str, fine: Any) -> Any:
        """A stack of entries that are smaller than the parameter. fine: whether the step is taken; None: it is."""
        before = self.before[key]
        entries = self.spread(self.program.state[key], before.shape).astype(self.precision).astype(before.dtype)
        return entries if fine is None else jnp.where(fine, entries, before)

    def figures(self) -> dict[str, Any]:
        """Of each job a number for each tensor, by name."""
        return {name: self.spread(value, self.shape) for name, value in self.program.stats.items()}
