"""What messages between owners and other ranks consist of: flat pieces, all in one dtype.

A piece has a row for each tensor of a batch. Figures and norms keep all their digits, however narrow the message is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.rules import Direction
from thalweg.torch.sharding.layouts import Block
from thalweg.torch.sharding.requests import Batch, Request


class Reader:
    """A flat message, read piece by piece."""

    def __init__(self, message: Tensor) -> None:
        self.message, self.place = message, 0

    def next(self, rows: int, size: int) -> Tensor:
        begin, self.place = self.place, self.place + rows * size
        return self.message[begin : self.place].view(rows, size)

    def next_stack(self, rows: int, shape: Shape) -> Tensor:
        """Tensors of one shape."""
        return self.next(rows, math.prod(shape)).view(rows, *shape)

    def next_numbers(self, rows: int, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Numbers of this dtype, with all their digits."""
        words = count_words(dtype, self.message.dtype)
        sent = self.next(rows, words * math.prod(shape))
        return (sent.to(dtype) if words == 1 else sent.clone().view(dtype)).reshape(rows, *shape)


def stack_blocks(tensors: Tensor | Sequence[Tensor], block: Block | None) -> Tensor:
    """A row for each tensor, or for this block of each."""
    if not isinstance(tensors, Tensor):
        tensors = torch.stack([x if block is None else block.cut(x) for x in tensors])
    elif block is not None:
        tensors = tensors[(slice(None), *block.slices)]
    return tensors.reshape(len(tensors), math.prod(tensors.shape[1:]))


# ---- what an owner is shown


def show(batch: Batch, request: Request) -> Iterator[Tensor]:
    """The pieces that this rank sends to the owner."""
    for tensors in request.tensors:
        yield stack_blocks([tensors[i] for i in batch.members], None)
    if batch.cold:
        for key in request.matrices:
            yield stack_blocks([request.factors[key][i] for i in batch.members], None)


def size_shown(batch: Batch, request: Request, rank: int) -> int:
    """How many elements of a message these pieces of a rank take."""
    blocks = batch.blocks[rank]
    factors = sum(blocks[key].size for key in request.matrices) if batch.cold else 0
    return batch.size * (blocks["p"].size * len(request.tensors) + factors)


# ---- what an owner answers


def pack(
    batch: Batch, request: Request, results: Direction, dtype: torch.dtype, blocks: Mapping[str, Block] | None = None
) -> Iterator[Tensor]:
    """The results for a rank, as pieces of a message.

    dtype: that of the message. blocks: what the rank gets of each tensor; None: all.
    """

    def cut(key: str, tensors: Tensor | Sequence[Tensor]) -> Tensor:
        return stack_blocks(tensors, None if blocks is None else blocks[key])

    yield cut("p", results.tensor)
    for key in request.rule.FIGURES:
        yield in_words(results.figures[key].to(request.dtype_of_figures), dtype)
    if request.changes:
        yield from (cut(key, results.state[key]) for key in request.matrices)
        for key in request.norms:
            yield in_words(stack_blocks(results.state[key], None).to(request.factors[key][0].dtype), dtype)


def unpack(batch: Batch, request: Request, reader: Reader, rank: int) -> Direction:
    """The results for this rank, from a message: stacks of tensors and of numbers."""
    count, blocks, dtype = batch.size, batch.blocks[rank], request.dtype
    tensors = reader.next_stack(count, blocks["p"].shape).to(dtype)
    shape, numbers = request.rule.figure_shape(batch.shape), request.dtype_of_figures
    figures = {key: reader.next_numbers(count, shape, numbers) for key in request.rule.FIGURES}
    if not request.changes:
        factors = {key: [entries[i] for i in batch.members] for key, entries in request.factors.items()}
        return Direction(tensors, figures, factors)
    state = {key: reader.next_stack(count, blocks[key].shape).to(dtype) for key in request.matrices}
    for key in request.norms:
        norm = request.factors[key][0]
        state[key] = reader.next_numbers(count, tuple(norm.shape), norm.dtype)
    return Direction(tensors, figures, state)


def size_answered(batch: Batch, request: Request, dtype: torch.dtype, rank: int) -> int:
    """How many elements of a message of this dtype these pieces take."""
    rule, blocks = request.rule, batch.blocks[rank]
    size = blocks["p"].size
    size += len(rule.FIGURES) * count_words(request.dtype_of_figures, dtype) * math.prod(rule.figure_shape(batch.shape))
    if request.changes:
        size += sum(blocks[key].size for key in request.matrices)
        norms = [request.factors[key][0] for key in request.norms]
        size += sum(norm.numel() * count_words(norm.dtype, dtype) for norm in norms)
    return batch.size * size


def count_words(numbers: torch.dtype, dtype: torch.dtype) -> int:
    """How many elements of a message of this dtype each of these numbers takes, which keep all their digits."""
    return max(1, numbers.itemsize // dtype.itemsize)


def in_words(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    return numbers if count_words(numbers.dtype, dtype) == 1 else numbers.contiguous().view(-1).view(dtype)
