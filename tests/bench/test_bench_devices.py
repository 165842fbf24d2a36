"""Devices: what differs between a CPU and a GPU, the latter by a double of torch.cuda."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from bench_cases import made_up

from thalweg.bench import devices, memory, process
from thalweg.bench.contestants import Contestant, Ready, Stepping
from thalweg.bench.devices import Cpu, Cuda, device_called
from thalweg.errors import CommandError


class FakeCuda:
    """A GPU that takes notes."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.allocated, self.peak = 1000, 1000

    def is_available(self) -> bool:
        return True

    def get_device_name(self) -> str:
        return "Imaginary 9000"

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def mem_get_info(self) -> tuple[int, int]:
        return 70, 80

    def empty_cache(self) -> None:
        self.log.append("empty_cache")

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def memory_allocated(self) -> int:
        return self.allocated

    def max_memory_allocated(self) -> int:
        return self.peak


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    torch = pytest.importorskip("torch")
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def test_the_cpu_is_there() -> None:
    device = device_called("cpu")
    assert isinstance(device, Cpu)
    assert "threads" in device.about()
    assert device.free_bytes() > 2**20
    device.give_back()


def test_an_action_is_timed_and_done() -> None:
    done: list[int] = []
    assert 0 <= Cpu().timed(lambda: done.append(1)) < 60
    assert done == [1]


def test_a_gpu_is_waited_for_before_and_after(cuda: FakeCuda) -> None:
    device = device_called("cuda")
    assert isinstance(device, Cuda)
    device.timed(lambda: cuda.log.append("step"))
    assert cuda.log == ["synchronize", "step", "synchronize"]
    assert (device.about(), device.free_bytes()) == ("Imaginary 9000", 70)
    device.give_back()
    assert cuda.log[-1] == "empty_cache"


def test_the_peak_on_a_gpu_is_counted_from_what_was_there(cuda: FakeCuda) -> None:
    cuda.peak = 9999  # of something earlier

    def step() -> None:
        cuda.peak = cuda.allocated + 250

    contestant = made_up("one", [])
    found = memory.on_gpu(contestant, Ready(step, probe=lambda: [0.0]))
    assert (found.extra, found.how) == (250, "torch.cuda.max_memory_allocated")


def test_of_jax_on_a_gpu_the_compiler_tells() -> None:
    def make(workload: Any, stepping: Stepping) -> Ready:
        raise NotImplementedError

    contestant = Contestant("optax.lamb", "lamb", "optax", "optax", make, 3)
    ready = Ready(lambda: None, probe=lambda: [0.0], compiled={"temporary_bytes": 321.0})
    assert memory.on_gpu(contestant, ready).extra == 321


def test_no_gpu_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CommandError, match="there is no GPU here that PyTorch can use: --device cpu"):
        device_called("cuda")


def test_no_torch_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match="--device cuda needs PyTorch, which is not installed"):
        device_called("cuda")


def test_there_are_two_devices() -> None:
    with pytest.raises(CommandError, match="there is no device 'tpu': there are cpu, cuda"):
        device_called("tpu")


def test_where_the_system_says_nothing_little_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError()))
    assert Cpu().free_bytes() == devices.LITTLE_MEMORY


def test_the_process_is_prepared_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    process.prepare("cuda", None)
    assert process.os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "JAX_PLATFORMS" not in process.os.environ
    process.prepare("cpu", None)
    assert process.os.environ["JAX_PLATFORMS"] == "cpu"


def test_everyone_is_kept_to_as_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[list[int]] = []
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "THALWEG_NUM_THREADS"):
        monkeypatch.setenv(variable, "0")  # and put back afterwards
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda _: {3, 1, 2}, raising=False)
    monkeypatch.setattr(process.os, "sched_setaffinity", lambda _, cores: chosen.append(cores), raising=False)
    process.prepare("cpu", 2)
    assert chosen == [[1, 2]]
    assert process.os.environ["OMP_NUM_THREADS"] == "2"
    with pytest.raises(CommandError, match="--threads 4 is more than the 3 cores"):
        process.prepare("cpu", 4)
