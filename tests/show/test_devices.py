"""Devices: how they are named and refused, how batches reach them, and what records say of a machine."""

from __future__ import annotations

import platform
from typing import NamedTuple

import pytest

from thalweg.errors import CommandError
from thalweg.show import devices
from thalweg.show.devices import Device, machine, versions


def test_the_cpu_is_there() -> None:
    assert Device("cpu").describe() == machine()["cpu"] != ""
    Device("cpu").wait()


def test_devices_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(CommandError, match="there is no device 'gpu': try cpu or cuda"):
        Device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CommandError, match="PyTorch can use no GPU here; try cpu"):
        Device("cuda:1")
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match="--device cuda needs PyTorch, which is not installed: pip install torch"):
        Device("cuda")


class Batch(NamedTuple):
    inputs: object
    targets: object


def test_batches_of_any_form_are_moved() -> None:
    torch = pytest.importorskip("torch")
    device, x = Device("cpu"), torch.ones(2)
    moved = device.move(Batch({"x": x}, [x, 3]))
    assert isinstance(moved, Batch)
    assert moved.inputs["x"] is x
    assert moved.targets == [x, 3]


def test_random_numbers_depend_on_seed_and_step_and_the_caller_s_go_on() -> None:
    torch = pytest.importorskip("torch")

    def drawn(seed: int, step: int) -> float:
        with Device("cpu").seed_torch(seed, step):
            return float(torch.rand(()))

    torch.manual_seed(5)
    first, _ = torch.rand(()), drawn(0, 0)
    second = torch.rand(())
    torch.manual_seed(5)
    assert (torch.rand(()), torch.rand(())) == (first, second)
    assert drawn(0, 1) == drawn(0, 1)
    assert len({drawn(seed, step) for seed in range(2) for step in range(2)}) == 4


def test_a_record_says_the_system_and_the_versions_and_nothing_of_the_owner() -> None:
    assert set(machine()) == {"cpu", "cores", "system"}
    assert machine()["system"].split()[0] == platform.system()
    assert versions(["numpy", "no-such-package"]).keys() == {"python", "numpy"}
