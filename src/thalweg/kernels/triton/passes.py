"""The passes of a rule over many tensors, and what happens between them: sums, decisions, the guard.

measure     reads everything once, one partial sum a chunk
add up      partial sums to one row of totals a tensor; where tensors are sharded over ranks, totals are summed
decide      from totals to what each tensor is scaled by, all tensors at once
rehearse    under a guard alone: would anything that is to be written not be finite?
settle      whether each parameter is stepped; its count goes on
write       writes parameters and state
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from thalweg.arrays import Axes, Shape
from thalweg.codecs import grouping
from thalweg.kernels.triton.cuts import MEASURING, STEPPING, cut_to_measure, cut_to_step, matrices_of
from thalweg.kernels.triton.loading import kernels_for
from thalweg.kernels.triton.memory import Stored
from thalweg.kernels.triton.print import OWN_FIGURES
from thalweg.kernels.triton.rows import Operand, Tensor
from thalweg.kernels.triton.stages import DECIDED, MEASURE, REHEARSE, WRITE, keep_kernel, settle_kernel
from thalweg.kernels.triton.statistics import COMPUTED, Statistics
from thalweg.kernels.triton.tables import ALIGNMENT, Chunks, Tables, add_up
from thalweg.kernels.triton.tiles import Grid
from thalweg.programs.host import function_of, options_of
from thalweg.programs.trace import GRADIENT, PARAMETER, example_of
from thalweg.rules import Rule
from thalweg.rules.rule import stand_in
from thalweg.settings import Handling
from thalweg.storage import RECORD

NARROW = (tl.bfloat16, tl.float16)


def dtype_of(dtype: Any) -> Any:
    """A framework's dtype in Triton's words."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def kind_of(value: Any) -> Hashable:
    """What Triton would compile for, of an argument that changes from step to step."""
    return (value.dtype, value.data_ptr() % 16 == 0) if hasattr(value, "data_ptr") else value is None


class Step(NamedTuple):
    """What changes from step to step, all of it without a wait: tensors are read on the device."""

    lr: float | Tensor | None
    lr_scale: float | Tensor = 1.0
    #: Multiplies all gradients.
    grad_scale: Tensor | None = None
    #: False leaves everything as it was.
    allowed: Tensor | None = None


class Sum(NamedTuple):
    """Sums over what is here of all tensors of a list, to be completed over ranks, in place."""

    tensor: Tensor
    #: Over which axes of the parameters they go.
    axes: Axes


def group_of(operand: Operand, stacked_axes: int) -> int:
    """How many neighbours share a scale, of those that are codes; all operands of one kind are grouped alike."""
    groups = grouping(whole_of(operand), stacked_axes)
    return 1 if groups is None or all(scales is None for scales in operand.scales) else groups.size


def whole_of(operand: Operand) -> Shape:
    """The shape of the whole parameter, of which this may be a part."""
    return operand.shape or tuple(operand.p.shape)


def counts_of(operand: Operand, stacked_axes: int, axes: tuple[int, int] | None) -> tuple[int, int, int]:
    """How many elements, rows and columns the whole tensor has, by which means are divided: of nothing, they are 0."""
    shape = whole_of(operand)
    rows, columns = (1, 1) if axes is None else (max(1, shape[axis]) for axis in axes)
    return max(1, math.prod(shape[stacked_axes:])), rows, columns


def stored_as(operand: Operand, g: Tensor, keys: Sequence[str]) -> tuple[tuple[Stored, ...], dict[str, Any]]:
    """How p, g, each entry and the record are stored; and the dtypes of entries."""
    entries = {key: entry for key, entry in zip(keys, operand.entries, strict=True) if entry is not None}
    tensors = {PARAMETER: operand.p, GRADIENT: g, **entries}
    if operand.record is not None:
        tensors[RECORD] = operand.record
    stored = tuple(Stored(key, x.element_size(), dtype_of(x.dtype) == tl.float32) for key, x in tensors.items())
    return stored, {key: dtype_of(entry.dtype) for key, entry in entries.items()}


