"""The launches of a refresh: measure y, add noise, whiten it, one step of each factor towards whitening it, balance."""

from __future__ import annotations

from typing import Any

from thalweg.kernels.triton.kron_begin import strength_kernel
from thalweg.kernels.triton.kron_dense import DenseStep
from thalweg.kernels.triton.kron_diagonal import balance_kernel, diagonal_step_kernel, left_kernel
from thalweg.kernels.triton.kron_elements import measure_kernel
from thalweg.kernels.triton.kron_layout import MEASURED, MEASURERS, VECTOR, Factor
from thalweg.kernels.triton.kron_plan import Plan
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
        programs = min(MEASURERS, ceiling(layout.rows * layout.columns, MEASURED))
        measured: dict[str, Any] = dict(partials=layout.measured, programs=programs, pitch=layout.measured.pitch)
        self.plan.add(measure_kernel, programs, **measured, BLOCK=MEASURED, num_warps=8)
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
