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
from thalweg.kernels.threads import num_threads, of_machine


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("THALWEG_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    thalweg.set_num_threads(None)
    yield
    thalweg.set_num_threads(None)


#: The environment, what the container of a process on three processors says of itself, and the threads.
LIMITS: list[tuple[dict[str, str], str | None, int]] = [
    *(({}, of_container, 3) for of_container in (None, "max 100000\n", "6400000 100000\n", "nonsense", "", "1 2 3\n")),
    *(({}, f"{quota} 100000\n", n) for quota, n in ((200_000, 2), (150_000, 2), (50_000, 1), (10_000, 1))),
    ({"OMP_NUM_THREADS": "7"}, "200000 100000\n", 7),
    ({"OMP_NUM_THREADS": "7", "THALWEG_NUM_THREADS": "2"}, None, 2),
    *(({"THALWEG_NUM_THREADS": text}, None, n) for text, n in (("4", 4), (" 4 ", 4), ("6,2", 6))),
    # what is no number of threads is ignored, as OpenMP does
    *(({"THALWEG_NUM_THREADS": text}, None, 3) for text in ("0", "-2", "", "many", "2.5", "1e3")),
]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="there is no affinity here")
@pytest.mark.parametrize(("environment", "of_container", "expected"), LIMITS, ids=str)
def test_what_is_set_or_the_environment_or_the_machine(
    environment: dict[str, str], of_container: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> str:
        if of_container is None:
            raise FileNotFoundError(path)
        return of_container

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 5})
    monkeypatch.setattr(Path, "read_text", read)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert num_threads(of_machine) == expected
    thalweg.set_num_threads(5)
    assert num_threads(of_machine) == 5


def test_more_threads_than_any_machine_has() -> None:
    thalweg.set_num_threads(2**40)
    weights = np.ones(10, np.float32)
    thalweg.numpy.LARS(lr=0.1).update("w", weights, np.ones_like(weights))
    assert (weights < 1).all()


@pytest.mark.parametrize("wrong", [0, -1, 1.0, 2.5, "2", True, False, [2]])
def test_what_cannot_be_set(wrong: Any) -> None:
    thalweg.set_num_threads(3)
    with pytest.raises(OptionError, match="the number of threads must be a whole number >= 1 or None, got"):
        thalweg.set_num_threads(wrong)
    assert num_threads(lambda: 11) == 3
