"""Which code takes a step: XLA's own, compiled from the rule, or native code that writes in place, in one call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from thalweg.errors import OptionError, Refused, refusal
from thalweg.optax.batches import Job, Leaf, Step, step_all
from thalweg.optax.native import cpu, gpu
from thalweg.optax.native.choice import either
from thalweg.optax.native.parts import by_parts
from thalweg.optax.shards import typed_layout
from thalweg.optax.steps import Results
from thalweg.programs.schedule import needs_sums
from thalweg.rules import Rule
from thalweg.rules.checks import check_choice
from thalweg.storage import arithmetic, describe_state

Engine: TypeAlias = Literal["auto", "xla", "native"]
#: Of each jax backend: the module with its native code, and the platform that compiled programs name.
NATIVE: dict[str, tuple[Any, str]] = {"cpu": (cpu, "cpu"), "gpu": (gpu, "cuda")}


def check_engine(rule: type[Rule], engine: Any) -> None:
    check_choice("engine", engine, "auto", "xla", "native")
    if engine == "native" and rule.needs_whole:
        raise OptionError(
            f"engine='native' cannot run {rule.__name__}: it is made of matrix products, and its steps are XLA's code"
        )


def step_jobs(jobs: Sequence[Job], step: Step, *, applied: bool) -> Results:
    """One step by XLA. applied: answer with new parameters, rounded once, instead of changes."""
    if applied:  # changes are then told in the precision of the arithmetic
        jobs = [replace(job, g=job.g.astype(arithmetic(job.p.dtype.name))) for job in jobs]
    outcomes = step_all(jobs, step)
    deltas, states, fine = [o.delta for o in outcomes], [o.state for o in outcomes], None
    if step.guarded:
        fine = jnp.all(jnp.stack([jnp.asarray(o.finite) for o in outcomes])) if outcomes else jnp.asarray(True)
        deltas = [jnp.where(fine, delta, 0) for delta in deltas]
        states = [
            {k: jnp.where(fine, new[k], job.state[k]) for k in new} for new, job in zip(states, jobs, strict=True)
        ]
    if applied:
        pairs = zip(jobs, deltas, strict=True)
        deltas = [(job.p.astype(delta.dtype) + delta).astype(job.p.dtype) for job, delta in pairs]
    return Results(deltas, states, fine, [o.stats for o in outcomes])


def apply_jobs(jobs: Sequence[Job], step: Step, engine: Engine, *, observed: bool) -> Results:
    """One step that answers with new parameters, by native code where that can be. observed: figures are wanted."""
    served = choose(jobs, step, engine, observed=observed)
    if not served:
        return step_jobs(jobs, step, applied=True)
    others = [index for index in range(len(jobs)) if index not in served]
    ours = run_either([jobs[i] for i in served], step, observed, is_required=engine == "native")
    rest = step_jobs([jobs[i] for i in others], step, applied=True)
    order = [*served, *others]
    fine = None if ours.fine is None else ours.fine & rest.fine

    def merge(first: Sequence[Any], other: Sequence[Any]) -> list[Any]:
        both = dict(zip(order, itertools.chain(first, other), strict=True))
        return [both[index] for index in range(len(jobs))]

    return Results(
        merge(ours.values, rest.values), merge(ours.states, rest.states), fine, merge(ours.stats, rest.stats)
    )


# ---- which of them


def check_native(engine: Engine) -> None:
    """Raise Refused if no parameter has native code here."""
    if engine == "xla":
        raise Refused("engine='xla'")
    device = jax.default_backend()
    if device not in NATIVE:
        raise Refused(f"steps run on {device}, and there is native code for CPUs and GPUs")
    handler = NATIVE[device][0].handler()
    if isinstance(handler, str):
        raise Refused(handler)


def admit(leaf: Leaf, engine: Engine) -> None:
    """Raise Refused if native code does not step a parameter."""
    setting, shape, dtype = leaf.setting, leaf.p.shape, leaf.p.dtype.name
    if setting.rule.needs_whole or leaf.axes is not None:
        raise Refused(f"{type(setting.rule).__name__} is made of matrix products, and its steps are XLA's code")
    if typed_layout(leaf.p) is not None:
        raise Refused("its sharding is explicit, which native code does not know")
    if any(leaf.mesh_axes) and (reason := refusal(admit_parts, leaf)):
        raise Refused(f"it may be sharded, and {reason}")
    if not leaf.p.size:
        raise Refused(f"shape {shape} is empty")
    native_code, _ = NATIVE[jax.default_backend()]
    native_code.admit(leaf)
    described = describe_state(setting.stored_rule, setting.handling, shape, dtype)
    if engine == "auto" and not described:
        raise Refused("it has no state, and XLA's code is as fast")
    if isinstance(leaf, Job) and any(entry.dtype.name != described[key][1] for key, entry in leaf.state.items()):
        raise Refused("its state is kept in another dtype than its options say")


def admit_parts(leaf: Leaf) -> None:
    """Raise Refused if parts of a parameter, each on its device, are not stepped by native code."""
    setting, shape = leaf.setting, leaf.space.shape(leaf.p)
    described = describe_state(setting.stored_rule, setting.handling, shape, leaf.p.dtype.name)
    if setting.handling.is_random:
        raise Refused("random numbers are those of places in whole arrays")
    if setting.handling.on_nonfinite != "propagate":
        raise Refused("each device would decide by itself whether its step is finite")
    if any(entry_shape != shape for entry_shape, _ in described.values()):
        raise Refused("native code steps whole arrays where state has another shape than its parameter")
    if is_summed(leaf):
        NATIVE[jax.default_backend()][0].admit_sums(leaf)


def is_elementwise(job: Job) -> bool:
    """Whether the compiler may divide a step of a parameter as it likes."""
    return not (any(job.mesh_axes) or is_summed(job) or refusal(admit_parts, job))


def is_summed(leaf: Leaf) -> bool:
    return needs_sums(leaf.setting.rule_at(1), leaf.space.shape(leaf.p))


def explain_engines(engine: Engine, leaves: Sequence[Leaf], *, guarded: bool, reached: bool) -> list[str]:
    """By which code ``make_step`` steps parameters, and why. reached: whether it takes their own steps."""
    refused = refusal(check_native, engine)
    reasons = [refused or refusal(admit, leaf, engine) for leaf in leaves]
    if not reached and engine != "xla":
        reasons = ["what is around its transformation calls update()"] * len(leaves)
    elif guarded and any(reasons):
        reasons = [reason or "on_nonfinite='skip' takes one code for all parameters" for reason in reasons]
    return [f"xla: {reason}" if reason else "native" for reason in reasons]


def choose(jobs: Sequence[Job], step: Step, engine: Engine, *, observed: bool) -> list[int]:
    """The jobs for native code. observed: figures are wanted."""
    in_program = any(isinstance(x, jax.core.Tracer) for job in jobs for x in (job.p, job.g, *job.state.values()))
    reason = refusal(check_native, engine) or ("" if in_program else "native code runs within jit")
    if not jobs or (reason and engine != "native"):
        return []
    reasons = [reason or refusal(admit, job, engine) for job in jobs]
    if observed:
        figures = "it may be sharded, and its figures are sums over devices"
        reasons = [why or (figures if any(job.mesh_axes) else "") for job, why in zip(jobs, reasons, strict=True)]
    for job, why in zip(jobs, reasons, strict=True):
        if why and engine == "native":
            raise OptionError(
                f"engine='native' cannot step parameter {job.names[0]!r}: {why}; use engine='auto', which takes the "
                "fastest code that can run"
            )
    served = [index for index, why in enumerate(reasons) if not why]
    # all parameters of a guarded step are written, or none
    return [] if step.guarded and len(served) < len(jobs) else served


# ---- native code


def run_either(jobs: Sequence[Job], step: Step, observed: bool, *, is_required: bool) -> Results:
    def given(ps: Any, gs: Any, states: Any, shared: Any) -> tuple[list[Job], Step]:
        traced = [replace(job, p=p, g=g, state=s) for job, p, g, s in zip(jobs, ps, gs, states, strict=True)]
        return traced, replace(step, **shared)

    def xla(*args: Any) -> Results:
        results = step_jobs(*given(*args), applied=True)
        return results if observed else results._replace(stats=[{} for _ in jobs])

    def native(*args: Any) -> Results:
        traced, now = given(*args)
        code = native_code.Native(traced, now, figures)
        return run_by_parts(code, traced) if is_local else code.run(traced, code.numbers())

    native_code, platform = NATIVE[jax.default_backend()]
    is_local = not step.guarded and not observed and all(map(is_elementwise, jobs))
    shared = {"t": step.t, "lr": step.lr, "grad_scale": step.grad_scale}
    shared = {name: value for name, value in shared.items() if isinstance(value, jax.Array)}
    args = [job.p for job in jobs], [job.g for job in jobs], [job.state for job in jobs], shared
    figures = jax.eval_shape(xla, *args).stats if observed else [{} for _ in jobs]
    results: Results = either(native, xla, *args, platform=platform, is_required=is_required, is_local=is_local)
    return results


def run_by_parts(code: Any, jobs: Sequence[Job]) -> Results:
    """A step of which each device takes its parts, without asking another."""

    def call(*arrays: Any) -> list[Any]:
        reader, parts = iter(arrays), []
        for job in jobs:
            p, g = next(reader), next(reader)
            parts.append(replace(job, p=p, g=g, state={key: next(reader) for key in job.state}))
        results = code.for_parts(parts).run(parts, list(reader))
        return [x for p, state in zip(results.values, results.states, strict=True) for x in (p, *state.values())]

    arrays: list[Any] = []
    owners: list[int] = []
    given: list[int] = []
    for job in jobs:
        first = len(arrays)
        arrays += [job.p, job.g, *job.state.values()]
        owners += [first] * (1 + len(job.state))
        given += [first] * (2 + len(job.state))
    numbers = code.numbers()
    news = iter(by_parts(call, owners, [*given, *[-1] * len(numbers)], *arrays, *numbers))
    values, states = [], []
    for job in jobs:
        values.append(next(news))
        states.append({key: next(news) for key in job.state})
    return Results(values, states, None, [{} for _ in jobs])
