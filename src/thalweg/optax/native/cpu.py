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
from thalweg.optax.batches import Job, Leaf, Step
from thalweg.optax.native.moves import stack_all, take_apart
from thalweg.optax.steps import Results
from thalweg.programs.evaluate import apply
from thalweg.programs.extents import ELEMENT
from thalweg.programs.graph import Value
from thalweg.programs.host import options_of
from thalweg.programs.trace import GRADIENT, PARAMETER
from thalweg.rules import Rule
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


class Native:
    """Jobs as native code is shown them: buffers that it writes, and a table of where each lies among them."""

    def __init__(
        self,
        jobs: Sequence[Job],
        step: Step,
        figures: Sequence[Mapping[str, Any]],
        rules: Mapping[int, Rule] | None = None,
    ) -> None:
        """figures: shapes of those that are wanted. rules: at this step, by the id of their setting, if known."""
        self.jobs, self.step, self.figures = jobs, step, figures
        self.rules = rules or {id(job.setting): stand_in(job.setting.rule_at(step.t)) for job in jobs}
        settings = {id(job.setting): job.setting for job in jobs}
        options = [
            Options(self.rules[key], own.numerics, 1, None if step.lr is None else 1.0, 1.0, declared=own.rule)
            for key, own in settings.items()
        ]
        places = {key: place for place, key in enumerate(settings)}
        by_kind: dict[Any, list[int]] = defaultdict(list)
        by_shape: dict[Any, list[int]] = defaultdict(list)
        for index, (job, operand) in enumerate(zip(jobs, operands_of(jobs, places), strict=True)):
            kind = operand.group, id(options[operand.group].code_for(operand))
            by_kind[kind].append(index)
            by_shape[kind, job.p.dtype, job.p.shape].append(index)
        #: Which jobs have the same code and options.
        self.groups = list(by_kind.values())
        self.order = [index for members in by_shape.values() for index in members]
        operands = operands_of([jobs[index] for index in self.order], places)
        self.layout = Layout(handler(), operands, options, threads=num_threads(of_machine))
        #: Those of one shape, which follow one another in the tables: their group, their code and their rows.
        self.stacks: list[tuple[int, Numbered, range, list[int]]] = []
        tables, kinds, first = self.layout.tables, list(by_kind), 0
        for (kind, *_), members in by_shape.items():
            end = first + len(members)
            rows = range(tables.spans[first].start, tables.spans[end - 1].stop)
            self.stacks.append((kinds.index(kind), self.layout.codes[tables.codes[first]], rows, members))
            first = end

    def numbers(self) -> list[Any]:
        """What a step is given beside its arrays: the count, and of each group the scale of gradients and options."""
        codes = {group: code for group, code, *_ in self.stacks}
        step, numbers = self.step, [jnp.asarray(self.step.t, "int32")]
        with jax.enable_x64(True):
            for group, members in enumerate(self.groups):
                setting = self.jobs[members[0]].setting
                given = options_of(setting.rule_at(step.t)) | {"t": step.t, "lr": step.lr, "lr_scale": setting.lr_scale}
                scale = jnp.asarray(1.0 if step.grad_scale is None else step.grad_scale, "float64")
                inputs = [jnp.asarray(given[name], "float64") for name in codes[group].inputs]
                numbers.append(jnp.stack([-scale if setting.numerics.maximize else scale, *inputs]))
        return numbers

    def run(self, jobs: Sequence[Job], numbers: Sequence[Any]) -> Results:
        with jax.enable_x64(True):  # numbers of tensors are computed in double precision
            return Run(self, jobs, numbers).step()


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

        shown = job.names[0], job.p.shape, job.p, job.g.dtype.name, job.state
        operands.append(operand_of(job.setting.rule, *shown, place, groups[id(job.setting)]))
    return [operand._replace(g=place_of(next(buffers))) for operand in operands]


def small_keys(job: Job) -> list[str]:
    """The entries that are smaller than the parameter: XLA computes them."""
    return [key for key, entry in entries_of(job.setting.rule, job.p.shape).items() if entry.over]


def keys_of(job: Job) -> list[str]:
    """The keys of what native code reads and writes of a job's state, in its order."""
    entries, small = list(job.setting.rule.entries(job.p.shape)), small_keys(job)
    keys = (*entries, *map(scale_key, entries), RECORD)
    return [key for key in keys if key in job.state and key not in small]


