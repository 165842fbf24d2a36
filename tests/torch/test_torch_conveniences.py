"""Overrides, what is not finite, steps inside the backward pass, explanations and statistics."""

from __future__ import annotations

import copy
import gc
import importlib.util
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import EVERY, backward, equal, make, model, train, values

import thalweg.torch
from thalweg.check.problem import weights
from thalweg.errors import NonFiniteError, OptionError, ParameterError, UnusedOverrideWarning
from thalweg.rules import RULES, Rule
from thalweg.torch import LAMB, Adafactor, Kron, step_in_backward

ENGINES = pytest.mark.parametrize("engine", ["reference", "foreach", "auto"])
NAN, INF = float("nan"), float("inf")


def named_lamb(net: Any, **options: Any) -> Any:
    return LAMB(net.named_parameters(), **options)


# ---- overrides


def test_unused_overrides_are_reported_once_where_a_step_is_called() -> None:
    net = model()
    optimizer = named_lamb(net, overrides=[("*.bais", dict(lr_scale=0.5)), ("*.bias", dict(lr_scale=0.5))])
    assert optimizer.explain().unused_overrides == ["*.bais"]
    backward(net)
    with pytest.warns(UnusedOverrideWarning, match=r"'\*\.bais'") as caught:
        optimizer.step()
    assert "'*.bias'" not in str(caught[0].message)
    assert caught[0].filename == __file__
    train(net, optimizer, 2)  # warnings are errors here


# ---- what is not finite


def state_of(optimizer: Any) -> list[Any]:
    return [entry.clone() for p in optimizer.parameters() for _, entry in sorted(optimizer.state.get(p, {}).items())]


@pytest.mark.slow
@ENGINES
@EVERY
@pytest.mark.parametrize("guarded", [dict(on_nonfinite="skip", max_grad_norm=1.0), dict(on_nonfinite="raise")], ids=str)
def test_a_step_that_is_not_finite_leaves_everything(rule: str, engine: str, guarded: dict[str, Any]) -> None:
    """At the very first step too."""
    net, other, skips = model(), model(), guarded["on_nonfinite"] == "skip"
    optimizer, plain = (make(rule, each.named_parameters(), engine, **guarded) for each in (net, other))
    for step in (0, 2):
        before, state = values(net), state_of(optimizer)
        optimizer.zero_grad()
        backward(net, step)
        net[0].bias.grad[0], net[2].weight.grad[0, 0] = NAN, -INF
        if skips:
            optimizer.step()
            assert optimizer.nonfinite() == ["0.bias", "2.weight"]
        else:
            with pytest.raises(NonFiniteError) as caught:
                optimizer.step()
            assert re.findall(r"'([^']+)'", str(caught.value)) == ["0.bias", "2.weight"]
        assert equal(values(net), before)
        assert not state or equal(state_of(optimizer), state)
        assert skips or state or not optimizer.state
        for each, stepped in ((net, optimizer), (other, plain)):
            train(each, stepped, 2, first=step)
        assert equal(values(net), values(other))
        assert optimizer.nonfinite() == (["0.bias", "2.weight"] if skips else []), "of the last skipped step"
    assert optimizer.skipped == (2 if skips else 0)


@pytest.mark.parametrize("engine", ["foreach", "auto"])
def test_the_source_of_the_last_skipped_step_is_known_whatever_was_stepped_since(engine: str) -> None:
    a, b, c = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = LAMB([("a", a), ("b", b), ("c", c)], lr=0.1, on_nonfinite="skip", engine=engine)
    fine, bad, huge = torch.ones(2), torch.tensor([1.0, NAN]), torch.tensor([INF, 1.0])
    found = []
    steps = [(fine, bad, None), (fine, fine, None), (None, fine, fine), (None, huge, bad), (fine, fine, None)]
    for a.grad, b.grad, c.grad in (*steps, (bad, fine, fine)):
        optimizer.step()
        found.append(optimizer.nonfinite())
    assert found == [["b"], ["b"], ["b"], ["b", "c"], ["b", "c"], ["a"]]
    assert optimizer.skipped == copy.deepcopy(optimizer).skipped == 3


@pytest.mark.parametrize("norm", [None, 1.0])
def test_gradients_that_clipping_has_made_nan_are_told(norm: float | None) -> None:
    """Nothing tells then in which of them it began."""
    net = model()
    optimizer = named_lamb(net, on_nonfinite="raise", max_grad_norm=norm)
    for clipped in (False, True):
        backward(net)
        net[2].weight.grad[0, 0] = NAN
        if clipped:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with pytest.raises(NonFiniteError) as caught:
            optimizer.step()
        for words in ("'0.weight'", "clip_grad_norm_ makes every gradient NaN", "max_grad_norm of the optimizer"):
            assert (words in str(caught.value)) == clipped


