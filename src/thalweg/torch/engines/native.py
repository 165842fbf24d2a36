"""Stepping CPU tensors by native code."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.cpu.operands import operand_of
from thalweg.kernels.cpu.tables import (
    END,
    MEASURE,
    REHEARSE,
    WRITE,
    Counts,
    Figures,
    Operand,
    Options,
    Tables,
)
from thalweg.kernels.threads import count_threads, num_threads
from thalweg.spaces.sharded import Asked
from thalweg.torch.engines.protocol import Bucket, Engine, say_buckets
from thalweg.torch.engines.squares import borrow_torch_threads
from thalweg.torch.params.checks import NAMES
from thalweg.torch.params.parameter import Param
from thalweg.torch.sharding.stages import Compute, Layout, Reduce, Stage

#: What a thread needs for itself.
BYTES_OF_THREAD = 2**16


class Native(Engine):
    """The native engine of one optimizer. Nothing of it outlives a plan."""

    def lay_out(self, buckets: Sequence[Bucket]) -> list[Layout]:
        return [NativeTables(buckets).layout()]

    def count_temporaries(self, params: Sequence[Param]) -> int:
        return BYTES_OF_THREAD * num_threads(torch.get_num_threads) + sum(p.table_bytes for p in params)


class NativeTables:
    """Buckets laid out in tables, in which only gradients move from step to step."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        borrow_torch_threads()
        self.buckets = buckets
        operands = [operand for group, bucket in enumerate(buckets) for operand in operands_of(bucket, group)]
        self.tables = Tables(operands, list(map(options_of, buckets)))
        #: Of all parameters, in the order of the buckets.
        self.params = [p for bucket in buckets for p in bucket.params]
        self.names = [name for bucket in buckets for name in bucket.names]
        self.counts = Counts([s["step"].data_ptr() for bucket in buckets for s in bucket.states])
        self.num_threads = count_threads(torch.get_num_threads)
        self.last = LastStep()
        #: For each parameter whether all of its step is finite and allowed; None if no guard asks for it.
        self.finite: list[bool] | None = None
        #: Of each bucket of shards, by pass: sums that other ranks complete, and where they are in the registers.
        self.sums: list[tuple[Tensor, Any]] = []

    def layout(self) -> Layout:
        what = say_buckets(self.buckets)
        read, statistics = Compute(f"find {len(self.names)} gradients", self.follow), self.last.read
        if any(bucket.parts for bucket in self.buckets):
            step = [
                *chain.from_iterable(self.shard_pass(number, what) for number in range(self.tables.rounds)),
                Compute(f"last pass: {what}", partial(self.step, REHEARSE), writes=True),
            ]
        elif self.buckets[0].setting.numerics.on_nonfinite == "propagate":
            step = [Compute(f"all passes: {what}", partial(self.step, MEASURE), writes=True)]
        else:
            step = [
                Compute(f"all passes but the last, and a look at that one: {what}", self.measure),
                Compute(f"last pass of what is finite: {what}", self.write, writes=True),
            ]
        return Layout([read], step, {name: partial(statistics, i) for i, name in enumerate(self.names)})

    def follow(self) -> None:
        self.tables.point(functools.reduce(operator.add, [bucket.locate_gradients() for bucket in self.buckets]))
        self.tables.fill(list(map(options_of, self.buckets)), self.num_threads())

    def is_allowed(self) -> bool:
        allowed = self.buckets[0].table.allowed
        return allowed is None or bool(allowed)

    def step(self, first: int) -> None:
        """All passes from this one on."""
        if self.is_allowed():
            self.begin_write()
            self.tables.run(first, END)
            self.end_write()

    def measure(self) -> None:
        self.tables.run(MEASURE, WRITE)
        allowed = self.is_allowed()
        self.finite = [allowed and fine for fine in self.tables.finite()]
        guilty = [name for name, fine in zip(self.names, self.finite, strict=True) if not fine]
        self.buckets[0].table.nonfinite += guilty

    def write(self) -> None:
        assert self.finite is not None
        self.begin_write()
        self.tables.skip([not fine for fine in self.finite])
        self.tables.run(WRITE, END)
        self.end_write()

    def begin_write(self) -> None:
        # what was saved for a backward pass is no longer what it was; told before the step, which empties the cache
        torch.autograd.graph.increment_version(self.params)
        self.counts.advance(self.finite)

    def end_write(self) -> None:
        self.last.figures = self.tables.figures()
        self.last.rates = [(bucket.rate, len(bucket.names)) for bucket in self.buckets]

    # ---- shards: without a guard, passes that measure may write state

    def shard_pass(self, number: int, what: str) -> list[Stage]:
        """A pass, and its sums over ranks."""
        return [
            Compute(f"pass {number}: {what}", partial(self.sum_up, number), writes=True),
            Reduce(f"sums of pass {number}", self.ask, writes=True),
            Compute(f"take the sums of pass {number}", self.take_sums, writes=True),
        ]

    def sum_up(self, number: int) -> None:
        self.sums = []
        if not self.is_allowed():
            return
        self.tables.run(number, number + 1)
        registers, first = self.registers(), 0
        for bucket in self.buckets:
            begin, columns = self.tables.spans[first].start, self.tables.places_of_sums(first, number)
            rows, first = slice(begin, begin + len(bucket.params)), first + len(bucket.params)
            if bucket.parts and columns:
                wide = torch.float64 if bucket.params[0].dtype == torch.float64 else torch.float32
                self.sums.append((registers[rows, columns].to(wide), (rows, columns, bucket.parts[0].across(None))))

    def registers(self) -> Tensor:
        return torch.frombuffer(self.tables.registers, dtype=torch.float64).view(-1, self.tables.width)

    def ask(self) -> list[Asked]:
        return [(partial_sums, groups) for partial_sums, (*_, groups) in self.sums]

    def take_sums(self) -> None:
        """Put the sums of all ranks where the next pass goes on from them."""
        if self.is_allowed():
            registers = self.registers()
            for whole, (rows, columns, _) in self.sums:
                registers[rows, columns] = whole.double()


class LastStep:
    """Statistics of the last step of a run; they keep no parameter alive."""

    figures: Figures | None = None
    #: Of each bucket, with the number of its parameters: as it was then, whatever becomes of an lr that is a tensor.
    rates: Sequence[tuple[dict[str, Any], int]] = ()

    def read(self, index: int) -> dict[str, Any]:
        """The statistics of a parameter; none where no step was taken yet."""
        if self.figures is None:
            return {}
        ends = itertools.accumulate(count for _, count in self.rates)
        rate = next(rate for (rate, _), end in zip(self.rates, ends, strict=True) if index < end)
        return {**rate, **self.figures.read(index, lambda v, s: torch.tensor(v, dtype=torch.float64).reshape(s))}


def options_of(bucket: Bucket) -> Options:
    assert bucket.t is not None
    setting = bucket.setting
    return Options(
        setting.rule_at(bucket.t),
        setting.numerics,
        bucket.t,
        None if bucket.lr is None else float(bucket.lr),
        bucket.lr_scale,
        None if bucket.table.grad_scale is None else float(bucket.table.grad_scale),
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
