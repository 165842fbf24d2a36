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
from array import array
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import triton.language as tl

from thalweg.arrays import Axes
from thalweg.codecs import grouping
from thalweg.kernels.triton.emission import OWN_FIGURES
from thalweg.kernels.triton.emit import Emitted
from thalweg.kernels.triton.rows import Operand, Tensor
from thalweg.kernels.triton.stages import BLOCK, keep_kernel, settle_kernel
from thalweg.kernels.triton.tables import Tables
from thalweg.programs.host import function_of, options_of
from thalweg.rules import Rule
from thalweg.settings import Handling

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
    groups = grouping(operand.shape or tuple(operand.p.shape), stacked_axes)
    return 1 if groups is None or all(scales is None for scales in operand.scales) else groups.size


class Passes:
    """A rule's passes over one list of operands, with tables and scratch memory that are kept between steps."""

    #: Elements that are worked on at a time.
    BLOCK: ClassVar[int] = BLOCK

    def __init__(
        self,
        operands: Sequence[Operand],
        grads: Sequence[Tensor],
        rule: Rule,
        handling: Handling,
        emitted: Emitted,
        sums: int,
        stored: Mapping[str, Any],
        *,
        uploads: Any,
        compiled: Any,
        counted: bool = True,
    ) -> None:
        """sums: how many are made for each tensor. stored: the dtypes of the entries of the state, by key.

        uploads, compiled: make memory, and launch kernels. counted: whether parameters have counts, which go on.
        """
        self.rule, self.handling, self.emitted = rule, handling, emitted
        self.stored = list(stored.values())
        self.last, sums = len(emitted.sums) - 1, max(1, sums)
        self.guarded = handling.on_nonfinite != "propagate"
        self.p_dtype, self.g_dtype = dtype_of(operands[0].p.dtype), dtype_of(grads[0].dtype)
        self.spread = any(operand.width for operand in operands)
        self.group = group_of(operands[0], rule.stacked_axes)
        self.chunk = self.BLOCK * emitted.blocks
        self.tables = Tables(operands, grads, list(stored), rule.stacked_axes, handling.seed, self.chunk, uploads)
        self.uploads, self.compiled, self.counted = uploads, compiled, counted
        rows = self.tables.count
        self.numbers_of = function_of(emitted.numbers)
        self.options = self.uploads.table(self.numbers())
        self.partials = uploads.empty((sums, self.tables.chunk_count))
        self.totals, self.failures = uploads.empty((rows, sums)), uploads.empty((rows, 1))
        self.figures = uploads.empty((OWN_FIGURES + emitted.figures, rows))
        #: Of what the state has one number of for each tensor: (entry, figure).
        self.scalars = uploads.table(array("i", itertools.chain(*emitted.scalars)), 2) if emitted.scalars else None
        self.finite = uploads.empty((len(operands),), "bool")
        self.operand_begins = uploads.table(array("i", itertools.accumulate(self.tables.slices, initial=0)))

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

    # ---- for passes of a kind to fill in

    def measure(self, step: Step) -> Iterator[list[Sum]]:
        """All that comes before writing. Gives sums that may have to be completed over ranks, and goes on from them."""
        raise NotImplementedError

    def write(self, step: Step, *, observed: bool = True) -> None:
        """Write what was measured; under a guard, nothing of a parameter that would not be finite.

        observed: figures that people alone look at are made too.
        """
        raise NotImplementedError

    # ---- one step

    def prepare(self, step: Step) -> None:
        """Compile what a step launches, before its first launch."""
        with self.compiled.preparing(self.device):
            for _ in self.measure(step):
                pass
            self.write(step)

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

    def flags_of(self, step: Step, stage: int) -> dict[str, Any]:
        """The constants that a pass is compiled for, beside those of where it goes."""
        return dict(
            STAGE=stage,
            SCALED=step.grad_scale is not None or self.handling.maximize,
            ALLOWED=step.allowed is not None,
            GUARDED=self.guarded,
            STOCHASTIC=self.handling.rounding == "stochastic" and self.p_dtype in NARROW,
            SPREAD=self.spread,
            P_DTYPE=self.p_dtype,
            G_DTYPE=self.g_dtype,
            GROUP=self.group,
            **self.dtypes(),
        )

    def dtypes(self) -> dict[str, Any]:
        return {f"S{i}_DTYPE": dtype for i, dtype in enumerate(self.stored)}

    def stats(self) -> dict[str, Tensor]:
        """What users may look at, by row; the next step writes over it."""
        return {
            name: self.figures[value]
            if isinstance(value, int)
            else self.figures.new_full(self.figures.shape[1:], value)
            for name, value in self.emitted.stats.items()
        }