# ---- in the backward pass


@pytest.mark.slow
@ENGINES
@EVERY
def test_step_in_backward_equals_step(rule: str, engine: str) -> None:
    """In the order of the backward pass, each parameter by `step_parameter`; a scheduler goes on."""
    net, other = model(), model()
    optimizer, whole = (make(rule, each.named_parameters(), engine) for each in (net, other))
    schedule, beside = (torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, whole))
    with step_in_backward(net, optimizer):
        for step in range(3):
            backward(net, step)
            assert all(p.grad is None for p in net.parameters())
            before = values(net)
            optimizer.step()
            assert equal(values(net), before)
            schedule.step()
    for step in range(3):
        train(other, whole, 1, step)
        beside.step()
    assert equal(values(net), values(other))
    # and afterwards as ever
    backward(net, 3)
    assert equal(values(net), before)
    optimizer.step()
    train(other, whole, 1, first=3)
    assert equal(values(net), values(other))


def test_accumulate_steps_the_sum() -> None:
    net, other = model(), model()
    optimizer, whole = named_lamb(net), named_lamb(other)
    handle = step_in_backward(net, optimizer)
    with handle.accumulate():
        backward(net, 0)
        backward(net, 1)
    assert equal(values(net), values(other))
    backward(net, 2)
    for step in range(3):
        backward(other, step)
    whole.step()
    torch.testing.assert_close(values(net), values(other))
    assert all(p.grad is None for p in net.parameters())
    handle.remove()


NET = model()
#: Calls, and what is said of them.
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: named_lamb(NET, overrides=[("*", dict(maximize=True))]), "overrides, entry"),
    (lambda: named_lamb(NET, overrides=[("*", dict(max_grad_norm=1.0))]), "overrides, entry"),
    (lambda: named_lamb(NET, overrides=[("*", dict(lr=1.0))]), "overrides, entry.*use lr_scale, which multiplies it"),
    (lambda: named_lamb(NET, overrides=[(lambda p: True, dict(lr_scale=0.1))]), r"takes \(name, parameter\)"),
    (lambda: LAMB(NET.parameters()).step_parameter(torch.ones(2)), "not a parameter of this optimizer"),
    (lambda: LAMB(NET.parameters(), max_grad_norm=1.0).step_parameter(NET[0].bias), "max_grad_norm"),
    (lambda: step_in_backward(NET, LAMB(NET.parameters(), max_grad_norm=1.0)), "max_grad_norm"),
    (lambda: step_in_backward(NET, LAMB(NET.parameters(), on_nonfinite="skip")), "skip"),
    (lambda: LAMB(NET.parameters(), spikes=True).step_parameter(NET[0].bias), "spikes needs all gradients of a step"),
    (lambda: step_in_backward(NET, LAMB(NET.parameters(), spikes=True)), "spikes needs all gradients of a step"),
    (lambda: step_in_backward(NET, LAMB(NET[0].parameters())), r"'2\.weight', '2\.bias'"),
    (lambda: step_in_backward(NET, torch.optim.SGD(NET.parameters(), 0.1)), "SGD"),
]


@pytest.mark.parametrize(("call", "told"), REFUSED)
def test_what_overrides_and_steps_of_single_parameters_refuse(call: Any, told: str) -> None:
    """Of overrides more is refused by what reads them for all front ends: tests/numpy/test_overrides_by_name.py."""
    with pytest.raises((ParameterError, OptionError), match=told):
        call()


def test_frozen_parameters_need_no_optimizer_in_backward() -> None:
    net = model()
    net[2].requires_grad_(False)
    with step_in_backward(net, LAMB(net[0].parameters())):
        backward(net)


def test_many_small_tensors_are_stepped_together_in_backward() -> None:
    """Counted by calls of Python's functions in the package, in steps that repeat the one before."""
    net = torch.nn.ParameterList(torch.ones(8, 8) for _ in range(200))
    optimizer, calls = thalweg.torch.AdamW(net.named_parameters()), list[bool]()

    def count(function: Callable[[], Any]) -> int:
        calls.clear()
        sys.setprofile(lambda frame, event, _: calls.append(event == "call" and "thalweg" in frame.f_code.co_filename))
        try:
            function()
        finally:
            sys.setprofile(None)
        return sum(calls)

    def compute_loss() -> Any:
        return torch.stack([p.sum() for p in net]).sum()

    for _ in range(3):
        compute_loss().backward()
        of_step = count(optimizer.step)
        optimizer.zero_grad()
    for _ in range(3):
        with step_in_backward(net, optimizer):
            of_backward = count(compute_loss().backward)
        assert all(p.grad is None for p in net)
    # a few for each hook, beside what one step of all takes
    assert of_backward <= of_step + 8 * 200


