"""What messages between owners and other ranks consist of: flat pieces, all in one dtype.

A piece has a row for each tensor of a batch. Tensors may travel as codes of eight bits. Figures and norms keep all
their digits, however narrow the message is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.codecs import CODECS, Grouping
from thalweg.rules.whole import CODED_GROUP, coded_bytes
from thalweg.spaces import torch as xp
from thalweg.torch.sharding.collectives import widest
from thalweg.torch.sharding.layouts import Block
from thalweg.torch.sharding.requests import Batch, Made, Request

CODED = Grouping(1, CODED_GROUP)


class Format(NamedTuple):
    """How a message is written: in the widest dtype of its tensors, which may be in codes."""

    dtype: torch.dtype
    codes: str | None

    @classmethod
    def of(cls, requests: Sequence[Request], codes: str | None) -> Format:
        return cls(widest([request.dtype for request in requests]), codes)

    def count(self, elements: int) -> int:
        """How many elements of a message a tensor of so many takes."""
        return elements if self.codes is None else -(-coded_bytes(elements) // self.dtype.itemsize)

    def write(self, x: Tensor) -> Tensor:
        """A row for each row of x."""
        size = x.shape[1]
        if self.codes is None or not size:
            return x
        wide = torch.nn.functional.pad(x.float(), (0, -size % CODED_GROUP))
        codes, scales = CODECS[self.codes].encode(xp, wide, CODED)
        both = torch.cat([codes[:, :size].view(torch.uint8), scales.view(torch.uint8)], 1)
        return torch.nn.functional.pad(both, (0, -both.shape[1] % self.dtype.itemsize)).view(self.dtype)

    def read(self, rows: Tensor, size: int) -> Tensor:
        if self.codes is None or not size:
            return rows
        sent = rows.view(torch.uint8)
        codes = torch.nn.functional.pad(sent[:, :size].view(getattr(torch, self.codes)), (0, -size % CODED_GROUP))
        scales = sent[:, size : coded_bytes(size)].clone(memory_format=torch.contiguous_format).view(torch.float32)
        whole: Tensor = CODECS[self.codes].decode(xp, codes, scales, CODED)
        return whole[:, :size]


class Reader:
    """A flat message, read piece by piece."""

    def __init__(self, message: Tensor, form: Format) -> None:
        self.message, self.form, self.place = message, form, 0

    def next(self, rows: int, size: int) -> Tensor:
        begin, self.place = self.place, self.place + rows * size
        return self.message[begin : self.place].view(rows, size)

    def next_stack(self, rows: int, shape: Shape, *, coded: bool) -> Tensor:
        """Tensors of one shape. coded: those that may be in codes."""
        size = math.prod(shape)
        found = self.form.read(self.next(rows, self.form.count(size)), size) if coded else self.next(rows, size)
        return found.reshape(rows, *shape)


def stack_blocks(tensors: Tensor | Sequence[Tensor], block: Block | None) -> Tensor:
    """A row for each tensor, or for this block of each."""
    if not isinstance(tensors, Tensor):
        tensors = torch.stack([x if block is None else block.of(x) for x in tensors])
    elif block is not None:
        tensors = tensors[(slice(None), *block.slices)]
    return tensors.reshape(len(tensors), math.prod(tensors.shape[1:]))


# ---- what an owner is shown


def show(batch: Batch, request: Request, form: Format) -> Iterator[Tensor]:
    """The pieces that this rank sends to the owner."""
    for tensors in request.tensors:
        yield form.write(stack_blocks([tensors[i] for i in batch.members], None))
    for key in request.matrices if batch.cold else ():
        yield stack_blocks([request.factors[key][i] for i in batch.members], None)


def size_shown(batch: Batch, request: Request, form: Format, rank: int) -> int:
    """How many elements of a message these pieces of a rank take."""
    blocks = batch.blocks[rank]
    factors = sum(blocks[key].size for key in request.matrices) if batch.cold else 0
    return batch.size * (form.count(blocks["p"].size) * len(request.tensors) + factors)


# ---- what an owner answers


def pack(
    batch: Batch, request: Request, made: Made, form: Format, blocks: Mapping[str, Block] | None = None
) -> Iterator[Tensor]:
    """The pieces that tell a rank what was made for it. blocks: what it gets of each tensor; None: all."""

    def cut(key: str, tensors: Tensor | Sequence[Tensor]) -> Tensor:
        return stack_blocks(tensors, None if blocks is None else blocks[key])

    yield form.write(cut("p", made.tensors))
    yield from (in_words(made.figures[key], form.dtype) for key in request.rule.FIGURES)
    if request.changes:
        yield from (cut(key, made.factors[key]) for key in request.matrices)
        for key in request.norms:
            norm = stack_blocks(made.factors[key], None).to(request.factors[key][0].dtype)
            yield norm.contiguous().view(form.dtype) if norm.itemsize > form.dtype.itemsize else norm


def unpack(batch: Batch, request: Request, reader: Reader, rank: int) -> Made:
    """What was made for this rank."""
    count, blocks, dtype = batch.size, batch.blocks[rank], request.dtype
    tensors = reader.next_stack(count, blocks["p"].shape, coded=True).to(dtype)
    shape, figures = request.rule.figure_shape(batch.shape), {}
    for key in request.rule.FIGURES:
        sent = reader.next(count, words(reader.form.dtype) * math.prod(shape))
        figures[key] = from_words(sent, dtype).reshape(count, *shape)
    factors: dict[str, Tensor | Sequence[Tensor]] = {}
    if not request.changes:
        factors = {key: [own[i] for i in batch.members] for key, own in request.factors.items()}
        return Made(tensors, figures, factors)
    for key in request.matrices:
        factors[key] = reader.next_stack(count, blocks[key].shape, coded=False).to(dtype)
    for key in request.norms:
        own = request.factors[key][0]
        sent = reader.next(count, norm_size(own, reader.form))
        read = sent.clone().view(own.dtype) if own.itemsize > sent.itemsize else sent.to(own.dtype)
        factors[key] = read.reshape(count, *own.shape)
    return Made(tensors, figures, factors)


def size_answered(batch: Batch, request: Request, form: Format, rank: int) -> int:
    """How many elements of a message these pieces take."""
    rule, blocks = request.rule, batch.blocks[rank]
    size = form.count(blocks["p"].size)
    size += len(rule.FIGURES) * words(form.dtype) * math.prod(rule.figure_shape(batch.shape))
    if request.changes:
        size += sum(blocks[key].size for key in request.matrices)
        size += sum(norm_size(request.factors[key][0], form) for key in request.norms)
    return batch.size * size


def norm_size(norm: Tensor, form: Format) -> int:
    return norm.numel() * max(1, norm.itemsize // form.dtype.itemsize)


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
