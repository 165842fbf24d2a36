"""``step_plan()`` tells the stages of a step, and why no faster code takes some parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from side_by_side import needs_core

import thalweg.torch
from thalweg import Spikes
from thalweg.errors import OptimError

pytestmark = needs_core


def stepped(make: Any, dtype: Any = torch.float32, **options: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 10)).to(dtype)
    optimizer = make(model if make is thalweg.torch.muon_adamw else model.parameters(), lr=0.1, **options)
    take_step(optimizer)
    return optimizer


def take_step(optimizer: Any) -> None:
    sum(p.sum() for p in optimizer.parameters()).backward()
    optimizer.step()


#: Options, and what is done in words, up to the guard and from there on; then why there is no fused code.
STAGES: dict[str, tuple[str, dict[str, Any], list[str], list[str]]] = {
    "native": (
        "AdamW",
        {},
        ["find 4 gradients"],
        ["all passes: AdamW, 4 tensors (940 elements)"],
    ),
    "decided by all gradients": (
        "LAMB",
        dict(max_grad_norm=1.0, spikes=Spikes(window=4), on_nonfinite="skip"),
        [
            "squares of 4 gradients",
            f"decide: max_grad_norm=1.0, spikes={Spikes(window=4)!r}, on_nonfinite='skip'",
            "find 4 gradients",
            "all passes but the last, and a look at that one: LAMB",
        ],
        ["remember what was decided", "last pass of what is finite: LAMB", "warn where all is clipped"],
    ),
    "lists": ("SGD", dict(engine="foreach"), [], ["by torch: SGD, 4 tensors", "no fused code for 4 tensors"]),
    "lists that may raise": (
        "SGD",
        dict(engine="foreach", on_nonfinite="raise"),
        ["new values by torch: SGD, 4 tensors", "raise if a step is not finite"],
        ["write new values: SGD, 4 tensors", "no fused code for 4 tensors (940 elements): engine='foreach'"],
    ),
    "no native code": (
        *("AdamW", dict(dtype=torch.float64, state_rounding="stochastic", state_dtype="bfloat16"), []),
        ["by torch: AdamW, 4 tensors", "there is no native code for state_rounding='stochastic' of float64"],
    ),
    "a mixture": (
        "muon_adamw",
        {},
        ["find 3 gradients"],
        ["by torch: Muon, 1 tensor", "all passes: AdamW, 3", "no fused code for 1 tensor (600 elements): Muon is"],
    ),
}


@pytest.mark.parametrize("what", STAGES)
def test_a_plan_tells_its_stages_and_why_its_code_is_not_faster(what: str) -> None:
    make, options, before, after = STAGES[what]
    first, *lines = str(stepped(getattr(thalweg.torch, make), **options).step_plan()).splitlines()
    assert first == "a step of 4 parameters (940 elements)"
    wanted = ["GradScaler", *before, "guard: nothing above writes parameters or state", *after]
    assert len(lines) == len(wanted)
    assert all(words in line for line, words in zip(lines, wanted, strict=True))


def test_the_next_step_has_the_same_plan_unless_something_has_changed() -> None:
    optimizer = stepped(thalweg.torch.AdamW)
    before = optimizer.step_plan()
    optimizer.param_groups[0]["lr"] = 0.2
    take_step(optimizer)
    assert optimizer.step_plan() is before
    optimizer.param_groups[0]["weight_decay"] = 0.0  # a number that is 0 is other code
    take_step(optimizer)
    assert optimizer.step_plan() is not before
    assert str(optimizer.step_plan()) == str(before)


def test_without_a_step_there_is_no_plan() -> None:
    optimizer = thalweg.torch.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(OptimError, match="there was no step"):
        optimizer.step_plan()
    optimizer.step()
    assert str(optimizer.step_plan()) == "a step of no parameters: none has a gradient"
