"""torch tensors stepped by native code: memory in any order, gradients of any kind, tensors that are replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from side_by_side import every_rule, needs_core

torch = pytest.importorskip("torch")

from side_by_side_torch import FULL, agree, gradients, make, parameters, side_by_side, train  # noqa: E402

from thalweg.errors import OptionError  # noqa: E402

pytestmark = needs_core

IMAGES = {"conv": (8, 6, 3, 5), "other": (4, 3, 2, 2)}
MATRICES = {"w": (40, 33), "square": (20, 20)}


def channels_last(p: Any) -> Any:
    return torch.nn.Parameter(p.detach().contiguous(memory_format=torch.channels_last))


@every_rule
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("order", ["contiguous", "channels last"])
def test_parameters_in_channels_last(rule: str, dtype: str, order: str) -> None:
    """Gradients in the same order or in another."""
    steps = gradients(3, dtype, IMAGES)
    if order == "channels last":
        steps = [{n: g.contiguous(memory_format=torch.channels_last) for n, g in step.items()} for step in steps]
    options = dict(factored=False, momentum=0.9) if rule == "Adafactor" else {}
    _, ours = side_by_side(rule, steps, dtype, IMAGES, prepare=channels_last, weight_decay=0.1, **options)
    assert all(p.is_contiguous(memory_format=torch.channels_last) for _, p in ours)


def test_factors_of_parameters_in_channels_last_are_computed_by_another_engine() -> None:
    steps = gradients(3, "float64", IMAGES)
    options: dict[str, Any] = dict(min_dim_size_to_factor=2)
    fused, _ = side_by_side("Adafactor", steps, "float64", IMAGES, engine="auto", prepare=channels_last, **options)
    assert fused.engine != "fused"


@every_rule
@pytest.mark.parametrize("options", [dict(stacked_axes=1), dict(rounding="stochastic")], ids=str)
def test_where_the_order_of_elements_matters_channels_last_is_left_to_others(rule: str, options: dict) -> None:
    steps = gradients(2, "float64", IMAGES)
    more = dict(factored=False) if rule == "Adafactor" else {}
    fused, _ = side_by_side(rule, steps, "float64", IMAGES, engine="auto", prepare=channels_last, **options, **more)
    assert fused.engine != "fused"


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda g: g.t().contiguous().t(),
    "strided": lambda g: torch.repeat_interleave(g, 2, dim=1)[:, ::2],
    "a slice": lambda g: torch.nn.functional.pad(g, (2, 3, 1, 1))[1:-1, 2:-3],
    "offset": lambda g: torch.cat([g.new_zeros(1), g.reshape(-1)])[1:].view(g.shape),
}


@every_rule
@pytest.mark.parametrize("layout", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("options", [{}, dict(max_grad_norm=0.5)], ids=["", "max_grad_norm"])
def test_gradients_in_any_layout(rule: str, layout: Any, options: dict) -> None:
    steps = [{name: layout(g) for name, g in step.items()} for step in gradients(3, "float64", MATRICES)]
    side_by_side(rule, steps, "float64", MATRICES, **options, **FULL[rule])


@every_rule
@pytest.mark.parametrize("options", [{}, dict(max_grad_norm=0.5), dict(on_nonfinite="skip")], ids=str)
def test_gradients_that_are_expanded(rule: str, options: dict) -> None:
    """As sum().backward() makes them: one number in memory."""
    steps = [{name: torch.full((), 0.5).expand(shape) for name, shape in MATRICES.items()} for _ in range(3)]
    side_by_side(rule, steps, "float32", MATRICES, **options, **FULL[rule])


@every_rule
def test_gradients_that_are_negated_in_passing(rule: str) -> None:
    """What lies in memory is minus the gradient: torch knows, and says so."""
    shapes = {"number": (), "vector": (5,)}
    steps = [{name: torch._neg_view(g) for name, g in step.items()} for step in gradients(2, "float64", shapes)]
    assert steps[0]["vector"].is_neg()
    side_by_side(rule, steps, "float64", shapes, **FULL[rule])


def transposed(p: Any) -> Any:
    return torch.nn.Parameter(p.detach().t().contiguous().t())


@every_rule
def test_transposed_parameters(rule: str) -> None:
    """Elementwise rules do not mind; factors do."""
    fused, _ = side_by_side(
        rule, gradients(3, "float64", MATRICES), "float64", MATRICES, engine="auto", prepare=transposed, **FULL[rule]
    )
    assert (fused.engine == "fused") == (rule != "Adafactor")


def gap(p: Any) -> Any:
    return torch.nn.Parameter(torch.repeat_interleave(p.detach(), 2, dim=1)[:, ::2])


@every_rule
def test_parameters_with_gaps_are_left_to_others(rule: str) -> None:
    fused, ours = side_by_side(
        rule, gradients(3, "float64", MATRICES), "float64", MATRICES, engine="auto", prepare=gap, **FULL[rule]
    )
    assert fused.engine != "fused"
    assert not ours[0][1].is_contiguous()


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
def test_gradients_made_anew_at_each_step(rule: str) -> None:
    """Addresses come back with other contents, or in another order."""
    both = []
    for engine in ("fused", "reference"):
        named = parameters("float64", MATRICES)
        optimizer = make(rule, named, engine, **FULL[rule])
        for t in range(8):
            torch.manual_seed(t)
            for _, p in reversed(named) if t % 2 else named:
                p.grad = torch.empty_like(p).copy_(p.detach() * (t + 1) - 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        both.append((optimizer, named))
    agree(*both[0], *both[1])


REPLACED: dict[str, Callable[[Any], Any]] = {
    "a copy": lambda x: x.clone(),
    "transposed in place": lambda x: x.t(),
    "transposed": lambda x: x.t().contiguous().t(),
    "with gaps": lambda x: torch.repeat_interleave(x, 2, dim=1)[:, ::2],
}


@every_rule
@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)
def test_parameters_whose_memory_is_replaced(rule: str, replace: Any) -> None:
    """``p.data = ...`` between two steps: state stays, and belongs to the same elements."""
    both = []
    for engine in ("auto", "reference"):
        named = parameters("float64", {"square": (20, 20), "other": (33,)})
        optimizer = make(rule, named, engine, **FULL[rule])
        for t, step in enumerate(gradients(4, "float64", {"square": (20, 20), "other": (33,)})):
            if t == 2:
                named[0][1].data = replace(named[0][1].data)
            train(optimizer, named, [step])
        both.append((optimizer, named))
    agree(*both[0], *both[1])


@every_rule
def test_state_in_another_order_than_its_parameter(rule: str) -> None:
    """A checkpoint that was made contiguous on its way is loaded for a parameter in channels last."""
    options = dict(factored=False, momentum=0.9) if rule == "Adafactor" else {}
    both = []
    for engine in ("auto", "reference"):
        named = [(name, channels_last(p)) for name, p in parameters("float64", IMAGES)]
        optimizer = make(rule, named, engine, **options)
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
