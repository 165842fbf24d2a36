"""What a record says of the processor, on systems that tell it in different ways."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thalweg.show import devices
from thalweg.show.devices import machine

INTEL = "processor\t: 0\nmodel name\t: Imaginary 9000 @ 2 GHz\n\nprocessor\t: 1\nmodel name\t: Imaginary 9000 @ 2 GHz\n"
ARM = "processor\t: {}\nCPU implementer\t: {}\nCPU architecture: 8\nCPU part\t: {}\nCPU revision\t: 1\n\n"


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A system that tells this of itself."""

    def says(cpuinfo: str | None, **answers: str) -> None:
        path = tmp_path / "cpuinfo"
        if cpuinfo is not None:
            path.write_text(cpuinfo)
        monkeypatch.setattr(devices, "CPUINFO", str(path))
        for name, answer in {"processor": "", **answers}.items():
            monkeypatch.setattr(platform, name, lambda answer=answer: answer)

    return says


@pytest.mark.parametrize(
    ("said", "meant"),
    [("x86_64", "x86-64"), ("AMD64", "x86-64"), ("aarch64", "arm64"), ("arm64", "arm64"), ("riscv64", "riscv64")],
)
def test_an_architecture_has_one_name(system: Any, said: str, meant: str) -> None:
    system(INTEL, machine=said)
    assert machine()["architecture"] == meant


def test_the_model_where_the_system_names_it(system: Any) -> None:
    system(INTEL)
    assert machine()["cpu"] == "Imaginary 9000 @ 2 GHz"


@pytest.mark.parametrize(
    ("cores", "name"),
    [
        ([("0x41", "0xd0c")] * 4, "Neoverse-N1"),
        ([("0x41", "0xd03"), ("0x41", "0xd03"), ("0x41", "0xd08")], "Cortex-A53 + Cortex-A72"),
        ([("0x99", "0x123")], "ARM core 0x123 by 0x99"),
    ],
)
def test_cores_of_arm_are_named_by_who_designed_them(system: Any, cores: list[tuple[str, str]], name: str) -> None:
    system("".join(ARM.format(index, *core) for index, core in enumerate(cores)), machine="aarch64")
    assert (machine()["cpu"], machine()["architecture"]) == (name, "arm64")


def test_a_mac_is_asked(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    system(None, machine="arm64", processor="arm")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="Apple M9\n"))
    assert machine()["cpu"] == "Apple M9"

    def fails(*_: Any, **__: Any) -> None:
        raise OSError

    monkeypatch.setattr(subprocess, "run", fails)
    assert machine()["cpu"] == "arm"


def test_where_nothing_is_told_the_architecture_stands_for_it(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "freebsd")
    system(None, machine="amd64")
    assert machine()["cpu"] == "x86-64"


def test_this_machine_is_named() -> None:
    found = machine()
    assert found["cpu"] not in ("", platform.machine())
    assert found["system"].split()[0] == platform.system()
