"""Devices: what differs between a CPU and a GPU, the latter by a double of torch.cuda."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from bench_cases import FakeCuda, made_up

from thalweg.bench import memory
from thalweg.bench.contestants import Contestant, Ready, Stepping
from thalweg.errors import CommandError
from thalweg.show import devices
from thalweg.show.devices import Device, prepare_process


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


def test_an_action_is_timed_and_done() -> None:
    done: list[int] = []
    assert 0 <= Device().time(lambda: done.append(1)) < 60
    assert done == [1]


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

    contestant = made_up("one", [])
    found = memory.measure_on_gpu(contestant, Ready(step, probe=lambda: [0.0]))
    assert (found.extra, found.how) == (250, "torch.cuda.max_memory_allocated")


def test_of_jax_on_a_gpu_the_compiler_tells() -> None:
    def make(workload: Any, stepping: Stepping) -> Ready:
        raise NotImplementedError

    contestant = Contestant("optax.lamb", "LAMB", "optax", "optax", make, 3)
    ready = Ready(lambda: None, probe=lambda: [0.0], compiled={"temporary_bytes": 321.0})
    assert memory.measure_on_gpu(contestant, ready).extra == 321


def test_no_gpu_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CommandError, match="there is no device 'cuda': PyTorch can use no GPU here; try cpu"):
        Device("cuda")


def test_no_torch_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match="--device cuda needs PyTorch, which is not installed"):
        Device("cuda")


def test_a_device_that_torch_does_not_know() -> None:
    pytest.importorskip("torch")
    with pytest.raises(CommandError, match="there is no device 'tpu': try cpu or cuda"):
        Device("tpu")


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
