"""Tasks, optimizers and options that are wrong: told in one sentence, before anything is run or written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from race_tasks import linear, parabola

from thalweg.errors import CommandError
from thalweg.race import race


def check_refused(words: str, folder: Path, task: Any, **asked: Any) -> None:
    with pytest.raises(CommandError, match=words) as caught:
        race(task, folder=folder / "report", **asked).run(lambda run: pytest.fail("something was run"))
    assert "\n" not in str(caught.value)
    assert not (folder / "report").exists()


SGD_OF_TORCH = dict(optimizers=["torch.optim.SGD"])


@pytest.mark.parametrize(
    ("make", "changes", "asked", "words"),
    [
        (parabola, dict(steps=0), {}, "'parabola': steps must be a whole number from 1 on, got 0"),
        (parabola, dict(name=""), {}, "a task needs a name"),
        (parabola, dict(target="low"), {}, "target must be a number, a loss, got 'low'"),
        (parabola, dict(best_score="all"), {}, "best_score must be 'most' or 'least', got 'all'"),
        (parabola, dict(warm_up=1), {}, "warm_up must be a share of the steps below 1, got 1"),
        (parabola, dict(init=3), {}, "init must be a function, got 3"),
        (parabola, dict(init=lambda seed: {"x": [1.0]}), {}, "init must return arrays by name, and 'x' is a list"),
        (parabola, dict(evaluate=lambda params: float("nan")), {}, "the loss before the first step is nan"),
        (parabola, dict(evaluate=lambda params: (1, 2, 3)), {}, "must return a loss, or a loss and a score, got tuple"),
        (parabola, dict(batches=lambda seed, size: 3), {}, "batches must return something to iterate over, got int"),
        (parabola, dict(batches=lambda seed, size: iter([])), {}, "batches must not end: start again after the last"),
        (parabola, dict(gradients=lambda params, batch: {"y": np.ones(4)}), {}, "'parabola'.*y"),
        (parabola, dict(gradients=lambda params, batch: {"x": np.ones(3)}), {}, "'parabola'.*'x'"),
        (parabola, dict(gradients=lambda params, batch: {"y": np.ones(4)}), SGD_OF_TORCH, "the gradient of 'y' failed"),
        (parabola, dict(gradients=lambda params, batch: {"x": np.ones(3)}), SGD_OF_TORCH, "the gradient of 'x' failed"),
        (parabola, dict(gradients=lambda params, batch: 1 / 0), {}, r"failed \(.*test_wrong.py, line \d+\): Zero"),
        (linear, dict(model=lambda seed: 3), {}, "model must return a torch.nn.Module, got int"),
        (linear, dict(loss=lambda model, batch: 3.0), {}, "loss must return a tensor with one element, got float"),
        (linear, dict(loss=lambda model, batch: batch["x"]), {}, r"tensor with one element, got shape \(8, 4\)"),
        (linear, dict(loss=lambda model, batch: batch["x"].sum()), {}, "the backward pass of loss failed"),
        (parabola, {}, dict(beyond=-1), "beyond must be a whole number from 0 on, got -1"),
        (parabola, {}, dict(optimizers=[3]), "3 is no optimizer: it must be a rule"),
        (parabola, {}, dict(options={"LAMB": {"weight_decy": 1}}), "LAMB has no option 'weight_decy': did you mean"),
        (parabola, {}, dict(options={"": {"momentun": 1}}), "no optimizer here has an option 'momentun': did you mean"),
        (parabola, {}, dict(options={"": {"engine": "warp"}}), "'parabola', SGD: engine must be one of 'auto', 'ref"),
        (parabola, {}, dict(options={"kron": {"clip": 1}}), "no optimizer 'kron' takes part: there are SGD, LAMB"),
        (parabola, {}, dict(options={"LAMB": 3}), "options of LAMB must be a dict, got 3"),
        (parabola, {}, dict(options={"LAMB": {"stacked_axes": 3}}), "stacked_axes=3"),
        (
            parabola,
            {},
            dict(options={"": {"lr": [0.1, -1]}}),
            r"SGD: lr must be a positive number, or several, got \[0",
        ),
        (
            parabola,
            {},
            dict(options={"lamb": {"lr": "fast"}}),
            "LAMB: lr must be a positive number, or several, got 'f",
        ),
    ],
)
def test_tasks_and_options(make: Any, changes: Any, asked: Any, words: str, tmp_path: Path) -> None:
    if asked is SGD_OF_TORCH:
        pytest.importorskip("torch")
    check_refused(words, tmp_path, make(**changes), **{"optimizers": ["SGD", "LAMB"], **asked})


@pytest.mark.parametrize(
    ("task", "optimizer", "words"),
    [
        ("digit", "SGD", "there is no task 'digit' (your own would be mymodule:task): did you mean 'digits'?"),
        ("race_tasks:parobola", "SGD", "module 'race_tasks' has no 'parobola': "),
        ("race_tasks:bowl", "SGD", "race_tasks:bowl: calling it failed: TypeError"),
        ("race_tasks:math", "SGD", "race_tasks:math is a module and must be an ArrayTask or a ModelTask of thalweg"),
        ("race_tasks:parabola", "Adam", "no optimizer 'Adam' (others go by import path, such as torch.optim.Adam)"),
        ("race_tasks:parabola", "race_tasks:math", "'race_tasks:math' is no optimizer: it must be a rule"),
        ("race_tasks:parabola", "torch.nn.Linear", "'parabola', torch.nn.Linear: making it with lr=0.05 failed"),
        ("race_tasks:parabola", "torch.optim.LBFGS", "'parabola', torch.optim.LBFGS: step() failed"),
        ("race_tasks:parabola", "race_factories:nothing", "it returned a int, and must return an optimizer of torch"),
        (
            "race_tasks:parabola",
            "race_factories:forgetful",
            "it has no lr in its groups, and the race must lower it step by",
        ),
    ],
)
def test_what_cannot_be_imported(task: str, optimizer: str, words: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    check_refused(re.escape(words), tmp_path, task, optimizers=["SGD", optimizer], options={"": {"lr": 0.05}})
