"""Native code on GPUs: emitted kernels over all parameters of a kind, in one call."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from thalweg.errors import Refused
from thalweg.kernels.triton import admission
from thalweg.optax.batches import Job, Leaf, Step
from thalweg.optax.native.step import NativeStep
from thalweg.optax.steps import Outcome
from thalweg.optax.values import in_precision, rule_in_precision
from thalweg.programs.host import numbers_in, options_of
from thalweg.programs.schedule import needs_sums
from thalweg.programs.trace import list_kind
from thalweg.rules import Rule
from thalweg.rules.entries import Count, PerSlice
from thalweg.spaces import jax as space
from thalweg.storage import describe_state


@functools.cache
def handler() -> Any:
    """The library that launches kernels for XLA, or why there is none."""
    kinds = {getattr(device, "compute_capability", "") for device in jax.local_devices()}
    if "rocm" in jax.local_devices()[0].client.platform_version or len(kinds) > 1:
        return "kernels are compiled for NVIDIA's GPUs, all of one kind"
    if capability() < 80:
        return f"the GPU has compute capability {kinds.pop()}, and the kernels need 8.0 or newer"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, and compiles the kernels"
    from thalweg.kernels.triton.xla import MULTIPLY, TARGET, compile_handler

    library = compile_handler(jax.ffi.include_dir())
    if not isinstance(library, str):
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.thalweg_launch), platform="CUDA")
        stages = dict.fromkeys(("initialize", "execute"), jax.ffi.pycapsule(library.thalweg_multiply))
        jax.ffi.register_ffi_target(MULTIPLY, stages, platform="CUDA")
    return library


def admit(leaf: Leaf) -> None:
    """Raise Refused if this code cannot step a parameter that is whole and has elements."""
    setting, shape, dtype = leaf.setting, leaf.p.shape, leaf.p.dtype.name
    state = describe_state(setting.stored_rule, setting.numerics, shape, dtype)
    admission.admit(setting, shape, dtype, state)
    name = type(setting.rule).__name__
    if setting.rule.keys(shape, Count):
        raise Refused(f"kernels inside programs of XLA do not count, as {name} does")
    if setting.rule.keys(shape, PerSlice):
        raise Refused(f"{name} keeps state that has shapes of its own, which XLA's products are for")


def admit_sums(leaf: Leaf) -> None:
    """Raise Refused if this code cannot sum over parts of a parameter that are on other devices."""
    if leaf.setting.rule.stacked_axes:
        raise Refused("GPU kernels step shards only with stacked_axes=0")


def move(arrays: Sequence[Any], results: Sequence[Any], moves: Sequence[int]) -> list[Any]:
    """What is copied from arrays to results, by one kernel. moves: of each copy two places, and how many bytes."""
    from thalweg.kernels.triton.moves import launch_moves
    from thalweg.kernels.triton.xla import TARGET, compile_for, register

    width = min(x.dtype.itemsize for x in arrays)
    table = [number if index % 3 < 2 else number // width for index, number in enumerate(moves)]
    compiled = functools.partial(compile_for, capability())
    launch = launch_moves(compiled, len(moves) // 3, width, len(arrays) + len(results))
    key = register(handler(), [launch], len(arrays), table)
    outputs = [*results, jax.ShapeDtypeStruct((8 * len(table),), "uint8")]
    return list(jax.ffi.ffi_call(TARGET, outputs)(*arrays, key=key)[:-1])


class Native(NativeStep):
    """Jobs in lists of one kind, each with what it launches."""

    def lay_out(self) -> None:
        groups: dict[Any, list[int]] = defaultdict(list)
        for index, job in enumerate(self.jobs):
            rule, stored = self.rules[id(job.setting)], tuple((key, x.dtype) for key, x in job.state.items())
            alike = list_kind(rule, job.setting.numerics, job.space.shape(job.p))
            groups[id(job.setting), alike, job.p.dtype, job.g.dtype, stored, axes_over(job)].append(index)
        self.groups, observed = list(groups.values()), any(self.figures)
        lists = [[self.jobs[index] for index in group] for group in self.groups]
        self.kinds = [Kind(jobs, self.step, self.rules, observed=observed) for jobs in lists]

    def numbers(self) -> list[Any]:
        """What a step is given beside its arrays: the count, the rate, the scale of gradients; the numbers of lists."""
        singles = [x for x in (self.step.t - 1, self.step.lr, self.step.grad_scale) if x is not None]
        return [
            *(jnp.asarray(in_precision(number, "float32"), "float32").reshape(1) for number in singles),
            *(kind.numbers(self.step) for kind in self.kinds),
        ]

    def take(self, numbers: Sequence[Any]) -> tuple[dict[int, Outcome], Any]:
        singles, fine = numbers[: len(numbers) - len(self.kinds)], None
        for kind, listed in zip(self.kinds, numbers[len(singles) :], strict=True):
            kind.begin([listed, *singles])
        if self.step.guarded:
            fine = jnp.all(jnp.concatenate([kind.measure() for kind in self.kinds]))
        by_place: dict[int, Outcome] = {}
        for kind, members in zip(self.kinds, self.groups, strict=True):
            by_place.update(zip(members, kind.write(fine), strict=True))
        return by_place, fine


class Kind:
    """A list of parameters of one kind, with what it launches."""

    def __init__(self, jobs: Sequence[Job], step: Step, rules: Mapping[int, Rule], *, observed: bool) -> None:
        from thalweg.kernels.triton.xla import Parameters, compile_for, record

        self.jobs, self.setting = jobs, jobs[0].setting
        first = jobs[0]
        parameters = Parameters(
            rule=rules[id(self.setting)],
            numerics=self.setting.numerics,
            names=[job.name for job in jobs],
            shapes=[job.p.shape for job in jobs],
            dtypes=(first.p.dtype.name, first.g.dtype.name),
            states=[{key: (x.shape, x.dtype.name) for key, x in job.state.items()} for job in jobs],
            lr_scale=float(self.setting.lr_scale),
            rated=step.lr is not None,
            scaled=step.grad_scale is not None,
        )
        wholes = [job.space.shape(job.p) for job in jobs]
        if any(first.mesh_axes) and needs_sums(parameters.rule, wholes[0]):
            parameters = parameters._replace(wholes=wholes)
        self.recorded = record(parameters, functools.partial(compile_for, capability()), observed=observed)

    def numbers(self, step: Step) -> Any:
        rule = rule_in_precision(self.setting.rule_at(step.t), "float32")
        sign = -1.0 if self.setting.numerics.maximize else 1.0
        numbers = sign, *numbers_in(space, self.recorded.numbers, options_of(rule))
        return jnp.stack([jnp.asarray(number, "float32") for number in numbers])

    def begin(self, numbers: Sequence[Any]) -> None:
        self.read = [*(job.g for job in self.jobs), *numbers]
        #: What calls write: parameters and their state, and scratch once it is there.
        self.written: Sequence[Any] = [x for job in self.jobs for x in (job.p, *job.state.values())]

    def call(self, number: int, *allowed: Any) -> None:
        from thalweg.kernels.triton.xla import TARGET, register

        recorded, read = self.recorded, [*self.read, *allowed, *map(constant_of, self.recorded.tables)]
        self.written = jax.ffi.ffi_call(
            TARGET,
            [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in recorded.results],
            input_output_aliases={len(read) + i: i for i in range(len(self.written))},
        )(*read, *self.written, key=register(handler(), recorded.calls[number], recorded.inputs, recorded.addresses))

    def complete(self, sums: Sequence[Sequence[Any]]) -> None:
        """Add up over devices what a call has summed of their parts."""
        results, over = list(self.written), self.jobs[0].space
        for result, first, end, axes in itertools.chain.from_iterable(sums):
            if names := over.across(axes):
                total = jax.lax.psum(results[result][..., first:end], names)
                results[result] = jax.lax.dynamic_update_slice_in_dim(results[result], total, first, -1)
        self.written = results

    def measure(self) -> Any:
        """All that comes before writing: whether each parameter's step is finite."""
        self.call(0, jnp.ones(1, "int32"))
        return self.written[self.recorded.finite]

    def write(self, fine: Any) -> list[Outcome]:
        """What comes of each parameter. fine: whether anything is written; None: it is."""
        if fine is None:
            for number in range(len(self.recorded.calls)):
                self.call(number)
                self.complete(self.recorded.sums[number : number + 1])
        else:
            self.call(1, fine.astype("int32").reshape(1))
        news, told, row = iter(self.written), self.written[self.recorded.figures], 0
        outcomes = []
        for job, slices in zip(self.jobs, self.recorded.slices, strict=True):
            p, state = next(news), {key: next(news) for key in job.state}
            shown = {
                name: told[place, row : row + slices] if isinstance(place, int) else jnp.full(slices, place)
                for name, place in self.recorded.stats.items()
            }
            row += slices
            outcomes.append(Outcome(p, state, shown))
        return outcomes


def axes_over(job: Job) -> Any:
    """How a parameter is divided, which all of a list have in common; None: it is whole."""
    return job.mesh_axes if any(job.mesh_axes) else None


@dataclass(frozen=True, eq=False)
class Table:
    """Numbers of the host."""

    values: Any


#: A table as a constant of the program. Arrays that functions close over are refused where these are divided.
table_p = Primitive("thalweg_table")
table_p.def_abstract_eval(lambda *, table: jax.typeof(table.values))
mlir.register_lowering(table_p, lambda _, *, table: [mlir.ir_constant(table.values)])


def constant_of(table: array[Any]) -> Any:
    with jax.ensure_compile_time_eval():
        values = jax.device_get(jnp.asarray(table))
    return table_p.bind(table=Table(values))


@functools.cache
def capability() -> int:
    """For which generation of GPUs kernels are compiled."""
    return int(jax.devices("gpu")[0].compute_capability.replace(".", ""))
