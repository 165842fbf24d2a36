"""The suite of training runs: its records can be read, its tables say what they say, and its contestants race."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from published_runs import peer

from thalweg.race.contest import RECORDS
from thalweg.race.run import read_records

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
try:
    from benchmarks.training import contestants, draw
    from benchmarks.training.tasks import SuiteTask
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


def line_task(name: str, data: Path | None, *, tiny: bool) -> SuiteTask:
    """A line through four points."""
    x = torch.tensor([[-1.0], [0.0], [1.0], [2.0]])

    def loss(model: Any, chosen: Any) -> Any:
        return (model(x[chosen]) - 3 * x[chosen]).square().mean()

    return SuiteTask(
        name=name,
        title=name,
        about="a line",
        steps=20,
        batch_size=2,
        best_score="least",
        model=lambda seed: torch.nn.Linear(1, 1),
        batches=lambda seed, size: iter([torch.tensor([0, 2]), torch.tensor([1, 3])] * 10),
        loss=loss,
        evaluate=lambda model: pytest.fail("it is scored instead"),
        score=lambda model, part, quick: float(loss(model, torch.arange(4))),
        data={},
        max_grad_norm=1.0,
        decay=0.1,
        fingerprint="points",
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what peers import
@pytest.mark.parametrize("name", contestants.CONTESTANTS)
def test_a_contestant_can_be_made_and_is_known_again(name: str) -> None:
    package = contestants.CONTESTANTS[name].package
    peer(package)
    task = line_task("line", None, tiny=True)
    first, second = (contestants.enter(name, task) for _ in range(2))
    assert str(first) == str(second)
    assert " at 0x" not in str(first)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 8))
    optimizer = first.make(model, lr=first.rates[1], **first.options)
    model(torch.arange(8)).square().sum().backward()
    if package == "thalweg":
        optimizer.make_state()
    else:
        with torch.compiler.set_stance("force_eager"):  # one compiles for a minute
            optimizer.step()
    assert len(optimizer.state) == len(list(model.parameters()))
