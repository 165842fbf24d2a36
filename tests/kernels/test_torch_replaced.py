"""Whatever is put in the place of a gradient, a parameter or its state: it is served, left to others, or refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from thalweg import OptionError, StateError  # noqa: E402
from thalweg.kernels.cpu.library import reason_missing  # noqa: E402
from thalweg.torch import LAMB, LARS  # noqa: E402

pytestmark = pytest.mark.skipif(reason_missing() is not None, reason="there is no native library")


def stepped(optimizer: object, p: torch.Tensor) -> None:
    p.grad = torch.ones_like(p)
    optimizer.step()  # type: ignore[attr-defined]


class Marked(torch.Tensor):
    """A subclass, whose memory may be anywhere."""


def test_a_gradient_of_another_class_is_left_to_other_engines() -> None:
    p = torch.nn.Parameter(torch.ones(8))
    p.grad = torch.ones(8).as_subclass(Marked)
    optimizer = LARS([p], lr=0.1)
    optimizer.step()
    assert optimizer.engine == "reference"
    insisting = LARS([p], lr=0.1, engine="fused")
    with pytest.raises(OptionError, match="a gradient of type Marked"):
        insisting.step()


def test_a_state_that_is_stretched_over_one_number_is_refused() -> None:
    p = torch.nn.Parameter(torch.ones(8))
    optimizer = LARS([p], lr=0.1)
    stepped(optimizer, p)
    before = p.detach().clone()
    optimizer.state[p]["momentum_buffer"] = torch.zeros(1).expand(8)
    with pytest.raises(StateError, match="'0'"):
        stepped(optimizer, p)
    assert torch.equal(p, before)


def test_a_state_of_another_dtype_is_stepped_as_what_it_is() -> None:
    p = torch.nn.Parameter(torch.ones(64))
    optimizer = LARS([p], lr=0.1)
    stepped(optimizer, p)
    optimizer.state[p]["momentum_buffer"] = optimizer.state[p]["momentum_buffer"].bfloat16()
    stepped(optimizer, p)
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.bfloat16
    assert torch.isfinite(p).all()
    assert (p < 1).all()


def test_a_parameter_that_grew_is_refused() -> None:
    memory = torch.ones(1000)
    p = torch.nn.Parameter(memory[:10])
    optimizer = LAMB([p], lr=0.1)
    stepped(optimizer, p)
    p.grad = None
    p.data = memory
    with pytest.raises(StateError, match="does not fit"):
        stepped(optimizer, p)
