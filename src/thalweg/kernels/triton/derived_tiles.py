"""Passes over tiles that are made from a rule: of rules that keep rows and columns, or sum over them."""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import triton
import triton.language as tl

from thalweg.arrays import Shape
from thalweg.kernels.triton import statistics as of_statistics
from thalweg.kernels.triton import tiles as of_tiles
from thalweg.kernels.triton.cuts import MEASURING, STEPPING, Limits, cut_to_measure, cut_to_step, matrices_of
from thalweg.kernels.triton.derived import DerivedPasses, elements_of, stored_as, whole_of
from thalweg.kernels.triton.emit_tiles import EmittedTiles, emit_tiles
from thalweg.kernels.triton.loading import loaded, named_in, title_of, traced
from thalweg.kernels.triton.memory import Stored, sizes_of
from thalweg.kernels.triton.passes import Passes, Step, Sum, kind_of
from thalweg.kernels.triton.rows import Operand, Tensor
from thalweg.kernels.triton.stages import DECIDED, MEASURE, REHEARSE, WRITE
from thalweg.kernels.triton.statistics import COMPUTED, Statistics
from thalweg.kernels.triton.tables import ALIGNMENT, add_up
from thalweg.kernels.triton.tiles import Grid
from thalweg.programs.extents import ELEMENT, TENSOR, Kinds, kinds_of
from thalweg.programs.schedule import reductions_before, schedule
from thalweg.programs.trace import example_of
from thalweg.rules import Rule
from thalweg.rules.rule import stand_in
from thalweg.settings import Handling


def passes_for(
    operands: Sequence[Operand],
    grads: Sequence[Tensor],
    rule: Rule,
    handling: Handling,
    keys: Sequence[str],
    *,
    sharded: bool,
    rated: bool = True,
    **memory: Any,
) -> Passes:
    """The passes of a rule over parameters of one kind. rated: whether there is an lr. memory: as Passes takes it."""
    program = traced(stand_in(rule), example_for(operands, rule), rated)
    kind = DerivedPasses if kinds_of(program, rule.stacked_axes).axes is None else TilePasses
    return kind(operands, grads, rule, handling, keys, sharded=sharded, rated=rated, **memory)


def example_for(operands: Sequence[Operand], rule: Rule) -> Shape:
    """A shape of the operands' kind, of as many axes as any: of fewer, a matrix cannot be told from a tensor."""
    return example_of(rule, max(map(whole_of, operands), key=len))


@functools.lru_cache(maxsize=256)
def kernels_for(
    rule: Rule,
    shape: Shape,
    stored: tuple[Stored, ...],
    guarded: bool,
    complete: bool,
    rated: bool,
    random: bool,
) -> tuple[EmittedTiles, Kinds, dict[str, Any]]:
    """What was emitted for tiles, the kinds of its values, and its kernels by name."""
    program = traced(rule, shape, rated)
    kinds = kinds_of(program, rule.stacked_axes)
    size, exact = sizes_of(stored), [entry.key for entry in stored if entry.exact]
    for is_complete in (complete or guarded, True):
        chosen = schedule(program, size, exact=exact, guarded=guarded, complete=is_complete)
        # sums of the last pass may be for people to look at, and then are such that all passes over tiles can make
        over = [(kinds.find(value.args[0]), kinds.find(value)) for value in chosen.passes[-1].sums]
        waited_for = reductions_before(program.state[key] for key in chosen.small) & set(chosen.passes[-1].sums)
        if len(chosen.passes) > 1 and all(pair == (ELEMENT, TENSOR) for pair in over) and not waited_for:
            break
    emitted = emit_tiles(chosen, title_of(rule), kinds, stored, guarded=guarded, random=random)
    module = loaded(emitted.source, type(rule).__name__, named_in(of_tiles, of_statistics))
    return (
        emitted,
        kinds,
        {name: module[name] for name in module if name.startswith(("pass_", "between_", "decide_")) or name == "keep"},
    )


