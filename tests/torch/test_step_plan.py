"""``step_plan()`` tells by which code parameters were stepped, and why not by faster."""

from __future__ import annotations

from typing import Any

import pytest
from side_by_side import needs_core

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg import Spikes  # noqa: E402
from thalweg.errors import OptimError  # noqa: E402

pytestmark = needs_core


def stepped(make: Any, dtype: Any = torch.float32, **options: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 10)).to(dtype)
    optimizer = make(model if make is thalweg.torch.muon_adamw else model.parameters(), lr=0.1, **options)
    take_step(optimizer)
    return optimizer


def take_step(optimizer: Any) -> None:
    for p in optimizer.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


FOLLOW = "take what a GradScaler leaves to the step"
#: Options, and what is done in words; ``...`` stands where nothing above has been written yet.
STAGES: dict[str, tuple[str, dict[str, Any], list[Any]]] = {
    "native": (
        "AdamW",
        {},
        [
            FOLLOW,
            "find the gradients of AdamW, 4 tensors",
            ...,
            "all passes: AdamW, 4 tensors (940 elements), float32 on cpu",
        ],
    ),
    "decided by all gradients": (
        "LAMB",
        dict(max_grad_norm=1.0, spikes=Spikes(window=4), on_nonfinite="skip"),
        [
            FOLLOW,
            "squares of 4 gradients",
            f"decide: max_grad_norm=1.0, spikes={Spikes(window=4)!r}, on_nonfinite='skip'",
            "find the gradients of LAMB",
            "all passes but the last, and a look at that one: LAMB",
            ...,
            "remember what was decided",
            "warn where all is clipped",
            "last pass of what is finite: LAMB",
        ],
    ),
    "lists": ("SGD", dict(engine="foreach"), [FOLLOW, ..., "write SGD, 4 tensors"]),
    "lists that may raise": (
        "SGD",
        dict(engine="foreach", on_nonfinite="raise"),
        [
            FOLLOW,
            "new values: SGD, 4 tensors",
            "raise if a step is not finite",
            ...,
            "write SGD, 4 tensors",
        ],
    ),
    "a mixture": (
        "muon_adamw",
        {},
        [FOLLOW, "find the gradients of AdamW, 3 tensors", ..., "write Muon, 1 tensor", "all passes: AdamW, 3 tensors"],
    ),
}
REFUSED = {
    "lists": "no fused code for 4 tensors (940 elements): engine='foreach'",
    "lists that may raise": "no fused code for 4 tensors (940 elements): engine='foreach'",
    "a mixture": "no fused code for 1 tensor (600 elements): Muon is made of matrix products alone",
}


@pytest.mark.parametrize("what", STAGES)
def test_a_plan_tells_its_stages_and_why_its_code_is_not_faster(what: str) -> None:
    make, options, wanted = STAGES[what]
    first, *lines = str(stepped(getattr(thalweg.torch, make), **options).step_plan()).splitlines()
    assert first == "a step of 4 parameters (940 elements)"
    wanted = [*wanted, *([REFUSED[what]] if what in REFUSED else [])]
    assert len(lines) == len(wanted)
    for line, told in zip(lines, wanted, strict=True):
        assert ("guard: nothing above writes parameters or state" if told is ... else told) in line


def test_there_is_no_fused_code_for_some_options() -> None:
    how: dict[str, Any] = dict(state_rounding="stochastic", state_dtype="bfloat16")
    plan = stepped(thalweg.torch.AdamW, torch.float64, **how).step_plan()
    assert "there is no native code for state_rounding='stochastic' of float64" in str(plan).splitlines()[-1]


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
