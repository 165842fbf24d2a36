"""The plain function: what it measures, what it refuses, and what Ctrl-C leaves."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_cases import TINY

from thalweg.bench import Bench, Comparison, Progress, Stopped, bandwidth, bench, run
from thalweg.errors import CommandError
from thalweg.kernels.cpu.library import levels, load, reason_missing
from thalweg.rules import RULES
from thalweg.show.arguments import Given
from thalweg.show.devices import Device, architecture
from thalweg.show.published import PACKAGES, is_installed

HURRIED: dict[str, Any] = dict(memory=False, wait=0.0, rest=0.0, large=0, yardstick_bytes=2**16)
#: What needs numpy alone.
OURS_ALONE: dict[str, Any] = dict(front_ends=["numpy"], against=[], repeats=2, **HURRIED)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "release_memory", lambda self: None)


def test_every_rule_of_ours_on_numpy_alone() -> None:
    finished: list[Comparison] = []
    names = ["lamb", "lars", "adafactor", "kron", "adamw", "sgd"]
    found = bench(TINY, optimizers=names, on_comparison=finished.append, **OURS_ALONE)
    assert isinstance(found, Bench)
    (comparison,) = found.comparisons
    assert finished == [comparison]
    assert [row.rule.lower() for row in comparison.rows] == names
    assert comparison.left_out == {}
    for row in comparison.rows:
        assert row.contestant.startswith("thalweg.numpy")
        assert len(row.seconds) == 2
        assert row.median > 0
        assert (row.share_of_floor is None) == (row.rule == "Kron")
        assert row.bandwidth is not None
    assert comparison.rows[0].ratio == 1
    assert (found.device, found.dtype, found.stopped, found.moving_grads) == ("cpu", "float32", False, True)
    assert found.absent == [package for package in PACKAGES if not is_installed(package)]
    assert {"python", "thalweg", "numpy"} <= set(found.versions)
    assert found.machine["architecture"] == architecture()
    assert found.machine["native_core"] == (None if reason_missing() else levels(load())[-1])


def test_peers_take_part_by_package_and_torch_s_adamw_comes_first() -> None:
    pytest.importorskip("torch")
    asked = {**OURS_ALONE, "against": ["torch"], "front_ends": ["numpy", "torch"]}
    found = bench([TINY, TINY], optimizers=["sgd", "muon_adamw"], **asked)
    assert len(found.comparisons) == 2
    assert [row.contestant for row in found.comparisons[0].rows] == [
        "torch.optim.AdamW(fused=True)",
        "thalweg.numpy SGD",
        "thalweg.torch SGD",
        "torch.optim.SGD(fused=True)",
        "torch.optim.SGD(foreach=True)",
        "thalweg.torch muon_adamw",
    ]


def test_ratios_are_to_the_reference_that_is_asked_for() -> None:
    found = bench(TINY, optimizers=["sgd", "lars"], reference="numpy lars", **OURS_ALONE)
    assert [row.contestant for row in found.comparisons[0].rows] == ["thalweg.numpy LARS", "thalweg.numpy SGD"]
    assert found.comparisons[0].reference == "thalweg.numpy LARS"
    with pytest.raises(CommandError, match=r"there is no contestant 'lamb': there are thalweg\.numpy SGD"):
        bench(TINY, optimizers=["sgd"], reference="lamb", **OURS_ALONE)


def test_many_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "make_yardstick", lambda *_: pytest.fail("a small model needs no yardstick"))
    (comparison,) = bench("small", optimizers=["sgd"], **{**OURS_ALONE, "repeats": 1, "large": 2**26}).comparisons
    assert (comparison.tensors, comparison.rows[0].bandwidth) == (148, None)


def test_all_is_every_rule() -> None:
    assert run.resolve_optimizers(["all"]) == list(RULES)
    assert run.resolve_optimizers(["lamb", "LAMB", "muon_adamw"]) == ["LAMB", "muon_adamw"]


def test_options_reach_the_optimizers() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    found = bench(TINY, optimizers=["lamb"], options=[Given("", "state_dtype", "bfloat16")], **OURS_ALONE)
    usual = bench(TINY, optimizers=["lamb"], **OURS_ALONE)
    with_option, without = (each.comparisons[0].rows[0].floor for each in (found, usual))
    assert with_option is not None
    assert without is not None
    assert with_option < without


def test_the_yardstick_counts_every_byte_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "time", lambda self, action: 0.5 if action() is None or True else 0.0)
    if importlib.util.find_spec("torch"):
        stick = bandwidth.make_yardstick(Device(), 4000)
        assert (stick.name, stick.measure()) == ("torch.optim.AdamW(fused=True)", 7000 / 0.5)  # 4 quarters in, 3 out
        assert [measure() for measure in stick.others.values()] == [8000 / 0.5, 4000 / 0.5, 4000 / 0.5]
    monkeypatch.setattr(bandwidth.importlib.util, "find_spec", lambda name: None)
    stick = bandwidth.make_yardstick(Device(), 4000)
    assert (stick.name, stick.measure(), stick.others) == ("numpy.multiply in place", 2 * 4000 / 0.5, {})


def test_a_model_is_whatever_plan_takes(tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"empty": [0, 3], "scalar": [], "weight": {"shape": [4, 3], "dtype": "bfloat16"}}))
    found = bench(str(shapes), rules=["lamb"], **OURS_ALONE)
    (comparison,) = found.comparisons
    assert (comparison.parameters, comparison.tensors, comparison.left_out) == (13, 3, {})
    assert comparison.rows[0].floor == 13 * 40  # float32 is what was asked for
    shapes.write_text("[[0, 3]]")
    with pytest.raises(CommandError, match=r"shapes\.json has no parameters to step"):
        bench(str(shapes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizers": ["lamp"]}, "there is no optimizer 'lamp': did you mean 'LAMB'?"),
        ({"optimizers": ["lamb"], "rules": ["lamb"]}, "optimizers and rules are two names of one argument"),
        ({"options": [Given("", "betta", 1)]}, "no optimizer here has an option 'betta': did you mean 'betas'?"),
        ({"options": [Given("kron", "lr", 1)]}, "the option kron.lr is for Kron, which is not among the optimizers"),
        ({"against": ["tim"]}, "there is no package 'tim': did you mean 'timm'?"),
        ({"front_ends": ["jax"]}, "there is no front end 'jax': there are torch, numpy, optax"),
        ({"engine": "fuse"}, "there is no engine 'fuse': did you mean 'fused'?"),
        ({"dtype": "float17"}, "there is no dtype 'float17': did you mean"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"inner": -1}, "inner must be at least 1, got -1"),
        ({"device": "tpu"}, "there is no device 'tpu': did you mean 'cpu'?"),
        ({"model": "gpt3"}, "there is no model 'gpt3': did you mean 'gpt2'?"),
    ],
)
def test_what_is_not_there_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CommandError) as refused:
        bench(**{"model": TINY, **options})
    assert message in str(refused.value)


def test_who_is_asked_for_and_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "is_installed", lambda package: package == "numpy")
    with pytest.raises(CommandError, match="timm is not installed, and --against asks for it: pip install timm"):
        bench(TINY, against=["timm"])
    with pytest.raises(CommandError, match="optax is not installed, and --front-ends asks for it: pip install"):
        bench(TINY, front_ends=["optax"])
    with pytest.raises(CommandError, match=r"apex is not installed, .* built from its source"):
        bench(TINY, against=["apex"])
    found = bench(TINY, rules=["sgd"], repeats=1, **HURRIED)  # and who is not asked for is left out
    assert [row.contestant for row in found.comparisons[0].rows] == ["thalweg.numpy SGD"]
    assert found.absent == list(PACKAGES)


def test_numpy_does_not_step_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "is_installed", lambda package: True)
    gpu = Device()
    gpu.cuda = object()
    with pytest.raises(CommandError, match=r"thalweg\.numpy steps on CPUs only"):
        run.list_contestants(["SGD"], (), gpu, None, ["numpy", "torch"])
    assert [c.front_end for c in run.list_contestants(["SGD"], (), gpu, [], None)] == ["torch", "optax"]


def test_ctrl_c_leaves_what_is_finished() -> None:
    """Also the heats of a model that has more to come."""

    def interrupt(progress: Progress) -> None:
        if progress.doing == "warming up thalweg.numpy AdamW":
            raise KeyboardInterrupt

    with pytest.raises(Stopped) as stopped:
        bench([TINY, TINY], rules=["lamb", "lars", "sgd", "adamw"], budget=1.0, on_progress=interrupt, **OURS_ALONE)
    assert isinstance(stopped.value, KeyboardInterrupt)
    assert stopped.value.finished.stopped
    (comparison,) = stopped.value.finished.comparisons
    assert [row.rule for row in comparison.rows] == ["LAMB", "LARS", "SGD"]


def test_memory_is_measured_for_everyone() -> None:
    found = bench(TINY, rules=["sgd"], **{**OURS_ALONE, "memory": True})
    memory = found.comparisons[0].rows[0].memory
    assert memory is not None
    assert (memory.extra is not None) == Path("/proc/self/clear_refs").exists(), memory.how


def test_importing_the_bench_loads_no_framework() -> None:
    """Cores are counted when libraries are loaded, and --threads has to come first."""
    program = "import sys, thalweg.bench; sys.exit(bool({'numpy', 'torch', 'jax', 'rich'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True)
