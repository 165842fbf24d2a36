"""How many threads native code uses: what is set, what the environment says, what the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import thalweg
import thalweg.numpy
from thalweg.errors import OptionError
from thalweg.kernels import threads
from thalweg.kernels.threads import num_threads, of_machine, set_num_threads, share_of_container


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("THALWEG_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    set_num_threads(None)
    yield
    set_num_threads(None)


def otherwise() -> int:
    return 11


def test_what_is_set_wins() -> None:
    assert num_threads(otherwise) == 11
    set_num_threads(5)
    assert num_threads(otherwise) == 5
    set_num_threads(None)
    assert num_threads(otherwise) == 11


def test_more_threads_than_any_machine_has() -> None:
    thalweg.set_num_threads(2**40)
    weights = np.ones(10, np.float32)
    thalweg.numpy.LARS(lr=0.1).update("w", weights, np.ones_like(weights))
    assert (weights < 1).all()


@pytest.mark.parametrize("wrong", [0, -1, 1.0, 2.5, "2", True, False, [2]])
def test_what_cannot_be_set(wrong: Any) -> None:
    set_num_threads(3)
    with pytest.raises(OptionError, match="the number of threads must be a whole number >= 1 or None, got"):
        set_num_threads(wrong)
    assert num_threads(otherwise) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", 3), (" 4 ", 4), ("6,2", 6), ("0", 11), ("-2", 11), ("", 11), ("many", 11), ("2.5", 11), ("1e3", 11)],
)
def test_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, expected: int) -> None:
    """What is no number of threads is ignored, as OpenMP does."""
    monkeypatch.setenv("THALWEG_NUM_THREADS", text)
    assert num_threads(otherwise) == expected
    set_num_threads(2)
    assert num_threads(otherwise) == 2


def test_openmp_has_a_say_where_nobody_else_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert of_machine() == 7
    assert num_threads(of_machine) == 7
    monkeypatch.setenv("THALWEG_NUM_THREADS", "2")
    assert num_threads(of_machine) == 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="there is no affinity here")
def test_no_more_than_the_process_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "share_of_container", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 5})
    assert of_machine() == 3
    monkeypatch.setattr(threads, "share_of_container", lambda: 2)
    assert of_machine() == 2
    monkeypatch.setattr(threads, "share_of_container", lambda: 64)
    assert of_machine() == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000\n", None),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("10000 100000\n", 1),
        ("nonsense\n", None),
        ("", None),
        ("1 2 3\n", None),
    ],
)
def test_the_share_of_a_container(monkeypatch: pytest.MonkeyPatch, text: str, expected: int | None) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert share_of_container() == expected


def test_without_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert share_of_container() is None
    assert of_machine() >= 1
