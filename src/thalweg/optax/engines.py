"""Which code takes a step: XLA's own, compiled from the rule, or native code that writes in place, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from thalweg.errors import OptionError, Refused, refusal
from thalweg.optax.batches import Job, Leaf, Step, step_all
from thalweg.optax.native import NATIVE, step_natively
from thalweg.optax.shards import typed_layout
from thalweg.optax.steps import Outcome
from thalweg.programs.schedule import needs_sums
from thalweg.rules import Rule
from thalweg.rules.checks import check_choice
from thalweg.storage import arithmetic, describe_state

Engine: TypeAlias = Literal["auto", "xla", "native"]


def check_engine(rule: type[Rule], engine: Any) -> None:
    check_choice("engine", engine, "auto", "xla", "native")
    if engine == "native" and rule.needs_whole:
        raise OptionError(
            f"engine='native' cannot run {rule.__name__}: it is made of matrix products, and its steps are XLA's code"
        )


def step_jobs(jobs: Sequence[Job], step: Step, *, applied: bool) -> tuple[list[Outcome], Any]:
    """One step by XLA, and whether all of it is finite; None: that was not asked.

    applied: answer with new parameters, rounded once, instead of changes.
    """
    if applied:  # changes are then told in the precision of the arithmetic
        jobs = [replace(job, g=job.g.astype(arithmetic(job.p.dtype.name))) for job in jobs]
    updates, outcomes, fine = step_all(jobs, step), [], None
    if step.guarded:
        fine = jnp.all(jnp.stack([jnp.asarray(update.finite) for update in updates])) if jobs else jnp.asarray(True)
    for job, update in zip(jobs, updates, strict=True):
        value, state = update.delta, update.state
        if fine is not None:
            value = jnp.where(fine, value, 0)
            state = {key: jnp.where(fine, entry, job.state[key]) for key, entry in state.items()}
        if applied:
            value = (job.p.astype(value.dtype) + value).astype(job.p.dtype)
        outcomes.append(Outcome(value, state, update.stats))
    return outcomes, fine


def apply_jobs(jobs: Sequence[Job], step: Step, engine: Engine, *, observed: bool) -> tuple[list[Outcome], Any]:
    """One step that answers with new parameters, by native code where that can be. observed: figures are wanted."""
    served = choose(jobs, step, engine, observed=observed)
    if not served:
        return step_jobs(jobs, step, applied=True)
    outcomes, fine = step_natively(
        [jobs[i] for i in served],
        step,
        step_jobs,
        observed=observed,
        is_required=engine == "native",
        is_local=not step.guarded and not observed and all(is_elementwise(jobs[i]) for i in served),
    )
    others = [index for index in range(len(jobs)) if index not in served]
    if others:  # of a step that is not guarded
        rest, _ = step_jobs([jobs[i] for i in others], step, applied=True)
        by_index = dict(zip([*served, *others], [*outcomes, *rest], strict=True))
        outcomes = [by_index[index] for index in range(len(jobs))]
    return outcomes, fine


# ---- which of them


def check_native(engine: Engine) -> None:
    """Raise Refused if no parameter has native code here."""
    if engine == "xla":
        raise Refused("engine='xla'")
    device = jax.default_backend()
    if device not in NATIVE:
        raise Refused(f"steps run on {device}, and there is native code for CPUs and GPUs")
    handler = NATIVE[device].handler()
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
    NATIVE[jax.default_backend()].admit(leaf)
    described = describe_state(setting.stored_rule, setting.numerics, shape, dtype)
    if engine == "auto" and not described:
        raise Refused("it has no state, and XLA's code is as fast")
    if isinstance(leaf, Job) and any(entry.dtype.name != described[key][1] for key, entry in leaf.state.items()):
        raise Refused("its state is kept in another dtype than its options say")


def admit_parts(leaf: Leaf) -> None:
    """Raise Refused if parts of a parameter, each on its device, are not stepped by native code."""
    setting, shape = leaf.setting, leaf.space.shape(leaf.p)
    described = describe_state(setting.stored_rule, setting.numerics, shape, leaf.p.dtype.name)
    if setting.numerics.is_random:
        raise Refused("random numbers are those of places in whole arrays")
    if setting.numerics.on_nonfinite != "propagate":
        raise Refused("each device would decide by itself whether its step is finite")
    if any(entry_shape != shape for entry_shape, _ in described.values()):
        raise Refused("native code steps whole arrays where state has another shape than its parameter")
    if is_summed(leaf):
        NATIVE[jax.default_backend()].admit_sums(leaf)


def is_elementwise(job: Job) -> bool:
    """Whether the compiler may divide a step of a parameter as it likes."""
    return not (any(job.mesh_axes) or is_summed(job) or refusal(admit_parts, job))


def is_summed(leaf: Leaf) -> bool:
    return needs_sums(leaf.setting.rule_at(1), leaf.space.shape(leaf.p))


def list_refusals(engine: Engine, leaves: Sequence[Leaf]) -> list[str]:
    """Why native code does not step each parameter; "" where it does."""
    refused = refusal(check_native, engine)
    return [refused or refusal(admit, leaf, engine) for leaf in leaves]


def explain_engines(engine: Engine, leaves: Sequence[Leaf], *, guarded: bool, reached: bool) -> list[str]:
    """By which code ``make_step`` steps parameters, and why. reached: whether it takes their own steps."""
    reasons = list_refusals(engine, leaves)
    if not reached and engine != "xla":
        reasons = ["what is around its transformation calls update()"] * len(leaves)
    elif guarded and any(reasons):
        reasons = [reason or "on_nonfinite='skip' takes one code for all parameters" for reason in reasons]
    return [f"xla: {reason}" if reason else "native" for reason in reasons]


def choose(jobs: Sequence[Job], step: Step, engine: Engine, *, observed: bool) -> list[int]:
    """The jobs for native code. observed: figures are wanted."""
    if engine == "xla":
        return []
    in_program = any(isinstance(x, jax.core.Tracer) for job in jobs for x in (job.p, job.g, *job.state.values()))
    reasons = list_refusals(engine, jobs) if in_program else ["native code runs within jit"] * len(jobs)
    if observed:
        figures = "it may be sharded, and its figures are sums over devices"
        reasons = [why or (figures if any(job.mesh_axes) else "") for job, why in zip(jobs, reasons, strict=True)]
    for job, why in zip(jobs, reasons, strict=True):
        if why and engine == "native":
            raise OptionError(
                f"engine='native' cannot step parameter {job.name!r}: {why}; use engine='auto', which takes the "
                "fastest code that can run"
            )
    served = [index for index, why in enumerate(reasons) if not why]
    # all parameters of a guarded step are written, or none
    return [] if step.guarded and len(served) < len(jobs) else served
