"""Options that somebody asks for: who gets them, who is told why not, and where they are shown."""

from __future__ import annotations

import html
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thalweg.errors import CommandError
from thalweg.race.array_task import ArrayTask
from thalweg.race.contest import load_race, race

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
    found = optimizers(options={"": {"zero_ratio": 0.5, "trust_coefficient": 0.01}})
    assert "trust_coefficient=0.01" in found["LARS"]
    assert "trust_coefficient" not in found["SGD"]


def test_variants_are_for_those_that_have_them() -> None:
    found = optimizers(options={"": {"variant": "kron_torch"}})
    assert "variant='kron_torch'" in found["Kron"]
    assert sum("variant" in options for options in found.values()) == 1


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
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(options: Any, words: str) -> None:
    with pytest.raises(CommandError) as caught:
        race(TASK, options=options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_for_whoever_does_not_take_part_are_told() -> None:
    with pytest.raises(CommandError, match=r"the option kron[.]clip is for Kron, which is not among"):
        race(TASK, optimizers=["SGD", "LAMB"], options={"Kron": {"clip": 1}})


@pytest.mark.parametrize("given", ["rates", "more_rates"])
def test_rates_for_whoever_does_not_take_part_are_told(given: str) -> None:
    with pytest.raises(CommandError, match=r"the option kron[.]lr is for Kron, which is not among"):
        race(TASK, optimizers=["SGD", "LAMB"], **{given: {"Kron": [0.1]}})


def test_an_option_without_effect_on_anyone_is_told() -> None:
    with pytest.raises(CommandError, match=re.escape("precond_dtype='float16' has no effect on any optimizer here")):
        race(TASK, optimizers=["SGD"], options={"": {"precond_dtype": "float16"}})


def test_betas_of_another_count_that_nobody_takes_are_refused() -> None:
    with pytest.raises(CommandError, match=re.escape("AdEMAMix: betas must be 3 numbers, got (0.5, 0.6)")):
        race(TASK, optimizers=["AdEMAMix", "SGD"], options={"": {"betas": (0.5, 0.6)}})


def test_a_rate_that_is_given_twice_is_told() -> None:
    with pytest.raises(CommandError, match="the learning rate of LAMB is given twice"):
        race(TASK, rates={"LAMB": [0.1]}, options={"LAMB": {"lr": 0.2}})


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


# ---- the command


def drawn(function: Any) -> Any:
    missing = [n for n in ("click", "rich", "matplotlib", "plotly") if importlib.util.find_spec(n) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{missing} not installed")(function)


QUICK = ["--optimizers", "sgd,lamb", "--lr", "0.02", "--steps", "2", "--seeds", "1"]


@pytest.mark.nightly
@drawn
def test_the_command_shows_options_in_table_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ml_dtypes")
    from thalweg.cli import run

    asked = ["--option", "lamb.betas=[0.9, 0.95]", "--option", "weight_decay=0.01", "--option", "momentum_dtype=bf16"]
    assert run(["race", *QUICK, *asked, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "LAMB: betas=(0.9, 0.95), momentum_dtype='bfloat16', weight_decay=0.01" in printed
    assert "SGD: momentum_dtype='bfloat16', weight_decay=0.01" in printed
    page = html.unescape((tmp_path / "index.html").read_text(encoding="utf-8"))
    assert "betas=(0.9, 0.95), momentum_dtype='bfloat16', weight_decay=0.01" in page


@drawn
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("weight_decay", "--option 'weight_decay' must be NAME=VALUE"),
        ("=3", "--option '=3' must be NAME=VALUE"),
        ("lamb.=3", "--option 'lamb.=3' must be NAME=VALUE"),
        ("lmab.eps=3", "there is no optimizer 'lmab': did you mean 'LAMB'?"),
        ("kron.clip=1", "the option kron.clip is for Kron, which is not among the optimizers: SGD, LAMB"),
        ("lamb.epsilon=1", "LAMB has no option 'epsilon': here it is eps"),
    ],
)
def test_mistakes_are_told_in_one_line(
    asked: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from thalweg.cli import run

    assert run(["race", *QUICK, "--option", asked, "--out", str(tmp_path / "new")]) == 1
    told = capsys.readouterr()
    assert words in told.err
    assert told.err.count("\n") == 1
    assert not (tmp_path / "new").exists()
