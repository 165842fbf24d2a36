"""The launches of one step of a dense factor: its gram matrix, the pace, the step, and the rotation after it."""

from __future__ import annotations

from typing import Any

from thalweg.kernels.triton.kron_bounds import columns_kernel, image_kernel, norm_kernel
from thalweg.kernels.triton.kron_layout import DOTS, TURNED, Factor, Panel
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
from thalweg.kernels.triton.passes import DTYPES
from thalweg.kernels.triton.products import ceiling


class DenseStep:
    """One step of one factor of each matrix."""

    def __init__(self, plan: Plan, factor: Factor) -> None:
        self.plan, self.factor = plan, factor
        self.own = plan.layout.dense[factor.axis]

    def run(self) -> None:
        layout, factor, own = self.plan.layout, self.factor, self.own
        white = layout.white_turned if factor.axis == 1 and len(layout.dense) == 2 else layout.white
        assert white is not None
        self.gram(white)
        self.bound(own.error, factor.right, own.gram.rows)
        if self.plan.rule.geometry == "quad":
            self.move(own.turned, own.stepped_straight, "left")
            self.move(own.stepped_straight, own.stepped_straight, "right")
            self.triangle(symmetrized_kernel, largest=own.largest.column, sums=own.sums.column)
            return
        self.move(own.turned, None, "")
        self.triangle(
            skew_kernel,
            turned=own.stepped_turned.column,
            skew=own.skew.column,
            largest=own.tile_largest.column,
            squares=own.column_squares.column,
            first_sums=own.first.column,
            columns_pitch=own.column_squares.pitch,
            DTYPE=self.plan.operand,
            CUTS=self.plan.batch.cuts,
        )
        self.bound(own.skew, 0.0, TURNED)
        self.rotate()

    def gram(self, white: Panel) -> None:
        """The gram matrix of what was whitened, less what it should be."""
        factor, own = self.factor, self.own
        tiles, out = own.tiles_above(own.gram.rows), own.part_sums or own.error
        noted: dict[str, Any] = dict(
            largest=own.tile_largest.column,
            squares=own.column_squares.column,
            right=factor.right,
            n=factor.size,
            parts=own.parts,
            columns_pitch=own.column_squares.pitch,
            DTYPE=self.plan.operand,
            CUTS=self.plan.batch.cuts,
        )
        self.plan.add(
            symmetric_kernel,
            tiles * own.parts,
            **noted,
            a=white.column,
            out=out.column,
            depth=white.pitch,
            refreshes=1,
            length=own.length,
            a_pitch=white.pitch,
            pitch=out.pitch,
            GRAM=True,
            PARTS=own.part_sums is not None,
            **own.gram.options(),
        )
        if own.part_sums is not None:
            self.plan.add(
                gather_kernel,
                tiles,
                **noted,
                sums=out.column,
                out=own.error.column,
                sums_pitch=out.pitch,
                pitch=own.error.pitch,
                BM=own.gram.rows,
                num_warps=8,
            )

    def bound(self, x: Panel, right: float, block: int) -> None:
        """A bound of the norm of x + right, of which tiles of this size were noted, and what follows from it."""
        factor, own = self.factor, self.own
        side, dots = ceiling(factor.size, block), ceiling(factor.size, DOTS)
        asked: dict[str, Any] = dict(
            best=own.best.column,
            best_column=own.best_column.column,
            n=factor.size,
            side=side,
            axis=factor.axis,
            num_warps=4,
        )
        self.plan.add(
            columns_kernel,
            side,
            **asked,
            largest=own.tile_largest.column,
            squares=own.column_squares.column,
            columns_pitch=own.column_squares.pitch,
            BM=block,
            SIDE=16,
        )
        for half in (True, False):
            self.plan.add(
                image_kernel,
                dots,
                **asked,
                e=x.column,
                vector=own.vector.column,
                vector_squares=own.vector_squares.column,
                image_squares=own.image_squares.column,
                right=right,
                pitch=x.pitch,
                DTYPE=self.plan.operand,
                FIRST=half,
                SIDE=128,
                SUMS=512,
                BM=DOTS,
                BK=256,
            )
        self.plan.add(
            norm_kernel,
            None,
            image_squares=own.image_squares.column,
            image_count=dots,
            right=right,
            axis=factor.axis,
            turns=int(x is own.skew),
            PACED=self.plan.formulas.paced,
            BLOCK=512,
            num_warps=4,
        )

    def move(self, turned: Panel, out: Panel | None, half: str) -> None:
        factor, own = self.factor, self.own
        self.plan.add(
            stepped_kernel,
            own.blocks.tiles(factor.size, factor.size),
            error=own.error.column,
            turned=turned.column,
            stepped=own.stepped.column,
            out=out.column if out else 0,
            n=factor.size,
            axis=factor.axis,
            pitch=own.error.pitch,
            Q_DTYPE=DTYPES[self.plan.batch.q_dtype],
            DTYPE=self.plan.operand,
            HALF=half,
            ALIGNED=self.plan.state_aligned(factor),
            CUTS=self.plan.batch.cuts,
            **own.blocks.options(),
        )

    def triangle(self, kernel: Any, **given: Any) -> None:
        """A kernel over the tiles of a stepped factor on and above its diagonal."""
        own = self.own
        self.plan.add(
            kernel,
            own.tiles_above(TURNED),
            **given,
            stepped=own.stepped.column,
            n=self.factor.size,
            pitch=own.stepped.pitch,
            BM=TURNED,
            num_warps=4,
        )

    def rotate(self) -> None:
        factor, own = self.factor, self.own
        tiles = own.blocks.tiles(factor.size, factor.size)
        asked: dict[str, Any] = dict(
            skew=own.skew.column,
            product=own.product.column,
            n=factor.size,
            axis=factor.axis,
            pitch=own.skew.pitch,
            DTYPE=self.plan.operand,
            **own.blocks.options(),
        )
        self.plan.add(
            turning_kernel,
            tiles,
            **asked,
            b=own.stepped_turned.column,
            turned=own.product_turned.column,
            second=own.second.column,
            CUTS=self.plan.batch.cuts,
        )
        self.plan.add(
            angle_kernel,
            None,
            first_sums=own.first.column,
            first_count=own.tiles_above(TURNED),
            second=own.second.column,
            second_count=tiles,
            axis=factor.axis,
            ANGLE_OF=self.plan.formulas.angle,
            BLOCK=1024,
            num_warps=4,
        )
        self.plan.add(
            rotated_kernel,
            tiles,
            **asked,
            b=own.product_turned.column,
            stepped=own.stepped.column,
            largest=own.largest.column,
            sums=own.sums.column,
        )
