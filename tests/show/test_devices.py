"""Devices: what differs between a CPU and a GPU, the latter by a double of torch.cuda, and what records call them."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from bench_cases import FakeCuda, made_up

from thalweg.bench import memory
from thalweg.bench.contestants import Ready
from thalweg.errors import CommandError
from thalweg.show import devices
from thalweg.show.devices import Device, machine, prepare_process


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    torch = pytest.importorskip("torch")
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def test_the_cpu_is_there() -> None:
    device = Device("cpu")
    assert "threads" in device.describe()
    assert device.count_free_bytes() > 2**20
    device.release_memory()
    device.forget_peak()
    assert device.peak_bytes() is None


def test_a_gpu_is_waited_for_before_and_after(cuda: FakeCuda) -> None:
    device = Device("cuda")
    device.time(lambda: cuda.log.append("step"))
    assert cuda.log == ["wait", "step", "wait"]
    assert (device.describe(), device.count_free_bytes()) == ("Imaginary 9000", 70)
    device.release_memory()
    assert cuda.log[-1] == "empty_cache"


def test_the_host_s_time_ends_before_the_gpu_is_waited_for(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_clock() -> float:
        cuda.log.append("clock")
        return float(len(cuda.log))

    monkeypatch.setattr(devices.time, "perf_counter", read_clock)
    assert Device("cuda").time_host(lambda: cuda.log.append("step")) == 2
    assert cuda.log == ["wait", "clock", "step", "clock", "wait"]


def test_a_held_queue_is_timed_by_events(cuda: FakeCuda) -> None:
    assert Device("cuda").time_queue(lambda: cuda.log.append("step"), hold=0.5) == cuda.ELAPSED / 1e3
    assert cuda.log == ["wait", "sleep", "event", "step", "event", "wait"]
    assert cuda.slept == 0.5 * devices.CYCLES


def test_the_peak_on_a_gpu_is_counted_from_what_was_there(cuda: FakeCuda) -> None:
    cuda.peak = 9999  # of something earlier

    def step() -> None:
        cuda.peak = cuda.allocated + 250

    found = memory.measure_on_gpu(made_up("one", []), Ready(step, probe=lambda: [0.0]))
    assert (found.extra, found.how) == (250, "torch.cuda.max_memory_allocated")
    compiled = Ready(lambda: None, probe=lambda: [0.0], compiled={"temporary_bytes": 321.0})
    in_jax = replace(made_up("two", []), front_end="optax")
    assert memory.measure_on_gpu(in_jax, compiled).extra == 321, "of jax the compiler tells"


def test_batches_are_moved_whatever_holds_them() -> None:
    torch = pytest.importorskip("torch")

    class Pair(NamedTuple):
        x: Any
        y: Any

    pair = Device("cpu").move(Pair(torch.ones(2), [torch.zeros(1)]))
    assert (type(pair), pair.x.tolist(), pair.y[0].tolist()) == (Pair, [1, 1], [0])


def test_a_device_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(CommandError, match="there is no device 'tpu': try cpu or cuda"):
        Device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CommandError, match="there is no device 'cuda': PyTorch can use no GPU here; try cpu"):
        Device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match="--device cuda needs PyTorch, which is not installed"):
        Device("cuda")


def test_where_the_system_says_nothing_little_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError()))
    assert Device().count_free_bytes() == devices.LITTLE_MEMORY


def test_the_process_is_prepared_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    prepare_process("cuda", None)
    assert devices.os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "JAX_PLATFORMS" not in devices.os.environ
    prepare_process("cpu", None)
    assert devices.os.environ["JAX_PLATFORMS"] == "cpu"


def test_everyone_is_kept_to_as_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[list[int]] = []
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "THALWEG_NUM_THREADS"):
        monkeypatch.setenv(variable, "0")  # and put back afterwards
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: {3, 1, 2}, raising=False)
    monkeypatch.setattr(devices.os, "sched_setaffinity", lambda _, cores: chosen.append(cores), raising=False)
    prepare_process("cpu", 2)
    assert chosen == [[1, 2]]
    assert devices.os.environ["OMP_NUM_THREADS"] == "2"
    with pytest.raises(CommandError, match="--threads 4 is more than the 3 cores"):
        prepare_process("cpu", 4)


# ---- what a record says of the processor

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
    assert (machine()["cpu"], machine()["architecture"]) == ("Imaginary 9000 @ 2 GHz", meant)


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
