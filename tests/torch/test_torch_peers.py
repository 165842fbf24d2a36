"""Runs that other optimizers have started are continued: five steps there and five here are ten there."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from peer_cases import (  # noqa: E402
    BEFORE,
    IN_ALL,
    SOURCES,
    Source,
    constructed,
    nothing_random,
    parameters,
    run,
    scheduler_of,
    two_groups,
)
from tolerances import CONTINUED  # noqa: E402

import thalweg.torch  # noqa: E402

EVERY = pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.name} as {source.rule}")


def ours(source: Source, params: Any) -> Any:
    return getattr(thalweg.torch, source.rule)(params, **{"lr": source.lr, **source.ours})


@EVERY
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed", "ignore:It is highly recommended to have 'opt_einsum'")
def test_a_run_is_continued(
    source: Source, dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """With two groups, in the middle of a schedule."""
    start = parameters(source, dtype)
    whole, parted = copy.deepcopy(start), copy.deepcopy(start)
    with nothing_random(source, dtype, monkeypatch) as clock:
        theirs = constructed(source, two_groups(source, whole), dtype)
        schedule = scheduler_of(theirs) if source.lr is not None else None
        run(whole, theirs, schedule, 0, BEFORE, clock)
        saved = copy.deepcopy((theirs.state_dict(), schedule and schedule.state_dict()))
        for name, p in whole.items():
            parted[name].data.copy_(p.data)
        run(whole, theirs, schedule, BEFORE, IN_ALL, clock)
    mine = ours(source, two_groups(source, parted))
    resumed = scheduler_of(mine) if schedule else None
    report = thalweg.torch.import_peer(mine, saved[0])
    if resumed:
        resumed.load_state_dict(saved[1])
    assert (report.source, report.rule, report.parameters) == (source.name, source.rule, 4)
    run(parted, mine, resumed, BEFORE, IN_ALL, [0])
    for name, p in whole.items():
        wrong = (p - parted[name]).abs().max()
        size = (p - start[name]).abs().max() if dtype == "float64" else p.abs().max()
        assert wrong <= CONTINUED[dtype] * size, name
