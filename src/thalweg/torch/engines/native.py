"""Stepping CPU tensors by native code."""

from __future__ import annotations

import functools
import itertools
import operator
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.cpu.library import borrow_openmp, is_here
from thalweg.kernels.cpu.operands import operand_of
from thalweg.kernels.cpu.tables import (
    END,
    MEASURE,
    REHEARSE,
    WRITE,
    Counts,
    Figures,
    GradientSquares,
    Operand,
    Options,
    Tables,
)
from thalweg.kernels.threads import count_threads, num_threads
from thalweg.torch.engines.admission import is_dense
from thalweg.torch.engines.memory import are_the_same, gradients_like, stage_shards
from thalweg.torch.engines.protocol import Bucket, Foreseen, Statistics
from thalweg.torch.params.checks import NAMES
from thalweg.torch.sharding.collectives import Computation, Question, summed

IS_CPU = operator.attrgetter("is_cpu")
#: What a thread needs for itself.
BYTES_OF_THREAD = 2**16


class Native:
    """The native engine of one optimizer. Nothing of it outlives a run."""

    def lay_out(self, buckets: Sequence[Bucket]) -> NativeRun:
        return NativeRun(buckets)

    def count_temporaries(self, params: Sequence[Foreseen]) -> int:
        return BYTES_OF_THREAD * num_threads(torch.get_num_threads) + sum(p.table_bytes for p in params)

    def forget(self) -> None:
        pass


class NativeRun:
    """Buckets laid out in tables, in which only gradients move from step to step."""

    measures_gradients, recorded = False, 0

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        borrow_torch_threads()
        self.sharded = any(bucket.parts for bucket in buckets)
        #: Shards that are not contiguous, with the copies that are stepped in their place.
        self.staged: list[tuple[Tensor, Tensor]] = []
        operands: list[Operand] = []
        #: What is stepped: parameters, or those copies. Gradients have to lie like them.
        self.stepped: list[Tensor] = []
        for group, bucket in enumerate(buckets):
            stepped, pairs = stage_shards(bucket) if bucket.parts else (bucket, [])
            self.staged += pairs
            self.stepped += stepped.params
            operands += operands_of(stepped, group)
        self.grads: Sequence[Tensor] = ()
        self.tables = Tables(operands, list(map(options_of, buckets)))
        #: Of all parameters, in the order of the buckets.
        self.params = [p for bucket in buckets for p in bucket.params]
        grads = [g for bucket in buckets for g in bucket.grads]
        self.contiguous = all(map(Tensor.is_contiguous, self.stepped))
        #: Whether gradients are read where they are, if they are stored like these.
        self.in_place = are_the_same(gradients_like(self.stepped, grads, self.contiguous), grads)
        self.names = [name for bucket in buckets for name in bucket.names]
        self.counts = Counts([s["step"].data_ptr() for bucket in buckets for s in bucket.states])
        self.num_threads = count_threads(torch.get_num_threads)
        self.last = LastStep()
        self.statistics: Statistics = {name: functools.partial(self.last.read, i) for i, name in enumerate(self.names)}
        #: For each parameter whether all of its step is finite and allowed; None if no guard asks for it.
        self.finite: list[bool] | None = None
        #: Whether a GradScaler forbids the step. Without a guard, passes that measure may write state.
        self.forbidden = False

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        self.buckets, self.finite = buckets, None
        addresses = addresses_in(buckets) if self.in_place else None
        if addresses is None:
            #: Kept until they have been read: some are copies.
            self.grads = gradients_like(self.stepped, [g for bucket in buckets for g in bucket.grads], self.contiguous)
            addresses = array("Q", map(Tensor.data_ptr, self.grads))
        for tensor, copy in self.staged:
            copy.copy_(tensor)
        self.tables.point(addresses)
        self.tables.fill(list(map(options_of, buckets)), self.num_threads())

    def measure(self, on_nonfinite: str) -> Iterator[Computation]:
        allowed = not [bucket for bucket in self.buckets if bucket.allowed is not None and not bucket.allowed]
        self.forbidden = not allowed and on_nonfinite == "propagate"
        if self.forbidden:
            return
        if self.sharded:
            yield self.measure_shards()
        elif on_nonfinite != "propagate":
            self.tables.run(MEASURE, WRITE)
            self.finite = [allowed and fine for fine in self.tables.finite()]

    def measure_shards(self) -> Computation:
        for number in range(self.tables.rounds):
            self.tables.run(number, number + 1)
            yield from self.complete(number)

    def complete(self, number: int) -> Computation:
        """Make the local sums of a pass those of whole parameters."""
        registers = torch.frombuffer(self.tables.registers, dtype=torch.float64).view(-1, self.tables.width)
        asked, places, first = [], [], 0
        for bucket in self.buckets:
            begin, columns = self.tables.spans[first].start, self.tables.places_of_sums(first, number)
            rows, first = slice(begin, begin + len(bucket.params)), first + len(bucket.params)
            if bucket.parts and columns:
                wide = torch.float64 if bucket.params[0].dtype == torch.float64 else torch.float32
                places.append((rows, columns))
                asked.append((registers[rows, columns].to(wide), bucket.parts[0].across(None)))
        for (rows, columns), whole in zip(places, (yield Question(summed, asked)), strict=True):
            registers[rows, columns] = whole.double()

    def nonfinite(self) -> list[str]:
        finite = self.finite or [True] * len(self.names)
        return [name for name, fine in zip(self.names, finite, strict=True) if not fine]

    def write(self) -> Statistics:
        if self.forbidden:
            return {}
        # what was saved for a backward pass is no longer what it was; told before the step, which empties the cache
        torch.autograd.graph.increment_version(self.params)
        self.counts.advance(self.finite)
        if self.sharded:
            self.tables.run(REHEARSE, END)
        elif self.finite is None:
            self.tables.run(MEASURE, END)
        else:
            self.tables.skip([not fine for fine in self.finite])
            self.tables.run(WRITE, END)
        for tensor, copy in self.staged:
            tensor.copy_(copy)
        self.last.figures = self.tables.figures()
        self.last.rates = [(bucket.rate, len(bucket.names)) for bucket in self.buckets]
        return self.statistics

    def release(self, *, taken: bool) -> None:
        self.buckets, self.grads = (), []


