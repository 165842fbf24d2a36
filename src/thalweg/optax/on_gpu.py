"""Native code on GPUs: emitted kernels over all parameters of a kind, in one call."""

from __future__ import annotations

import functools
import importlib.util
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from thalweg.kernels.triton import served
from thalweg.optax.batches import Job, Leaf, Step
from thalweg.optax.results import Results
from thalweg.optax.values import in_precision, rule_in_precision
from thalweg.programs.host import numbers_in, options_of
from thalweg.programs.trace import stand_in
from thalweg.rules.entries import Count
from thalweg.spaces import jax as space
from thalweg.storage import describe_state, kind

#: Whether ``engine="auto"`` takes it.
IS_DEFAULT = False


@functools.cache
def handler() -> Any:
    """The library that launches kernels for XLA, or why there is none."""
    kinds = {getattr(device, "compute_capability", "") for device in jax.local_devices()}
    if "rocm" in jax.local_devices()[0].client.platform_version or len(kinds) > 1:
        return "kernels are compiled for NVIDIA's GPUs, all of one kind"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, and compiles the kernels"
    from thalweg.kernels.triton.xla import TARGET, compile_handler

    library = compile_handler(jax.ffi.include_dir())
    if not isinstance(library, str):
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.thalweg_launch), platform="CUDA")
    return library


def reason_against(leaf: Leaf) -> str:
    """Why this code cannot step a parameter that is whole and has elements, "" if it can."""
    setting, shape, dtype = leaf.setting, leaf.p.shape, leaf.p.dtype.name
    state = describe_state(setting.stored_rule, setting.handling, shape, dtype)
    if reason := served.reason_against(setting, shape, dtype, state):
        return reason
    if setting.rule.keys(shape, Count):
        return f"kernels inside programs of XLA do not count, as {type(setting.rule).__name__} does"
    return ""


def run_native(jobs: Sequence[Job], step: Step, figures: Sequence[Mapping[str, Any]]) -> Results:
    """figures: shapes of those that are wanted."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, job in enumerate(jobs):
        rule, stored = stand_in(job.setting.rule_at(1)), tuple((key, x.dtype) for key, x in job.state.items())
        alike = id(job.setting), kind(rule, job.setting.handling, job.p.shape), job.p.dtype, job.g.dtype, stored
        groups[alike].append(index)
    kinds = [Kind([jobs[i] for i in members], step, [figures[i] for i in members]) for members in groups.values()]
    fine = None
    if step.guarded:
        fine = jnp.all(jnp.concatenate([each.measure() for each in kinds]))
    found: dict[int, Any] = {}
    for each, members in zip(kinds, groups.values(), strict=True):
        found.update(zip(members, each.write(fine), strict=True))
    values, states, stats = zip(*(found[i] for i in range(len(jobs))), strict=True)
    return Results(list(values), list(states), fine, list(stats))


class Kind:
    """Parameters of one kind, in the middle of a step."""

    def __init__(self, jobs: Sequence[Job], step: Step, figures: Sequence[Mapping[str, Any]]) -> None:
        from thalweg.kernels.triton.xla import Parameters, compile_for, record

        first, setting = jobs[0], jobs[0].setting
        own = Parameters(
            rule=stand_in(setting.rule_at(step.t)),
            handling=setting.handling,
            names=[job.names[0] for job in jobs],
            shapes=[job.p.shape for job in jobs],
            dtypes=(first.p.dtype.name, first.g.dtype.name),
            states=[{key: (x.shape, x.dtype.name) for key, x in job.state.items()} for job in jobs],
            lr_scale=float(setting.lr_scale),
            rated=step.lr is not None,
            scaled=step.grad_scale is not None,
        )
        self.jobs, self.figures = jobs, figures
        self.recorded = record(own, functools.partial(compile_for, capability()), observed=any(figures))
        rule = rule_in_precision(setting.rule_at(step.t), "float32")
        sign = -1.0 if setting.handling.maximize else 1.0
        numbers = sign, *numbers_in(space, self.recorded.numbers, options_of(rule))
        singles = [x for x in (step.t - 1, step.lr, step.grad_scale) if x is not None]
        self.read = [
            *(job.g for job in jobs),
            jnp.stack([jnp.asarray(number, "float32") for number in numbers]),
            *(jnp.asarray(in_precision(number, "float32"), "float32").reshape(1) for number in singles),
        ]
        #: What calls write: parameters and their state, and scratch once it is there.
        self.written: Sequence[Any] = [x for job in jobs for x in (job.p, *job.state.values())]

    def call(self, number: int, *allowed: Any) -> None:
        from thalweg.kernels.triton.xla import TARGET, register

        read = [*self.read, *allowed, *map(jnp.asarray, self.recorded.tables)]
        self.written = jax.ffi.ffi_call(
            TARGET,
            [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.recorded.results],
            input_output_aliases={len(read) + i: i for i in range(len(self.written))},
        )(*read, *self.written, key=register(handler(), self.recorded, number))

    def measure(self) -> Any:
        """All that comes before writing: whether each parameter's step is finite."""
        self.call(0, jnp.ones(1, "int32"))
        return self.written[self.recorded.finite]

    def write(self, fine: Any) -> list[Any]:
        """New values, states and figures. fine: whether anything is written; None: it is."""
        if fine is None:
            self.call(0)
        else:
            self.call(1, fine.astype("int32").reshape(1))
        news, told, row = iter(self.written), self.written[self.recorded.figures], 0
        found = []
        for job, slices, wanted in zip(self.jobs, self.recorded.slices, self.figures, strict=True):
            p, state, stats = next(news), {key: next(news) for key in job.state}, {}
            for name, like in wanted.items():
                place = self.recorded.stats[name]
                value = told[place, row : row + slices] if isinstance(place, int) else jnp.full(slices, place)
                stats[name] = value.reshape(like.shape).astype(like.dtype)
            row += slices
            found.append((p, state, stats))
        return found


@functools.cache
def capability() -> int:
    """For which generation of GPUs kernels are compiled."""
    return int(jax.devices("gpu")[0].compute_capability.replace(".", ""))
