"""``thalweg check``: tables, files, exit codes, mistakes told in one sentence; and checks as tests."""

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

from thalweg.check import Report, Verdict, check, parametrize
from thalweg.check.tables import repeat_command
from thalweg.cli import run

FEW = ["--only", "zero-grad,loading-twice,odd"]


def test_what_failed_is_shown_with_how_to_see_it_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record, table = tmp_path / "found.json", tmp_path / "found.md"
    files = ["--json", str(record), "--markdown", str(table)]
    options = ["--options", '{"lr": 0.1}', "--against", "check_faulty:Adam(betas=(0.8, 0.9)),thalweg.torch.LAMB"]
    assert run(["check", "check_faulty:Adam", *options, *FEW, *files]) == 1
    printed = capsys.readouterr().out
    assert "failed: check_faulty:Adam, loading-twice" in printed
    assert "again: thalweg check 'check_faulty:Adam(lr=0.1)' --only loading-twice" in printed
    assert "again: thalweg check 'check_faulty:Adam(betas=(0.8, 0.9))' --only loading-twice" in printed
    assert "not offered: odd (not declared)" in printed
    found = json.loads(record.read_text())
    assert [each["counts"].get("failed", 0) for each in found] == [1, 1, 0]
    assert "| `check_faulty:Adam` | 1 of 2 | - | loading-twice |" in table.read_text()
    assert "| `thalweg.torch.LAMB` | 2 of 2 | - | none |" in table.read_text()


def test_one_that_cannot_be_constructed_is_a_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "found.md"
    others = "torch.optim.AdamW(lr=-1),thalweg.torch.AdamW"
    assert run(["check", "thalweg.torch.LAMB", "--against", others, *FEW, "--markdown", str(table)]) == 1
    printed = capsys.readouterr().out
    assert "failed: torch.optim.AdamW(lr=-1), construction" in printed
    assert "Invalid learning rate: -1" in printed
    assert "again: thalweg check 'torch.optim.AdamW(lr=-1)'\n" in printed
    assert "| `torch.optim.AdamW(lr=-1)` | 0 of 1 | - | construction |" in table.read_text()
    assert "Invalid learning rate: -1" in table.read_text()
    assert "| `thalweg.torch.AdamW` | 2 of 2 | - | none |" in table.read_text()


def test_the_command_that_shows_a_failure_again() -> None:
    failed = Verdict(check="odd", group="numbers", holds="", outcome="failed", ranks=3)
    found = Report(subject="a:B", options={"lr": 1}, versions={}, facts={"odd": True}, verdicts=[failed])
    assert repeat_command(found, failed) == """thalweg check 'a:B(lr=1)' --facts '{"odd": true}' --ranks 3 --only odd"""


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
        (["json:dumps"], "cannot be tried"),
    ],
)
def test_mistakes_are_told(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_a_rule_is_checked_as_an_optimizer_for_torch() -> None:
    assert check(Signed, only="descends", lr=0.01).counts == {"passed": 1}


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
