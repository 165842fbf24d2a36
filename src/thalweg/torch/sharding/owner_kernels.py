"""Whitening by owners with GPU kernels: all tensors of one shape at once, as on one device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.arrays import Shape, State
from thalweg.torch.sharding.requests import Answer, Work


class Whitener:
    """The kernels of one optimizer for the tensors that this rank owns, loaded when first needed."""

    def __init__(self) -> None:
        self.kernels: Any = None

    def whitened(self, works: Sequence[Work]) -> dict[str, Answer]:
        """By name the whitened tensor, the mean of its squares, and the factors."""
        if not works:
            return {}
        from thalweg.kernels.triton.kron_owners import Job, OwnerKernels

        if self.kernels is None:
            self.kernels = OwnerKernels()
        batches: dict[Hashable, list[Work]] = defaultdict(list)
        for work in works:
            task, first = work.task, work.shown[0]
            dtype = work.factors["Q_0"].dtype
            kind = first.device, first.shape, task.rule, dtype, len(work.shown), task.seed, task.t
            batches[kind].append(work)
        jobs = []
        for batch in batches.values():
            task = batch[0].task
            learned = [work.shown[-1] for work in batch]
            jobs.append(
                Job(
                    names=[work.task.name for work in batch],
                    learned=learned,
                    shown=learned if len(batch[0].shown) == 1 else [work.shown[0] for work in batch],
                    factors=[work.factors for work in batch],
                    rule=task.rule,
                    seed=task.seed,
                    t=task.t,
                    due=[work.task.due for work in batch],
                )
            )
        done = {}
        for batch, (h, squares) in zip(batches.values(), self.kernels.whitened(jobs), strict=True):
            axes = [1] * len(batch[0].task.rule.sizes(tuple(batch[0].shown[0].shape)))
            for work, own, square in zip(batch, h, squares, strict=True):
                done[work.task.name] = own, square.reshape(-1, *axes), work.factors
        return done


def room_for_factors(
    shapes: Mapping[str, Shape], norms: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> State[Tensor]:
    """Memory for whole factors and their norms, laid out for the kernels."""
    factors = {key: torch.empty(shape, dtype=dtype, device=device) for key, shape in shapes.items()}
    return {**factors, **{key: torch.empty_like(norm, device=device) for key, norm in norms.items()}}
