"""The plain function: what it measures, what it refuses, and what Ctrl-C leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_cases import TINY

from thalweg.bench import Bench, Comparison, Progress, Stopped, bandwidth, bench, run
from thalweg.bench.devices import Cpu
from thalweg.errors import CommandError
from thalweg.kernels.cpu.library import levels, load, reason_missing
from thalweg.show.published import PACKAGES, installed
from thalweg.show.surroundings import architecture

#: What needs numpy alone.
OURS_ALONE: dict[str, Any] = dict(front_ends=["numpy"], against=[], repeats=2, memory=False, wait=0.0)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "SIZE", 2**16)
    monkeypatch.setattr(Cpu, "rest", 0.0)
    monkeypatch.setattr(Cpu, "give_back", lambda self: None)


def test_every_rule_of_ours_on_numpy_alone() -> None:
    finished: list[Comparison] = []
    rules = ["lamb", "lars", "adafactor", "kron", "adamw", "sgd"]
    found = bench(TINY, rules=rules, on_comparison=finished.append, **OURS_ALONE)
    assert isinstance(found, Bench)
    assert [comparison.rule for comparison in found.comparisons] == rules
    assert finished == found.comparisons
    for comparison in found.comparisons:
        (row,) = comparison.rows
        assert comparison.left_out == {}
        assert row.contestant.startswith("thalweg.numpy")
        assert (len(row.seconds), row.ratio) == (2, 1)
        assert row.median > 0
        assert (row.share_of_floor is None) == (comparison.rule == "kron")
        assert row.bandwidth > 0
    assert (found.device, found.dtype, found.stopped) == ("cpu", "float32", False)
    assert found.absent == [package for package in PACKAGES if not installed(package)]
    assert {"python", "thalweg", "numpy"} <= set(found.versions)
    assert found.machine["architecture"] == architecture()
    assert found.machine["native_core"] == (None if reason_missing() else levels(load())[-1])


def test_several_models_and_the_order_of_front_ends() -> None:
    pytest.importorskip("torch")
    found = bench([TINY, TINY], rules=["sgd"], **{**OURS_ALONE, "front_ends": ["numpy", "torch"]})
    assert len(found.comparisons) == 2
    assert [row.contestant.split()[0] for row in found.comparisons[0].rows] == ["thalweg.numpy", "thalweg.torch"]


def test_peers_take_part_by_package() -> None:
    pytest.importorskip("torch")
    found = bench(TINY, rules=["sgd"], **{**OURS_ALONE, "against": ["torch"]})
    assert [row.entrant.package for row in found.comparisons[0].rows] == ["thalweg", "torch", "torch"]


def test_without_torch_numpy_is_the_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth.importlib.util, "find_spec", lambda name: None)
    stick = bandwidth.yardstick(Cpu())
    assert stick.name == "numpy.multiply in place"
    assert stick.update() > 0
    assert stick.others == {}


def test_with_torch_adamw_is_the_yardstick() -> None:
    pytest.importorskip("torch")
    stick = bandwidth.yardstick(Cpu())
    assert stick.name == "torch.optim.AdamW(fused=True)"
    assert all(measure() > 0 for measure in (stick.update, *stick.others.values()))


def test_the_yardstick_counts_every_byte_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cpu, "timed", lambda self, action: 0.5 if action() is None or True else 0.0)
    assert bandwidth.numpy_yardstick(Cpu(), 4000).update() == 2 * 4000 / 0.5
    pytest.importorskip("torch")
    stick = bandwidth.torch_yardstick(Cpu(), 4000)
    assert stick.update() == 7000 / 0.5  # four quarters are read and three written
    assert [measure() for measure in stick.others.values()] == [8000 / 0.5, 4000 / 0.5, 4000 / 0.5]


def test_a_model_is_whatever_plan_takes(tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"empty": [0, 3], "scalar": [], "weight": {"shape": [4, 3], "dtype": "bfloat16"}}))
    found = bench(str(shapes), rules=["lamb"], **OURS_ALONE)
    (comparison,) = found.comparisons
    assert (comparison.parameters, comparison.tensors, comparison.left_out) == (13, 3, {})
    assert comparison.floor == 13 * 40  # float32 is what was asked for
    shapes.write_text("[[0, 3]]")
    with pytest.raises(CommandError, match=r"shapes\.json has no parameters to step"):
        bench(str(shapes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": ["lamp"]}, "there is no rule 'lamp': did you mean 'lamb'?"),
        ({"against": ["tim"]}, "there is no package 'tim': did you mean 'timm'?"),
        ({"front_ends": ["jax"]}, "there is no front end 'jax': there are torch, numpy, optax"),
        ({"engine": "fuse"}, "there is no engine 'fuse': did you mean 'fused'?"),
        ({"dtype": "float17"}, "there is no dtype 'float17': did you mean"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"inner": -1}, "inner must be at least 1, got -1"),
        ({"device": "tpu"}, "there is no device 'tpu': there are cpu, cuda"),
        ({"model": "gpt3"}, "there is no model 'gpt3': did you mean 'gpt2'?"),
    ],
)
def test_what_is_not_there_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CommandError) as refused:
        bench(**{"model": TINY, **options})
    assert message in str(refused.value)


def test_who_is_asked_for_and_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "installed", lambda package: package == "numpy")
    with pytest.raises(CommandError, match="timm is not installed, and --against asks for it: pip install timm"):
        bench(TINY, against=["timm"])
    with pytest.raises(CommandError, match="optax is not installed, and --front-ends asks for it: pip install"):
        bench(TINY, front_ends=["optax"])
    with pytest.raises(CommandError, match=r"apex is not installed, .* built from its source"):
        bench(TINY, against=["apex"])
    found = bench(TINY, rules=["sgd"], repeats=1, memory=False, wait=0.0)  # and who is not asked for is left out
    assert list(found.comparisons[0].entrants) == ["thalweg.numpy SGD"]
    assert found.absent == list(PACKAGES)


class NotACpu(Cpu):
    name = "cuda"


def test_numpy_does_not_step_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "installed", lambda package: True)
    with pytest.raises(CommandError, match=r"thalweg\.numpy steps on CPUs alone"):
        run.contestants(NotACpu(), None, ["numpy", "torch"])
    assert all(c.front_end != "numpy" for c in run.contestants(NotACpu(), [], None))


def test_ctrl_c_leaves_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(progress: Progress) -> None:
        if progress.rule == "lars":
            raise KeyboardInterrupt

    with pytest.raises(Stopped) as stopped:
        bench(TINY, rules=["lamb", "lars", "sgd"], on_progress=impatient, **OURS_ALONE)
    assert isinstance(stopped.value, KeyboardInterrupt)
    assert [comparison.rule for comparison in stopped.value.finished.comparisons] == ["lamb"]
    assert stopped.value.finished.stopped


def test_memory_is_measured_for_everyone() -> None:
    found = bench(TINY, rules=["sgd"], **{**OURS_ALONE, "memory": True})
    memory = found.comparisons[0].rows[0].entrant.memory
    assert memory is not None
    assert (memory.extra is not None) == Path("/proc/self/clear_refs").exists(), memory.how


def test_importing_the_bench_loads_no_framework() -> None:
    """Cores are counted when libraries are loaded, and --threads has to come first."""
    program = "import sys, thalweg.bench; sys.exit(bool({'numpy', 'torch', 'jax', 'rich'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True)
