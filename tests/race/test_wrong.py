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

MODULE = """
import torch
from race_tasks import parabola

task = parabola()

def nothing(params, lr):
    return 3

def forgetful(params, lr):
    made = torch.optim.SGD(params, lr=lr)
    del made.param_groups[0]["lr"]
    return made
"""


def check_refused(words: str, folder: Path, task: Any, **asked: Any) -> None:
    with pytest.raises(CommandError, match=words) as caught:
        race(task, folder=folder / "report", **asked).run(lambda run: pytest.fail("something was run"))
    assert "\n" not in str(caught.value)
    assert not (folder / "report").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(steps=0), "'parabola': steps must be a whole number from 1 on, got 0"),
        (dict(name=""), "a task needs a name"),
        (dict(target="low"), "target must be a number, a loss, got 'low'"),
        (dict(best_score="all"), "best_score must be 'most' or 'least', got 'all'"),
        (dict(warm_up=1), "warm_up must be a share of the steps below 1, got 1"),
        (dict(init=3), "init must be a function, got 3"),
        (dict(init=lambda seed: {"x": [1.0]}), "init must return arrays by name, and 'x' is a list"),
        (dict(evaluate=lambda params: float("nan")), "the loss before the first step is nan"),
        (dict(evaluate=lambda params: (1, 2, 3)), "evaluate must return a loss, or a loss and a score, got tuple"),
        (dict(batches=lambda seed, size: 3), "batches must return something to iterate over, got int"),
        (dict(batches=lambda seed, size: iter([1, 2])), "'parabola': batches must not end: start again after the last"),
        (dict(gradients=lambda params, batch: {"y": params["x"]}), "'parabola'.*y"),
        (dict(gradients=lambda params, batch: {"x": np.ones(3)}), "'parabola'.*'x'"),
        (dict(gradients=lambda params, batch: 1 / 0), r"gradients failed \(.*test_wrong.py, line \d+\): Zero"),
    ],
)
@pytest.mark.parametrize("optimizer", ["SGD", "torch.optim.SGD"])
def test_tasks_in_numpy(changes: dict[str, Any], words: str, optimizer: str) -> None:
    if optimizer != "SGD":
        pytest.importorskip("torch")
    with pytest.raises(CommandError, match=words):
        race(parabola(**changes), optimizers=[optimizer]).run()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(model=lambda seed: 3), "model must return a torch.nn.Module, got int"),
        (dict(loss=lambda model, batch: 3.0), "loss must return a tensor with one element, got float"),
        (dict(loss=lambda model, batch: batch["x"]), r"a tensor with one element, got shape \(8, 4\)"),
        (dict(loss=lambda model, batch: batch["x"].sum()), "the backward pass of loss failed"),
    ],
)
def test_tasks_in_torch(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    check_refused(words, tmp_path, linear(**changes), optimizers=["SGD"])


@pytest.mark.parametrize(
    ("task", "optimizer", "words"),
    [
        ("digit", "SGD", "there is no task 'digit' (your own would be mymodule:task): did you mean 'digits'?"),
        ("race_wrong:tusk", "SGD", "module 'race_wrong' has no 'tusk': did you mean 'task'"),
        ("race_wrong:nothing", "SGD", "race_wrong:nothing: calling it failed: TypeError"),
        ("race_wrong:torch", "SGD", "race_wrong:torch is a module and must be an ArrayTask or a ModelTask of thalweg"),
        ("race_wrong:task", "Adam", "no optimizer 'Adam' (others go by import path, such as torch.optim.Adam)"),
        ("race_wrong:task", "torch.optim.Adm", "torch.optim.Adm: module 'torch.optim' has no 'Adm': did you mean"),
        ("race_wrong:task", "race_wrong:task", "'race_wrong:task' is no optimizer: it must be a rule"),
        ("race_wrong:task", "torch.nn.Linear", "'parabola', torch.nn.Linear: making it with lr=0.05 failed"),
        ("race_wrong:task", "torch.optim.LBFGS", "'parabola', torch.optim.LBFGS: step() failed"),
        ("race_wrong:task", "race_wrong:nothing", "it returned a int, and must return an optimizer of torch"),
        ("race_wrong:task", "race_wrong:forgetful", "it has no lr in its groups, and the race must lower it step by"),
    ],
)
def test_what_cannot_be_imported(task: str, optimizer: str, words: str, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("torch")
    (tmp_path / "race_wrong.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    check_refused(re.escape(words), tmp_path, task, optimizers=["SGD", optimizer], options={"": {"lr": 0.05}})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"LAMB": {"weight_decy": 1}}, "LAMB has no option 'weight_decy': did you mean 'weight_decay'?"),
        ({"": {"momentun": 1}}, "no optimizer here has an option 'momentun': did you mean 'momentum'?"),
        ({"": {"engine": "warp"}}, "'parabola', SGD: engine must be one of 'auto', 'reference', 'fused'"),
        ({"kron": {"clip": 1}}, "no optimizer 'kron' takes part: there are SGD, LAMB"),
        ({"LAMB": 3}, "options of LAMB must be a dict, got 3"),
        ({"LAMB": {"stacked_axes": 3}}, "stacked_axes=3"),
        ({"": {"lr": [0.1, -1]}}, "SGD: lr must be a positive number, or several, got [0.1, -1]"),
        ({"lamb": {"lr": "fast"}}, "LAMB: lr must be a positive number, or several, got 'fast'"),
    ],
)
def test_options(options: Any, words: str, tmp_path: Path) -> None:
    check_refused(re.escape(words), tmp_path, parabola(), optimizers=["SGD", "LAMB"], options=options)