class LastStep:
    """Statistics of the last step of a run; they keep no parameter alive."""

    figures: Figures
    #: Of each bucket, with the number of its parameters.
    rates: Sequence[tuple[dict[str, Any], int]] = ()

    def read(self, index: int) -> dict[str, Any]:
        ends = itertools.accumulate(count for _, count in self.rates)
        rate = next(rate for (rate, _), end in zip(self.rates, ends, strict=True) if index < end)
        return {**rate, **self.figures.read(index, lambda v, s: torch.tensor(v, dtype=torch.float64).reshape(s))}


def addresses_in(buckets: Sequence[Bucket]) -> array[int] | None:
    """Where all gradients are, if every bucket knows it."""
    if len(buckets) == 1:
        return buckets[0].addresses
    known = [bucket.addresses for bucket in buckets if bucket.addresses is not None]
    return functools.reduce(operator.add, known) if len(known) == len(buckets) else None


def options_of(bucket: Bucket) -> Options:
    assert bucket.t is not None
    setting = bucket.setting
    return Options(
        setting.rule_at(bucket.t),
        setting.handling,
        bucket.t,
        None if bucket.lr is None else float(bucket.lr),
        bucket.lr_scale,
        None if bucket.grad_scale is None else float(bucket.grad_scale),
        setting.rule,
    )


def operands_of(bucket: Bucket, group: int) -> Iterator[Operand]:
    """The parameters of a bucket as native code is shown them; gradients come later."""
    shards: Sequence[tuple[int, Any]] = [(part.position, part.shape) for part in bucket.parts]
    g = NAMES[bucket.grads[0].dtype]
    for name, p, s, (position, whole) in zip(
        *(bucket.names, bucket.params, bucket.states), shards or [(0, None)] * len(bucket.names), strict=True
    ):
        rule, shape = bucket.setting.rule, tuple(p.shape)
        yield operand_of(rule, name, shape, p, g, s, place, group, position=position, whole=whole)


def place(x: Tensor) -> tuple[int, str]:
    return x.data_ptr(), str(x.dtype).removeprefix("torch.")


def borrow_torch_threads() -> None:
    home = Path(torch.__file__).parent
    borrow_openmp((str(home), str(home.with_name("torch.libs"))))


def squares_for(gradients: Sequence[Tensor]) -> GradientSquares | None:
    """What sums the squares of gradients that are stored like these; None if native code cannot."""
    if not is_here() or not set(map(type, gradients)) <= {Tensor} or not all(map(IS_CPU, gradients)):
        return None
    dense = all(map(Tensor.is_contiguous, gradients)) or all(map(is_dense, gradients))
    if not dense or any(map(Tensor.is_neg, gradients)):
        return None
    borrow_torch_threads()
    return GradientSquares([(NAMES[g.dtype], g.numel()) for g in gradients])
