"""Runs that other optimizers have started are continued: five steps there and five here are ten there."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lanes import by_turns, one_in  # noqa: E402
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
from tolerances import CONTINUED, FLIPPED  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.torch.peers.sources import PEERS  # noqa: E402

pytestmark = pytest.mark.slow

#: torch warns where a CPU has no products of bfloat16, and timm where it would be slow.
QUIET = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed", "ignore:It is highly recommended to have 'opt_ein")
ROWS = [pytest.param(source, id=f"{source.name} as {source.rule}") for source in SOURCES]


def ours(source: Source, params: Any) -> Any:
    return getattr(thalweg.torch, source.rule)(params, **{"lr": source.lr, **source.ours})


@by_turns("source")
@QUIET
@pytest.mark.parametrize("source", one_in(3, ROWS))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
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
        digits = "float32" if source.kind == "SOAP" else dtype  # in which it decomposes
        size = (p - start[name]).abs().max() if digits == "float64" else p.abs().max()
        assert wrong <= CONTINUED[digits] * size, name


@QUIET
@pytest.mark.parametrize("source", one_in(11, ROWS))
def test_bfloat16_is_continued_as_the_source_would_in_float32(
    source: Source, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Most sources round every product and sum to bfloat16; ours rounds parameters, once a step."""
    parted = parameters(source, "bfloat16")
    with nothing_random(source, "bfloat16", monkeypatch) as clock:
        theirs = constructed(source, two_groups(source, parted), "bfloat16")
        run(parted, theirs, None, 0, BEFORE, clock)
        saved = copy.deepcopy(theirs.state_dict())
        wide = {name: torch.nn.Parameter(p.detach().float()) for name, p in parted.items()}
        exact = constructed(source, two_groups(source, wide), "float32")
        exact.load_state_dict(copy.deepcopy(saved))
        for p, before in zip(wide.values(), saved["state"].values(), strict=True):
            if "exprs" in before:  # which torch's loader spoils
                exact.state[p]["exprs"] = before["exprs"]
        exact.register_step_post_hook(lambda *_: [p.data.copy_(p.data.to(torch.bfloat16)) for p in wide.values()])
        run(wide, exact, None, BEFORE, IN_ALL, clock, given="bfloat16")
    mine = ours(source, two_groups(source, parted))
    thalweg.torch.import_peer(mine, saved)
    for p in parted.values():
        assert all(entry.dtype == torch.float32 for entry in mine.state[p].values())
    run(parted, mine, None, BEFORE, IN_ALL, [0])
    flipped = torch.cat([(p != parted[name].float()).flatten() for name, p in wide.items()])
    assert flipped.double().mean() <= FLIPPED


def documented() -> dict[str, str]:
    """The calls that the docs name, by source."""
    page = Path(__file__).parents[2] / "docs" / "recipes" / "continue.md"
    table = page.read_text().split("\n## Sources\n")[1].split("\n*For matrices alone*")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")][1:]
    return {name: re.findall("`([^`]+)`", call)[0] for names, call in rows for name in re.findall("`([^`]+)`", names)}


def test_the_documented_calls_continue_runs_of_every_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Of matrices, with options as the source has them when none is given."""
    calls = documented()
    assert calls.keys() == PEERS.keys()
    for source in {source.name: source for source in SOURCES}.values():
        with contextlib.suppress(pytest.skip.Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            params = {name: p for name, p in parameters(source, "float32").items() if p.ndim == 2}
            lr = None if "lr" not in calls[source.name].partition(")")[0] else 0.01
            more = {"adam_debias": True} if source.name == "pytorch_optimizer.Lamb" else {}
            more |= {"relative_step": False} if source.name == "transformers.Adafactor" else {}
            bare = replace(source, theirs=more, lr=lr or 0.01)
            with nothing_random(bare, "float32", monkeypatch) as clock:
                theirs = constructed(bare, params.items(), "float32")
                run(params, theirs, None, 0, 2, clock)
            mine = eval(calls[source.name], vars(thalweg.torch), {"ps": params.items(), "lr": lr})
            assert thalweg.torch.import_peer(mine, theirs.state_dict()).source == source.name
