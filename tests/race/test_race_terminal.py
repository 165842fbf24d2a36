"""The race in a terminal: a table that fits into 80 columns, bars that stand in line."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from race_summary import race_summary

pytest.importorskip("rich")

from rich.console import Console

from thalweg.race import terminal
from thalweg.race.contest import race
from thalweg.race.terminal import edges, progress_bars, results_table


@pytest.mark.slow
def test_the_table_fits_into_80_columns() -> None:
    screen = io.StringIO()
    course: dict[str, Any] = race_summary()["courses"][0]
    Console(file=screen, width=80).print(results_table(course))
    shown = screen.getvalue()
    assert "…" not in shown
    for name in ("Adafactor", "accuracy", "training", "seconds"):
        assert name in shown
    rows = [line for line in shown.splitlines() if line.startswith(tuple(r["contestant"] for r in course["results"]))]
    assert len(rows) == len(course["results"])


def test_names_of_bars_end_in_one_column() -> None:
    screen = io.StringIO()
    ready = race("digits", optimizers=["AdamW", "SGD", "Adafactor"], steps=1, seeds=1, rates={"": [0.1]})
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    with progress_bars(console, ready) as (advance, settle):
        advance(ready.wanted[0], 1, 2.5)
        settle(ready.wanted[0])
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).replace("\r", "\n").splitlines()
    ends = {line.index(name) + len(name) for line in lines for name in ("AdamW", "SGD", "Adafactor") if name in line}
    assert len(ends) == 1
    assert "loss 2.50e+00" in screen.getvalue()


def test_where_nobody_watches_a_line_says_now_and_then_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, clock = io.StringIO(), [0.0]
    monkeypatch.setattr(terminal, "monotonic", lambda: clock[0])
    ready = race("digits", optimizers=["SGD"], steps=1, seeds=1, rates={"": [0.1, 0.2]})
    with progress_bars(Console(file=screen), ready) as (advance, _):
        for clock[0] in (terminal.PAUSE - 1, terminal.PAUSE, terminal.PAUSE + 1):
            advance(ready.wanted[0], 1, 2.5)
    assert screen.getvalue() == f"0 of 2 runs are done; now SGD, lr {ready.wanted[0].lr:g}, seed 0.\n"


def test_who_diverged_is_not_said_to_be_at_the_edge_of_its_rates() -> None:
    sweep = {"lr": [0.1, 0.2, 0.3], "loss": [None, None, None]}
    results = [
        {"contestant": "SGD", "lr": 0.1, "loss": None, "sweep": sweep},
        {"contestant": "LAMB", "lr": 0.3, "loss": 0.5, "sweep": sweep},
        {"contestant": "Kron", "lr": 0.2, "loss": 0.5, "sweep": sweep},
    ]
    assert edges({"results": results}) == " At the edge of its rates: LAMB."
