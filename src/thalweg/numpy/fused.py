"""Stepping arrays by native code: which can be, and how."""

from __future__ import annotations

import operator
import threading
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from thalweg.arrays import Shape
from thalweg.kernels.cpu.operands import operand_of
from thalweg.kernels.cpu.reasons import reason_unserved
from thalweg.kernels.cpu.tables import END, MEASURE, WRITE, Operand, Options, Tables, sums_of_squares
from thalweg.kernels.threads import num_threads, of_machine
from thalweg.numpy.arrays import Arr, Name, address, dtype_name
from thalweg.numpy.memory import Job


def reason_against(job: Job) -> str | None:
    """Why native code cannot step this parameter, or None if it can."""
    tracked = job.tracked
    if tracked.unserved is None:  # shape and rule decide, and do not change
        tracked.unserved = reason_unserved(job.rule, job.handling, job.weights.shape, dtype_name(job.weights)) or ""
    if tracked.unserved:
        return tracked.unserved
    if tracked.operand is None and not all(entry.flags.c_contiguous for entry in tracked.state.values()):
        return "its state is not in C order"
    if not job.weights.flags.c_contiguous:
        return "it is not in C order"
    (start, end), (first, last) = job.place, job.gradient_place
    if not (start < last and first < end) or not job.gradient.flags.c_contiguous:
        return None  # apart in memory, or to be copied
    same = start == first and job.weights.dtype == job.gradient.dtype
    return None if same else "its gradient overlaps it in memory"


class Fused:
    """The native engine of one optimizer, with tables that are kept between steps."""

    def __init__(self) -> None:
        #: What is laid out, of the last step of these names.
        self.known: dict[tuple[Name, ...], Laid] = {}
        self.copies: list[Arr] = []
        #: Held by a step from its first table to its last figure.
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Fused], tuple[()]]:
        return Fused, ()  # copies begin empty: addresses belong to this optimizer alone

    def prepare(self, jobs: Sequence[Job], grad_scale: float | None) -> None:
        """Take the gradients and numbers of a step; nothing is written. What has changed since the last is laid out."""
        self.copies = [np.ascontiguousarray(job.gradient) for job in jobs]
        groups: dict[Any, int] = {}
        options: list[Options] = []
        operands = []
        for job, gradient in zip(jobs, self.copies, strict=True):
            key = id(job.rule), id(job.handling), job.t, job.lr, job.lr_scale
            group = groups.setdefault(key, len(options))
            if group == len(options):
                declared = job.tracked.setting.rule if job.tracked.setting is not None else None
                options.append(Options(job.rule, job.handling, job.t, job.lr, job.lr_scale, grad_scale, declared))
            operands.append(show_job(job, group, gradient))
        names = tuple([job.name for job in jobs])
        layout = [each.layout for each in options]
        laid = self.known.get(names)
        if laid is None or laid.layout != layout or not all(map(operator.is_, operands, laid.operands)):
            # a name is in one list or in few: all at once, or each by itself
            self.known = {own: each for own, each in self.known.items() if len(own) == len(names) == 1}
            laid = self.known[names] = Laid(operands, layout, Tables(operands, options))
        self.tables = laid.tables
        self.tables.point(array("Q", map(address, self.copies)))
        self.tables.fill(options, num_threads(of_machine))

    def step(self) -> None:
        self.tables.run(MEASURE, END)

    def measure(self) -> list[bool]:
        """For each job whether all of its step is finite; nothing is written."""
        self.tables.run(MEASURE, WRITE)
        return self.tables.finite()

    def write(self, skipped: Sequence[bool]) -> None:
        self.tables.skip(skipped)
        self.tables.run(WRITE, END)

    def stats(self) -> list[Any]:
        """For each job a function that tells its figures."""
        figures = self.tables.figures()
        return [partial(figures.of, index, reshape) for index in range(len(self.tables.spans))]

    def release(self) -> None:
        """Let go of copies that were made for a step."""
        self.copies = []


class Laid(NamedTuple):
    """Operands that are laid out, and what decided how."""

    operands: list[Operand]
    layout: list[Any]
    tables: Tables


def show_job(job: Job, group: int, gradient: Arr) -> Operand:
    """How native code is shown a parameter: as the last time, if nothing has moved but its gradient."""
    tracked, known = job.tracked, job.tracked.operand
    dtypes = dtype_name(job.weights), dtype_name(gradient)
    if known is not None and (known.p, known.group) == (job.place[0], group) and known.dtypes[:2] == dtypes:
        return known
    assert tracked.setting is not None
    rule, shape = tracked.setting.rule, job.weights.shape
    tracked.operand = operand_of(rule, job.name, shape, job.weights, dtypes[1], tracked.state, place, group)
    return tracked.operand


def place(x: Arr) -> tuple[int, str]:
    return address(x), dtype_name(x)


def reshape(values: list[float], shape: Shape) -> Arr:
    return np.array(values).reshape(shape)


def squares_of(arrays: Sequence[Arr]) -> list[float]:
    """The sum of squares of each array, in double precision."""
    whole = [np.ascontiguousarray(array) for array in arrays]
    return sums_of_squares([(address(x), dtype_name(x), x.size) for x in whole], num_threads(of_machine))
