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


@pytest.mark.parametrize(
    ("make", "options", "lines"),
    [
        ("AdamW", {}, ["fused     AdamW, group 0: 4 tensors (940 elements), float32 on cpu"]),
        (
            "LAMB",
            dict(max_grad_norm=1.0, spikes=Spikes(window=4), on_nonfinite="skip"),
            [
                "before anything is written, by all gradients together: "
                f"max_grad_norm=1.0, spikes={Spikes(window=4)!r}, on_nonfinite='skip'",
                "fused     LAMB, group 0: 4 tensors (940 elements), float32 on cpu",
            ],
        ),
        (
            "SGD",
            dict(engine="foreach"),
            ["foreach   SGD, group 0: 4 tensors (940 elements), float32 on cpu; no fused code: engine='foreach'"],
        ),
        (
            "AdamW",
            dict(dtype=torch.float64, state_rounding="stochastic", state_dtype="bfloat16"),
            [
                "foreach   AdamW, group 0: 4 tensors (940 elements), float64 on cpu; no fused code: "
                "there is no native code for state_rounding='stochastic' of float64"
            ],
        ),
        (
            "muon_adamw",
            {},
            [
                "reference Muon, group 0: 1 tensor (600 elements), float32 on cpu; no fused code: "
                "Muon is made of matrix products alone, which array libraries do best",
                "fused     AdamW, group 1: 1 tensor (300 elements), float32 on cpu",
                "fused     AdamW, group 2: 2 tensors (40 elements), float32 on cpu",
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_plan_tells_the_code_and_why_it_is_not_faster(make: str, options: dict[str, Any], lines: list[str]) -> None:
    plan = stepped(getattr(thalweg.torch, make), **options).step_plan()
    assert str(plan).splitlines() == ["a step of 4 parameters (940 elements)", *lines]


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
