"""The command line as a whole: verbs, help, completion, and words for whoever mistyped."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys

import pytest

pytest.importorskip("click")

from click.shell_completion import BashComplete

import thalweg
from thalweg.cli import VERBS, command, run


def test_a_mistyped_verb_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rce"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "thalweg: there is no verb 'rce': did you mean 'race'? (thalweg --help says more)\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--version"], 0, [thalweg.__version__]),
        ([], 2, ["Usage: thalweg [OPTIONS] VERB [ARGS]..."]),
        (["--help"], 0, [*(f"thalweg {verb}" for verb in VERBS), "_THALWEG_COMPLETE=bash_source"]),
        (
            ["race", "--help"],
            0,
            ["thalweg race text", "mymodule:task", "--full", "torch.optim.Adam,mymodule:Sharp"],
        ),
        (["plan", "--help"], 0, ["thalweg plan llama-8b --dtype bf16 --memory 80GB", "activations are not"]),
        (["bench", "--help"], 0, ["thalweg bench gpt2,resnet50 --device cuda", "[MODEL]", "--gradients", "--budget"]),
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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["plan", "llama"], {"llama-1b", "llama-8b", "llama-70b"}),
        (["plan", "gpt2,res"], {"gpt2,resnet50"}),
        (["plan", "--option", "momentum_d"], {"momentum_dtype="}),
    ],
)
def test_the_shell_completes(line: list[str], expected: set[str]) -> None:
    shell = BashComplete(command, {}, "thalweg", "_THALWEG_COMPLETE")
    assert {found.value for found in shell.get_completions(line[:-1], line[-1])} == expected


def test_a_shell_asks_the_program_itself() -> None:
    asked = {**os.environ, "_THALWEG_COMPLETE": "bash_complete", "COMP_WORDS": "thalweg ", "COMP_CWORD": "1"}
    program = "from thalweg.__main__ import main; import sys; sys.argv = ['thalweg']; main()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=asked, check=False)
    assert {line.partition(",")[2] for line in ended.stdout.splitlines()} == set(VERBS)


def test_a_letter_that_the_output_does_not_know_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    importlib.import_module("thalweg.show.console").console().print("2 µs – or less")
    assert written.getvalue() == b"2 ?s ? or less\n"