def test_what_leaves_or_enters_between_steps_of_single_parameters_is_noticed() -> None:
    a, b, c, new = (torch.nn.Parameter(torch.ones(2)) for _ in range(4))
    optimizer = thalweg.torch.SGD([("a", a), ("b", b), ("c", c)], lr=1.0)
    for p in (a, b, c, new):
        p.grad = torch.ones(2)
    optimizer.step_parameter(a)
    (group,) = optimizer.param_groups
    del group["params"][1], group["param_names"][1]
    with pytest.raises(ParameterError, match="not a parameter"):
        optimizer.step_parameter(b)
    group["params"][0] = new
    group["lr"] = 0.5
    optimizer.step_parameter(new)
    optimizer.step_parameter(c)
    with pytest.raises(ParameterError, match="not a parameter"):
        optimizer.step_parameter(a)
    assert [p.tolist() for p in (a, b, c, new)] == [[0.0] * 2, [1.0] * 2, [0.5] * 2, [0.5] * 2]
    seen = weakref.ref(a)
    del optimizer.state[a], a, p
    gc.collect()
    assert seen() is None


def test_step_in_backward_raises_what_is_not_finite() -> None:
    net = model()
    before = values(net)
    with step_in_backward(net, named_lamb(net, on_nonfinite="raise")):
        loss = net(torch.full((2, 5), NAN, dtype=torch.float64)).mean()
        with pytest.raises(NonFiniteError):
            loss.backward()
    # but the last bias, whose gradient does not depend on what is not finite
    assert equal(values(net)[:3], before[:3])


# ---- looking inside


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@settings(max_examples=max(1, settings.default.max_examples // 5))
@given(data=st.data())
def test_explained_bytes_are_those_allocated(rule: type[Rule], data: Any) -> None:
    options = data.draw(strategies.options(rule, without=["spikes"]))  # whose norms are one tensor for all
    made = rule(**{name: value for name, value in options.items() if name in rule.__dataclass_fields__})
    shapes, dtype = data.draw(strategies.shapes(made)), getattr(torch, data.draw(strategies.dtypes))
    params = {name: torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for name, shape in shapes.items()}
    optimizer = thalweg.torch.optimizer(rule)(params.items(), engine="reference", **options)
    explanation = optimizer.explain()
    assert not optimizer.state
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.explain().state_bytes == explanation.state_bytes
    for row in explanation.rows:
        assert row.state_bytes == sum(entry.nbytes for entry in optimizer.state[params[row.name]].values()), row.name
        figures = optimizer.stats()[row.name].values()
        assert all(isinstance(figure, (bool, int, float)) or figure.numel() > 1 for figure in figures)  # one a block


def test_explain_warns() -> None:
    net = model().bfloat16()
    optimizer = named_lamb(net, lr=1e-9, overrides=[("*.bias", dict(lr_scale=0.0))])
    warned = {row.name: " ".join(row.warnings) for row in optimizer.explain().rows}
    assert "stochastic" in warned["0.weight"]
    assert warned["0.bias"] == "its learning rate is 0"
    assert named_lamb(net, lr=1e-9, rounding="stochastic").explain().warnings == []
    # a warm-up from zero is one line for all
    net = model()
    assert named_lamb(net, lr=0.0).explain().warnings == ["all 4 parameters: its learning rate is 0"]
    net[0].bias.data[0] = NAN
    told = named_lamb(net, lr=0.1).explain().warnings
    assert [words.partition(":")[0] for words in told if "it holds NaN" in words] == ["0.bias"]


CODED = [(130, 140), (140, 130), (7,)]


def test_fused_code_of_each_treatment_is_shown_when_it_is_asked_for() -> None:
    assert LAMB(weights(CODED), exempt=None).explain().code == {}
    found = LAMB(weights(CODED), exempt=None).explain(code=True)
    ((treatment, code),) = found.code.items()
    assert treatment == "LAMB, trust ratio, float32 on cpu:"
    assert code in str(found)
    assert len(set(Adafactor(weights(CODED)).explain(code=True).code.values())) == 2
    of_kron = Kron(weights(CODED)).explain(code=True).code.values()
    assert all("computed by its own formulas" in text for text in of_kron)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton here")
def test_code_of_kernels_for_gpus_is_shown() -> None:
    from interpreter import serving

    with serving():
        codes = Adafactor(weights(CODED)).explain(code=True).code.values()
        of_kron = str(Kron(weights(CODED)).explain(code=True))
    assert all(code.startswith('"""Adafactor(') for code in codes)
    assert "between them: matrix products by library calls" in of_kron
