"""What messages between owners and other ranks consist of: flat pieces, all in one dtype.

Tensors may travel as codes of eight bits. Figures and norms keep all their digits, however narrow the message is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.codecs import CODECS, GROUP, Grouping
from thalweg.rules import Direction
from thalweg.spaces import torch as xp
from thalweg.torch.sharding.collectives import widest
from thalweg.torch.sharding.requests import Request

#: Elements of tensors are coded in groups, of which two fill whole numbers of every dtype.
CODED = Grouping(0, GROUP)


class Format(NamedTuple):
    """How a message is written: in the widest dtype of its tensors, which may be in codes."""

    dtype: torch.dtype
    codes: str | None

    @classmethod
    def of(cls, requests: Sequence[Request], codes: str | None) -> Format:
        return cls(widest([request.dtype for request in requests]), codes)

    def count(self, elements: int) -> int:
        """How many elements of a message a tensor of so many takes."""
        if self.codes is None:
            return elements
        pairs = -(-elements // (2 * GROUP))
        return pairs * 2 * (GROUP + torch.float32.itemsize) // self.dtype.itemsize

    def write(self, x: Tensor) -> Tensor:
        if self.codes is None:
            return x
        flat = torch.nn.functional.pad(x.reshape(-1).float(), (0, -x.numel() % (2 * GROUP)))
        codes, scales = CODECS[self.codes].encode(xp, flat, CODED)
        return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)]).view(self.dtype)

    def read(self, sent: Tensor, shape: Shape) -> Tensor:
        if self.codes is None:
            return sent.reshape(shape)
        found = sent.clone().view(torch.uint8)  # which lies anywhere in a message
        size = found.numel() * GROUP // (GROUP + torch.float32.itemsize)
        codes, scales = found[:size].view(getattr(torch, self.codes)), found[size:].view(torch.float32)
        whole: Tensor = CODECS[self.codes].decode(xp, codes, scales, CODED)
        return whole[: math.prod(shape)].reshape(shape)


class Reader:
    """A flat message, read piece by piece."""

    def __init__(self, message: Tensor, form: Format) -> None:
        self.message, self.form, self.place = message, form, 0

    def next(self, shape: Shape) -> Tensor:
        begin, self.place = self.place, self.place + math.prod(shape)
        return self.message[begin : self.place].reshape(shape)

    def next_tensor(self, shape: Shape) -> Tensor:
        """One that may be in codes."""
        return self.form.read(self.next((self.form.count(math.prod(shape)),)), shape)


# ---- what an owner answers


def pack(request: Request, direction: Direction, form: Format) -> Iterator[Tensor]:
    """The pieces that tell a rank what was made for it."""
    yield form.write(direction.tensor)
    yield from (in_words(direction.figures[key], form.dtype) for key in request.rule.FIGURES)
    if request.changes:
        yield from (direction.state[key] for key in request.matrices)
        for key in request.norms:
            norm = direction.state[key].to(request.factors[key].dtype).reshape(-1)
            yield norm.view(form.dtype) if norm.itemsize > form.dtype.itemsize else norm


def unpack(request: Request, reader: Reader, shapes: Sequence[Shape]) -> Direction:
    """What was made for this rank. shapes: of its shards of the tensor and of the factors."""
    rule, shape = request.rule, request.rule.figure_shape(request.part.shape)
    tensor = reader.next_tensor(shapes[0]).to(request.dtype)
    length = words(reader.form.dtype) * math.prod(shape)
    figures = {key: from_words(reader.next((length,)), request.dtype).reshape(shape) for key in rule.FIGURES}
    if not request.changes:
        return Direction(tensor, figures, dict(request.factors))
    factors = {key: reader.next(own).to(request.dtype) for key, own in zip(request.matrices, shapes[1:], strict=True)}
    for key in request.norms:
        own = request.factors[key]
        sent = reader.next((norm_size(own, reader.form),))
        read = sent.clone().view(own.dtype) if own.itemsize > sent.itemsize else sent.to(own.dtype)
        factors[key] = read.reshape(own.shape)
    return Direction(tensor, figures, factors)


def answer_size(request: Request, shapes: Sequence[Shape], form: Format) -> int:
    """How many elements of a message these pieces take."""
    rule, (shape, *factors) = request.rule, shapes
    size = form.count(math.prod(shape))
    size += len(rule.FIGURES) * words(form.dtype) * math.prod(rule.figure_shape(request.part.shape))
    if request.changes:
        size += sum(map(math.prod, factors)) + sum(norm_size(request.factors[key], form) for key in request.norms)
    return size


def norm_size(norm: Tensor, form: Format) -> int:
    return norm.numel() * max(1, norm.itemsize // form.dtype.itemsize)


def words(dtype: torch.dtype) -> int:
    """How many elements of a message each figure takes: figures keep at least the digits of float32."""
    return 2 if torch.finfo(dtype).bits == 16 else 1


def in_words(figure: Tensor, dtype: torch.dtype) -> Tensor:
    return figure.float().reshape(-1).contiguous().view(dtype) if words(dtype) == 2 else figure.reshape(-1)


def from_words(sent: Tensor, dtype: torch.dtype) -> Tensor:
    """A figure from a message, in the precision of the arithmetic. dtype: of the tensor it belongs to."""
    if words(sent.dtype) == 2:
        return sent.clone().view(torch.float32)
    return sent.to(torch.float32 if words(dtype) == 2 else dtype)
