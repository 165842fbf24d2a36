"""Spikes in torch: by every engine the steps of numpy, in checkpoints, in mixtures; what is refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from spiked import KINDS, STEPS, draw, factors_by_hand
from tolerances import FLOAT64

import thalweg.numpy
import thalweg.torch
from thalweg import NonFiniteError, OptionError, ResumeWarning, Spikes

OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": dict(lr=0.1),
    "LAMB": dict(lr=0.1, exempt=None),
    "Kron": dict(lr=0.01, damping_mode="expected"),
}


def model() -> list[tuple[str, Any]]:
    return [(name, torch.nn.Parameter(torch.from_numpy(p))) for name, p in draw(0).items()]


def train(optimizer: Any, named: Any, steps: range = range(1, STEPS + 1)) -> None:
    for t in steps:
        for name, p in named:
            p.grad = torch.from_numpy(draw(t)[name]).to(p.dtype)
        optimizer.step()


def train_numpy(rule: str, **options: Any) -> tuple[Any, Any]:
    optimizer, params = getattr(thalweg.numpy, rule)(**OPTIONS[rule], **options), draw(0)
    for t in range(1, STEPS + 1):
        optimizer.step(params, draw(t))
    return optimizer, params


def pairs(named: Any, others: Any) -> Any:
    return [(p.detach(), q.detach()) for (_, p), (_, q) in zip(named, others, strict=True)]


@pytest.mark.parametrize("engine", ["reference", "foreach", "auto"])
@pytest.mark.parametrize(("rule", "kind"), [*(("AdamW", kind) for kind in KINDS), ("LAMB", "skip"), ("Kron", "skip")])
def test_every_engine_takes_the_steps_of_numpy(rule: str, kind: str, engine: Any) -> None:
    wanted, params = train_numpy(rule, spikes=KINDS[kind])
    named = model()
    optimizer = getattr(thalweg.torch, rule)(named, engine=engine, spikes=KINDS[kind], **OPTIONS[rule])
    train(optimizer, named)
    for name, p in named:
        assert np.max(np.abs(p.detach().numpy() - params[name])) < FLOAT64
        assert optimizer.state[p]["step"] == wanted.state[name]["step"]
    assert optimizer.skipped == factors_by_hand(KINDS[kind]).count(None)
    found, told = optimizer.stats()["a"], wanted.stats()["a"]
    for key in ("joint_norm", "joint_limit", "spikes"):
        assert found[key] == pytest.approx(told[key], rel=FLOAT64)
    assert len(optimizer._steps) == 1, "the step was laid out once"


def through_a_file(optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_checkpoints_and_copies_have_the_norms() -> None:
    whole, named = None, model()
    whole = thalweg.torch.AdamW(named, lr=0.1, spikes=KINDS["skip"])
    train(whole, named, range(1, 9))
    others = [(name, torch.nn.Parameter(p.detach().clone())) for name, p in named]
    loaded = thalweg.torch.AdamW(others, lr=0.1, spikes=True)
    loaded.load_state_dict(through_a_file(whole))
    assert loaded.param_groups[0]["spikes"] == whole.param_groups[0]["spikes"]
    copied = copy.deepcopy(whole)
    train(whole, named, range(9, STEPS + 1))
    train(loaded, others, range(9, STEPS + 1))
    again = list(zip("ab", copied.parameters(), strict=True))
    train(copied, again, range(9, STEPS + 1))
    assert all(torch.equal(*pair) for pair in pairs(named, others) + pairs(named, again))
    assert whole.skipped == 2
    assert loaded.stats()["a"]["spikes"] == 2


def test_state_goes_to_other_front_ends_and_comes_back() -> None:
    named = model()
    optimizer = thalweg.torch.AdamW(named, lr=0.1, spikes=KINDS["clip"])
    train(optimizer, named, range(1, 9))
    arrays = thalweg.numpy.AdamW(lr=0.1, spikes=KINDS["clip"])
    arrays.load_state_dict(thalweg.torch.export_state(optimizer))
    params = {name: p.detach().numpy().copy() for name, p in named}
    arrays.step(params, draw(9))
    thalweg.torch.import_state(optimizer, arrays.state_dict())
    assert np.array_equal(optimizer.state[named[0][1]]["spikes"].numpy(), arrays.state["a"]["spikes"])


def test_a_run_gains_and_drops_it() -> None:
    named = model()
    before = thalweg.torch.AdamW(named, lr=0.1)
    train(before, named, range(1, 3))
    optimizer = thalweg.torch.AdamW(named, lr=0.1, spikes=KINDS["skip"])
    optimizer.load_state_dict(before.state_dict())
    with pytest.warns(ResumeWarning, match="'spikes' of 'a' is new"):
        train(optimizer, named, range(3, 4))
    after = thalweg.torch.AdamW(named, lr=0.1)
    after.load_state_dict(optimizer.state_dict())
    after.param_groups[0]["spikes"] = False
    optimizer = after
    with pytest.warns(ResumeWarning, match="'spikes' of 'a' is dropped"):
        train(optimizer, named, range(4, 5))
    assert "spikes" not in optimizer.state[named[0][1]]


def test_an_error_is_not_remembered() -> None:
    named = model()
    optimizer = thalweg.torch.AdamW(named, lr=0.1, spikes=KINDS["clip"], on_nonfinite="raise")
    train(optimizer, named, range(1, 9))
    kept = optimizer.state[named[0][1]]["spikes"].clone()
    named[0][1].grad[0, 0] = float("nan")
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert torch.equal(optimizer.state[named[0][1]]["spikes"], kept)


def test_with_steps_that_are_not_finite_skipped_too() -> None:
    named = model()
    optimizer = thalweg.torch.AdamW(named, lr=0.1, spikes=KINDS["skip"], on_nonfinite="skip")
    train(optimizer, named, range(1, 10))
    named[0][1].grad[0, 0] = float("nan")
    optimizer.step()
    assert optimizer.skipped == 2
    assert optimizer.stats()["a"]["spikes"] == 1
    assert optimizer.state[named[0][1]]["step"] == 8


def test_a_mixture_has_one_norm() -> None:
    entries = [("a", thalweg.torch.SGD.options(lr=0.1)), ("b", thalweg.torch.AdamW.options(lr=0.1))]
    named, plain = model(), draw(0)
    optimizer = thalweg.torch.Mixture(named, entries, spikes=KINDS["skip"])
    optimizer.add_param_group({"params": [("c", torch.nn.Parameter(torch.ones(2)))], "rule": "SGD"})
    train(optimizer, named)
    theirs = [("a", thalweg.numpy.SGD.options(lr=0.1)), ("b", thalweg.numpy.AdamW.options(lr=0.1))]
    arrays = thalweg.numpy.Mixture(theirs, spikes=KINDS["skip"])
    for t in range(1, STEPS + 1):
        arrays.step(plain, draw(t))
    assert arrays.skipped == {"a": 2, "b": 2}
    assert optimizer.skipped == 2
    assert all(np.max(np.abs(p.detach().numpy() - plain[name])) < FLOAT64 for name, p in named)
    with pytest.raises(OptionError, match="spikes concerns the whole step: give it to the mixture"):
        thalweg.torch.SGD.options(lr=0.1, spikes=True)


def test_a_scaler_leaves_its_scale_to_the_step() -> None:
    """As a GradScaler does on GPUs: norms are those without its scale."""
    named, others = model(), model()
    plain, scaled = (thalweg.torch.AdamW(own, lr=0.1, spikes=KINDS["clip"]) for own in (named, others))
    train(plain, named)
    for t in range(1, STEPS + 1):
        for name, p in others:
            p.grad = torch.from_numpy(draw(t)[name]) * 1024
        scaled.grad_scale, scaled.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
        scaled.step()
    assert all(torch.allclose(*pair, rtol=1e-12, atol=0) for pair in pairs(named, others))


@pytest.mark.parametrize("action", ["skip", "clip"])
def test_what_needs_all_gradients_is_refused_one_by_one(action: Any) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = thalweg.torch.AdamW(layer.named_parameters(), lr=0.1, spikes=Spikes(action=action))
    layer.weight.grad = torch.ones(2, 2)
    with pytest.raises(OptionError, match="spikes needs all gradients of a step at once"):
        optimizer.step_parameter(layer.weight)
    with pytest.raises(OptionError, match="spikes needs all gradients of a step at once"):
        thalweg.torch.step_in_backward(layer, optimizer)
    groups = [{"params": [layer.weight]}, {"params": [layer.bias], "spikes": False}]
    with pytest.raises(OptionError, match="spikes concerns the whole step"):
        thalweg.torch.AdamW(groups, lr=0.1, spikes=True)
