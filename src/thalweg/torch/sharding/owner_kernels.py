"""Whitening by owners with GPU kernels: all tensors of one shape at once, as on one device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from thalweg.arrays import Shape, State
from thalweg.rules import Direction, Kron
from thalweg.torch.sharding.requests import Assembled


class OwnerWhitening:
    """The kernels of one optimizer for the tensors that this rank owns, loaded when first needed."""

    def __init__(self) -> None:
        self.kernels: Any = None

    def whiten(self, works: Sequence[Assembled]) -> dict[str, Direction]:
        """By name the whitened tensor, the mean of its squares, and the factors."""
        if not works:
            return {}
        from thalweg.kernels.triton.kron_owners import Job, OwnerKernels

        if self.kernels is None:
            self.kernels = OwnerKernels()
        batches: dict[Hashable, list[Assembled]] = defaultdict(list)
        for work in works:
            request, first = work.request, work.tensors[0]
            dtype = work.factors["Q_0"].dtype
            kind = first.device, first.shape, request.rule, dtype, len(work.tensors), request.seed, request.t
            batches[kind].append(work)
        jobs = []
        for batch in batches.values():
            request = batch[0].request
            learned = [work.tensors[-1] for work in batch]
            jobs.append(
                Job(
                    names=[work.request.name for work in batch],
                    learned=learned,
                    shown=learned if len(batch[0].tensors) == 1 else [work.tensors[0] for work in batch],
                    factors=[work.factors for work in batch],
                    rule=cast(Kron, request.rule),
                    seed=request.seed,
                    t=request.t,
                    due=[work.request.due for work in batch],
                )
            )
        done = {}
        for batch, (h, squares) in zip(batches.values(), self.kernels.whitened(jobs), strict=True):
            shape = batch[0].request.rule.figure_shape(tuple(batch[0].tensors[0].shape))
            for work, own, square in zip(batch, h, squares, strict=True):
                done[work.request.name] = Direction(own, {"square": square.reshape(shape)}, work.factors)
        return done


def room_for_factors(
    shapes: Mapping[str, Shape], norms: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> State[Tensor]:
    """Memory for whole factors and their norms, laid out for the kernels."""
    factors = {key: torch.empty(shape, dtype=dtype, device=device) for key, shape in shapes.items()}
    return {**factors, **{key: torch.empty_like(norm, device=device) for key, norm in norms.items()}}
