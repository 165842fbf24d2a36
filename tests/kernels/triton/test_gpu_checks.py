"""Optimizers that kernels for GPUs step keep what `thalweg check` asks of anybody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cases import FUSED_RULES
from on_device import DEVICE

from thalweg.check import parametrize

pytestmark = [
    pytest.mark.slow,  # programs are interpreted
    pytest.mark.skipif(DEVICE != "cpu", reason="the check steps tensors of the CPU, where kernels are interpreted"),
]

#: Those that concern tables of addresses and numbers, by turns of rules.
OF_TABLES = {
    "views-stay-inside": "LAMB",
    "channels-last": "LARS",
    "gradients-with-other-strides": "Adafactor",
    "gradients-untouched": "LAMB",
    "maximize": "LARS",
    "late-parameters": "LAMB",
    "replaced-data": "Adafactor",
    "replaced-parameters": "LARS",
    "loading-replaces": "LAMB",
    "groups-have-their-own-lr": "LARS",
    "lr-as-a-tensor": "Adafactor",
    "schedulers-with-lr-as-a-tensor": "LAMB",
    "deterministic": "Adafactor",
    "gradients-are-released": "LARS",
}


def checks() -> list[Any]:
    return [
        pytest.param(*check.values, id=f"{rule}-{check.id}")
        for rule in FUSED_RULES
        for check in parametrize(f"thalweg.torch.{rule}").args[1]
        if OF_TABLES.get(check.id) == rule
    ]


@pytest.mark.parametrize("check", checks())
def test_kernels_keep_what_users_rely_on(check: Callable[[], Any]) -> None:
    check()
