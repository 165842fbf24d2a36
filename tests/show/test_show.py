"""What the commands share: verbs and help, words for whoever mistyped, devices, and sizes as people write them."""

from __future__ import annotations

import importlib
import io
import platform
import subprocess
import sys

import pytest

import thalweg
from thalweg.cli import VERBS, run
from thalweg.errors import CommandError
from thalweg.show.devices import Device, machine, versions
from thalweg.show.units import parse_size


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
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    importlib.import_module("thalweg.show.console").console().print("2 µs – or less")
    assert written.getvalue() == b"2 ?s ? or less\n"


# ---- devices


def test_a_device_that_nobody_has_is_refused() -> None:
    with pytest.raises(CommandError, match="there is no device 'gpu': try cpu or cuda"):
        Device("gpu")


def test_a_record_says_the_system_and_the_versions_and_nothing_of_the_owner() -> None:
    assert set(machine()) == {"cpu", "cores", "system"}
    assert Device("cpu").describe() == machine()["cpu"] != ""
    assert machine()["system"].split()[0] == platform.system()
    assert versions(["numpy", "no-such-package"]).keys() == {"python", "numpy"}


# ---- sizes


@pytest.mark.parametrize(
    ("text", "size"), [("512B", 512), ("1.5kB", 1500), ("2 kib", 2048), ("80G", 80 * 10**9), ("1TiB", 2**40)]
)
def test_sizes_have_decimal_and_binary_units(text: str, size: int) -> None:
    assert parse_size(text, option="--memory") == size
