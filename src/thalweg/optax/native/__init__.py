"""Native code inside compiled programs, for ``make_step``.

``cpu`` and ``gpu`` admit parameters, and step them by what they make of ``step``; ``choice`` takes native code or XLA's
when a program is compiled; ``moves`` makes stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from thalweg.optax.batches import Job, Step
from thalweg.optax.native import cpu, gpu
from thalweg.optax.native.choice import either
from thalweg.optax.native.step import NativeStep
from thalweg.optax.steps import Outcome

#: The native code of each jax backend, and the platform that compiled programs name.
NATIVE: dict[str, Any] = {"cpu": cpu, "gpu": gpu}
PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}


def step_natively(
    jobs: Sequence[Job],
    step: Step,
    step_jobs: Callable[..., tuple[list[Outcome], Any]],
    *,
    observed: bool,
    is_required: bool,
    is_local: bool,
) -> tuple[list[Outcome], Any]:
    """One step that answers with new parameters, by native code in programs that can have it.

    step_jobs: the step by XLA. observed: figures are wanted. is_required: a program without native code is an error.
    is_local: the compiler may divide the step over devices as it likes.
    """

    def given(ps: Any, gs: Any, states: Any, shared: Any) -> tuple[list[Job], Step]:
        traced = [replace(job, p=p, g=g, state=s) for job, p, g, s in zip(jobs, ps, gs, states, strict=True)]
        return traced, replace(step, **shared)

    def xla(*args: Any) -> tuple[list[Outcome], Any]:
        outcomes, fine = step_jobs(*given(*args), applied=True)
        return [outcome if observed else outcome._replace(stats={}) for outcome in outcomes], fine

    def native(*args: Any) -> tuple[list[Outcome], Any]:
        traced, now = given(*args)
        code: NativeStep = NATIVE[backend].Native(traced, now, figures)
        return code.run_by_parts() if is_local else code.run(code.numbers())

    backend = jax.default_backend()
    shared = {"t": step.t, "lr": step.lr, "grad_scale": step.grad_scale}
    shared = {name: value for name, value in shared.items() if isinstance(value, jax.Array)}
    args = [job.p for job in jobs], [job.g for job in jobs], [job.state for job in jobs], shared
    figures = [outcome.stats for outcome in jax.eval_shape(xla, *args)[0]] if observed else [{} for _ in jobs]
    how: dict[str, Any] = dict(platform=PLATFORMS[backend], is_required=is_required, is_local=is_local)
    outcomes, fine = either(native, xla, *args, **how)
    return outcomes, fine