class TilePasses(Passes):
    """The passes of a rule over tiles, as its schedule has them."""

    emitted: EmittedTiles
    BLOCK = 2**40  # one for each tensor: these passes go through tiles

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
        measuring: Limits = MEASURING,
        stepping: Limits = STEPPING,
        **memory: Any,
    ) -> None:
        """measuring, stepping: how large tiles may be in passes that sum, and in all others."""
        stored, dtypes = stored_as(operands[0], grads[0], keys)
        guarded, random = handling.on_nonfinite != "propagate", handling.state_rounding == "stochastic"
        code = kernels_for(stand_in(rule), example_for(operands, rule), stored, guarded, sharded, rated, random)
        emitted, kinds, self.kernels = code
        super().__init__(operands, grads, rule, handling, emitted, emitted.begins[-1], dtypes, **memory)
        assert kinds.axes is not None
        stacked, axes = rule.stacked_axes, kinds.axes
        #: Of everything that is as large as a parameter: elements that one load takes, where lines begin at addresses
        #: for the widest ones.
        shapes = {key: entry.over for key, entry in rule.entries(whole_of(operands[0])).items()}  # type: ignore[attr-defined]
        large = [
            [operand.p, *(e for key, e in zip(keys, operand.entries, strict=True) if e is not None and not shapes[key])]
            for operand in operands
        ]
        self.vector = ALIGNMENT // min(tensor.element_size() for tensor in (*large[0], grads[0]))
        self.aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensors in large for tensor in tensors)
        seen = [
            matrices_of(tuple(operand.p.shape[stacked:]), axes[0] - stacked, axes[1] - stacked)
            for operand, slices in zip(operands, self.tables.slices, strict=True)
            for _ in range(slices)
        ]
        cuts = cut_to_measure(seen, self.vector, measuring)
        self.statistics = Statistics(self.emitted.statistics, cuts, self.uploads)
        self.measuring = Grid(cuts, self.uploads, measuring.warps)
        self.stepping = Grid(cut_to_step(seen, self.vector, stepping), self.uploads, stepping.warps)
        self.partials = self.uploads.empty((self.totals.shape[1], self.stepping.count))
        counts = [
            (elements_of(operand, stacked), *(max(1, whole_of(operand)[axis]) for axis in axes))
            for operand, slices in zip(operands, self.tables.slices, strict=True)
            for _ in range(slices)
        ]
        self.counts = self.uploads.table(array("f", itertools.chain.from_iterable(counts)), 3)
        self.blocks = {number: self.statistics.blocks(kinds_) for number, kinds_ in self.emitted.between.items()}
        self.kept_blocks = self.statistics.blocks(self.emitted.guarded_kinds) if self.emitted.guarded_kinds else None
        self.sums = self.sums_of_passes()

    def sums_of_passes(self) -> list[list[Sum]]:
        """Of each pass the sums that are to be completed over ranks, with the axes that they go over."""
        sums, gathered = [], iter(self.statistics.totals)
        for number, values in enumerate(self.emitted.sums):
            if self.emitted.gathers[number]:
                over = [tuple(sorted(set(value.axes) & value.args[0].extent)) for value in values]
                sums.append([Sum(next(gathered), axes) for axes in over])
            else:
                begin, end = self.emitted.begins[number : number + 2]
                sums.append([Sum(self.totals[:, begin:end], None)] if end > begin else [])
        return sums

    # ---- one step

    def measure(self, step: Step) -> Iterator[list[Sum]]:
        for number in range(self.last):
            self.go(step, number, MEASURE)
            self.add_up(number)
            if self.sums[number]:
                yield self.sums[number]
            self.compute_after(step, number)
        if self.guarded:
            self.go(step, self.last, REHEARSE)
            add_up(self.compiled, self.partials[:1], self.stepping.begins, self.failures)
            self.keep(step, REHEARSE)
            yield [Sum(self.failures, None)]
        self.settle(step, counts=self.handling.on_nonfinite != "raise")  # of which nothing may be seen if it raises

    def write(self, step: Step, *, observed: bool = True) -> None:
        if self.handling.on_nonfinite == "raise":
            self.settle(step, counts=True)
        self.go(step, self.last, WRITE)
        self.keep(step, WRITE)
        self.keep_numbers(step)
        if observed:
            self.add_up(self.last)
            self.compute_after(step, self.last)

    def add_up(self, number: int) -> None:
        if self.emitted.gathers[number]:
            self.statistics.add_up(self.compiled, number)
        elif self.sums[number]:
            begin, end = self.emitted.begins[number : number + 2]
            add_up(self.compiled, self.partials[begin:end], self.stepping.begins, self.sums[number][0].tensor)

    def go(self, step: Step, number: int, stage: int) -> None:
        """One pass over all tiles."""
        turns = number + (stage == WRITE and self.guarded)  # forth and back, in turns: a rehearsal is one more
        grid = self.measuring if self.emitted.gathers[number] else self.stepping
        if not grid.count:
            return
        vector = self.vector if self.aligned and self.tables.grads_aligned else 1
        self.compiled.run(
            self.kernels[f"pass_{number}"],
            (grid.count,),
            (
                self.tables.rows,
                self.tables.gradients,
                self.statistics.tensors,
                grid.table,
                self.statistics.sums,
                self.options,
                self.figures,
                self.partials,
                step.grad_scale,
                step.allowed,
                step.lr,
                step.lr_scale,
                self.tables.count,
                grid.count,
            ),
            lambda: dict(**self.flags_of(step, stage), BACKWARDS=turns % 2 == 1, **grid.constants(vector)),
            warps=grid.warps,
            key=(number, stage, vector, *map(kind_of, step)),
        )

    def compute_after(self, step: Step, number: int) -> None:
        """What follows from the sums of a pass, for rows, columns, matrices and tensors."""
        tables = self.tables
        if number in self.blocks and len(blocks := self.blocks[number]):
            self.compiled.run(
                self.kernels[f"between_{number}"],
                (len(blocks),),
                (
                    tables.rows,
                    self.counts,
                    self.options,
                    self.statistics.tensors,
                    blocks,
                    self.statistics.sums,
                    self.totals,
                    step.allowed,
                    step.lr,
                    step.lr_scale,
                ),
                lambda: dict(ALLOWED=step.allowed is not None, **self.dtypes(), BLOCK=COMPUTED),
                warps=4,
                key=(kind_of(step.allowed), *map(kind_of, step[:2])),
            )
        if number in self.emitted.decisions and tables.count:
            self.compiled.run(
                self.kernels[f"decide_{number}"],
                (triton.cdiv(tables.count, DECIDED),),
                (
                    tables.rows,
                    self.counts,
                    self.options,
                    self.statistics.tensors,
                    self.statistics.sums,
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

    def keep(self, step: Step, stage: int) -> None:
        """Under a guard: write what rows and columns have now, or find out whether that can be stored."""
        overflows = any(dtype == tl.float16 for dtype in self.stored)
        if self.kept_blocks is None or not len(self.kept_blocks) or (stage == REHEARSE and not overflows):
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
