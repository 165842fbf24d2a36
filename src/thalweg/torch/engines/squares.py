"""Sums of squares of all gradients of a step on a GPU, by kernels."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.triton import admission as by_kernels
from thalweg.torch.engines.admission import are_for_kernels, is_dense

#: Lists of gradients of other sizes, whose tables are kept at once.
MOST_KEPT = 8


class Squares:
    """Sums the squares of each of some gradients, wherever these are: a table for each dtype."""

    def __init__(self, grads: Sequence[Tensor]) -> None:
        from thalweg.kernels.triton.launching import Compiled
        from thalweg.kernels.triton.squares import GradientSquares
        from thalweg.kernels.triton.uploads import Uploads

        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, g in enumerate(grads):
            by_dtype.setdefault(g.dtype, []).append(i)
        device, self.members = grads[0].device, list(by_dtype.values())
        self.tables: list[Any] = [
            GradientSquares([grads[i].numel() for i in members], dtype, Uploads(device), Compiled())
            for dtype, members in by_dtype.items()
        ]
        #: Puts squares into the order of the gradients.
        self.order: Tensor | None = None
        if len(self.tables) > 1:
            self.order = torch.tensor([i for members in self.members for i in members]).argsort().to(device)

    def follow(self, places: array[int]) -> None:
        """Note where the gradients are now."""
        for table, members in zip(self.tables, self.members, strict=True):
            table.follow(places if self.order is None else array("Q", [places[i] for i in members]))

    def measure(self) -> Tensor:
        squares: list[Tensor] = [table.measure() for table in self.tables]
        return squares[0] if self.order is None else torch.cat(squares)[self.order]


def squares_by_kernels(known: dict[Hashable, Squares], grads: Sequence[Tensor]) -> Tensor | None:
    """The squares of gradients; None if there are no kernels for all of them. known: those that were needed before."""
    first = grads[0]
    if not are_for_kernels(grads) or not all(g.is_contiguous() or is_dense(g) for g in grads):
        return None
    key = first.device, *((g.numel(), g.dtype) for g in grads)
    if key not in known:
        if any(str(g.dtype).removeprefix("torch.") not in by_kernels.DTYPES for g in grads):
            return None
        while len(known) >= MOST_KEPT:
            del known[next(iter(known))]
        known[key] = Squares(grads)
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        known[key].follow(array("Q", map(Tensor.data_ptr, grads)))
        return known[key].measure()
