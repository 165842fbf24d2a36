"""The command: a table, a picture, and a clear word when an extra is missing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from thalweg.race import command, digits
from thalweg.race.contestants import CONTESTANTS
from thalweg.race.run import Record


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few contestants, rates and images: what is tested is the command, not the race."""
    data = digits.load()
    few = replace(data, train_images=data.train_images[:256], train_labels=data.train_labels[:256])
    monkeypatch.setattr(digits, "load", lambda: few)
    monkeypatch.setattr(command, "CONTESTANTS", tuple(replace(c, rates=c.rates[2:3]) for c in CONTESTANTS[:3]))


@pytest.mark.usefixtures("quick")
def test_the_command_prints_a_table_and_writes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    command.main(["--epochs", "1", "--seeds", "2", "--out", str(tmp_path / "report")])
    printed = capsys.readouterr().out
    assert "training loss" in printed
    for contestant in CONTESTANTS[:3]:
        assert contestant.name in printed
    picture = (tmp_path / "report" / "race.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


def test_drawing_survives_losses_that_no_logarithm_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from thalweg.race.draw import draw

    best = {
        contestant.name: [
            Record(
                contestant=contestant.name,
                lr=0.1,
                seed=0,
                losses=(2.3, final),
                accuracies=(0.1, 0.1),
                seconds=1.0,
                parameter_count=1,
                state_bytes=0,
            )
        ]
        for contestant, final in zip(CONTESTANTS, (float("inf"), 0.1, 0.0), strict=False)
    }
    draw(best, CONTESTANTS, tmp_path / "race.png")
    assert (tmp_path / "race.png").stat().st_size > 0


def test_labels_move_apart_and_keep_their_order() -> None:
    pytest.importorskip("matplotlib")
    from thalweg.race.draw import spread

    assert spread([0.0, 0.5, 1.0], 0.1) == pytest.approx([0.0, 0.5, 1.0])
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    assert spread([0.1, 0.5, 0.5, 0.52], 0.1) == pytest.approx([0.1, 0.40667, 0.50667, 0.60667], abs=1e-4)


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_a_missing_extra_is_named_before_the_race_begins(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if package == "matplotlib":
        pytest.importorskip("rich")  # which is looked for first
    for module in [*sys.modules]:
        if module.partition(".")[0] == package or module in ("thalweg.race.draw", "thalweg.race.terminal"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(command, "run", lambda *_, **__: pytest.fail("the race was run"))
    with pytest.raises(SystemExit, match=f'{package} is not installed: pip install "thalweg\\[cli\\]"'):
        command.main([])


@pytest.mark.parametrize("arguments", [["--epochs", "0"], ["--seeds", "-1"]])
def test_counts_must_be_positive(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert "must be at least 1" in capsys.readouterr().err


def test_importing_the_race_loads_no_extra() -> None:
    program = "import sys, thalweg.race.command; sys.exit(bool({'rich', 'matplotlib'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True)
