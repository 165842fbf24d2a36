"""The command line as a whole: verbs, versions, and words for whoever mistyped."""

from __future__ import annotations

import pytest

pytest.importorskip("click")

from thalweg.cli import VERBS, run


def test_a_mistyped_verb_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rce"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "thalweg: there is no verb 'rce': did you mean 'race'? (thalweg --help says more)\n"


def test_help_names_every_verb_and_how_to_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Usage: thalweg [OPTIONS] VERB [ARGS]...")
    for verb in VERBS:
        assert f"thalweg {verb}" in printed
    assert "_THALWEG_COMPLETE=bash_source" in printed


def test_without_a_verb_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "Usage: thalweg" in capsys.readouterr().out


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    import thalweg

    assert run(["--version"]) == 0
    assert thalweg.__version__ in capsys.readouterr().out
