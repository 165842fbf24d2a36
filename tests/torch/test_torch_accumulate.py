"""Gradients that are added up in float32: one step with their mean, by every engine, in checkpoints."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from spiked import draw
from tolerances import FLOAT64

import thalweg.numpy
import thalweg.torch
from thalweg import OptionError, ParameterError, ResumeWarning, Spikes, StateError

WANTED = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": dict(lr=0.1),
    "LAMB": dict(lr=0.1, exempt=None),
    "Kron": dict(lr=0.01, damping_mode="expected"),
}


def model(dtype: Any = torch.float64) -> list[tuple[str, Any]]:
    return [(name, torch.nn.Parameter(torch.from_numpy(p).to(dtype))) for name, p in draw(0).items()]


def mean(step: int) -> dict[str, Any]:
    """Of the gradients of a step, in float64."""
    parts = [draw(WANTED * step + i) for i in range(1, WANTED + 1)]
    return {name: np.mean([part[name] for part in parts], axis=0) for name in parts[0]}


def train(optimizer: Any, named: Any, calls: range) -> None:
    for call in calls:
        for name, p in named:
            p.grad = torch.from_numpy(draw(call)[name]).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()


def train_once(optimizer: Any, named: Any, steps: int) -> None:
    """The same without the option."""
    for step in range(steps):
        for name, p in named:
            p.grad = torch.from_numpy(mean(step)[name]).to(p.dtype)
        optimizer.step()


def largest_error(named: Any, others: Any) -> float:
    return max(float((p.detach() - q.detach()).abs().max()) for (_, p), (_, q) in zip(named, others, strict=True))


@pytest.mark.parametrize("engine", ["reference", "foreach", "auto"])
@pytest.mark.parametrize("rule", OPTIONS)
@pytest.mark.parametrize("options", [{}, dict(max_grad_norm=0.5, on_nonfinite="skip")], ids=str)
def test_it_is_one_step_with_the_mean(rule: str, engine: Any, options: Any) -> None:
    (named, others), make = (model(), model()), getattr(thalweg.torch, rule)
    optimizer = make(named, engine=engine, accumulate=WANTED, **OPTIONS[rule], **options)
    train(optimizer, named, range(1, 4 * WANTED + 1))
    train_once(make(others, engine="reference", **OPTIONS[rule], **options), others, 4)
    assert largest_error(named, others) < FLOAT64
    assert optimizer.state[named[0][1]]["step"] == 4
    assert len(optimizer._steps) == 1, "the step was laid out once"


def test_bfloat16_is_added_up_in_float32() -> None:
    """A gradient of 1 and many that bfloat16 would round away beside it."""
    p = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    optimizer = thalweg.torch.SGD([p], lr=1.0, accumulate=256)
    for call in range(256):
        p.grad = torch.full_like(p, 1.0 if call == 0 else 2.0**-10)
        optimizer.step()
    # (1 + 255 / 1024) / 256 has no more digits than float32, and is rounded once to the parameter
    assert torch.equal(p.detach(), torch.full_like(p, -(1 + 255 / 1024) / 256))
    assert optimizer.state[p]["accumulated"].dtype == torch.float32


def test_calls_between_steps_add_to_the_same_lists() -> None:
    named = model()
    optimizer = thalweg.torch.AdamW(named, lr=0.1, accumulate=WANTED)
    train(optimizer, named, range(1, 3))
    found = optimizer._accumulation.latest
    train(optimizer, named, range(3, 2 * WANTED))
    assert optimizer._accumulation.latest is found is not None, "gradients moved, and nothing else"
    named[0][1].grad = torch.ones_like(named[0][1]).to_sparse()
    waiting = optimizer.state[named[1][1]]["accumulated"].clone()
    with pytest.raises(ParameterError, match="the gradient of 'a' is sparse"):
        optimizer.step()
    assert torch.equal(optimizer.state[named[1][1]]["accumulated"], waiting)


def test_nothing_moves_before_the_last_call() -> None:
    named = model()
    optimizer = thalweg.torch.AdamW(named, lr=0.1, accumulate=WANTED)
    train(optimizer, named, range(1, WANTED))
    assert largest_error(named, model()) == 0
    assert optimizer.state[named[0][1]]["step"] == 0
    train(optimizer, named, range(WANTED, WANTED + 1))
    assert largest_error(named, model()) > 0


def test_spikes_are_looked_for_in_the_mean() -> None:
    named, others, spikes = model(), model(), Spikes(window=4, z=2.0, action="clip")
    optimizer = thalweg.torch.AdamW(named, lr=0.1, accumulate=WANTED, spikes=spikes)
    train(optimizer, named, range(1, 8 * WANTED + 1))
    once = thalweg.torch.AdamW(others, lr=0.1, spikes=spikes)
    train_once(once, others, 8)
    assert largest_error(named, others) < FLOAT64
    assert optimizer.stats()["a"]["spikes"] == once.stats()["a"]["spikes"] > 0


def test_checkpoints_and_copies_go_on_in_the_middle() -> None:
    named = model()
    optimizer = thalweg.torch.AdamW(named, lr=0.1, accumulate=WANTED)
    train(optimizer, named, range(1, WANTED + 3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = [(name, torch.nn.Parameter(p.detach().clone())) for name, p in named]
    loaded = thalweg.torch.AdamW(others, lr=0.1, accumulate=WANTED)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(optimizer)
    again = list(zip("ab", copied.parameters(), strict=True))
    for each, own in ((optimizer, named), (loaded, others), (copied, again)):
        train(each, own, range(WANTED + 3, 3 * WANTED))
    assert largest_error(named, others) == largest_error(named, again) == 0
    assert loaded.param_groups[0]["accumulated"] == 3
    with pytest.raises(StateError, match="gradients of 3 steps wait for others"):
        thalweg.torch.export_state(optimizer)


def test_what_waits_is_dropped_with_the_option() -> None:
    named, others = model(), model()
    optimizer, plain = thalweg.torch.SGD(named, lr=0.1, accumulate=WANTED), thalweg.torch.SGD(others, lr=0.1)
    train(optimizer, named, range(1, 3))
    optimizer.param_groups[0]["accumulate"] = None
    with pytest.warns(ResumeWarning, match="'accumulated' of 'a' is dropped"):
        train(optimizer, named, range(3, 4))
    train(plain, others, range(3, 4))
    assert largest_error(named, others) == 0


def test_a_parameter_without_a_gradient_counts_as_zero_or_is_left_alone() -> None:
    named = [(name, torch.nn.Parameter(torch.zeros(2))) for name in "abc"]
    optimizer = thalweg.torch.SGD(named, lr=1.0, accumulate=2)
    for present in (("a", "b"), ("a",)):
        for name, p in named:
            p.grad = torch.ones(2) if name in present else None
        optimizer.step()
    assert [p.detach()[0].item() for _, p in named] == [-1.0, -0.5, 0.0]
    assert named[2][1] not in optimizer.state


def test_it_is_the_step_of_numpy() -> None:
    named, params = model(), draw(0)
    optimizer = thalweg.torch.AdamW(named, lr=0.1, accumulate=3)
    arrays = thalweg.numpy.AdamW(lr=0.1, accumulate=3)
    train(optimizer, named, range(1, 10))
    for call in range(1, 10):
        arrays.step(params, draw(call))
    assert all(np.max(np.abs(p.detach().numpy() - params[name])) < FLOAT64 for name, p in named)


def test_what_is_refused() -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = thalweg.torch.AdamW(layer.named_parameters(), lr=0.1, accumulate=2)
    layer.weight.grad = torch.ones(2, 2)
    with pytest.raises(OptionError, match="accumulate counts steps of all parameters"):
        optimizer.step_parameter(layer.weight)
    with pytest.raises(OptionError, match="accumulate adds up gradients that step_in_backward frees"):
        thalweg.torch.step_in_backward(layer, optimizer)
    for bad in (0, -1, 1.5, "2"):
        with pytest.raises(OptionError, match="accumulate"):
            thalweg.torch.AdamW(layer.parameters(), lr=0.1, accumulate=bad)
    assert not optimizer._step_supports_amp_scaling
