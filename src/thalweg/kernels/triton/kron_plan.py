"""The launches of one step of a batch, from what is known before it: rule, handling, layout.

refresh         only where due: see ``kron_refresh``
precondition    the factors as products take them, P, and P x
settle          under a guard a rehearsal, then whether each parameter is stepped; counts and norms
step            clip, decay, momentum, parameter
"""

from __future__ import annotations

import math
from typing import Any

import torch

from thalweg.kernels.triton.kron_batch import Batch
from thalweg.kernels.triton.kron_begin import settle_kernel, squares_kernel
from thalweg.kernels.triton.kron_diagonal import diagonal_kernel
from thalweg.kernels.triton.kron_elements import operand_kernel, step_kernel
from thalweg.kernels.triton.kron_formulas import Formulas
from thalweg.kernels.triton.kron_launches import Launches
from thalweg.kernels.triton.kron_layout import TURNED, VECTOR, Factor, Panel
from thalweg.kernels.triton.kron_products import turn_kernel
from thalweg.kernels.triton.kron_whitening import Products
from thalweg.kernels.triton.passes import NARROW, dtype_of
from thalweg.kernels.triton.products import ceiling, padded
from thalweg.rules import Kron
from thalweg.settings import Handling


class Plan:
    """One step of the matrices of a batch that share scratch memory at a time, from ``first`` on."""

    def __init__(
        self, launches: Launches, batch: Batch, rule: Kron, formulas: Formulas, handling: Handling, first: int
    ) -> None:
        self.launches, self.batch, self.rule, self.formulas = launches, batch, rule, formulas
        self.layout, self.matrices = batch.layout, batch.matrices(first)
        self.guarded = handling.on_nonfinite == "skip"
        self.dense = [factor for factor in self.layout.factors if factor.dense]
        high, wide = self.layout.element_tile
        aligned = batch.aligned and batch.grads_aligned
        #: What kernels take by these names, unless they are given something else.
        self.scope: dict[str, Any] = dict(
            **batch.common(first),
            **formulas.constants(),
            rows=self.layout.rows,
            columns=self.layout.columns,
            size=math.prod(batch.grid.sizes),
            stride=self.layout.stride,
            pieces=batch.pieces,
            blocks=batch.blocks,
            finite=batch.finite,
            axis=self.layout.factors[0].axis,
            P_DTYPE=dtype_of(batch.p_dtype),
            G_DTYPE=dtype_of(batch.g_dtype),
            M_DTYPE=dtype_of(batch.m_dtype),
            GROUP=batch.group,
            Q_DTYPE=dtype_of(batch.q_dtype),
            DTYPE=dtype_of(batch.operand),
            OUT_DTYPE=dtype_of(batch.operand),
            STOCHASTIC=dtype_of(batch.p_dtype) in NARROW and handling.rounding == "stochastic",
            SCALES_FIRST=rule.init_scale is None,
            GUARDED=self.guarded,
            ALIGNED=aligned,
            CUTS=batch.cuts,
            HIGH=high,
            WIDE=wide,
            BLOCK=1024,
        )
        self.products = Products(self)
        #: Whether products take the gradient from where it lies.
        self.in_place = (
            bool(self.dense)
            and not self.layout.across
            and formulas.shows_gradient
            and aligned
            and batch.g_dtype == batch.operand == torch.float32
            and batch.blocks == 1
            and self.layout.columns == self.layout.gradient.pitch
        )

    def add(self, kernel: Any, tiles: int | None, /, **given: Any) -> None:
        """A launch over the tiles of each matrix; None: one program a matrix.

        given: what is this launch's own; of it and of the scope a kernel gets what it takes. A panel goes by its
        column, and one that there is not by 0.
        """
        grid = (self.matrices,) if tiles is None else (tiles, self.matrices)
        names = {*kernel.arg_names, "num_warps", "num_stages"}
        known = {name: value for name, value in {**self.scope, **given}.items() if name in names}
        columns = {name: value.column for name, value in known.items() if isinstance(value, Panel)}
        nothing = {name: 0 for name, value in known.items() if value is None}
        self.launches.add(kernel, *grid, **{**known, **columns, **nothing})

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
        self.add(squares_kernel, None, partials=layout.h_squares, tiles=layout.h_tiles)

    def settle(self, *, counted: bool) -> None:
        if self.guarded:
            self.step(rehearsal=True)
        failures, tiles = self.layout.failures, self.layout.tiles_of_elements
        self.add(settle_kernel, None, partials=failures, tiles=tiles, COUNTED=counted)

    def step(self, *, rehearsal: bool) -> None:
        own: dict[str, Any] = dict(h_panel=self.layout.h, pitch=self.layout.h.pitch, partials=self.layout.failures)
        self.add(step_kernel, self.layout.tiles_of_elements, **own, REHEARSAL=rehearsal, num_warps=8)

    # ---- operands

    def show_gradient(self, *, noisy: bool) -> None:
        layout = self.layout
        self.add(
            operand_kernel,
            layout.tiles_of_elements,
            out=layout.gradient,
            pitch=layout.gradient.pitch,
            SHOWN=self.formulas.learned if noisy else self.formulas.shown,
            NOISY=noisy,
            FAR=self.batch.size >= 2**31,
            ACROSS=layout.across,
            num_warps=8,
        )

    def show_factors(self, *, refreshes: bool, operands: bool, state: bool) -> None:
        """Factors as products take them, as a refresh begins with them or as it left them; new ones into the state."""
        asked = dict(refreshes=int(refreshes), operands=int(operands), state=int(state))
        for factor in self.layout.factors:
            n = factor.size
            if factor.dense:
                own = self.layout.dense[factor.axis]
                self.add(
                    turn_kernel,
                    ceiling(n, TURNED) ** 2,
                    **asked,
                    **self.of_factor(factor),
                    source=own.stepped,
                    turned=own.turned if refreshes else own.final_turned,
                    straight=own.straight if refreshes else own.final_straight,
                    STRAIGHT=factor.direct,
                    BLOCK=TURNED,
                )
            else:
                diagonal = self.layout.diagonal[factor.axis]
                panels: dict[str, Any] = dict(stepped=diagonal.stepped, squares=diagonal.squares)
                self.add(diagonal_kernel, ceiling(n, VECTOR), **asked, **self.of_factor(factor), **panels)

    def of_factor(self, factor: Factor) -> dict[str, Any]:
        """What kernels take of a factor; the pitch is that of its panels if it is dense."""
        aligned = self.batch.factors_aligned and factor.aligned
        own: dict[str, Any] = dict(n=factor.size, axis=factor.axis, stride=factor.stride)
        return dict(**own, pitch=padded(factor.size), ALIGNED=aligned)
