"""The command line as a whole: verbs, help, and words for whoever mistyped."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys

import pytest

pytest.importorskip("click")

import thalweg
from thalweg.cli import VERBS, run


def test_a_mistyped_verb_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rce"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "thalweg: there is no verb 'rce': did you mean 'race'? (thalweg --help says more)\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--version"], 0, [thalweg.__version__]),
        ([], 2, ["Usage: thalweg [OPTIONS] VERB [ARGS]...", *(f"thalweg {verb}" for verb in VERBS)]),
        (["race", "--help"], 0, ["thalweg race mymodule:task", "torch.optim.Adam,mymodule:Sharp"]),
        (["plan", "--help"], 0, ["thalweg plan llama-8b --dtype bf16 --memory 80GB", "activations are"]),
    ],
)
def test_help_teaches_by_examples(
    arguments: list[str], code: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == code
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)


def test_help_loads_no_framework() -> None:
    program = (
        "import sys; from thalweg.cli import run; run(['--help']);"
        "sys.exit(bool({'numpy', 'torch', 'jax', 'matplotlib', 'rich', 'plotly'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_a_letter_that_the_output_does_not_know_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    importlib.import_module("thalweg.show.console").console().print("2 µs – or less")
    assert written.getvalue() == b"2 ?s ? or less\n"
