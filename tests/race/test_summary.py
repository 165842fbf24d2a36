"""What is concluded from records, and the report: the best rate, means over seeds, who won, the table and the page."""

from __future__ import annotations

import html.parser
import json
from typing import Any

import pytest
from race_tasks import parabola

from thalweg.race import race
from thalweg.race.run import Record, Result, Run
from thalweg.race.summary import below_zero, describe, in_percent, list_results, verdict


def record(contestant: str, lr: float, seed: int, losses: tuple[float | None, ...], score: float = 0.5) -> Record:
    about: dict[str, Any] = dict(task="t", fingerprint="", optimizer="", batch_size=None, steps=2)
    run = Run(**about, contestant=contestant, lr=lr, seed=seed, device="cpu", thalweg="0")
    steps = tuple(range(len(losses)))
    scores, seconds = (0.1, 0.2, score), tuple(map(float, steps))
    return Record(
        run, Result(step=steps, seconds=seconds, loss=losses, score=scores, parameters=10, state_bytes=40), {}
    )


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
    wanted = dict(lr=0.1, loss=0.35, loss_low=0.3, loss_high=0.4, score=0.6, score_low=0.5, score_high=0.7)
    assert {key: best[key] for key in wanted} == pytest.approx(wanted)
    assert (best["steps_to_target"], best["seconds_to_target"]) == (1, 1.0)
    losses = [pytest.approx(0.35), pytest.approx(0.5)]
    assert best["sweep"] == {"lr": [0.1, 1.0], "loss": losses, "stopped": [None, None]}


def test_one_seed_that_diverged_spoils_its_rate_and_the_diverged_come_last() -> None:
    records = [
        record("SGD", 0.1, 0, (2.0, 1.0, None)),
        record("LAMB", 0.1, 0, (2.0, 1.5, 0.9)),
        record("LAMB", 1.0, 0, (2.0, 0.9, 0.8)),
        record("LAMB", 0.1, 1, (2.0, 1.5, 0.9)),
        record("LAMB", 1.0, 1, (2.0, None, None)),
    ]
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
    ],
)
def test_one_sentence_says_who_won(losses: dict[str, list[float | None]], words: str) -> None:
    records = [
        record(name, 0.1, seed, (2.0, 1.0, loss)) for name, finals in losses.items() for seed, loss in enumerate(finals)
    ]
    assert verdict({"results": list_results(records, None), "loss_name": "loss, nats"}).startswith(words)


def test_the_best_of_a_column_are_marked_and_where_all_are_equal_none_is() -> None:
    summary = race(parabola(loss_name="loss"), optimizers=["SGD", "LAMB"]).summary
    assert summary["verdict"] == "No run is recorded yet."
    ended = {"A": (0.1, 0.2), "SGD": (0.2, 0.3), "LAMB": (None, 0.3)}
    records = [record(who, 0.1, seed, (2.0, 1.0, loss)) for who in ended for seed, loss in enumerate(ended[who])]
    everyone = [{"name": name, "options": "", "grid": [0.1]} for name in ended]
    told = {**summary, "results": list_results(records, None), "score_name": "score", "contestants": everyone}
    rows = {
        row["contestant"]: dict(zip(describe(told)["columns"][1:], row["cells"], strict=True))
        for row in describe(told)["rows"]
    }
    marked = {key: [cells[key]["is_best"] for cells in rows.values()] for key in ("lr", "loss", "score", "state")}
    assert marked == {"lr": [False] * 3, "loss": [True, False, False], "score": [False] * 3, "state": [False] * 3}
    assert rows["SGD"]["loss"] == {"text": "0.25", "seeds": "0.2 to 0.3", "is_best": False}
    assert rows["LAMB"]["loss"] == {"text": "diverged", "seeds": "in some seeds", "is_best": False}
    assert rows["A"]["score"]["text"] == "50.0 %"


# ---- the report


class Page(html.parser.HTMLParser):
    """The elements of a page, whether all of them are closed, and its texts by the element that they stand in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, Any]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.elements.append((tag, dict(attributes)))
        self.open += [tag] if tag != "meta" else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))


@pytest.mark.parametrize(("name", "below"), [("Digits", 0), ("</script><script src='http://x'>$title & \"", 2)])
def test_the_report_shows_the_summary_and_asks_for_nothing(name: str, below: float) -> None:
    pytest.importorskip("plotly")
    from thalweg.race.page import make_page

    task = parabola(
        **dict(title=name, about=name, loss_name=name, score_name=name, seeds=2, steps=9),
        evaluate=lambda params: (float((params["x"] ** 2).sum()) - below, 27.5 if below else 0.25),
    )
    options = {"": {"lr": [0.1, 0.2]}, "lamb": {"lr": 1e30}}
    summary = race(task, optimizers=["SGD", "LAMB"], options=options, command=name).run().summary
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
    for words in ("diverged", "25.0 %" if not below else "27.5"):
        assert ("span", words) in page.texts
    (data,) = [text for tag, text in page.texts if tag == "script" and text.startswith('{"summary"')]
    report = json.loads(data)
    assert report["summary"] == json.loads(json.dumps(summary))
    assert (report["log"], report["share"]) == (not below, not below) == (not below_zero(summary), in_percent(summary))
