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
from thalweg.programs.extents import kinds_of, spread_shapes
from thalweg.programs.host import numbers_in, options_of
from thalweg.programs.trace import GRADIENT, PARAMETER, example_of, stand_in, trace
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
    rule, handling = stand_in(setting.rule_at(1)), setting.handling
    state = describe_state(setting.stored_rule, handling, shape, dtype)
    if reason := served.reason_against(setting, shape, dtype, state):
        return reason
    if any(kept not in served.DTYPES for _, kept in state.values()) or handling.is_random:
        return "kernels inside programs of XLA round to the nearest, and know no codes of eight bits"
    if handling.on_nonfinite != "propagate":
        return f"kernels inside programs of XLA know no on_nonfinite={handling.on_nonfinite!r}"
    example = example_of(rule, shape)
    program = trace(rule, example, spread_shapes(rule.entries(example), example))
    if kinds_of(program, rule.stacked_axes).axes is not None:
        return f"kernels of {type(rule).__name__} with rows and columns are not launched inside programs of XLA"
    return ""


def run_native(jobs: Sequence[Job], step: Step, figures: Sequence[Mapping[str, Any]]) -> Results:
    """figures: shapes of those that are wanted."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, job in enumerate(jobs):
        rule, stored = stand_in(job.setting.rule_at(1)), tuple((key, x.dtype) for key, x in job.state.items())
        alike = id(job.setting), kind(rule, job.setting.handling, job.p.shape), job.p.dtype, job.g.dtype, stored
        groups[alike].append(index)
    found: dict[int, Any] = {}
    for members in groups.values():
        results = run_kind([jobs[i] for i in members], step, [figures[i] for i in members])
        found.update(zip(members, results, strict=True))
    values, states, stats = zip(*(found[i] for i in range(len(jobs))), strict=True)
    return Results(list(values), list(states), None, list(stats))


def run_kind(jobs: Sequence[Job], step: Step, figures: Sequence[Mapping[str, Any]]) -> list[Any]:
    """New values, states and figures of parameters of one kind."""
    from thalweg.kernels.triton.xla import TARGET, Launches, Parameters, compile_for, lay_out, register

    first, setting = jobs[0], jobs[0].setting
    keys = list(setting.rule.entries(first.p.shape))
    dtypes = {PARAMETER: first.p, GRADIENT: first.g, **{key: first.state[key] for key in keys}}
    own = Parameters(
        rule=stand_in(setting.rule_at(step.t)),
        names=[job.names[0] for job in jobs],
        shapes=[job.p.shape for job in jobs],
        dtypes={key: x.dtype.name for key, x in dtypes.items()},
        lr_scale=float(setting.lr_scale),
        seed=setting.handling.seed,
        maximize=setting.handling.maximize,
        rated=step.lr is not None,
        scaled=step.grad_scale is not None,
    )
    laid = lay_out(own, Launches(functools.partial(compile_for, capability())), observed=any(figures))
    rule = rule_in_precision(setting.rule_at(step.t), "float32")
    numbers = -1.0 if own.maximize else 1.0, *numbers_in(space, laid.numbers, options_of(rule))
    written = [x for job in jobs for x in (job.p, *(job.state[key] for key in keys))]
    singles = [step.t - 1, *([step.lr] if own.rated else []), *([step.grad_scale] if own.scaled else [])]
    results = jax.ffi.ffi_call(
        TARGET,
        [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in laid.results],
        input_output_aliases={i: i for i in range(len(written))},
    )(
        *written,
        *(job.g for job in jobs),
        jnp.stack([jnp.asarray(number, "float32") for number in numbers]),
        *(jnp.asarray(in_precision(number, "float32"), "float32").reshape(1) for number in singles),
        jnp.asarray(laid.chunks, "int32"),
        jnp.asarray(laid.begins, "int32"),
        jnp.asarray(laid.counts, "float32"),
        key=register(handler(), laid),
    )
    news, told, row = iter(results[: len(written)]), results[len(written)], 0
    found = []
    for job, slices, wanted in zip(jobs, laid.slices, figures, strict=True):
        p, state = next(news), {key: next(news) for key in keys}
        stats = {}
        for name, like in wanted.items():
            place = laid.stats[name]
            value = told[place, row : row + slices] if isinstance(place, int) else jnp.full(slices, place)
            stats[name] = value.reshape(like.shape).astype(like.dtype)
        row += slices
        found.append((p, {key: state[key] for key in job.state}, stats))
    return found


@functools.cache
def capability() -> int:
    """For which generation of GPUs kernels are compiled."""
    return int(jax.devices("gpu")[0].compute_capability.replace(".", ""))
