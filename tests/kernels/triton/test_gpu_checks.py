"""Optimizers that kernels for GPUs step keep what `thalweg check` asks of anybody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cases import FUSED_RULES
from lanes import with_nightly
from on_device import DEVICE

from thalweg.check import parametrize

pytestmark = [
    pytest.mark.slow,  # programs are interpreted
    pytest.mark.skipif(DEVICE != "cpu", reason="the check steps tensors of the CPU, where kernels are interpreted"),
]

#: Those that concern tables of addresses and numbers, which `make test` has.
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


def every_check() -> list[Any]:
    found = []
    for rule in FUSED_RULES:
        for each in parametrize(f"thalweg.torch.{rule}").args[1]:
            param = pytest.param(*each.values, id=f"{rule}-{each.id}")
            found.append(param if OF_TABLES.get(each.id) == rule else with_nightly(param))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("check", every_check())
def test_kernels_keep_what_users_rely_on(check: Callable[[], Any]) -> None:
    check()
