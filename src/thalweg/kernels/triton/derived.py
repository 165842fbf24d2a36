"""Passes that are made from a rule, over lists of tensors."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import triton
import triton.language as tl

from thalweg.arrays import Shape
from thalweg.kernels.triton.loading import kernels_for
from thalweg.kernels.triton.memory import Stored
from thalweg.kernels.triton.passes import Passes, Step, Sum, dtype_of, kind_of
from thalweg.kernels.triton.rows import Operand, Tensor
from thalweg.kernels.triton.stages import DECIDED, MEASURE, REHEARSE, WARPS, WRITE
from thalweg.kernels.triton.tables import add_up
from thalweg.programs.trace import GRADIENT, PARAMETER, example_of
from thalweg.rules import Rule
from thalweg.rules.rule import stand_in
from thalweg.settings import Handling
from thalweg.storage import RECORD


def whole_of(operand: Operand) -> Shape:
    """The shape of the whole parameter, of which this may be a part."""
    return operand.shape or tuple(operand.p.shape)


def elements_of(operand: Operand, stacked_axes: int) -> int:
    """Elements of the whole tensor, by which means are divided. At least 1, so that a mean of nothing is 0."""
    return max(1, math.prod(whole_of(operand)[stacked_axes:]))


def stored_as(operand: Operand, g: Tensor, keys: Sequence[str]) -> tuple[tuple[Stored, ...], dict[str, Any]]:
    """How p, g, each entry and the record are stored; and the dtypes of entries."""
    entries = {key: entry for key, entry in zip(keys, operand.entries, strict=True) if entry is not None}
    tensors = {PARAMETER: operand.p, GRADIENT: g, **entries}
    if operand.record is not None:
        tensors[RECORD] = operand.record
    stored = tuple(Stored(key, x.element_size(), dtype_of(x.dtype) == tl.float32) for key, x in tensors.items())
    return stored, {key: dtype_of(entry.dtype) for key, entry in entries.items()}


class DerivedPasses(Passes):
    """The passes of a rule whose sums all go over whole tensors, as its schedule has them."""

    def __init__(
        self,
        operands: Sequence[Operand],
        grads: Sequence[Tensor],
        rule: Rule,
        handling: Handling,
        keys: Sequence[str],
        *,
        sharded: bool,
        rated: bool = True,
        **memory: Any,
    ) -> None:
        """memory: what makes it, and launches kernels, as ``Passes`` takes them."""
        stored, dtypes = stored_as(operands[0], grads[0], keys)
        shape, guarded = example_of(rule, whole_of(operands[0])), handling.on_nonfinite != "propagate"
        random = handling.state_rounding == "stochastic"
        self.kernels = kernels_for(stand_in(rule), shape, stored, guarded, sharded, rated, random)
        ends = list(itertools.accumulate(map(len, self.kernels.emitted.sums), initial=0))
        super().__init__(operands, grads, rule, handling, self.kernels.emitted, ends[-1], dtypes, **memory)
        counts = [elements_of(operand, rule.stacked_axes) for operand in operands]
        by_row = [elements for elements, slices in zip(counts, self.tables.slices, strict=True) for _ in range(slices)]
        self.counts = self.uploads.table(array("f", by_row))
        #: Of each pass: where its chunks leave their sums, and the totals of tensors. Made once: views take time.
        self.places = [(self.partials[begin:end], self.totals[:, begin:end]) for begin, end in itertools.pairwise(ends)]
        self.sums = [[Sum(totals, None)] for _, totals in self.places]

    # ---- one step

    def measure(self, step: Step) -> Iterator[list[Sum]]:
        for number in range(self.last):
            self.go(step, number, MEASURE)
            if self.emitted.sums[number]:
                self.add_up(number)
                yield self.sums[number]
            self.decide_after(step, number)
        if self.guarded:
            self.go(step, self.last, REHEARSE)
            add_up(self.compiled, self.partials[:1], self.tables.begins, self.failures)
            yield [Sum(self.failures, None)]
        if self.last or self.guarded:
            self.settle(step, counts=self.handling.on_nonfinite != "raise")  # of which nothing may be seen if it raises

    def write(self, step: Step, *, observed: bool = True) -> None:
        if self.handling.on_nonfinite == "raise":
            self.settle(step, counts=True)
        self.go(step, self.last, WRITE)
        if self.emitted.late or (self.emitted.sums[self.last] and observed):
            if self.emitted.sums[self.last]:
                self.add_up(self.last)
            self.decide_after(step, self.last)
        self.keep_numbers(step)
        if not self.last and not self.guarded:  # the only pass has read the number of the step
            self.settle(step, counts=True)

    def add_up(self, number: int) -> None:
        partials, totals = self.places[number]
        add_up(self.compiled, partials, self.tables.begins, totals)

    def go(self, step: Step, number: int, stage: int) -> None:
        """One pass over all chunks."""
        tables = self.tables
        if not tables.chunk_count:
            return
        aligned = tables.aligned and tables.grads_aligned
        # forth and back, in turns: a rehearsal is one more
        turns = number + (stage == WRITE and self.guarded)
        self.compiled.run(
            self.kernels.passes[number],
            (tables.chunk_count,),
            (
                tables.rows,
                tables.gradients,
                tables.chunks,
                self.options,
                self.figures,
                self.partials,
                step.grad_scale,
                step.allowed,
                step.lr,
                step.lr_scale,
                tables.count,
                tables.chunk_count,
            ),
            lambda: dict(
                **self.flags_of(step, stage),
                BACKWARDS=turns % 2 == 1,
                ALIGNED=aligned,
                CHUNK=self.chunk,
                BLOCK=self.BLOCK,
            ),
            warps=WARPS,
            key=(number, stage, aligned, *map(kind_of, step)),
        )

    def decide_after(self, step: Step, number: int) -> None:
        self.compiled.run(
            self.kernels.decisions[number],
            (triton.cdiv(self.tables.count, DECIDED),),
            (
                self.tables.rows,
                self.counts,
                self.options,
                self.totals,
                self.figures,
                step.lr,
                step.lr_scale,
                self.tables.count,
            ),
            lambda: dict(BLOCK=DECIDED),
            warps=4,
            key=(number, *map(kind_of, step[:2])),
        )
