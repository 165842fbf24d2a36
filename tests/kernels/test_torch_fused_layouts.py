"""torch tensors stepped by native code: which layouts it serves, and what is put in the place of a tensor.

That other layouts give the same steps, `thalweg check` asks of every rule; that tensors are replaced between steps,
tests/torch/test_torch_remembered.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from lanes import by_turns
from side_by_side import every_rule, needs_core

torch = pytest.importorskip("torch")

from side_by_side_torch import FULL, agree, gradients, make, parameters, side_by_side, train  # noqa: E402

from thalweg import OptionError, StateError  # noqa: E402
from thalweg.torch import LAMB, LARS  # noqa: E402

pytestmark = needs_core

IMAGES = {"conv": (8, 6, 3, 5), "other": (4, 3, 2, 2)}
MATRICES = {"w": (40, 33), "square": (20, 20)}


def channels_last(p: Any) -> Any:
    return torch.nn.Parameter(p.detach().contiguous(memory_format=torch.channels_last))


def transposed(p: Any) -> Any:
    return torch.nn.Parameter(p.detach().t().contiguous().t())


def gap(p: Any) -> Any:
    return torch.nn.Parameter(torch.repeat_interleave(p.detach(), 2, dim=1)[:, ::2])


UNFACTORED = {"LARS": {}, "LAMB": {}, "Adafactor": dict(factored=False, momentum=0.9)}
STOCHASTIC, STACKED = dict(rounding="stochastic"), dict(stacked_axes=1)
#: Where native code serves a layout: elementwise rules do not mind the order of elements, factors and chance do.
LAYOUTS = {
    "channels last": (channels_last, IMAGES, UNFACTORED, {}, True),
    "channels last, factored": (channels_last, IMAGES, FULL, {}, "not factored"),
    "channels last, stacked": (channels_last, IMAGES, UNFACTORED, STACKED, False),
    "channels last, rounded by chance": (channels_last, IMAGES, UNFACTORED, STOCHASTIC, False),
    "transposed": (transposed, MATRICES, FULL, {}, "not factored"),
    "with gaps": (gap, MATRICES, FULL, {}, False),
}


@every_rule
@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_in_any_layout(rule: str, name: str) -> None:
    prepare, shapes, options, more, served = LAYOUTS[name]
    given: dict[str, Any] = dict(engine="auto", prepare=prepare, **options[rule], **more)
    fused, ours = side_by_side(rule, gradients(3, "float64", shapes), "float64", shapes, **given)
    served = rule != "Adafactor" if served == "not factored" else served
    assert (fused.engine == "fused") == served
    assert all(p.stride() == prepare(p).stride() for _, p in ours)


GRADIENTS = {
    "transposed": lambda g: g.t().contiguous().t(),
    "a slice": lambda g: torch.nn.functional.pad(g, (2, 3, 1, 1))[1:-1, 2:-3],
    "offset": lambda g: torch.cat([g.new_zeros(1), g.reshape(-1)])[1:].view(g.shape),
    "expanded": lambda g: g[:1, :1].expand(g.shape),
}


@by_turns("layout", "options")
@every_rule
@pytest.mark.parametrize("layout", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("options", [dict(max_grad_norm=0.5), dict(on_nonfinite="skip")], ids=str)
def test_gradients_in_any_layout_reach_norms_and_guards(rule: str, layout: Any, options: dict[str, Any]) -> None:
    steps = [{name: layout(g) for name, g in step.items()} for step in gradients(3, "float64", MATRICES)]
    side_by_side(rule, steps, "float64", MATRICES, **options, **FULL[rule])


@every_rule
def test_who_insists_is_told_which_parameter_and_why(rule: str) -> None:
    named = [("fine", torch.nn.Parameter(torch.ones(3, 4))), ("with gaps", gap(torch.ones(3, 4)))]
    optimizer = make(rule, named)
    for _, p in named:
        p.grad = torch.ones(3, 4)
    with pytest.raises(OptionError, match="engine='fused' cannot run") as caught:
        optimizer.step()
    assert "'with gaps'" in str(caught.value)
    assert "strides" in str(caught.value)
    assert all((p == 1).all() for _, p in named)
    assert not optimizer.state


@every_rule
def test_state_in_another_order_than_its_parameter(rule: str) -> None:
    """A checkpoint that was made contiguous on its way is loaded for a parameter in channels last."""
    both = []
    for engine in ("auto", "reference"):
        named = [(name, channels_last(p)) for name, p in parameters("float64", IMAGES)]
        optimizer = make(rule, named, engine, **UNFACTORED[rule])
        steps = gradients(4, "float64", IMAGES)
        train(optimizer, named, steps[:2])
        saved = optimizer.state_dict()
        for entries in saved["state"].values():
            for key, entry in entries.items():
                entries[key] = entry.contiguous()
        optimizer.load_state_dict(saved)
        train(optimizer, named, steps[2:])
        both.append((optimizer, named))
    agree(*both[0], *both[1])


# ---- what is put in the place of a gradient or a state


def stepped(optimizer: Any, p: Any) -> None:
    p.grad = torch.ones_like(p)
    optimizer.step()


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
