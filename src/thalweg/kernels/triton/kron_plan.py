"""The launches of one step of a batch, from what is known before it: rule, handling, layout.

refresh         only where due: see ``kron_refresh``
precondition    the factors as products take them, P, and P x
settle          under a guard a rehearsal, then whether each parameter is stepped; counts and norms
step            clip, decay, momentum, parameter
"""

from __future__ import annotations

from typing import Any

import torch

from thalweg.kernels.triton.kron_batch import Batch
from thalweg.kernels.triton.kron_begin import settle_kernel, squares_kernel
from thalweg.kernels.triton.kron_diagonal import diagonal_kernel
from thalweg.kernels.triton.kron_elements import operand_kernel, step_kernel
from thalweg.kernels.triton.kron_formulas import Formulas
from thalweg.kernels.triton.kron_launches import Launches
from thalweg.kernels.triton.kron_layout import TURNED, VECTOR, Factor
from thalweg.kernels.triton.kron_products import turn_kernel
from thalweg.kernels.triton.kron_whitening import Products
from thalweg.kernels.triton.passes import DTYPES
from thalweg.kernels.triton.products import ceiling
from thalweg.rules import Kron
from thalweg.settings import Handling


class Plan:
    """One step of the matrices of a batch that share scratch memory at a time, from ``first`` on."""

    def __init__(
        self, launches: Launches, batch: Batch, rule: Kron, formulas: Formulas, handling: Handling, first: int
    ) -> None:
        self.launches, self.batch, self.rule, self.handling, self.first = launches, batch, rule, handling, first
        self.formulas = formulas
        self.layout, self.matrices = batch.layout, batch.matrices(first)
        self.common = batch.common(first)
        self.operand = DTYPES[batch.operand]
        self.guarded = handling.on_nonfinite == "skip"
        self.axes = [factor.axis for factor in self.layout.factors]
        self.dense = [factor for factor in self.layout.factors if factor.dense]
        self.tile = dict(zip(("HIGH", "WIDE"), self.layout.element_tile, strict=True))
        self.aligned = batch.aligned and batch.grads_aligned
        self.products = Products(self)
        #: Whether products take the gradient from where it lies.
        self.in_place = (
            bool(self.dense)
            and not self.layout.across
            and formulas.shows_gradient
            and self.aligned
            and batch.g_dtype == batch.operand == torch.float32
            and self.layout.columns == self.layout.gradient.pitch
        )

    def add(self, kernel: Any, tiles: int | None, /, **given: Any) -> None:
        """A launch over the tiles of each matrix; None: one program a matrix."""
        grid = (self.matrices,) if tiles is None else (tiles, self.matrices)
        self.launches.add(kernel, *grid, **self.common, **given)

    def precondition(self) -> None:
        """P x, and the mean of its squares."""
        layout = self.layout
        self.show_factors(refreshes=False, operands=True, state=not self.guarded)
        x = layout.gradient
        if self.in_place:
            x = self.batch.gradient_as_it_lies()
        else:
            self.show_gradient(noisy=False)
        if self.dense:
            a, b = self.products.whitening(x, refreshes=False)
            if len(self.dense) == 1 and not layout.across:
                a, b = b, a
            axis = next(iter(layout.diagonal), None)
            self.products.multiply(
                a,
                b,
                layout.h,
                refreshes=False,
                scales=None if axis is None else layout.diagonal[axis].squares,
                scales_of="" if axis is None else ("rows", "columns")[axis],
                sums=layout.h_squares,
                sums_of="tile",
            )
        else:
            self.products.scale(refreshes=False)
        self.add(
            squares_kernel,
            None,
            partials=layout.h_squares.column,
            size=layout.rows * layout.columns,
            tiles=layout.h_tiles,
            UPDATE_RMS_OF=self.formulas.update_rms,
            BLOCK=1024,
            num_warps=4,
        )

    def settle(self, *, counted: bool) -> None:
        batch = self.batch
        if self.guarded:
            self.step(rehearsal=True)
        self.launches.add(
            settle_kernel,
            self.matrices // batch.slices,
            **self.common,
            partials=self.layout.failures.column,
            finite=batch.finite,
            tiles=self.layout.tiles_of_elements,
            slices=batch.slices,
            IS_FINE=self.formulas.is_fine,
            GUARDED=self.guarded,
            COUNTED=counted,
            axis=self.axes[0],
            BLOCK=1024,
            num_warps=4,
        )

    def step(self, *, rehearsal: bool) -> None:
        layout = self.layout
        low = self.batch.p_dtype in (torch.bfloat16, torch.float16)
        self.add(
            step_kernel,
            layout.tiles_of_elements,
            **self.batch.dtypes(),
            **self.tile,
            h_panel=layout.h.column,
            partials=layout.failures.column,
            rows=layout.rows,
            columns=layout.columns,
            pitch=layout.h.pitch,
            STEPPED=self.formulas.stepped,
            KEEPS_MOMENTUM=self.formulas.keeps_momentum,
            STOCHASTIC=low and self.handling.rounding == "stochastic",
            REHEARSAL=rehearsal,
            ALIGNED=self.aligned,
            num_warps=8,
        )

    # ---- operands

    def show_gradient(self, *, noisy: bool) -> None:
        batch, layout = self.batch, self.layout
        self.add(
            operand_kernel,
            layout.tiles_of_elements,
            **batch.dtypes(),
            **self.tile,
            out=layout.gradient.column,
            rows=layout.rows,
            columns=layout.columns,
            pitch=layout.gradient.pitch,
            OUT_DTYPE=self.operand,
            SHOWN=self.formulas.learned if noisy else self.formulas.shown,
            NOISY=noisy,
            FAR=batch.size >= 2**31,
            ACROSS=layout.across,
            CUTS=batch.cuts,
            ALIGNED=self.aligned,
            num_warps=8,
        )

    def show_factors(self, *, refreshes: bool, operands: bool, state: bool) -> None:
        """Factors as products take them, as a refresh begins with them or as it left them; new ones into the state."""
        batch, layout = self.batch, self.layout
        asked: dict[str, Any] = dict(
            refreshes=int(refreshes),
            operands=int(operands),
            state=int(state),
            Q_DTYPE=DTYPES[batch.q_dtype],
            num_warps=4,
        )
        for factor in layout.factors:
            if factor.dense:
                own = layout.dense[factor.axis]
                self.add(
                    turn_kernel,
                    ceiling(factor.size, TURNED) ** 2,
                    **asked,
                    source=own.stepped.column,
                    turned=(own.turned if refreshes else own.final_turned).column,
                    straight=(own.straight if refreshes else own.final_straight).column,
                    n=factor.size,
                    axis=factor.axis,
                    pitch=own.turned.pitch,
                    DTYPE=self.operand,
                    ALIGNED=self.state_aligned(factor),
                    STRAIGHT=factor.direct,
                    CUTS=batch.cuts,
                    BLOCK=TURNED,
                )
            else:
                diagonal = layout.diagonal[factor.axis]
                self.add(
                    diagonal_kernel,
                    ceiling(factor.size, VECTOR),
                    **asked,
                    stepped=diagonal.stepped.column,
                    squares=diagonal.squares.column,
                    n=factor.size,
                    axis=factor.axis,
                    BLOCK=VECTOR,
                )

    def state_aligned(self, factor: Factor) -> bool:
        return self.batch.factors_aligned and factor.size % 16 == 0
