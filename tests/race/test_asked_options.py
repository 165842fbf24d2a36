"""Options that somebody asks for: who gets them, who is told why not, and where they are shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thalweg.errors import CommandError
from thalweg.race.array_task import ArrayTask
from thalweg.race.contest import load_race, race
from thalweg.race.contestants import CONTESTANTS

TASK = ArrayTask(
    name="parabola",
    init=lambda seed: {"x": np.full((2, 2), 1.0)},
    gradients=lambda params, batch: {"x": 2 * params["x"]},
    evaluate=lambda params: float(np.square(params["x"]).sum()),
    steps=4,
    seeds=1,
    options={"LAMB": dict(eps=1e-3), "Kron": dict(max_skew=None)},
)


def optimizers(**asked: Any) -> dict[str, str]:
    """Who takes part, as it is recorded."""
    return {run.contestant: run.optimizer for run in race(TASK, **asked).wanted}


def test_an_option_for_all_goes_to_all_that_have_it() -> None:
    found = optimizers(options={"": {"betas": (0.5, 0.6), "weight_decay": 0.25}})
    assert found["LAMB"] == "LAMB(betas=(0.5, 0.6), eps=0.001, weight_decay=0.25)"
    assert found["AdamW"] == "AdamW(betas=(0.5, 0.6), weight_decay=0.25)"
    assert found["SGD"] == "SGD(momentum=0.9, weight_decay=0.25)"
    assert "betas" not in found["Kron"]
    assert "betas" not in found["AdEMAMix"]  # whose betas are three
    assert all("weight_decay=0.25" in options for options in found.values())


def test_an_option_for_one_wins_over_that_for_all_over_that_of_the_task_over_our_own() -> None:
    asked = {"": {"eps": 1e-4, "momentum": 0.5}, "LAMB": {"eps": 1e-5}}
    found = optimizers(optimizers=["LAMB", "AdamW", "SGD"], options=asked)
    assert "eps=1e-05" in found["LAMB"]
    assert "eps=0.0001" in found["AdamW"]
    assert "momentum=0.5" in found["SGD"]
    assert "eps=0.001" in optimizers()["LAMB"]


def test_an_option_for_all_is_left_out_where_it_has_no_effect() -> None:
    found = optimizers(options={"": {"trust_coefficient": 0.01, "variant": "kron_torch"}})
    assert "trust_coefficient=0.01" in found["LARS"]
    assert "trust_coefficient" not in found["SGD"]
    assert [name for name, options in found.items() if "variant='kron_torch'" in options] == ["Kron"]


def test_options_change_what_is_computed() -> None:
    def loss(**asked: Any) -> Any:
        (course,) = race(TASK, optimizers=["AdamW"], rates={"": [0.1]}, **asked).run().summary["courses"]
        return course["results"][0]["loss"]

    assert loss(options={"AdamW": {"betas": (0.1, 0.2)}}) != loss()


def test_a_learning_rate_is_an_option_too() -> None:
    ready = race(TASK, optimizers=["AdamW", "LAMB"], options={"LAMB": {"lr": 0.5}, "": {"lr": (0.1, 0.2)}})
    assert [(run.contestant, run.lr) for run in ready.wanted] == [("AdamW", 0.1), ("AdamW", 0.2), ("LAMB", 0.5)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"LAMB": {"weight_decy": 1}}, "LAMB has no option 'weight_decy': did you mean 'weight_decay'?"),
        ({"AdamW": {"weight_decy": 1}}, "AdamW has no option 'weight_decy': did you mean 'weight_decay'?"),
        ({"LAMB": {"betas": (0.9, 1.5)}}, "LAMB: betas"),
        ({"SGD": {"weight_decay": -1}}, "SGD: weight_decay must be a finite number >= 0, got -1"),
        ({"": {"weight_decay": "much"}}, "SGD: weight_decay must be a finite number >= 0, got 'much'"),
        ({"": {"eps": 1e-8}}, "Adafactor: eps must be a pair of numbers, got 1e-08"),
        ({"": {"nonsense": 1}}, "no optimizer here has an option 'nonsense'"),
        ({"": {"momentun": 1}}, "no optimizer here has an option 'momentun': did you mean 'momentum'?"),
        ({"AdamW": {"trust": True}}, "AdamW has no option 'trust'"),
        ({"SGD": {"momentum": 0.0, "nesterov": True}}, "SGD: nesterov=True has no effect here"),
        ({"lamb": {"eps": 1}}, "there is no optimizer 'lamb': did you mean 'LAMB'?"),
        ({"LAMB": 3}, "options of LAMB must be a dict, got 3"),
        ({"LAMB": {"lr": -1}}, "rates of LAMB must be positive numbers"),
        ({"LAMB": {"variant": "none"}}, "LAMB: variant must be one of 'paper', 'optax'"),
        ({"LAMB": {"momentum_dtype": "int4"}}, "LAMB: momentum_dtype must be one of"),
        ({"Kron": {"clip": 1}}, "the option kron.clip is for Kron, which is not among"),
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(options: Any, words: str) -> None:
    everyone = [name for name in CONTESTANTS if name != "Kron"]
    with pytest.raises(CommandError) as caught:
        race(TASK, optimizers=everyone, options=options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (dict(rates={"Kron": [0.1]}), "the option kron.lr is for Kron, which is not among"),
        (dict(more_rates={"Kron": [0.1]}), "the option kron.lr is for Kron, which is not among"),
        (dict(rates={"SGD": [0.1]}, options={"SGD": {"lr": 0.2}}), "the learning rate of SGD is given twice"),
        (
            dict(options={"": {"precond_dtype": "float16"}}),
            "precond_dtype='float16' has no effect on any optimizer here",
        ),
        (dict(options={"": {"betas": (0.5, 0.6)}}), "AdEMAMix: betas must be 3 numbers, got (0.5, 0.6)"),
    ],
)
def test_what_cannot_be_among_two_is_told(asked: Any, words: str) -> None:
    with pytest.raises(CommandError, match=re.escape(words)):
        race(TASK, optimizers=["SGD", "AdEMAMix"], **asked)


def test_what_a_model_refuses_is_told_before_anything_runs(tmp_path: Path) -> None:
    asked = {"LAMB": {"stacked_axes": 2}, "Kron": {"stacked_axes": 3}}
    ready = race(TASK, optimizers=["LAMB", "Kron"], options=asked, folder=tmp_path / "report")
    with pytest.raises(CommandError, match="stacked_axes=3"):
        ready.run(on_measure=lambda *progress: pytest.fail("something was run"))
    assert list(tmp_path.iterdir()) == []


def test_other_options_are_other_runs_and_are_recorded(tmp_path: Path) -> None:
    def ready(**asked: Any) -> Any:
        return race(TASK, optimizers=["LAMB"], rates={"": [0.1]}, folder=tmp_path, **asked)

    ready().run()
    assert ready().waiting == []
    asked = ready(options={"LAMB": {"weight_decay": 0.25}})
    assert len(asked.waiting) == 1
    summary = asked.run().summary
    (who,) = summary["contestants"]
    assert (who["given"], who["options"]) == ("weight_decay=0.25", "LAMB(eps=0.001, weight_decay=0.25)")
    again, _ = load_race(tmp_path)
    assert again.summary["contestants"] == summary["contestants"]
    last = json.loads((tmp_path / "runs.jsonl").read_text().splitlines()[-1])
    assert last["run"]["optimizer"] == "LAMB(eps=0.001, weight_decay=0.25)"
