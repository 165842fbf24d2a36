"""What is concluded from records, and the report: the best rate, means over seeds, who won, the table and the page."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

import pytest
from race_tasks import parabola

from thalweg.race import race
from thalweg.race.run import Record, Result, Run
from thalweg.race.summary import describe, give_verdict, list_results


def record(contestant: str, lr: float, seed: int, losses: tuple[float | None, ...], score: float = 0.5) -> Record:
    about: dict[str, Any] = dict(task="t", fingerprint="", optimizer="", batch_size=None, steps=2)
    run = Run(**about, contestant=contestant, lr=lr, seed=seed, device="cpu", thalweg="0")
    curves: dict[str, Any] = dict(step=(0, 1, 2), seconds=(0.0, 1.0, 2.0), loss=losses, score=(0.1, 0.2, score))
    return Record(run, Result(**curves, parameters=10, state_bytes=40), {})


def test_the_best_rate_has_the_least_mean_final_loss_and_the_score_has_no_say() -> None:
    records = [
        record("SGD", 0.1, 0, (2.0, 1.0, 0.3), score=0.5),
        record("SGD", 0.1, 1, (2.0, 0.5, 0.4), score=0.7),
        record("SGD", 1.0, 0, (2.0, 1.0, 0.1), score=0.9),
        record("SGD", 1.0, 1, (2.0, 1.0, 0.9), score=0.9),
    ]
    (best,) = list_results(records, target=0.75)
    wanted = dict(lr=0.1, loss=0.35, loss_low=0.3, loss_high=0.4, score=0.6, score_low=0.5, score_high=0.7)
    wanted |= dict(steps_to_target=1, seconds_to_target=1.0)
    assert {key: best[key] for key in wanted} == pytest.approx(wanted)
    assert best["sweep"] == {"lr": [0.1, 1.0], "loss": pytest.approx([0.35, 0.5]), "stopped": [None, None]}


def test_one_seed_that_diverged_spoils_its_rate_and_the_diverged_come_last() -> None:
    records = [record("SGD", 0.1, 0, (2.0, 1.0, None))]
    records += [record("LAMB", lr, 0, (2.0, 1.5, loss)) for lr, loss in ((0.1, 0.9), (1.0, 0.8))]
    records += [record("LAMB", lr, 1, (2.0, 1.5, loss)) for lr, loss in ((0.1, 0.9), (1.0, None))]
    lamb, sgd = list_results(records, target=0.5)
    assert (lamb["contestant"], lamb["lr"], lamb["sweep"]["loss"]) == ("LAMB", 0.1, [0.9, None])
    assert (sgd["contestant"], sgd["loss"], sgd["steps_to_target"]) == ("SGD", None, None)
    assert (sgd["curve"]["loss"], sgd["curve"]["step"]) == ([2.0, 1.0], [0, 1]), "until it diverged"


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (
            {"A": [0.1, 0.2], "B": [0.5, 0.7]},
            "A won: it ended with a loss of 0.15 (0.1 to 0.2 over 2 seeds) nats, B with 0.6 (0.5 to 0.7 over 2 seeds).",
        ),
        ({"A": [0.1, 0.6], "B": [0.5, 0.7]}, "A leads, but not clearly, for the seeds of both overlap: it ended with"),
        ({"A": [0.1], "B": [0.5]}, "A leads, in the one seed that ran: it ended with a loss of 0.1 nats, B with 0.5."),
        ({"A": [0.1]}, "A ran alone: it ended with a loss of 0.1 nats."),
        ({"A": [None]}, "Every run diverged."),
        ({}, "No run is recorded yet."),
    ],
)
def test_one_sentence_says_who_won(losses: dict[str, list[float | None]], words: str) -> None:
    ends = [(name, seed, loss) for name, finals in losses.items() for seed, loss in enumerate(finals)]
    results = list_results([record(name, 0.1, seed, (2.0, 1.0, loss)) for name, seed, loss in ends], None)
    assert give_verdict({"results": results, "loss_name": "loss, nats"}).startswith(words)


def test_the_best_of_a_column_are_marked_and_where_all_are_equal_none_is() -> None:
    ended = {"A": (0.1, 0.2), "SGD": (0.2, 0.3), "LAMB": (None, 0.3)}
    records = [record(who, 0.1, seed, (2.0, 1.0, loss)) for who in ended for seed, loss in enumerate(ended[who])]
    everyone = [{"name": name, "options": "", "grid": [0.1]} for name in ended]
    known = {"results": list_results(records, None), "contestants": everyone, "score_name": "score"}
    summary = describe({**race(parabola()).summary, **known})
    cells = [dict(zip(summary["columns"][1:], row["cells"], strict=True)) for row in summary["rows"]]
    for column, marked in (("lr", [0, 0, 0]), ("training loss", [1, 0, 0]), ("score", [0, 0, 0]), ("state", [0, 0, 0])):
        assert [row[column]["is_best"] for row in cells] == marked
    assert cells[1]["training loss"] == {"text": "0.25", "seeds": "0.2 to 0.3", "is_best": False}
    assert cells[2]["training loss"] == {"text": "diverged", "seeds": "in some seeds", "is_best": False}
    assert cells[0]["score"]["text"] == "50.0 %"


@pytest.mark.parametrize(("name", "below"), [("Digits", 0), ("</script><script src='http://x'>$title & \"", 2)])
def test_the_report_shows_the_summary_and_asks_for_nothing(name: str, below: float) -> None:
    """Also with scores that are no shares and losses below zero, which no logarithm shows."""
    plotly = pytest.importorskip("plotly.offline").get_plotlyjs()
    from thalweg.race.page import make_page

    names = dict.fromkeys(("title", "about", "loss_name", "score_name"), name)
    loss = parabola().evaluate
    task = parabola(**names, seeds=2, evaluate=lambda params: (loss(params) - below, 27.5 if below else 0.25))
    options = {"": {"lr": [0.1, 0.2]}, "lamb": {"lr": 1e30}}
    summary = race(task, optimizers=["SGD", "LAMB"], options=options, command=name).run().summary
    page = make_page(summary).replace(plotly, "")
    assert "default-src 'none'" in page
    assert not re.search(r"<[^>]* (src|href)=", page)
    assert page.count("<script") == page.count("</script>") == 3
    for words in (name, summary["verdict"], "diverged", "27.5" if below else "25.0 %"):
        assert f">{escape(words)}<" in page
    assert re.findall(r'class="chip".*?data-contestant="(\w+)"', page) == ["SGD", "LAMB"]
    assert re.findall(r'<tr data-contestant="(\w+)"', page) == ["SGD", "LAMB"]
    (data,) = re.findall('<script type="application/json" id="report">(.*)</script>', page)
    wanted = {"summary": summary, "log": not below, "share": not below, "baselines": ["SGD", "AdamW"]}
    assert json.loads(data) == json.loads(json.dumps(wanted))
