"""Kernels for GPUs against their rules: every option, in every precision; one of each by day."""

from __future__ import annotations

import pytest
from cases import FUSED_OPTIONS, Case
from lanes import one_in
from on_device import FEW, gradients, side_by_side

pytestmark = pytest.mark.slow  # programs are interpreted


@pytest.mark.parametrize(("case", "options"), one_in(len(FUSED_OPTIONS), FUSED_OPTIONS, first=44))
def test_it_equals_its_rule(case: Case, options: dict) -> None:
    moves = options.get("lr") != 0.0
    side_by_side(case.name, gradients(3, shapes=FEW), shapes=FEW, **options, moves=moves)


@pytest.mark.parametrize(("case", "options"), one_in(len(FUSED_OPTIONS), FUSED_OPTIONS, first=20))
def test_it_equals_its_rule_in_sixteen_bits(case: Case, options: dict, request: pytest.FixtureRequest) -> None:
    """In bfloat16 and float16 by turns: what options do does not depend on how their results are stored."""
    place = [param.id for param in FUSED_OPTIONS].index(request.node.callspec.id)
    dtype = ("bfloat16", "float16")[place % 2]
    small = options.get("lr") == 0.0 or bool(options.get("warmup_init")) or "phi" in options
    side_by_side(case.name, gradients(2, dtype, FEW), dtype, FEW, **options, moves=not small, lockstep=True)
