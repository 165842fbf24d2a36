"""Sums of torch tensors that are as exact on one processor as on another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thalweg.arrays import Axes, reduced_shape

#: Squares of so many elements in a row are summed as torch does it; the sums of rows add up in the wide dtype. Shorter
#: axes have this many rows, or else errors of rounding would not cancel.
ROW, ROWS = 256, 16
#: Up to so many elements are made wide at once: rows are not worth while.
SMALL = 4096
#: What does not lie in rows is made wide by pieces: a hundredth of it, within these numbers of elements.
LEAST_PIECE, PIECE = 2**10, 2**16


def accumulated_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which sums that are wanted in ``dtype`` add up.

    On a CPU, torch adds squares one after the other in as many lanes as a vector has, which differ between processors:
    over four million elements in float32 that was seen to be off by 4e-4. So float32 adds up in float64 there. GPUs add
    in trees, which is exact enough, and on most of them float64 is slow; MPS has none.
    """
    return torch.float64 if dtype == torch.float32 and device.type == "cpu" else dtype


def plain(x: Tensor, axes: Axes) -> Tensor:
    """Sum over the axes, which keep size 1, in the dtype of x."""
    wide = accumulated_in(x.dtype, x.device)
    if torch.compiler.is_compiling():  # a compiler makes one loop of it
        return x.sum(dim=axes, keepdim=axes is not None, dtype=wide).to(x.dtype)
    # what lies side by side torch adds by blocks, and blocks by blocks: in float32, that is exact to the last digit
    if wide == x.dtype or x.numel() <= ROW or (x.is_contiguous() and is_trailing(x, axes)):
        return x.sum(dim=axes, keepdim=axes is not None)
    return by_pieces(x, axes, x.dtype, squared=False)


def squares(x: Tensor, axes: Axes, dtype: torch.dtype | None = None) -> Tensor:
    """Sum squares over the axes, which keep size 1, in the dtype of x or in a wider one: infinite where it overflows.

    No wide copy of x as a whole is made.
    """
    dtype = dtype or x.dtype
    wide = accumulated_in(dtype, x.device)
    if wide == dtype:
        return norm(x, axes, dtype).square()
    if torch.compiler.is_compiling():
        return x.to(wide).square().sum(dim=axes, keepdim=axes is not None).to(dtype)
    if axes is None:
        return norm(condense(x, dtype), None, wide).square().to(dtype)
    if x.numel() > SMALL and x.is_contiguous() and is_trailing(x, axes):
        flat = x.flatten(x.ndim - len(axes))
        if flat.shape[-1] >= 8 * ROWS:
            squares = norm(in_rows(flat, dtype), (-1,), wide).square().to(dtype)
            return squares.reshape(reduced_shape(tuple(x.shape), axes))
    return by_pieces(x, axes, dtype, squared=True)


def norm(x: Tensor, axes: Axes, dtype: torch.dtype) -> Tensor:
    """torch's own norm, which first makes all of x another dtype."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=axes, keepdim=axes is not None, dtype=dtype)
    return norms


def squares_of_each(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The sums of squares of whole tensors of one dtype on one device, as one vector."""
    dtype = dtype or tensors[0].dtype
    wide = accumulated_in(dtype, tensors[0].device)
    if wide == dtype:
        other = None if dtype == tensors[0].dtype else dtype
        return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=other)).square()
    return torch.stack(torch._foreach_norm([condense(x, dtype) for x in tensors], 2, dtype=wide)).square().to(dtype)


def condense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the same norm as x that is small enough to be made wide."""
    if x.numel() <= SMALL:
        return x
    if not x.is_contiguous():
        x = x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))  # as it lies in memory
    if x.is_contiguous():
        return in_rows(x.view(-1), dtype)
    return by_pieces(x, None, accumulated_in(dtype, x.device), squared=True).sqrt()


def is_trailing(x: Tensor, axes: Axes) -> bool:
    """Whether these are all axes, or the last of them."""
    return axes is None or sorted(axis % x.ndim for axis in axes) == list(range(x.ndim - len(axes), x.ndim))


def in_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The norms of rows along the last axis, and after them the elements that fill no row."""
    size = x.shape[-1]
    row = min(ROW, size // ROWS)
    left = size % row
    whole = x[..., : size - left] if left else x
    norms = norm(whole.view(*x.shape[:-1], -1, row), (-1,), dtype).squeeze(-1)
    return torch.cat([norms, x[..., size - left :]], dim=-1) if left else norms


def by_pieces(x: Tensor, axes: Axes, dtype: torch.dtype, *, squared: bool) -> Tensor:
    """Sum over axes that need not lie side by side; no more than a piece of x is in a wider dtype at a time."""
    over = tuple(range(x.ndim)) if axes is None else tuple(axis % max(1, x.ndim) for axis in axes)
    sums = x.new_empty(reduced_shape(tuple(x.shape), over), dtype=dtype)
    most = min(PIECE, max(LEAST_PIECE, x.numel() // 128))
    add_up(x, over, sums, accumulated_in(torch.float32, x.device), squared, most)
    return sums.reshape(()) if axes is None else sums


def add_up(x: Tensor, axes: tuple[int, ...], sums: Tensor, wide: torch.dtype, squared: bool, most: int) -> None:
    """Write the sums over the axes into ``sums``. most: elements of a piece."""
    if x.numel() <= most:
        piece = x.to(wide)
        sums.copy_((piece.square_() if squared else piece).sum(dim=axes, keepdim=True))
        return
    # Pieces follow the order of memory, unless too many sums would have to wait for the rest of their terms.
    choice = [axis for axis in range(x.ndim) if axis not in axes or sums.numel() <= most // 8]
    axis = max(choice, key=lambda axis: (x.shape[axis] > 1, x.stride(axis)))
    size = max(1, most * x.shape[axis] // x.numel())
    if axis not in axes:
        for piece, part in zip(torch.split(x, size, axis), torch.split(sums, size, axis), strict=True):
            add_up(piece, axes, part, wide, squared, most)
        return
    total, part = (torch.zeros_like(sums, dtype=wide) for _ in range(2))
    for piece in torch.split(x, size, axis):
        add_up(piece, axes, part, wide, squared, most)
        total += part
    sums.copy_(total)