class Passes:
    """A rule's passes over one list of operands, with tables and scratch memory that are kept between steps."""

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
        uploads: Any,
        compiled: Any,
        counted: bool = True,
    ) -> None:
        """rated: whether there is an lr. counted: whether parameters have counts, which go on.

        uploads, compiled: make memory, and launch kernels.
        """
        self.rule, self.handling, stacked = rule, handling, rule.stacked_axes
        self.guarded, random = handling.on_nonfinite != "propagate", handling.state_rounding == "stochastic"
        stored, dtypes = stored_as(operands[0], grads[0], keys)
        # of fewer axes than any has, a matrix cannot be told from a tensor
        example = example_of(rule, max(map(whole_of, operands), key=len))
        kernels = kernels_for(stand_in(rule), example, stored, self.guarded, sharded, rated, random)
        self.printed, self.kernels = kernels
        printed, self.stored, self.last = self.printed, list(dtypes.values()), self.printed.last
        self.p_dtype, self.g_dtype = dtype_of(operands[0].p.dtype), dtype_of(grads[0].dtype)
        self.spread = any(operand.width for operand in operands)
        self.group = group_of(operands[0], stacked)
        self.tables = Tables(operands, grads, list(dtypes), stacked, handling.seed, uploads)
        self.uploads, self.compiled, self.counted = uploads, compiled, counted
        rows, axes, slices = self.tables.count, printed.axes, self.tables.slices
        self.numbers_of = function_of(printed.numbers)
        self.options = uploads.table(self.numbers())
        nested = [(operand,) * count for operand, count in zip(operands, slices, strict=True)]
        of_rows = list(itertools.chain.from_iterable(nested))
        counts = [counts_of(operand, stacked, axes) for operand in of_rows]
        self.counts = uploads.table(array("f", itertools.chain.from_iterable(counts)), 3)
        #: What passes go through, those that sum rows and columns, and all others; and what is kept for these.
        self.measuring: Any = None
        self.statistics: Any = None
        if axes is None:
            self.stepping: Any = Chunks(self.tables.sizes, printed.blocks, uploads)
        else:
            shapes = [tuple(operand.p.shape[stacked:]) for operand in of_rows]
            seen = [matrices_of(shape, axes[0] - stacked, axes[1] - stacked) for shape in shapes]
            vector = ALIGNMENT // min(entry.bytes for entry in stored if printed.is_large(entry.key))
            cuts = cut_to_measure(seen, vector)
            self.statistics = Statistics(printed.statistics, cuts, uploads)
            self.measuring = Grid(cuts, vector, self.statistics, uploads, MEASURING.warps)
            cuts = cut_to_step(seen)
            self.stepping = Grid(cuts, vector, self.statistics, uploads, STEPPING.warps)
        sums = max(1, printed.begins[-1])
        self.partials = uploads.empty((sums, self.stepping.count))
        self.totals, self.failures = uploads.empty((rows, sums)), uploads.empty((rows, 1))
        self.figures = uploads.empty((OWN_FIGURES + printed.figures, rows))
        #: Of what the state has one number of for each tensor: (entry, figure).
        self.scalars = uploads.table(array("i", itertools.chain(*printed.scalars)), 2) if printed.scalars else None
        self.finite = uploads.empty((len(operands),), "bool")
        self.operand_begins = uploads.table(array("i", itertools.accumulate(slices, initial=0)))
        #: Of each pass: where its programs leave sums of tensors, and what these are added up to. Made once: views take
        #: time. Then what is to be completed over ranks.
        ends = itertools.pairwise(printed.begins)
        self.places = [(self.partials[begin:end], self.totals[:, begin:end]) for begin, end in ends]
        self.sums = self.sums_of_passes()
        #: By pass: blocks of rows, columns and matrices for which something is computed after it; and those that a
        #: guard lets be written.
        self.blocks = [self.statistics.blocks(kinds) if kinds else () for kinds in printed.between]
        self.kept_blocks = self.statistics.blocks(printed.guarded_kinds) if printed.guarded_kinds else ()

    def sums_of_passes(self) -> list[list[Sum]]:
        """Of each pass the sums that are to be completed over ranks, with the axes that they go over."""
        sums, gathered = [], iter(self.statistics.totals if self.statistics is not None else ())
        for number, values in enumerate(self.printed.sums):
            if self.printed.gathers(number):
                over = [tuple(sorted(set(value.axes) & value.args[0].extent)) for value in values]
                sums.append([Sum(next(gathered), axes) for axes in over])
            else:
                sums.append([Sum(self.places[number][1], None)] if values else [])
        return sums

    @property
    def device(self) -> Any:
        return self.uploads.device

    def numbers(self) -> array[float]:
        """The options of the rule as kernels read them."""
        sign = -1.0 if self.handling.maximize else 1.0
        return array("f", [sign, *self.numbers_of(options_of(self.rule))])

    def follow(self, rule: Rule) -> None:
        """Take other numbers of the same rule, as schedulers write them."""
        if rule is not self.rule:
            self.rule = rule
            self.uploads.refill(self.options, self.numbers())

    # ---- one step

    def prepare(self, step: Step) -> None:
        """Compile what a step launches, before its first launch."""
        with self.compiled.preparing(self.device):
            for _ in self.measure(step):
                pass
            self.write(step)

    def measure(self, step: Step) -> Iterator[list[Sum]]:
        """All that comes before writing. Gives sums that may have to be completed over ranks, and goes on from them."""
        for number in range(self.last):
            self.go(step, number, MEASURE)
            self.add_up(number)
            if self.sums[number]:
                yield self.sums[number]
            self.compute_after(step, number)
        if self.guarded:
            if not self.last:  # nothing was measured: whether steps are finite follows from nothing
                self.compute_after(step, 0)
            self.go(step, self.last, REHEARSE)
            add_up(self.compiled, self.partials[:1], self.stepping.begins, self.failures)
            self.keep(step, REHEARSE)
            yield [Sum(self.failures, None)]
        if self.last or self.guarded:
            self.settle(step, counts=self.handling.on_nonfinite != "raise")  # of which nothing may be seen if it raises

    def write(self, step: Step, *, observed: bool = True) -> None:
        """Write what was measured; under a guard, nothing of a parameter that would not be finite.

        observed: figures that people alone look at are made too.
        """
        if self.handling.on_nonfinite == "raise":
            self.settle(step, counts=True)
        self.go(step, self.last, WRITE)
        self.keep(step, WRITE)
        if self.printed.late or observed:
            self.add_up(self.last)
            self.compute_after(step, self.last)
        self.keep_numbers(step)
        if not self.last and not self.guarded:  # the only pass has read the number of the step
            self.settle(step, counts=True)

    def go(self, step: Step, number: int, stage: int) -> None:
        """One pass over all chunks or tiles."""
        tables, grid = self.tables, self.measuring if self.printed.gathers(number) else self.stepping
        if not grid.count:
            return
        aligned = tables.aligned and tables.grads_aligned
        # forth and back, in turns: a rehearsal is one more
        turns = number + (stage == WRITE and self.guarded)
        self.compiled.run(
            self.kernels[f"pass_{number}"],
            (grid.count,),
            (
                tables.rows,
                tables.gradients,
                *grid.given,
                self.options,
                self.figures,
                self.partials,
                step.grad_scale,
                step.allowed,
                step.lr,
                step.lr_scale,
                tables.count,
                grid.count,
            ),
            lambda: dict(
                STAGE=stage,
                SCALED=step.grad_scale is not None or self.handling.maximize,
                ALLOWED=step.allowed is not None,
                GUARDED=self.guarded,
                STOCHASTIC=self.handling.rounding == "stochastic" and self.p_dtype in NARROW,
                SPREAD=self.spread,
                P_DTYPE=self.p_dtype,
                G_DTYPE=self.g_dtype,
                GROUP=self.group,
                BACKWARDS=turns % 2 == 1,
                **grid.constants(aligned),
                **self.dtypes(),
            ),
            warps=grid.warps,
            key=(number, stage, aligned, *map(kind_of, step)),
        )

    def add_up(self, number: int) -> None:
        if self.printed.gathers(number):
            self.statistics.add_up(self.compiled, number)
        elif self.sums[number]:
            partials, totals = self.places[number]
            add_up(self.compiled, partials, self.stepping.begins, totals)

    def compute_after(self, step: Step, number: int) -> None:
        """What follows from the sums of a pass, for rows, columns, matrices and tensors."""
        tables, own = self.tables, self.statistics
        tensors, sums = (None, None) if own is None else (own.tensors, own.sums)
        if len(blocks := self.blocks[number]):
            self.compiled.run(
                self.kernels[f"between_{number}"],
                (len(blocks),),
                (
                    tables.rows,
                    self.counts,
                    self.options,
                    tensors,
                    blocks,
                    sums,
                    self.totals,
                    step.allowed,
                    step.lr,
                    step.lr_scale,
                ),
                lambda: dict(ALLOWED=step.allowed is not None, **self.dtypes(), BLOCK=COMPUTED),
                warps=4,
                key=(kind_of(step.allowed), *map(kind_of, step[:2])),
            )
        if number in self.printed.decisions and tables.count:
            self.compiled.run(
                self.kernels[f"decide_{number}"],
                (triton.cdiv(tables.count, DECIDED),),
                (
                    tables.rows,
                    self.counts,
                    self.options,
                    tensors,
                    sums,
                    self.totals,
                    self.figures,
                    step.lr,
                    step.lr_scale,
                    tables.count,
                ),
                lambda: dict(BLOCK=DECIDED),
                warps=4,
                key=tuple(map(kind_of, step[:2])),
            )

    def settle(self, step: Step, *, counts: bool) -> None:
        if not (self.counted or self.guarded):
            return
        counts = counts and self.counted
        self.compiled.run(
            settle_kernel,
            (len(self.tables.operands),),
            (
                self.tables.rows,
                self.operand_begins,
                self.figures,
                self.failures,
                step.allowed,
                self.finite,
                self.tables.count,
            ),
            lambda: dict(GUARDED=self.guarded, ALLOWED=step.allowed is not None, COUNTS=counts),
            warps=1,
            key=(counts, kind_of(step.allowed)),
        )

    def keep(self, step: Step, stage: int) -> None:
        """Under a guard: write what rows and columns have now, or find out whether that can be stored."""
        overflows = any(dtype == tl.float16 for dtype in self.stored)
        if not len(self.kept_blocks) or (stage == REHEARSE and not overflows):
            return
        self.compiled.run(
            self.kernels["keep"],
            (len(self.kept_blocks),),
            (
                self.tables.rows,
                self.statistics.tensors,
                self.kept_blocks,
                self.statistics.sums,
                self.figures,
                self.failures,
                step.allowed,
                self.tables.count,
            ),
            lambda: dict(STAGE=stage, ALLOWED=step.allowed is not None, GUARDED=True, **self.dtypes(), BLOCK=COMPUTED),
            warps=4,
            key=(stage, kind_of(step.allowed)),
        )

    def keep_numbers(self, step: Step) -> None:
        """Write the entries that are one number for each tensor, after all kernels have read the old ones."""
        if self.scalars is not None and self.tables.count:
            allowed, count = step.allowed is not None, len(self.scalars)
            self.compiled.run(
                keep_kernel,
                (self.tables.count,),
                (self.tables.rows, self.figures, self.scalars, step.allowed, self.tables.count),
                lambda: dict(KEPT=count, ALLOWED=allowed, GUARDED=self.guarded),
                warps=1,
                key=kind_of(step.allowed),
            )

    def dtypes(self) -> dict[str, Any]:
        return {f"S{i}_DTYPE": dtype for i, dtype in enumerate(self.stored)}

    def stats(self) -> dict[str, Tensor]:
        """What users may look at, by row; the next step writes over it."""
        return {
            name: self.figures[value]
            if isinstance(value, int)
            else self.figures.new_full(self.figures.shape[1:], value)
            for name, value in self.printed.stats.items()
        }
