"""``thalweg check``: its table and file, exit codes, mistakes told in one sentence; and checks as tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("click")
pytest.importorskip("rich")

from check_faulty import Adam
from own_rules import Signed

from thalweg.check import check, parametrize
from thalweg.cli import run

FEW = ["--only", "zero-grad,loading-twice,odd"]


def test_what_failed_is_shown_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = tmp_path / "found.json"
    options = ["--options", '{"lr": 0.1}', "--against", "check_faulty:Adam(betas=(0.8, 0.9)),thalweg.torch.LAMB"]
    assert run(["check", "check_faulty:Adam", *options, *FEW, "--json", str(record)]) == 1
    printed, progress = capsys.readouterr()
    assert not progress
    (all_groups,) = (line.split() for line in printed.splitlines() if line.startswith("all"))
    assert " ".join(all_groups) == "all 1 of 2 1 of 2 2 of 2"
    assert "failed: check_faulty:Adam, loading-twice\n  must hold: " in printed
    assert "failed: check_faulty:Adam(betas=(0.8, 0.9)), loading-twice\n  must hold: " in printed
    assert "  seen: the state dict that was loaded, two steps later: " in printed
    assert "check_faulty:Adam, not offered: odd (not declared)" in printed
    reports = json.loads(record.read_text())
    assert [report["options"] for report in reports] == [{"lr": 0.1}, {"betas": [0.8, 0.9]}, {}]
    outcomes = [{verdict["check"]: verdict["outcome"] for verdict in report["verdicts"]} for report in reports]
    passes, fails = ({"zero-grad": "passed", "odd": "not offered", "loading-twice": x} for x in ("passed", "failed"))
    assert outcomes == [fails, fails, passes]


def test_exit_code_0_where_nothing_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "thalweg.torch.LAMB", "--only", "bad-input"]) == 0
    assert "failed" not in capsys.readouterr().out


def test_the_checks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "torch.optim.AdamW", "--list", "--only", "memory"]) == 0
    assert "gradients-are-released" in capsys.readouterr().out
    assert run(["check", "torch.optim.AdamW", "--list", "--ranks"]) == 0
    assert "files-at-fewer-ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["torch.optim.AdamV"], "module 'torch.optim' has no 'AdamV'"),
        (
            ["torch.optim.AdamW", "--only", "zero-grd"],
            "no check or group 'zero-grd': did you mean 'zero-grad'?",
        ),
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


@parametrize("thalweg.torch.LAMB", only="bad-input", lr=0.1)
def test_one_test_a_check(check: Callable[[], Any]) -> None:
    check()


def test_a_test_fails_as_its_check_does() -> None:
    cases = {case.id: case.values[0] for case in parametrize(Adam, only="loading-twice,odd").args[1]}
    with pytest.raises(pytest.fail.Exception, match="two steps later"):
        cases["loading-twice"]()
    with pytest.raises(pytest.skip.Exception, match="not declared"):
        cases["odd"]()