class Run:
    """One step, call by call."""

    def __init__(self, native: Native, jobs: Sequence[Job], numbers: Sequence[Any]) -> None:
        self.native, self.layout, self.jobs = native, native.layout, [jobs[index] for index in native.order]
        self.count, *given = numbers
        self.groups = [
            GroupNumbers(code, [jobs[index] for index in members], rows, given[group])
            for group, code, rows, members in native.stacks
        ]
        stacks = iter(
            stack_all(move, [[job.state[key] for job in group.jobs] for group in self.groups for key in group.small])
        )
        for group in self.groups:
            group.before = {key: next(stacks) for key in group.small}
        #: Of each job: the buffers of p and of its state, by key, among all; gradients are behind them.
        self.buffers: list[dict[str, int]] = []
        self.arrays: list[Any] = []
        for job in self.jobs:
            keys = keys_of(job)
            self.buffers.append({key: len(self.arrays) + place for place, key in enumerate((PARAMETER, *keys))})
            self.arrays += [job.p, *(job.state[key] for key in keys)]
        self.gradients = [job.g for job in self.jobs]

    def step(self) -> Results:
        guarded, fine = self.native.step.guarded, None
        for stage in range(max(len(group.code.numbers) for group in self.groups) - 1):
            self.call(stage)
        if guarded:
            looked = self.call(REHEARSE)
            fine = jnp.all(jnp.stack([jnp.all(looked != 0), *(jnp.all(group.finite()) for group in self.groups)]))
        self.call(WRITE, fine)
        results: dict[int, tuple[Any, Any, Any]] = {}
        places = iter(range(len(self.jobs)))
        members = iter(take_apart(move, [group.new_state(key, fine) for group in self.groups for key in group.small]))
        for group in self.groups:
            small = {key: next(members) for key in group.small}
            for number, (job, shown) in enumerate(zip(group.jobs, group.figures(), strict=True)):
                place = next(places)
                buffers, index = self.buffers[place], self.native.order[place]
                state = {key: small[key][number] if key in small else self.arrays[buffers[key]] for key in job.state}
                wanted = self.native.figures[index]
                stats = {name: shown[name].reshape(own.shape).astype(own.dtype) for name, own in wanted.items()}
                results[index] = self.arrays[buffers[PARAMETER]], state, stats
        ordered = [results[index] for index in range(len(self.jobs))]
        return Results([p for p, *_ in ordered], [state for _, state, _ in ordered], fine, [own for *_, own in ordered])

    def call(self, stage: int, allowed: Any = None) -> Any:
        """Take all tensors through a stage, and note sums. The answer: whether each is finite, if it was looked at."""
        arrays, gathered, given = [*self.arrays, *self.gradients], list[GroupNumbers](), list[Any]()
        written: list[int] = []
        small: dict[int, int] = {}
        places = iter(self.buffers)
        for group in self.groups:
            number = group.pass_of(stage)
            for job in group.jobs:
                buffers = next(places)
                if number is not None and stage != REHEARSE:
                    written += [buffers[key] for key in group.written(number, job)]
            if number is not None and group.code.gathers == number:
                gathered.append(group)
            elif number is not None and group.reads_small(number):
                given.append(group.small_values(number))
                small |= group.place_rows(place_of(len(arrays) + len(given) - 1))
        registers = jnp.concatenate([group.registers(stage, self.layout.width) for group in self.groups])
        allowed = jnp.ones((), "int32") if allowed is None else allowed.astype("int32")
        arguments = [*arrays, *given, registers, self.count, allowed]
        results = [like(arrays[buffer]) for buffer in written]
        aliases = {buffer: place for place, buffer in enumerate(written)}
        aliases[len(arguments) - 3] = len(results)
        results.append(like(registers))
        for group in gathered:
            small |= group.place_rows(place_of(len(arguments) + len(results)))
            results.append(jax.ShapeDtypeStruct(group.small_shape, group.precision))
        results.append(jax.ShapeDtypeStruct((len(registers),), "int32"))
        results.append(jax.ShapeDtypeStruct((self.layout.workspace_bytes,), "uint8"))
        key = self.layout.register(stage, written, small)
        news = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)(*arguments, key=key)
        for buffer, new in zip(written, news, strict=False):
            self.arrays[buffer] = new
        registers, *means, finite, _ = news[len(written) :]
        for group, mean in zip(gathered, means, strict=True):
            group.take_means(mean)
        for group in self.groups:
            group.take_sums(stage, registers)
        return finite


def like(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


class GroupNumbers:
    """What holds for the tensors, rows and columns of jobs of one shape, by value, in double precision.

    Arrays have the axes of a parameter behind that of the jobs, and size 1 along axes along which they do not vary.
    """

    def __init__(self, code: Numbered, jobs: Sequence[Job], rows: range, given: Any) -> None:
        """rows: of their tensors in the tables. given: the scale of gradients, and options."""
        self.code, self.jobs, self.rows = code, jobs, rows
        self.emitted, self.program = code.code.emitted, code.code.emitted.schedule.program
        self.precision = arithmetic(jobs[0].p.dtype.name)
        shape, stacked = jobs[0].p.shape, self.program.stacked_axes
        #: The shape of arrays that have one number for each tensor; and the elements of each.
        self.shape = len(jobs), *shape[:stacked], *[1] * (len(shape) - stacked)
        self.size = math.prod(shape[stacked:])
        #: The shapes of one row, or one column, for each tensor; and how many numbers these are.
        row, column = self.emitted.kinds.axes or (0, 0)
        lines = [[1 if axis == other else n for axis, n in enumerate(shape)] for other in (column, row)]
        self.lines = [(len(jobs), *line) for line in lines]
        self.lengths = [math.prod(line[stacked:]) for line in lines]
        #: The keys of entries that are smaller than the parameter, and by key the stacks of them before the step.
        self.small = self.emitted.schedule.small
        self.before: dict[str, Any] = {}
        self.scale, *numbers = jnp.unstack(given)
        self.known = {self.program.inputs[name]: x for name, x in zip(code.inputs, numbers, strict=True)}

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

    def written(self, number: int, job: Job) -> list[str]:
        """The keys of what a pass writes of a job: p and its record, and state with its scales."""
        pass_, entries = self.emitted.passes[number], job.setting.rule.entries(job.p.shape)
        operands = (PARAMETER, GRADIENT, *entries)
        keys = [operands[place] for place, written in zip(pass_.operands, pass_.written, strict=True) if written]
        beside = [scale_key(key) if key != PARAMETER else RECORD for key in keys]
        return [*keys, *(key for key in beside if key in job.state)]

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

    def figures(self) -> list[dict[str, Any]]:
        """Of each job the figures, a number for each tensor."""
        shown = {name: self.spread(value, self.shape) for name, value in self.program.stats.items()}
        return [{name: values[place] for name, values in shown.items()} for place in range(len(self.jobs))]
