"""Stepping arrays by native code: which can be, and how."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from thalweg.kernels.cpu.plan import (
    END,
    MEASURE,
    WRITE,
    Operand,
    Options,
    Plan,
    entries_of,
    reason_unserved,
    sums_of_squares,
)
from thalweg.kernels.threads import num_threads, of_machine
from thalweg.numpy.arrays import Arr, address

if TYPE_CHECKING:
    from thalweg.numpy.optimizer import Job


def reason_against(job: Job) -> str | None:
    """Why native code cannot step this parameter, or None if it can."""
    tracked = job.tracked
    if tracked.unserved is None:  # shape and rule decide, and do not change
        tracked.unserved = reason_unserved(job.rule, job.weights.shape) or ""
    if tracked.unserved:
        return tracked.unserved
    if not all(array.flags.c_contiguous for array in (job.weights, *tracked.state.values())):
        return "it is not in C order"
    if not job.gradient.flags.c_contiguous:
        return None  # it will be copied
    start, other = address(job.weights), address(job.gradient)
    shared = start < other + job.gradient.nbytes and other < start + job.weights.nbytes
    same = start == other and job.weights.dtype == job.gradient.dtype
    return "its gradient overlaps it in memory" if shared and not same else None


class Fused:
    """The native engine of one optimizer, with tables that are kept between steps."""

    def __init__(self, rule_name: str) -> None:
        self.plan = Plan(rule_name)
        self.jobs: Sequence[Job] = ()
        self.gradients: list[Arr] = []

    def prepare(self, jobs: Sequence[Job], grad_scale: float | None) -> None:
        """Lay out a step of these jobs; nothing is written yet."""
        self.jobs = jobs
        self.gradients = [np.ascontiguousarray(job.gradient).reshape(job.gradient.shape) for job in jobs]
        groups: dict[Any, int] = {}
        options: list[Options] = []
        operands = []
        for job, gradient in zip(jobs, self.gradients, strict=True):
            key = id(job.rule), id(job.handling), job.t, job.lr, job.lr_scale
            group = groups.setdefault(key, len(options))
            if group == len(options):
                options.append(Options(job.rule, job.handling, job.t, job.lr, job.lr_scale, grad_scale))
            operands.append(operand_of(job, gradient, group, self.plan.rule_name))
        self.plan.prepare(operands, options, num_threads(of_machine))

    def step(self) -> None:
        self.plan.run(MEASURE, END)

    def measure(self) -> list[bool]:
        """For each job whether all of its step is finite; nothing is written."""
        self.plan.run(MEASURE, WRITE)
        return self.plan.finite()

    def write(self, skipped: Sequence[bool]) -> None:
        self.plan.skip(skipped)
        self.plan.run(WRITE, END)

    def stats(self) -> list[Any]:
        """For each job a function that tells its figures."""
        figures = self.plan.figures()
        return [partial(figures.of, index) for index in range(len(self.jobs))]


def operand_of(job: Job, gradient: Arr, group: int, rule_name: str) -> Operand:
    state = job.tracked.state
    entries = [state.get(key) for key in entries_of(rule_name, state)]
    return Operand(
        job.name,
        job.weights.shape,
        address(job.weights),
        address(gradient),
        tuple([0 if entry is None else address(entry) for entry in entries]),
        (
            job.weights.dtype.name,
            job.gradient.dtype.name,
            *["" if entry is None else entry.dtype.name for entry in entries],
        ),
        group,
    )


def squares_of(arrays: Sequence[Arr]) -> list[float]:
    """The sum of squares of each array, in double precision."""
    whole = [np.ascontiguousarray(array) for array in arrays]
    return sums_of_squares([(address(x), x.dtype.name, x.size) for x in whole], num_threads(of_machine))
