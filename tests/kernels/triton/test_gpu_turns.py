"""Kernels step state that is on the host turn by turn, wherever gradients are, and whichever parameters have one."""

from __future__ import annotations

from typing import Any

import pytest
from on_device import DEVICE, parameters

torch = pytest.importorskip("torch")

from simulated_lanes import simulated  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.torch.step.turns import Turns  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # programs are interpreted
    pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu has it on a GPU itself"),
]

SHAPES = {"a": (12, 10), "b": (12, 10), "c": (9, 14), "d": (30,)}


@pytest.mark.nightly
@pytest.mark.parametrize(("rule", "options"), [("LAMB", {}), ("Kron", dict(precond_update_probability=0.0))])
def test_sets_of_gradients_that_take_turns(rule: str, options: dict[str, Any]) -> None:
    """Gradients move at every step; one is missing in between."""
    found: list[Any] = []
    for offload_state in (False, True):
        named = parameters(shapes=SHAPES)
        optimizer = getattr(thalweg.torch, rule)(named, lr=0.01, offload_state=offload_state, **options)
        optimizer._turns = Turns(1500)  # bytes: a little more than the moments of one
        draw, kept = torch.Generator().manual_seed(1), []
        with simulated():
            for missing in (None, None, "b", None, None, "b", None):
                for name, p in named:
                    kept.append(p.grad)  # so that the next one lies elsewhere
                    p.grad = None if name == missing else torch.randn(p.shape, generator=draw)
                optimizer.step()
            assert optimizer.engine == "fused"
            assert not offload_state or len(optimizer._turns.chunks) > 1
            found.append([p.detach().clone() for _, p in named])
    for plain, moved in zip(*found, strict=True):
        assert torch.equal(plain, moved)
