"""How jobs are stepped: by native code or by the rule as it is, and what is written when."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from thalweg.boundary import Advance, advance, slice_of
from thalweg.errors import NonFiniteError, OptionError, StateError
from thalweg.kernels.chunks import STACK
from thalweg.kernels.cpu.library import reason_missing, warn_once
from thalweg.numpy.arrays import Arr, is_aliased
from thalweg.numpy.batches import batches, normals, stack_jobs
from thalweg.numpy.fused import Fused, reason_against, squares_of
from thalweg.numpy.memory import Job, Memory
from thalweg.rules.checks import check_choice
from thalweg.rules.noise import tensor_id
from thalweg.rules.spikes import Judgement, Spikes, judge
from thalweg.settings import Settings
from thalweg.spaces import numpy as xp

#: Native code, or numpy's own arithmetic; "auto" takes native code wherever it can.
Engine: TypeAlias = Literal["auto", "reference", "fused"]


class Stepping(Memory):
    """Takes jobs through a step, on the engine that was asked for."""

    #: Elements of a stack of small arrays.
    _most_stacked = STACK
    #: Whether averages are in the place of parameters.
    _is_evaluated = False

    def _choose(self, engine: Engine, settings: Settings) -> None:
        check_engine(engine)
        self._settings, self._wanted_engine = settings, engine
        self._engines_used: set[str] = set()
        self._fused = Fused()

    @property
    def engine(self) -> str:
        """The engines that the last step used, or the one that was asked for."""
        return " + ".join(sorted(self._engines_used)) or self._wanted_engine

    def _run(self, jobs: Sequence[Job], scale: float | None) -> None:
        if self._is_evaluated:
            raise OptionError("a step within averaged(): leave it first, since parameters are averages there")
        with self._fused.lock:
            try:
                self._locked_run(jobs, scale)
            finally:
                self._fused.release()

    def _locked_run(self, jobs: Sequence[Job], scale: float | None) -> None:
        aliased = len(jobs) > 1 and is_aliased([job.place for job in jobs], [job.gradient_place for job in jobs])
        policy = self._settings.base.handling.on_nonfinite
        known = len(self._tracked)
        fused, others = self._divide(jobs, aliased)
        self._engines_used = {name for name, used in (("fused", fused), ("reference", others)) if used}
        results: Iterable[tuple[Job, Advance]] = ((job, self._compute(job, scale)) for job in others)
        # Kron has products that numpy does best, and native code for the rest
        by_shape = [job for job in fused if job.rule.needs_whole]
        if by_shape:
            results = itertools.chain(results, self._compute_by_shape(by_shape, scale))
            fused = [job for job in fused if not job.rule.needs_whole]
        if fused:
            self._fused.prepare(fused, scale)
        finite = self._fused.measure() if fused and policy != "propagate" else None
        if finite is not None and policy == "raise":
            for job, fine in zip(fused, finite, strict=True):
                check_finite(job, fine)
        if aliased or policy == "raise":
            # nothing is written before everything has been read, and is known to be finite
            results = list(results)
        if finite is not None:
            self._fused.write([not fine for fine in finite])
        elif fused:
            self._fused.step()
        if fused:
            for job, stats, fine in zip(fused, self._fused.stats(), finite or [True] * len(fused), strict=True):
                self._commit(job, stats, fine)
        for job, result in results:
            fine = result.finite is None or bool(result.finite)
            if fine:
                job.weights[...] = result.p
                job.tracked.state, job.tracked.operand = result.state, None
            self._commit(job, partial(dict, result.stats), fine)
        if len(self._tracked) > known:  # new ones in the order they came, however they were served
            new = {job.name for job in jobs} - set(itertools.islice(self._tracked, known))
            for job in jobs:
                if job.name in new:
                    self._tracked[job.name] = self._tracked.pop(job.name)

    def _divide(self, jobs: Sequence[Job], aliased: bool) -> tuple[list[Job], list[Job]]:
        """The jobs for native code, and those for the reference."""
        if self._wanted_engine == "reference":
            return [], list(jobs)
        missing = reason_missing()
        if self._wanted_engine == "auto" and missing is not None:
            warn_once(missing)
            return [], list(jobs)
        fused: list[Job] = []
        others: list[Job] = []
        for job in jobs:
            reason = "parameters overlap other parameters' gradients in memory" if aliased else reason_against(job)
            if reason is not None and self._wanted_engine == "fused":
                raise OptionError(
                    f"engine='fused' cannot run for parameter {job.name!r}: {reason}; "
                    "use engine='auto', which takes the fastest engine that can run"
                )
            (fused if reason is None else others).append(job)
        return fused, others

    def _compute_by_shape(self, jobs: Sequence[Job], scale: float | None) -> Iterator[tuple[Job, Advance]]:
        """Noise by native code, products by BLAS, and small arrays of equal shape as one batch."""
        for batch in batches(jobs, self._most_stacked):
            if len(batch) == 1:
                yield batch[0], self._compute(batch[0], scale, partial(normals, batch))
            else:
                result = self._compute(stack_jobs(batch), scale, partial(normals, batch))
                for i, job in enumerate(batch):
                    part = slice_of(result, i)
                    yield job, part._replace(state={key: np.array(entry) for key, entry in part.state.items()})

    def _compute(self, job: Job, grad_scale: float | None = None, noise: Callable[[], Arr] | None = None) -> Advance:
        with np.errstate(all="ignore"):  # what is not finite is dealt with below, or wanted
            result = advance(
                xp,
                job.rule,
                job.handling,
                job.weights,
                job.gradient,
                job.tracked.state,
                t=job.t,
                lr=job.lr,
                lr_scale=job.lr_scale,
                tensor=tensor_id(job.name),
                grad_scale=grad_scale,
                noise=noise,
            )
        if job.handling.on_nonfinite == "raise":
            check_finite(job, result.finite)
        return result

    def _commit(self, job: Job, stats: Callable[[], Mapping[str, Any]], is_taken: bool) -> None:
        tracked = job.tracked
        tracked.stats = stats
        if is_taken:
            tracked.step = job.t
        else:
            tracked.skipped += 1
        self._tracked[job.name] = tracked

    def _run_together(self, jobs: Sequence[Job]) -> None:
        """Step a whole model: what its gradients have in common is decided first."""
        handling = self._settings.base.handling
        if not jobs or not handling.needs_norm:
            self._run(jobs, None)
            return
        norm, guard = self._joint_norm(jobs), handling.guard
        scale = None if handling.max_grad_norm is None else scale_to(handling.max_grad_norm, norm)
        if guard is None:
            self._run(jobs, scale)
            return
        judgement = self._judge(guard, norm)
        is_skipped = guard.action == "skip" and judgement.is_spike.item()
        if guard.action != "skip":
            own = judgement.scale.item()
            scale = own if scale is None else min(scale, own)
        self._run(() if is_skipped else jobs, scale)
        self._norms, self._joint_figures = judgement.kept, judgement.figures
        for job in jobs if is_skipped else ():
            self._commit(job, job.tracked.stats, is_taken=False)

    def _judge(self, spikes: Spikes, norm: float) -> Judgement:
        kept = np.zeros(spikes.kept_shape) if self._norms is None else self._norms
        if kept.shape != spikes.kept_shape:
            raise StateError(
                f"spikes has window={spikes.window}, and the norms of {kept.size - 1} steps are kept: use that window, "
                "or drop them with clear_state()"
            )
        with np.errstate(all="ignore"):
            return judge(xp, spikes, np.array([norm]), kept)

    def _joint_norm(self, jobs: Sequence[Job]) -> float:
        if self._wanted_engine == "reference" or reason_missing() is not None:
            with np.errstate(all="ignore"):
                sums = [float(np.square(job.gradient, dtype=np.float64).sum()) for job in jobs]
        else:
            sums = squares_of([job.gradient for job in jobs])
        squares = dict(zip([job.name for job in jobs], sums, strict=True))
        norm = math.sqrt(sum(squares.values()))
        if not math.isfinite(norm) and self._settings.base.handling.on_nonfinite == "raise":
            guilty = [name for name, square in squares.items() if not math.isfinite(square)]
            raise NonFiniteError(f"these gradients are not finite, or too large to be squared: {guilty}")
        return norm


def scale_to(limit: float, norm: float) -> float:
    """What brings the joint norm of all gradients down to a limit."""
    return 1 / max(1.0, norm / limit) if math.isfinite(norm) else math.nan


def check_engine(engine: Any) -> None:
    check_choice("engine", engine, "auto", "reference", "fused")
    if engine == "fused" and (reason := reason_missing()) is not None:
        raise OptionError(
            f"engine='fused' cannot run: {reason}; use engine='auto', which takes the fastest engine that can run"
        )


def check_finite(job: Job, finite: Any) -> None:
    if not finite:
        raise NonFiniteError(f"parameter {job.name!r}, step {job.t}: the gradient or the update is not finite")
