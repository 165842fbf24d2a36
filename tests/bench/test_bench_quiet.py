"""Rounds are chosen by what other processes took, and by nothing else."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from thalweg.bench import quiet
from thalweg.bench.quiet import PATIENCE, count_busy_elsewhere, run_undisturbed, wait_for_quiet


def disturbed_by(monkeypatch: pytest.MonkeyPatch, shares: list[float]) -> None:
    """The rounds to come have these shares of the cores taken by others."""
    left = iter(shares)
    monkeypatch.setattr(quiet, "watch_round", lambda run: quiet.Round(run(), next(left)))


def test_quiet_rounds_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed_by(monkeypatch, [0.0, 0.5, 0.01, 0.02])
    numbers = iter(range(10))
    seen: list[tuple[int, float]] = []
    counted, left_out = run_undisturbed(
        lambda: next(numbers), 3, wait=0, on_round=lambda done, others: seen.append((done, others))
    )
    assert [each.result for each in counted] == [0, 2, 3]
    assert [each.result for each in left_out] == [1]
    assert seen == [(1, 0.0), (1, 0.5), (2, 0.01), (3, 0.02)]


def test_patience_ends_and_the_least_disturbed_count(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed_by(monkeypatch, [0.9, 0.2, 0.8, 0.7, 0.3, 0.6])
    numbers = iter(range(10))
    counted, left_out = run_undisturbed(lambda: next(numbers), 2, wait=0)
    assert [each.result for each in counted] == [1, 4]
    assert len(left_out) == 2 * (PATIENCE - 1)


def test_waiting_ends_when_it_is_quiet_or_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[float] = []
    monkeypatch.setattr(time, "sleep", looked.append)
    disturbed_by(monkeypatch, [0.9, 0.9, 0.0])
    wait_for_quiet(60.0)
    assert len(looked) == 3
    wait_for_quiet(0.0)
    assert len(looked) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells it on Linux alone")
def test_what_this_process_does_is_not_others_work() -> None:
    if not any(map(int, Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:])):
        pytest.skip("this system does not count")
    begin, own = count_busy_elsewhere(), time.process_time()
    while time.process_time() - own < 0.2:
        pass
    busy = time.process_time() - own
    # others may be busy meanwhile, on as many cores as there are; less than nothing they cannot be
    assert count_busy_elsewhere() - begin > -0.5 * busy
