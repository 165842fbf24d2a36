"""The passes of a rule over many tensors, and what happens between them: sums, decisions, the guard.

measure     reads everything once, and each program leaves its part of all sums
add up      these parts; where tensors are sharded over ranks, their sums are summed
compute     what follows from sums, for each tensor, row, column and matrix
rehearse    under a guard alone: would anything that is to be written not be finite?
settle      whether each parameter is stepped; its count goes on
write       writes parameters and state
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import triton.language as tl

from thalweg.arrays import Axes, Shape
from thalweg.codecs import grouping
from thalweg.kernels.triton.blocks import Grid, cut_into_runs, cut_to_measure, cut_to_step, matrices_of
from thalweg.kernels.triton.loading import kernels_for
from thalweg.kernels.triton.memory import Stored
from thalweg.kernels.triton.print import OWN_FIGURES
from thalweg.kernels.triton.rows import Operand, Tensor
from thalweg.kernels.triton.stages import MEASURE, REHEARSE, WRITE, settle_kernel
from thalweg.kernels.triton.sums import COMPUTED, Sums
from thalweg.kernels.triton.tables import ALIGNMENT, Tables
from thalweg.programs.host import function_of, options_of
from thalweg.programs.trace import GRADIENT, PARAMETER, example_of
from thalweg.rules import Rule
from thalweg.rules.rule import stand_in
from thalweg.settings import Numerics
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
        numerics: Numerics,
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
        self.rule, self.numerics, stacked = rule, numerics, rule.stacked_axes
        self.guarded, random = numerics.on_nonfinite != "propagate", numerics.state_rounding == "stochastic"
        stored, dtypes = stored_as(operands[0], grads[0], keys)
        # of fewer axes than any has, a matrix cannot be told from a tensor
        example = example_of(rule, max(map(whole_of, operands), key=len))
        kernels = kernels_for(stand_in(rule), example, stored, self.guarded, sharded, rated, random)
        self.printed, self.kernels = kernels
        printed, self.stored, self.last = self.printed, list(dtypes.values()), self.printed.last
        self.p_dtype, self.g_dtype = dtype_of(operands[0].p.dtype), dtype_of(grads[0].dtype)
        self.spread = any(operand.width for operand in operands)
        self.group = group_of(operands[0], stacked)
        self.tables = Tables(operands, grads, list(dtypes), stacked, numerics.seed, uploads)
        self.uploads, self.compiled, self.counted = uploads, compiled, counted
        rows, axes, slices = self.tables.count, printed.axes, self.tables.slices
        self.numbers_of = function_of(printed.numbers)
        self.options = uploads.table(self.numbers())
        nested = [(operand,) * count for operand, count in zip(operands, slices, strict=True)]
        of_rows = list(itertools.chain.from_iterable(nested))
        counts = [counts_of(operand, stacked, axes) for operand in of_rows]
        self.counts = uploads.table(array("f", itertools.chain.from_iterable(counts)), 3)
        #: What passes go through, those that sum rows and columns, and all others.
        steps, measures = cut_into_runs(self.tables.sizes, printed.blocks), None
        large = [entry.bytes for entry in stored if printed.is_large(entry.key)]
        vector = ALIGNMENT // min(large)
        if axes is not None:
            shapes = [tuple(operand.p.shape[stacked:]) for operand in of_rows]
            seen = [matrices_of(shape, axes[0] - stacked, axes[1] - stacked) for shape in shapes]
            steps, measures = cut_to_step(seen), cut_to_measure(seen, vector)
        self.stepping = self.measuring = Grid(steps, uploads, is_summed=False, vector=vector)
        if measures is not None:
            self.measuring = Grid(measures, uploads, is_summed=True, vector=vector)
        grids = {number: self.grid(number) for number in range(self.last + 1)}
        cuts = list(zip(measures or steps, steps, strict=True))
        #: All sums, and what is kept of them; that of failures is what a rehearsal finds.
        self.sums = Sums(printed.statistics, {**grids, self.last + 1: self.stepping}, cuts, uploads)
        self.failures = self.sums.totals[printed.places[None]]
        self.shared = [self.sums_of(number) for number in range(self.last + 1)]
        self.figures = uploads.empty((OWN_FIGURES + printed.figures, rows))
        self.finite = uploads.empty((len(operands),), "bool")
        self.operand_begins = uploads.table(array("i", itertools.accumulate(slices, initial=0)))
        #: By pass: blocks of tensors, rows, columns and matrices for which something is computed after it; and those
        #: whose entries are written at the end.
        self.blocks = [self.sums.blocks(kinds) if kinds else () for kinds in printed.between]
        self.kept_blocks = self.sums.blocks(printed.kept_kinds) if printed.kept_kinds else ()

    def grid(self, number: int) -> Grid:
        return self.measuring if self.printed.gathers(number) else self.stepping

    def sums_of(self, number: int) -> list[Sum]:
        """The sums of a pass that are to be completed over ranks, with the axes that they go over."""
        values = [added.value for added in self.printed.sums(number)]
        totals = [self.sums.totals[self.printed.places[value]] for value in values]
        if values and not self.printed.gathers(number):  # which lie side by side
            first, count = self.printed.places[values[0]], self.tables.count
            return [Sum(self.sums.memory[first * count : (first + len(values)) * count], None)]
        axes = [tuple(sorted(set(value.axes) & value.args[0].extent)) for value in values]
        return [Sum(total, over) for total, over in zip(totals, axes, strict=True)]

    @property
    def device(self) -> Any:
        return self.uploads.device

    def numbers(self) -> array[float]:
        """The options of the rule as kernels read them."""
        sign = -1.0 if self.numerics.maximize else 1.0
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
            self.sums.add_up(self.compiled, number)
            if self.shared[number]:
                yield self.shared[number]
            self.compute_after(step, number)
        if self.guarded:
            if not self.last:  # nothing was measured: whether steps are finite follows from nothing
                self.compute_after(step, 0)
            self.go(step, self.last, REHEARSE)
            self.sums.add_up(self.compiled, self.last + 1)
            self.keep(step, REHEARSE)
            yield [Sum(self.failures, None)]
        if self.last or self.guarded:
            self.settle(step, counts=self.numerics.on_nonfinite != "raise")  # of which nothing may be seen if it raises

    def write(self, step: Step, *, observed: bool = True) -> None:
        """Write what was measured; under a guard, nothing of a parameter that would not be finite.

        observed: figures that people alone look at are made too.
        """
        if self.numerics.on_nonfinite == "raise":
            self.settle(step, counts=True)
        self.go(step, self.last, WRITE)
        if self.printed.late or observed:
            self.sums.add_up(self.compiled, self.last)
            self.compute_after(step, self.last)
        self.keep(step, WRITE)  # after all kernels have read what was there
        if not self.last and not self.guarded:  # the only pass has read the number of the step
            self.settle(step, counts=True)

    def go(self, step: Step, number: int, stage: int) -> None:
        """One pass over all pieces."""
        tables, grid = self.tables, self.grid(number)
        if not grid.count:
            return
        aligned = tables.aligned and tables.grads_aligned
        # forth and back, in turns: a rehearsal is one more
        turns = number + (stage == WRITE and self.guarded)
        constants = grid.constants(aligned) | dict(STAGE=stage, BACKWARDS=turns % 2 == 1)
        given = dict(pieces=grid.table, parts=grid.count)
        kernel, key = self.kernels[f"pass_{number}"], (number, stage, aligned)
        self.launch(kernel, grid.count, step, given, constants, warps=grid.warps, key=key)

    def compute_after(self, step: Step, number: int) -> None:
        """What follows from the sums of a pass, for tensors, rows, columns and matrices."""
        if len(blocks := self.blocks[number]):
            kernel = self.kernels[f"between_{number}"]
            self.launch(kernel, len(blocks), step, dict(blocks=blocks), dict(BLOCK=COMPUTED))

    def settle(self, step: Step, *, counts: bool) -> None:
        """Note which parameters are stepped. counts: their counts go on, if they have any."""
        if self.counted or self.guarded:
            constants = dict(COUNTS=counts and self.counted)
            given = dict(operand_begins=self.operand_begins, finite=self.finite)
            self.launch(settle_kernel, len(self.tables.operands), step, given, constants, warps=1, key=counts)

    def keep(self, step: Step, stage: int) -> None:
        """Write what tensors, rows and columns have now that was not written before, or find out whether it can be."""
        overflows = self.guarded and any(dtype == tl.float16 for dtype in self.stored)
        if len(self.kept_blocks) and (stage == WRITE or overflows):
            given, constants = dict(blocks=self.kept_blocks), dict(STAGE=stage, BLOCK=COMPUTED)
            self.launch(self.kernels["keep"], len(self.kept_blocks), step, given, constants, key=stage)

    def launch(
        self,
        kernel: Any,
        programs: int,
        step: Step,
        given: Mapping[str, Any],
        constants: Mapping[str, Any],
        *,
        warps: int = 4,
        key: Hashable = (),
    ) -> None:
        """Launch a kernel with what it names of all that there is. key: what decides of its constants beside a step."""
        named = {
            "rows": self.tables.rows,
            "gradients": self.tables.gradients,
            "tensors": self.sums.tensors,
            "sums": self.sums.memory,
            "partials": self.sums.partials,
            "counts": self.counts,
            "numbers": self.options,
            "figures": self.figures,
            "failures": self.failures,
            "count": self.tables.count,
            **step._asdict(),
            **given,
        }

        def chosen() -> dict[str, Any]:
            every = {
                "SCALED": step.grad_scale is not None or self.numerics.maximize,
                "ALLOWED": step.allowed is not None,
                "GUARDED": self.guarded,
                "STOCHASTIC": self.numerics.rounding == "stochastic" and self.p_dtype in NARROW,
                "SPREAD": self.spread,
                "P_DTYPE": self.p_dtype,
                "G_DTYPE": self.g_dtype,
                "GROUP": self.group,
                **{f"S{i}_DTYPE": dtype for i, dtype in enumerate(self.stored)},
                **constants,
            }
            return {name: every[name] for name in kernel.arg_names if name in every}

        arguments = tuple(named[name] for name in kernel.arg_names if name in named)
        self.compiled.run(kernel, (programs,), arguments, chosen, warps=warps, key=(key, *map(kind_of, step)))

    def stats(self) -> dict[str, Tensor]:
        """What users may look at, by row; the next step writes over it."""
        return {
            name: self.figures[value]
            if isinstance(value, int)
            else self.figures.new_full(self.figures.shape[1:], value)
            for name, value in self.printed.stats.items()
        }
