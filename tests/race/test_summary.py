"""What is concluded from records, and the report: the best rate, means over seeds, who won, tables and charts."""

from __future__ import annotations

import html.parser
import json
from typing import Any

import pytest

pytest.importorskip("rich")

from thalweg.race import race
from thalweg.race.run import Record, Result
from thalweg.race.summary import Summary, below_zero, in_percent, list_results, verdict
from thalweg.race.table import columns_of
from thalweg.race.task import Run


def record(contestant: str, lr: float, seed: int, losses: tuple[float | None, ...], score: float = 0.5) -> Record:
    about: dict[str, Any] = dict(
        task="t", fingerprint="", contestant=contestant, optimizer="", batch_size=None, steps=2
    )
    run = Run(**about, lr=lr, seed=seed, engine="auto", device="cpu", thalweg="0")
    steps = tuple(range(len(losses)))
    counts: dict[str, Any] = dict(parameters=10, state_bytes=40, engine="reference")
    result = Result(step=steps, seconds=tuple(map(float, steps)), loss=losses, score=(0.1, 0.2, score), **counts)
    return Record(run, result, {})


def test_the_best_rate_has_the_least_mean_final_loss_and_the_score_has_no_say() -> None:
    (best,) = list_results(
        [
            record("SGD", 0.1, 0, (2.0, 1.0, 0.3), score=0.5),
            record("SGD", 0.1, 1, (2.0, 0.5, 0.4), score=0.7),
            record("SGD", 1.0, 0, (2.0, 1.0, 0.1), score=0.9),
            record("SGD", 1.0, 1, (2.0, 1.0, 0.9), score=0.9),
        ],
        target=0.75,
    )
    assert best["lr"] == 0.1
    assert best["loss"] == pytest.approx(0.35)
    assert (best["loss_low"], best["loss_high"]) == (0.3, 0.4)
    assert best["score"] == pytest.approx(0.6)
    assert (best["score_low"], best["score_high"]) == (0.5, 0.7)
    assert (best["steps_to_target"], best["seconds_to_target"]) == (1, 1.0)
    losses = [pytest.approx(0.35), pytest.approx(0.5)]
    assert best["sweep"] == {"lr": [0.1, 1.0], "loss": losses, "stopped": [None, None]}


def test_one_seed_that_diverged_spoils_its_rate_and_the_diverged_come_last() -> None:
    lamb, sgd = list_results(
        [
            record("SGD", 0.1, 0, (2.0, None, None)),
            record("LAMB", 0.1, 0, (2.0, 1.5, 0.9)),
            record("LAMB", 1.0, 0, (2.0, None, None)),
        ],
        target=0.5,
    )
    assert (lamb["contestant"], lamb["lr"], lamb["sweep"]["loss"]) == ("LAMB", 0.1, [0.9, None])
    assert (sgd["contestant"], sgd["loss"], sgd["steps_to_target"]) == ("SGD", None, None)


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
    ],
)
def test_one_sentence_says_who_won(losses: dict[str, list[float | None]], words: str) -> None:
    records = [
        record(name, 0.1, seed, (2.0, 1.0, loss)) for name, finals in losses.items() for seed, loss in enumerate(finals)
    ]
    assert verdict({"results": list_results(records, None), "loss_name": "loss, nats"}).startswith(words)


def test_the_best_of_a_column_are_marked_and_where_all_are_equal_none_is() -> None:
    results = list_results([record(name, 0.1, 0, (2.0, 1.0, loss)) for name, loss in (("A", 0.1), ("B", 0.2))], None)
    summary = dict(results=results, target=None, loss_name="loss", score_name="score", best_score="most")
    marked = {column.key: [column.is_best(result, results) for result in results] for column in columns_of(summary)}
    assert marked["loss"] == [True, False]
    assert marked["score"] == marked["state_bytes"] == [False, False]
    assert in_percent(summary)
    assert not below_zero(summary)


# ---- the report


class Page(html.parser.HTMLParser):
    """The elements of a page, whether all of them are closed, and its texts by the element that they stand in."""

    EMPTY = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, Any]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))


EVIL = "</script><script src='http://x'>$title & \""


def raced(name: str) -> Summary:
    from race_tasks import parabola

    task = parabola(title=name, about=name, loss_name=name, score_name=name, seeds=2, target=1.0)
    task = parabola(**{**vars(task), "evaluate": lambda params: (float((params["x"] ** 2).sum()), 0.25)})
    rates = {"": [0.1, 0.2], "lamb": [1e30]}
    return race(task, optimizers=["SGD", "LAMB"], rates=rates, command=name, steps=9).run().summary


@pytest.mark.parametrize("name", ["Digits", EVIL])
def test_the_report_shows_the_summary_and_asks_for_nothing(name: str) -> None:
    pytest.importorskip("plotly")
    from thalweg.race.page import make_page

    summary = raced(name)
    page = Page(make_page(summary))
    assert page.open == []
    assert not any("src" in attributes or "href" in attributes for _, attributes in page.elements)
    (policy,) = [attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes]
    assert policy.startswith("default-src 'none'")
    assert ("h1", name) in page.texts
    assert ("p", summary["verdict"]) in page.texts
    chips = [attributes["data-contestant"] for _, attributes in page.elements if attributes.get("class") == "chip"]
    assert chips == ["SGD", "LAMB"]
    rows = [attributes["data-contestant"] for tag, attributes in page.elements if tag == "tr" and attributes]
    assert rows == [result["contestant"] for result in summary["results"]] == ["SGD", "LAMB"]
    assert ("span", "diverged") in page.texts

    (data,) = [text for tag, text in page.texts if tag == "script" and text.startswith('{"log"')]
    report = json.loads(data)
    assert report["log"] is True
    band, line = report["figures"]["loss"]["data"][0], report["figures"]["loss"]["data"][2]
    curve = summary["results"][0]["curve"]
    assert line["y"] == curve["loss"]
    assert (line["meta"]["step"], line["meta"]["seconds"]) == (curve["step"], curve["seconds"])
    assert band["y"] == [*curve["high"], *reversed(curve["low"])]
    assert report["figures"]["loss"]["data"][3]["y"] == [summary["results"][1]["curve"]["loss"][0]], "then it diverged"
    assert report["figures"]["loss"]["layout"]["shapes"][0]["y0"] == 1.0
    sweep = report["figures"]["sweep"]["data"][0]
    assert (sweep["x"], sweep["y"]) == ([0.1, 0.2], summary["results"][0]["sweep"]["loss"])
    assert report["figures"]["score"]["data"][0]["y"] == curve["score"]


def test_a_race_without_scores_or_with_losses_below_zero_has_a_report_too() -> None:
    pytest.importorskip("plotly")
    from race_tasks import parabola

    from thalweg.race.page import make_page

    task = parabola(evaluate=lambda params: float((params["x"] ** 2).sum()) - 2)
    summary = race(task, optimizers=["SGD"], rates={"": [0.1]}).run().summary
    page = Page(make_page(summary))
    (data,) = [text for tag, text in page.texts if tag == "script" and text.startswith('{"log"')]
    report = json.loads(data)
    assert (report["log"], report["figures"]["score"]) == (False, None)
    assert report["figures"]["sweep"]["layout"]["yaxis"]["type"] == "linear"
