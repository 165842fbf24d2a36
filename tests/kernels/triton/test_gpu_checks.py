"""Optimizers that kernels for GPUs step keep what `thalweg check` asks of anybody's."""

from __future__ import annotations

import pytest
from day import BY_DAY
from on_device import DEVICE
from side_by_side import RATES

from thalweg.check import check

pytestmark = [
    pytest.mark.slow,  # programs are interpreted
    pytest.mark.skipif(DEVICE != "cpu", reason="the check steps tensors of the CPU, where kernels are interpreted"),
]

#: Those that concern tables of addresses and numbers, and no other test of kernels has: all that is run where programs
#: of the tests compile soon. Most are of LARS, which has the fewest programs.
OF_TABLES = {
    "Adafactor": "gradients-with-other-strides,deterministic",
    "LAMB": "views-stay-inside,gradients-untouched,schedulers-with-lr-as-a-tensor",
    "LARS": "replaced-parameters,groups-have-their-own-lr,replaced-data,late-parameters,loading-replaces",
}


@pytest.mark.parametrize("rule", RATES)
def test_kernels_keep_what_users_rely_on(rule: str) -> None:
    report = check(f"thalweg.torch.{rule}", only=OF_TABLES[rule] if BY_DAY else None)
    assert not report.failed, report.failed
