"""``thalweg check``: its table, exit codes, mistakes told in one sentence; and the plugin of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from check_faulty import Adam
from own_rules import Signed

from thalweg.check import check
from thalweg.cli import run

FEW = ["--only", "zero-grad,loading-twice,lr-zero", "--facts", '{"lr_zero_is_no_step": false}']


def test_what_failed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--options", '{"lr": 0.1}', "--against", "check_faulty:Adam(betas=(0.8, 0.9)),thalweg.torch.LAMB"]
    assert run(["check", "check_faulty:Adam", *options, *FEW]) == 1
    printed, progress = capsys.readouterr()
    assert not progress
    (all_groups,) = (line.split() for line in printed.splitlines() if line.startswith("all"))
    assert " ".join(all_groups) == "all 1 of 2 2 of 3 3 of 3"
    assert "failed: check_faulty:Adam, loading-twice\n  must hold: " in printed
    assert "failed: check_faulty:Adam(betas=(0.8, 0.9)), loading-twice\n  must hold: " in printed
    assert "  seen: the state dict that was loaded, two steps later: " in printed
    assert "check_faulty:Adam, not offered: lr-zero (declared otherwise)" in printed


def test_nothing_of_the_users_own_tests_is_met_and_no_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conftest.py").write_text("raise RuntimeError('a conftest')")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "test_mine.py").write_text("def test_mine():\n    raise RuntimeError('a test')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    monkeypatch.setenv("PYTEST_PLUGINS", "no_such_plugin")
    before = sorted(tmp_path.iterdir()), sys.path.copy(), dict(os.environ)
    assert run(["check", "check_faulty:Adam", "--only", "zero-grad"]) == 0
    assert (sorted(tmp_path.iterdir()), sys.path, dict(os.environ)) == before
    printed, aside = capsys.readouterr()
    assert not aside
    assert [line.split() for line in printed.splitlines()[2:]] == [
        ["contract", "1", "of", "1"],
        ["all", "1", "of", "1"],
    ]


def test_ctrl_c_stops_all() -> None:
    with pytest.raises(KeyboardInterrupt):
        check(Stopped, only="contract")


class Stopped(Adam):
    """Its user stops the program at its third step."""

    steps = 0

    def before(self, params: list[Any]) -> None:
        Stopped.steps += 1
        if Stopped.steps == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["thalweg.torch.LAMB", "--only", "bad-input"], "all"),
        (["torch.optim.AdamW", "--list", "--only", "memory"], "gradients-are-released"),
        (["torch.optim.AdamW", "--list", "--ranks"], "files-at-fewer-ranks"),
    ],
)
def test_exit_code_0_where_nothing_failed_or_checks_are_listed(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", *arguments]) == 0
    printed = capsys.readouterr().out
    assert words in printed
    assert "failed:" not in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["torch.optim.AdamV"], "module 'torch.optim' has no 'AdamV'"),
        (["torch.optim.AdamW", "--only", "zero-grd"], "no check or group 'zero-grd': did you mean 'zero-grad'?"),
        (["torch.optim.AdamW", "--only", "fsdp2"], "fsdp2 is checked by several processes: add --ranks"),
        (["torch.optim.AdamW", "--options", "lr=1"], "--options 'lr=1' is no JSON"),
        (["torch.optim.AdamW", "--options", '{"lr": -1}'], 'cannot be tried with the options {"lr": -1}'),
        (["torch.optim.AdamW", "--facts", '{"even": true}'], "unknown facts even"),
        (["torch.optim.AdamW(0.1)"], "write options as Name(lr=0.1"),
        (["AdamW"], "write module:Class"),
        (["torch.optim.AdamW", "--against", "torch.optim.AdamV"], "module 'torch.optim' has no 'AdamV'"),
        (["torch.optim.AdamW", "--against", "torch.optim.SGD(lr=-1)"], "SGD(lr=-1) cannot be tried with the options"),
        (["json:dumps"], "cannot be tried"),
        (["builtins:repr"], "cannot be tried"),
        (["torch.optim.AdamW", "--only", ","], "--only: nothing is left"),
    ],
)
def test_mistakes_are_told(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_a_rule_is_checked_as_an_optimizer_for_torch() -> None:
    assert [each.outcome for each in check(Signed, only="descends", lr=0.01).verdicts] == ["passed"]


def test_the_surroundings_are_kept() -> None:
    import torch

    torch.manual_seed(3)
    before = torch.get_rng_state()
    check("check_faulty:GlobalRandomness", only="generators-untouched,deterministic")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "code"), [(["check", "torch.optim.AdamW"], 1), (["--help"], 0)])
def test_without_pytest_the_other_verbs_are_there(arguments: list[str], code: int) -> None:
    script = f"import sys; sys.modules['pytest'] = None; from thalweg.cli import run; sys.exit(run({arguments!r}))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert ended.stderr == ('thalweg: pytest is not installed: pip install "thalweg[check]"\n' if code else "")


def test_pytest_runs_checks_by_its_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plugin = ["-p", "thalweg.check.plugin", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
    few = ["-k", "zero_grad or loading_twice or lr_zero", "--junit-xml", "found.xml", *FEW[2:]]
    assert pytest.main([*plugin, "--optimizer", "check_faulty:Adam", "--options", '{"lr": 0.1}', *few]) == 1
    assert "1 failed, 2 passed, 1 skipped" in capsys.readouterr().out
    told = Path("found.xml").read_text()
    assert "A state dict can be loaded again after the optimizer that took it has stepped" in told
    assert pytest.main([*plugin, "--optimizer", "AdamW"]) == 4
    assert "ERROR: 'AdamW' is no optimizer: write module:Class" in capsys.readouterr().err
