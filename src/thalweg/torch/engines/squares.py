"""Sums of squares of all gradients of a step, by native code and by kernels."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.cpu.library import borrow_openmp, is_here
from thalweg.kernels.cpu.tables import GradientSquares
from thalweg.kernels.threads import num_threads
from thalweg.kernels.triton import admission as by_kernels
from thalweg.torch.engines.admission import are_for_kernels, is_dense
from thalweg.torch.engines.recorder import on_device
from thalweg.torch.params.checks import NAMES

IS_CPU = operator.attrgetter("is_cpu")


class Squares:
    """Sums the squares of each of some gradients, wherever these are: a table for each dtype."""

    def __init__(self, grads: Sequence[Tensor]) -> None:
        from thalweg.kernels.triton import squares
        from thalweg.kernels.triton.launching import Compiled
        from thalweg.kernels.triton.uploads import Uploads

        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, g in enumerate(grads):
            by_dtype.setdefault(g.dtype, []).append(i)
        device, self.members = grads[0].device, list(by_dtype.values())
        self.tables: list[Any] = [
            squares.GradientSquares([grads[i].numel() for i in members], dtype, Uploads(device), Compiled())
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


def sums_by_kernels(grads: Sequence[Tensor]) -> Callable[[array[int]], Tensor] | None:
    """Finds the squares of gradients that are stored like these, wherever they are; None if there are no kernels."""
    device = grads[0].device
    if not are_for_kernels(grads) or not all(g.is_contiguous() or is_dense(g) for g in grads):
        return None
    if any(str(g.dtype).removeprefix("torch.") not in by_kernels.DTYPES for g in grads):
        return None
    squares = Squares(grads)

    def measure(addresses: array[int]) -> Tensor:
        with on_device(device):
            squares.follow(addresses)
            return squares.measure()

    return measure


def sums_by_native_code(gradients: Sequence[Tensor]) -> Callable[[array[int]], Tensor] | None:
    """The same for gradients on the CPU."""
    if not is_here() or not set(map(type, gradients)) <= {Tensor} or not all(map(IS_CPU, gradients)):
        return None
    dense = all(map(Tensor.is_contiguous, gradients)) or all(map(is_dense, gradients))
    if not dense or any(map(Tensor.is_neg, gradients)):
        return None
    borrow_torch_threads()
    sums = GradientSquares([(NAMES[g.dtype], g.numel()) for g in gradients])

    def measure(addresses: array[int]) -> Tensor:
        return torch.tensor(sums.measure(addresses, num_threads(torch.get_num_threads)), dtype=torch.float64)

    return measure


def borrow_torch_threads() -> None:
    home = Path(torch.__file__).parent
    borrow_openmp((str(home), str(home.with_name("torch.libs"))))
