"""Kernels for GPUs against their rules: every option, in every precision."""

from __future__ import annotations

import pytest
from cases import Case
from every_option import TABLE
from on_device import gradients, side_by_side


@pytest.mark.parametrize(("case", "options"), TABLE)
def test_it_equals_its_rule(case: Case, options: dict) -> None:
    side_by_side(case.name, gradients(4), **options, moves=options.get("lr") != 0.0)


@pytest.mark.parametrize(("case", "options"), TABLE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_equals_its_rule_in_sixteen_bits(case: Case, options: dict, dtype: str) -> None:
    small = options.get("lr") == 0.0 or bool(options.get("warmup_init"))
    side_by_side(case.name, gradients(3, dtype), dtype, **options, moves=not small, lockstep=True)
