"""What messages between owners and other ranks consist of: flat pieces, all in one dtype.

A piece has a row for each tensor of a batch. Figures and norms keep all their digits, however narrow the message is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.torch.sharding.layouts import Block
from thalweg.torch.sharding.requests import Batch, BatchResults, Request


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
    batch: Batch, request: Request, results: BatchResults, dtype: torch.dtype, blocks: Mapping[str, Block] | None = None
) -> Iterator[Tensor]:
    """The results for a rank, as pieces of a message.

    dtype: that of the message. blocks: what the rank gets of each tensor; None: all.
    """

    def cut(key: str, tensors: Tensor | Sequence[Tensor]) -> Tensor:
        return stack_blocks(tensors, None if blocks is None else blocks[key])

    yield cut("p", results.tensors)
    yield from (in_words(results.figures[key], dtype) for key in request.rule.FIGURES)
    if request.changes:
        yield from (cut(key, results.factors[key]) for key in request.matrices)
        for key in request.norms:
            norm = stack_blocks(results.factors[key], None).to(request.factors[key][0].dtype)
            yield norm.contiguous().view(dtype) if norm.itemsize > dtype.itemsize else norm


def unpack(batch: Batch, request: Request, reader: Reader, rank: int) -> BatchResults:
    """The results for this rank, from a message."""
    count, blocks, dtype = batch.size, batch.blocks[rank], request.dtype
    tensors = reader.next_stack(count, blocks["p"].shape).to(dtype)
    shape, figures = request.rule.figure_shape(batch.shape), {}
    for key in request.rule.FIGURES:
        sent = reader.next(count, words(reader.message.dtype) * math.prod(shape))
        figures[key] = from_words(sent, dtype).reshape(count, *shape)
    factors: dict[str, Tensor | Sequence[Tensor]] = {}
    if not request.changes:
        factors = {key: [entries[i] for i in batch.members] for key, entries in request.factors.items()}
        return BatchResults(tensors, figures, factors)
    for key in request.matrices:
        factors[key] = reader.next_stack(count, blocks[key].shape).to(dtype)
    for key in request.norms:
        norm = request.factors[key][0]
        sent = reader.next(count, norm_size(norm, reader.message.dtype))
        read = sent.clone().view(norm.dtype) if norm.itemsize > sent.itemsize else sent.to(norm.dtype)
        factors[key] = read.reshape(count, *norm.shape)
    return BatchResults(tensors, figures, factors)


def size_answered(batch: Batch, request: Request, dtype: torch.dtype, rank: int) -> int:
    """How many elements of a message of this dtype these pieces take."""
    rule, blocks = request.rule, batch.blocks[rank]
    size = blocks["p"].size
    size += len(rule.FIGURES) * words(dtype) * math.prod(rule.figure_shape(batch.shape))
    if request.changes:
        size += sum(blocks[key].size for key in request.matrices)
        size += sum(norm_size(request.factors[key][0], dtype) for key in request.norms)
    return batch.size * size


def norm_size(norm: Tensor, dtype: torch.dtype) -> int:
    return norm.numel() * max(1, norm.itemsize // dtype.itemsize)


def words(dtype: torch.dtype) -> int:
    """How many elements of a message each figure takes: figures keep at least the digits of float32."""
    return 2 if dtype.itemsize == 2 else 1


def in_words(figures: Tensor, dtype: torch.dtype) -> Tensor:
    return figures.float().contiguous().view(-1).view(dtype) if words(dtype) == 2 else figures


def from_words(sent: Tensor, dtype: torch.dtype) -> Tensor:
    """Figures from a message, in the precision of the arithmetic. dtype: of the tensors they belong to."""
    if words(sent.dtype) == 2:
        return sent.clone().view(torch.float32)
    return sent.to(torch.float32 if words(dtype) == 2 else dtype)
