"""The suite of training runs: its records can be read, and its tables say what they say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from thalweg.race.contest import RECORDS
from thalweg.race.run import read_records

pytest.importorskip("torch")
pytest.importorskip("rich")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
try:
    from benchmarks.training import contestants, draw
finally:
    sys.path.remove(str(ROOT))

RESULTS = ROOT / "benchmarks/training/results"


def test_what_is_checked_in_is_what_the_records_say() -> None:
    """After new records: python -m benchmarks.training.draw."""
    for path in RESULTS.glob(f"*/{RECORDS}"):
        records, skipped = read_records(path)
        assert (len(records), skipped) == (len(path.read_text().splitlines()), 0)
    report = draw.write_report(draw.load_fields(RESULTS), contestants.CONTESTANTS)
    assert (RESULTS / "results.md").read_text() == report
    cited = (ROOT / "docs/choosing.md").read_text().split("<!-- rows of results.md -->")[1::2]
    assert cited
    assert {row for text in cited for row in text.splitlines() if re.match(r"\| \w", row)} <= {*report.splitlines()}
