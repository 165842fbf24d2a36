"""Kernels for GPUs are tested on one where there is one, else by Triton's interpreter on tensors of the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

#: Kernels are written in Triton and step tensors of torch.
MISSING = any(importlib.util.find_spec(name) is None for name in ("torch", "triton"))
if MISSING:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def kernels_serve_the_device() -> Iterator[None]:
    """For the time of a test, kernels for GPUs step the tensors that it has."""
    from interpreter import serving
    from on_device import DEVICE

    with serving(DEVICE):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU, all of these are tests of it."""
    own = [item for item in items if "kernels/triton" in item.path.as_posix()]
    if MISSING or not own:
        return
    from on_device import DEVICE

    for item in own:
        if DEVICE == "cuda":
            item.add_marker(pytest.mark.gpu)
