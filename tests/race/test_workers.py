"""Runs by several processes: the records of one, in whatever order they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from thalweg.race.contest import race
from thalweg.race.records import Book
from thalweg.race.workers import Workers, count_workers


@pytest.mark.nightly
def test_workers_record_what_one_process_records(tmp_path: Path) -> None:
    """With rates among which some are hopeless: who stops depends on who came before."""
    rates = {"": [0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0]}
    asked = dict(task="digits", optimizers=["SGD", "AdamW", "Lion"], steps=12, seeds=2, rates=rates)
    alone = race(**asked).run()  # type: ignore[arg-type]
    assert any(record.stopped for record in alone.records.values())
    with Workers(2, asked) as workers:
        told: list[object] = []
        watch = lambda *seen: told.append(seen)  # noqa: E731
        shared = race(**asked, folder=tmp_path).run(watch, watch, workers)  # type: ignore[arg-type]
    assert shared.records == alone.records
    assert Book(tmp_path / "runs.jsonl").records == alone.records
    assert len(told) == 2 * len(alone.records)


def test_short_races_need_no_workers() -> None:
    assert count_workers(race("digits", optimizers=["SGD"], steps=2)) == 1
