"""Streams that know fewer letters than we use."""

from __future__ import annotations

import io
import sys

import pytest

pytest.importorskip("rich")

from thalweg.show.console import console


def test_a_letter_that_the_output_does_not_know_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    console().print("2 µs – or less")
    assert written.getvalue() == b"2 ?s ? or less\n"
