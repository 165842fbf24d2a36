"""Small arrays of equal shape as one batch, for Kron: their time goes into calls, not into arithmetic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from thalweg.kernels.chunks import SMALL, extent, pieces
from thalweg.kernels.cpu.noise import fill_normal
from thalweg.kernels.threads import num_threads, of_machine
from thalweg.numpy.arrays import Arr, address, dtype_name
from thalweg.numpy.memory import Job, Tracked
from thalweg.rules.entries import Count
from thalweg.rules.noise import tensor_id
from thalweg.storage import arithmetic


def batches(jobs: Sequence[Job], most: int) -> Iterator[list[Job]]:
    """The jobs, those together that can be stepped as one. most: elements of a stack."""
    found: dict[Any, list[Job]] = defaultdict(list)
    for index, job in enumerate(jobs):
        apart = job.handling.on_nonfinite != "propagate" or job.handling.is_random
        if apart or job.weights.size > SMALL:
            found[index].append(job)
            continue
        dtypes = dtype_name(job.weights), dtype_name(job.gradient)
        shape = job.weights.shape
        counts = tuple(float(job.tracked.state[key]) for key in job.rule.keys(shape, Count))  # refreshed together
        same = id(job.rule), id(job.handling), job.t, job.lr, job.lr_scale, shape, dtypes, counts
        found[same].append(job)
    for batch in found.values():
        extents = (extent(job.weights.size, (entry.size for entry in job.tracked.state.values())) for job in batch)
        for members in pieces(extents, most):
            yield [batch[i] for i in members]


def stack_jobs(jobs: Sequence[Job]) -> Job:
    """Several jobs as one, with a leading axis more."""
    first = jobs[0]
    counts = first.rule.keys(first.weights.shape, Count)
    state = {
        key: entry if key in counts else np.stack([job.tracked.state[key] for job in jobs])
        for key, entry in first.tracked.state.items()
    }
    return first._replace(
        weights=np.stack([job.weights for job in jobs]),
        gradient=np.stack([job.gradient for job in jobs]),
        tracked=Tracked(state),
        rule=replace(first.rule, stacked_axes=first.rule.stacked_axes + 1),
    )


def normals(jobs: Sequence[Job]) -> Arr:
    """The noise of some jobs, stacked if they are several."""
    first = jobs[0]
    precision = arithmetic(dtype_name(first.weights))
    noise = np.empty((len(jobs), *first.weights.shape), precision)
    for own, job in zip(noise.reshape(len(jobs), -1), jobs, strict=True):
        fill_normal(
            address(own),
            precision,
            own.size,
            seed=job.handling.seed,
            tensor=tensor_id(job.name),
            t=job.t,
            threads=num_threads(of_machine),
        )
    return noise[0] if len(jobs) == 1 else noise
