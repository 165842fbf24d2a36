"""The launches that multiply gradients by the factors of Kron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton.language as tl

from thalweg.kernels.triton.kron_diagonal import scaled_kernel
from thalweg.kernels.triton.kron_layout import Factor, G, Panel
from thalweg.kernels.triton.kron_products import multiply_kernel, symmetric_kernel

if TYPE_CHECKING:
    from thalweg.kernels.triton.kron_plan import Plan


class Products:
    """Products of a plan's matrices with their factors."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def whitening(self, source: Panel, *, refreshes: bool) -> tuple[Panel, Panel]:
        """The last two operands of P x: the first lies along the rows of a dense factor."""
        layout, last = self.plan.layout, self.plan.dense[0]
        if len(self.plan.dense) == 2:
            assert layout.half is not None
            pair = self.along(self.plan.dense[1], source, layout.between, refreshes=refreshes)
            self.multiply(*pair, layout.half, refreshes=refreshes)
            return self.along(last, layout.half, layout.half_between, refreshes=refreshes)
        return self.along(last, source, layout.between, refreshes=refreshes)

    def along(self, factor: Factor, source: Panel, between: Panel | None, *, refreshes: bool) -> tuple[Panel, Panel]:
        """What is left to be multiplied to apply P along an axis: P and the source, or Q^T and Q times the source."""
        own = self.plan.layout.dense[factor.axis]
        turned = own.turned if refreshes else own.final_turned
        if factor.direct:
            assert between is not None
            self.multiply(source, own.straight if refreshes else own.final_straight, between, refreshes=refreshes)
            return turned, between
        square = own.square if refreshes else own.final_square
        self.square(turned, square, factor, refreshes=refreshes)
        return square, source

    def multiply(
        self,
        a: Panel,
        b: Panel,
        out: Panel,
        *,
        refreshes: bool,
        scales: Panel | None = None,
        scales_of: str = "",
        sums: Panel | None = None,
        sums_of: str = "",
        turned: Panel | None = None,
    ) -> None:
        """out = a b^T, and what ``multiply_kernel`` does beside it."""
        rows, columns, layout = a.rows, b.rows, self.plan.layout
        blocks = layout.wide if (rows, columns) == (layout.rows, layout.columns) else layout.narrow
        # what is no operand of a product is kept in full
        exact = dict(OUT_DTYPE=tl.float32, CUTS=False) if out is layout.h else {}
        self.plan.add(
            multiply_kernel,
            blocks.tiles(rows, columns),
            a=a,
            b=b,
            out=out,
            turned=turned,
            scales=scales,
            sums=sums,
            rows=rows,
            columns=columns,
            depth=a.pitch,
            refreshes=int(refreshes),
            as_it_lies=int(G.value in (a.column, b.column)),
            a_pitch=a.pitch,
            b_pitch=b.pitch,
            pitch=out.pitch,
            turned_pitch=turned.pitch if turned else 0,
            sums_pitch=sums.pitch if sums else 0,
            SCALES=scales_of,
            SUMS=sums_of,
            TURNED=turned is not None,
            **exact,
            **blocks.options(),
        )

    def square(self, a: Panel, out: Panel, factor: Factor, *, refreshes: bool) -> None:
        """out = a a^T."""
        own = self.plan.layout.dense[factor.axis]
        unused = dict(largest=0, squares=0, columns_pitch=0, parts=1, length=0)
        self.plan.add(
            symmetric_kernel,
            own.tiles_above(own.triangle.rows),
            **unused,
            a=a,
            out=out,
            n=a.rows,
            depth=a.pitch,
            refreshes=int(refreshes),
            a_pitch=a.pitch,
            pitch=out.pitch,
            GRAM=False,
            PARTS=False,
            **own.triangle.options(),
        )

    def scale(self, *, refreshes: bool) -> None:
        """P x where no factor is dense."""
        layout = self.plan.layout
        given: dict[str, Any] = dict.fromkeys(("row_scales", "row_sums", "row_pitch"), 0)
        for axis, own in layout.diagonal.items():
            name = "column" if axis else "row"
            given |= {f"{name}_scales": own.squares, f"{name}_sums": own.part_sums}
            given[f"{name}_pitch"] = own.part_sums.pitch
        self.plan.add(
            scaled_kernel,
            layout.tiles_of_elements,
            **given,
            a=layout.gradient,
            out=layout.h,
            sums=layout.h_squares,
            pitch=layout.gradient.pitch,
            ROWS=0 in layout.diagonal,
            REFRESHES=refreshes,
            num_warps=8,
        )
