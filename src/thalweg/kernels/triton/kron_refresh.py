"""The launches of a refresh: measure y, add noise, whiten it, one step of each factor towards whitening it, balance."""

from __future__ import annotations

from typing import Any

from thalweg.kernels.triton.kron_begin import strength_kernel
from thalweg.kernels.triton.kron_bounds import columns_kernel, image_kernel, norm_kernel
from thalweg.kernels.triton.kron_diagonal import balance_kernel, diagonal_step_kernel, left_kernel
from thalweg.kernels.triton.kron_elements import measure_kernel
from thalweg.kernels.triton.kron_layout import DOTS, MEASURERS, TURNED, VECTOR, Factor, Panel
from thalweg.kernels.triton.kron_plan import Plan
from thalweg.kernels.triton.kron_products import gather_kernel, symmetric_kernel
from thalweg.kernels.triton.kron_rotation import (
    angle_kernel,
    rotated_kernel,
    skew_kernel,
    stepped_kernel,
    symmetrized_kernel,
    turning_kernel,
)
from thalweg.kernels.triton.products import ceiling


class Refresh:
    """The part of a plan that is run only where factors may be due."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.layout = plan, plan.layout

    def run(self) -> None:
        self.measure()
        self.plan.show_gradient(noisy=True)
        self.plan.show_factors(refreshes=True, operands=True, state=False)
        self.whiten()
        for factor in self.layout.factors:
            if factor.dense:
                DenseStep(self.plan, factor).run()
            else:
                self.step_diagonal(factor)
        self.balance()

    def measure(self) -> None:
        """What y is like: its largest magnitude, and how strong noise has to be."""
        layout = self.layout
        programs = min(MEASURERS, layout.tiles_of_elements)
        measured: dict[str, Any] = dict(partials=layout.measured, programs=programs, pitch=layout.measured.pitch)
        self.plan.add(measure_kernel, programs, **measured, num_warps=8)
        self.plan.add(strength_kernel, None, **measured, BLOCK=MEASURERS, num_warps=1)

    def whiten(self) -> None:
        """P y, and the diagonals of gram matrices as far as that gives them."""
        layout = self.layout
        if not layout.dense:
            self.plan.products.scale(refreshes=True)
            return
        assert layout.white is not None
        a, b = self.plan.products.whitening(layout.gradient, refreshes=True)
        other = next(iter(layout.diagonal.values()), None)
        self.plan.products.multiply(
            a,
            b,
            layout.white,
            refreshes=True,
            scales=other.squares if other else None,
            scales_of="columns" if other else "",
            sums=other.part_sums if other else None,
            sums_of="columns" if other else "",
            turned=layout.white_turned,
        )

    def balance(self) -> None:
        layout = self.layout
        found: dict[str, Any] = dict.fromkeys(("row_largest", "row_sums", "row_count"), 0)
        for axis, panels in (layout.dense | layout.diagonal).items():
            name = "column" if axis else "row"
            found |= {
                f"{name}_largest": panels.largest,
                f"{name}_sums": panels.sums,
                f"{name}_count": panels.sums_count,
            }
        self.plan.add(balance_kernel, None, **found, ROWS=layout.factors[0].axis == 0)

    # ---- the step of a factor

    def step_diagonal(self, factor: Factor) -> None:
        own, tiles = self.layout.diagonal[factor.axis], ceiling(factor.size, VECTOR)
        given: dict[str, Any] = dict(**self.plan.of_factor(factor), left=own.left, left_largest=own.left_largest)
        parts: dict[str, Any] = dict(parts=own.parts, sums=own.part_sums, sums_pitch=own.part_sums.pitch)
        self.plan.add(left_kernel, tiles, **given, **parts)
        self.plan.add(diagonal_step_kernel, tiles, **given, stepped=own.stepped, largest=own.largest, sums=own.sums)


class DenseStep:
    """One step of a dense factor of each matrix: its gram matrix, the pace, the step, and the rotation after it."""

    def __init__(self, plan: Plan, factor: Factor) -> None:
        self.plan, self.factor = plan, factor
        self.own = own = plan.layout.dense[factor.axis]
        self.tiles = own.blocks.tiles(factor.size, factor.size)
        self.scope: dict[str, Any] = dict(
            **plan.of_factor(factor),
            error=own.error,
            stepped=own.stepped,
            skew=own.skew,
            product=own.product,
            best=own.best,
            best_column=own.best_column,
            vector=own.vector,
            vector_squares=own.vector_squares,
            image_squares=own.image_squares,
            first_sums=own.first,
            second=own.second,
            columns_pitch=own.column_squares.pitch,
        )

    def add(self, kernel: Any, tiles: int | None, /, **given: Any) -> None:
        self.plan.add(kernel, tiles, **{**self.scope, **given})

    def run(self) -> None:
        layout, factor, own = self.plan.layout, self.factor, self.own
        white = layout.white_turned if factor.axis == 1 and len(layout.dense) == 2 else layout.white
        assert white is not None
        #: What is noted of a matrix for a bound of its norm, and of a new factor at the end.
        noted: dict[str, Any] = dict(largest=own.tile_largest, squares=own.column_squares)
        final: dict[str, Any] = dict(largest=own.largest, sums=own.sums)
        self.gram(white, noted)
        self.bound(own.error, own.gram.rows, noted)
        triangle, blocks = own.tiles_above(TURNED), own.blocks.options()
        if self.plan.rule.geometry == "quad":
            out = own.stepped_straight
            self.add(stepped_kernel, self.tiles, **blocks, turned=own.turned, out=out, HALF="left")
            self.add(stepped_kernel, self.tiles, **blocks, turned=out, out=out, HALF="right")
            self.add(symmetrized_kernel, triangle, **final, BM=TURNED)
            return
        self.add(stepped_kernel, self.tiles, **blocks, turned=own.turned, out=None, HALF="")
        self.add(skew_kernel, triangle, **noted, turned=own.stepped_turned, BM=TURNED)
        self.bound(own.skew, TURNED, noted)
        self.add(turning_kernel, self.tiles, **blocks, b=own.stepped_turned, turned=own.product_turned)
        self.add(angle_kernel, None, first_count=triangle, second_count=self.tiles)
        self.add(rotated_kernel, self.tiles, **blocks, **final, b=own.product_turned)

    def gram(self, white: Panel, noted: dict[str, Any]) -> None:
        """The gram matrix of what was whitened, less what it should be."""
        own = self.own
        tiles, out = own.tiles_above(own.gram.rows), own.part_sums or own.error
        self.add(
            symmetric_kernel,
            tiles * own.parts,
            **noted,
            a=white,
            out=out,
            depth=white.pitch,
            refreshes=1,
            parts=own.parts,
            length=own.length,
            a_pitch=white.pitch,
            GRAM=True,
            PARTS=own.part_sums is not None,
            **own.gram.options(),
        )
        if own.part_sums is not None:
            sums: dict[str, Any] = dict(sums=out, sums_pitch=out.pitch, parts=own.parts)
            self.add(gather_kernel, tiles, **noted, **sums, out=own.error, BM=own.gram.rows, num_warps=8)

    def bound(self, x: Panel, block: int, noted: dict[str, Any]) -> None:
        """A bound of the norm of a gram matrix or a skew one, noted in tiles of this size, and what follows from it."""
        side, dots = ceiling(self.factor.size, block), ceiling(self.factor.size, DOTS)
        asked: dict[str, Any] = dict(e=x, side=side, turns=int(x is self.own.skew))
        self.add(columns_kernel, side, **asked, **noted, BM=block, SIDE=16)
        for half in (True, False):
            self.add(image_kernel, dots, **asked, FIRST=half, SIDE=128, SUMS=512, BM=DOTS, BK=256)
        self.add(norm_kernel, None, **asked, image_count=dots, BLOCK=512)
