"""Kernels for GPUs are tested on one where there is one, else by Triton's interpreter on tensors of the CPU."""

from __future__ import annotations

import importlib.util

import pytest

#: Kernels are written in Triton and step tensors of torch.
MISSING = any(importlib.util.find_spec(name) is None for name in ("torch", "triton"))
if MISSING:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def kernels_serve_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the time of a test, kernels for GPUs step the tensors that it has."""
    from on_device import DEVICE

    from thalweg.kernels import triton

    monkeypatch.setattr(triton, "DEVICES", {DEVICE})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU, all of these are tests of it. The interpreter computes with numpy, which warns of what is meant."""
    own = [item for item in items if "kernels/triton" in item.path.as_posix()]
    if MISSING or not own:
        return
    from on_device import DEVICE

    for item in own:
        item.add_marker(pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"))
        if DEVICE == "cuda":
            item.add_marker(pytest.mark.gpu)
