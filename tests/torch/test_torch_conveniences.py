"""Overrides, what is not finite, steps inside the backward pass, explanations and statistics."""

from __future__ import annotations

import copy
import gc
import re
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cases import Case
from tolerances import FLOAT64, ROUNDED_STEP

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import strategies  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from networks import EVERY, backward, equal, make, model, train, values  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.errors import NonFiniteError, OptionError, ParameterError, UnusedOverrideWarning  # noqa: E402
from thalweg.rules import RULES, Rule  # noqa: E402
from thalweg.torch import LAMB, step_in_backward  # noqa: E402

ENGINES = pytest.mark.parametrize("engine", ["reference", "foreach", "auto"])


# ---- overrides


@ENGINES
@EVERY
def test_an_override_of_the_rate_is_a_group_with_another_rate(case: Case, engine: str) -> None:
    net, other = model(), model()
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "lr": 0.5 * (case.lr or 1.0)}]
    for name, p in other.named_parameters():
        groups[name.endswith("bias")]["params"].append((name, p))
    train(net, make(case, net.named_parameters(), engine, overrides=[("*.bias", dict(lr_scale=0.5))]), 3)
    train(other, make(case, groups, engine), 3)
    torch.testing.assert_close(values(net), values(other), rtol=FLOAT64, atol=FLOAT64)


@pytest.mark.parametrize(
    "pattern", ["*.bias", re.compile(r"bias$"), lambda name, p: p.ndim == 1], ids=["glob", "regex", "function"]
)
def test_patterns(pattern: Any) -> None:
    rows = LAMB(model().named_parameters(), overrides=[(pattern, dict(lr_scale=0.0))]).explain().rows
    assert [row.lr_scale for row in rows] == [1.0, 0.0, 1.0, 0.0]


def test_later_overrides_win() -> None:
    overrides = [("*", dict(weight_decay=0.1)), ("0.*", dict(weight_decay=0.2)), ("0.bias", dict(weight_decay=0.0))]
    rows = LAMB(model().named_parameters(), overrides=overrides).explain().rows
    assert [row.weight_decay for row in rows] == [0.2, 0.0, 0.1, 0.1]


@pytest.mark.parametrize(
    ("pattern", "option", "told"),
    [
        ("*", dict(maximize=True), "overrides, entry"),
        ("*", dict(max_grad_norm=1.0), "overrides, entry"),
        ("*", dict(weight_decy=1.0), "overrides, entry"),
        ("*", dict(lr=1.0), "overrides, entry.*use lr_scale, which multiplies it"),
        (lambda p: True, dict(lr_scale=0.1), r"takes \(name, parameter\)"),
        (lambda: True, dict(lr_scale=0.1), r"takes \(name, parameter\)"),
    ],
    ids=["maximize", "norm", "typo", "lr", "one argument", "no argument"],
)
def test_refused_overrides(pattern: Any, option: dict, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        LAMB(model().named_parameters(), overrides=[(pattern, option)])


def test_overrides_by_name_need_names() -> None:
    net = model()
    for pattern in ("*.bias", re.compile("bias")):
        with pytest.raises(OptionError, match="named_parameters"):
            LAMB(net.parameters(), overrides=[(pattern, dict(lr_scale=0.5))])
    LAMB(net.parameters(), overrides=[(lambda name, p: p.ndim == 1, dict(lr_scale=0.5))])


def test_unused_overrides_are_reported_once_where_a_step_is_called() -> None:
    net = model()
    overrides = [("*.bais", dict(lr_scale=0.5)), ("*.bias", dict(lr_scale=0.5))]
    optimizer = LAMB(net.named_parameters(), overrides=overrides)
    assert optimizer.explain().unused_overrides == ["*.bais"]
    backward(net)
    with pytest.warns(UnusedOverrideWarning, match=r"'\*\.bais'") as caught:
        optimizer.step()
    assert "'*.bias'" not in str(caught[0].message)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(net, optimizer, 2)


# ---- what is not finite


def state_of(optimizer: Any) -> list[Any]:
    return [entry.clone() for p in optimizer.parameters() for _, entry in sorted(optimizer.state.get(p, {}).items())]


@pytest.mark.slow
@ENGINES
@EVERY
@pytest.mark.parametrize("guarded", [dict(on_nonfinite="skip", max_grad_norm=1.0), dict(on_nonfinite="raise")], ids=str)
def test_a_step_that_is_not_finite_leaves_everything(case: Case, engine: str, guarded: dict[str, Any]) -> None:
    """At the very first step too."""
    net, other, skips = model(), model(), guarded["on_nonfinite"] == "skip"
    optimizer, plain = (make(case, each.named_parameters(), engine, **guarded) for each in (net, other))
    for step in (0, 2):
        before, state = values(net), state_of(optimizer)
        optimizer.zero_grad()
        backward(net, step)
        net[0].bias.grad[0], net[2].weight.grad[0, 0] = float("nan"), -float("inf")
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


@ENGINES
@pytest.mark.parametrize(
    ("dtype", "size", "value"), [(torch.float64, 4, 1e30), (torch.float16, 10000, 1000.0)], ids=["float64", "float16"]
)
def test_the_norm_of_large_gradients_does_not_overflow(engine: str, dtype: Any, size: int, value: float) -> None:
    p = torch.nn.Parameter(torch.ones(size, dtype=dtype))
    p.grad = torch.full_like(p, value)
    plain = dict(lr=1.0, trust=False, momentum=0.0, engine=engine)
    optimizer = thalweg.torch.LARS([p], max_grad_norm=1.0, **plain)
    optimizer.step()
    assert float((1 - p.detach().double()).norm()) == pytest.approx(1.0, rel=ROUNDED_STEP)
    skipping = thalweg.torch.LARS([p], on_nonfinite="skip", **{**plain, "lr": 0.01 / value})
    skipping.step()
    assert skipping.skipped == 0
    assert skipping.state[p]["step"] == 1


@pytest.mark.parametrize("engine", ["foreach", "auto"])
def test_the_source_of_the_last_skipped_step_is_known_whatever_was_stepped_since(engine: str) -> None:
    a, b, c = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = LAMB([("a", a), ("b", b), ("c", c)], lr=0.1, on_nonfinite="skip", engine=engine)
    fine, bad, huge = torch.ones(2), torch.tensor([1.0, float("nan")]), torch.tensor([float("inf"), 1.0])
    found = []
    steps = [(fine, bad, None), (fine, fine, None), (None, fine, fine), (None, huge, bad), (fine, fine, None)]
    for a.grad, b.grad, c.grad in (*steps, (bad, fine, fine)):
        optimizer.step()
        found.append(optimizer.nonfinite())
    assert found == [["b"], ["b"], ["b"], ["b", "c"], ["b", "c"], ["a"]]
    assert optimizer.skipped == 3


@pytest.mark.parametrize("norm", [None, 1.0])
def test_gradients_that_clipping_has_made_nan_are_told(norm: float | None) -> None:
    """Nothing tells then in which of them it began."""
    net = model()
    optimizer = LAMB(net.named_parameters(), on_nonfinite="raise", max_grad_norm=norm)
    for clipped in (False, True):
        backward(net)
        net[2].weight.grad[0, 0] = float("nan")
        if clipped:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with pytest.raises(NonFiniteError) as caught:
            optimizer.step()
        assert ("'0.weight'" in str(caught.value)) == clipped
        assert ("clip_grad_norm_ makes every gradient NaN" in str(caught.value)) == clipped
        assert ("max_grad_norm of the optimizer" in str(caught.value)) == clipped


def test_explain_tells_which_parameters_hold_nan() -> None:
    net = model()
    optimizer = LAMB(net.named_parameters(), lr=0.1)
    assert not optimizer.explain().warnings
    backward(net)
    net[0].bias.grad[0] = float("nan")
    optimizer.step()
    assert [told.partition(":")[0] for told in optimizer.explain().warnings if "it holds NaN" in told] == ["0.bias"]


def test_a_copy_remembers_what_was_skipped() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = LAMB([p], on_nonfinite="skip")
    p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    assert copy.deepcopy(optimizer).skipped == optimizer.skipped == 1


# ---- in the backward pass


@pytest.mark.slow
@ENGINES
@EVERY
def test_step_in_backward_equals_step(case: Case, engine: str) -> None:
    """In the order of the backward pass, each parameter by `step_parameter`; a scheduler goes on."""
    net, other = model(), model()
    optimizer, whole = (make(case, each.named_parameters(), engine) for each in (net, other))
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
    optimizer, whole = LAMB(net.named_parameters()), LAMB(other.named_parameters())
    handle = step_in_backward(net, optimizer)
    with handle.accumulate():
        backward(net, 0)
        backward(net, 1)
    assert equal(values(net), values(other))
    backward(net, 2)
    for step in range(3):
        backward(other, step)
    whole.step()
    for a, b in zip(values(net), values(other), strict=True):
        torch.testing.assert_close(a, b)
    assert all(p.grad is None for p in net.parameters())
    handle.remove()


def test_steps_of_single_parameters_refuse() -> None:
    net = model()
    with pytest.raises(ParameterError, match="not a parameter of this optimizer"):
        LAMB(net.parameters()).step_parameter(torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(OptionError, match="max_grad_norm"):
        LAMB(net.parameters(), max_grad_norm=1.0).step_parameter(next(net.parameters()))
    with pytest.raises(OptionError, match="max_grad_norm"):
        step_in_backward(net, LAMB(net.parameters(), max_grad_norm=1.0))
    with pytest.raises(OptionError, match="skip"):
        step_in_backward(net, LAMB(net.parameters(), on_nonfinite="skip"))
    with pytest.raises(ParameterError, match=r"'2\.weight', '2\.bias'"):
        step_in_backward(net, LAMB(net[0].parameters()))
    with pytest.raises(ParameterError, match="SGD"):
        step_in_backward(net, torch.optim.SGD(net.parameters(), 0.1))
    net[2].requires_grad_(False)
    with step_in_backward(net, LAMB(net[0].parameters())):
        backward(net)


def test_a_thousand_small_tensors_are_stepped_together_in_backward() -> None:
    """Counted by calls of Python's functions in the package, in steps that repeat the one before."""
    net = torch.nn.ParameterList(torch.ones(8, 8) for _ in range(1000))
    optimizer, calls = thalweg.torch.AdamW(net.named_parameters()), Counter[str]()

    def count(what: str, function: Callable[[], Any]) -> None:
        def note(frame: Any, event: str, _: Any) -> None:
            calls[what] += event == "call" and "thalweg" in frame.f_code.co_filename

        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(None)

    def compute_loss() -> Any:
        return torch.stack([p.sum() for p in net]).sum()

    for _ in range(3):
        compute_loss().backward()
        calls.clear()
        count("step", optimizer.step)
        optimizer.zero_grad()
    for _ in range(3):
        with step_in_backward(net, optimizer):
            loss = compute_loss()
            calls["backward"] = 0
            count("backward", loss.backward)
        assert all(p.grad is None for p in net)
    # a few for each hook, beside what one step of all takes
    assert calls["backward"] <= calls["step"] + 8 * 1000


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
    with step_in_backward(net, LAMB(net.named_parameters(), on_nonfinite="raise")):
        loss = net(torch.full((2, 5), float("nan"), dtype=torch.float64)).mean()
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
        assert all(isinstance(figure, (bool, int, float)) for figure in optimizer.stats()[row.name].values())


def test_explain_on_meta_and_in_print() -> None:
    with torch.device("meta"):
        net = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 10))
    optimizer = LAMB(net.named_parameters(), overrides=[("*.bias", dict(weight_decay=0.0, lr_scale=0.5))])
    explanation = optimizer.explain()
    assert [row.name for row in explanation.rows] == [name for name, _ in net.named_parameters()]
    assert [row.shape for row in explanation.rows] == [(200, 300), (200,), (10, 200), (10,)]
    assert [row.lr_scale for row in explanation.rows] == [1.0, 0.5, 1.0, 0.5]
    text = str(explanation)
    assert "0.weight" in text
    assert "200x300" in text
    assert f"{explanation.state_bytes:,}" in text.splitlines()[-3]
    assert f"{explanation.temporary_bytes:,}" in text.splitlines()[-2]
    assert text.splitlines()[-1].startswith("group 0: 4 stepped, lr ")


def test_explain_warns() -> None:
    net = model().bfloat16()
    optimizer = LAMB(net.named_parameters(), lr=1e-9, overrides=[("*.bias", dict(lr_scale=0.0))])
    warned = {row.name: " ".join(row.warnings) for row in optimizer.explain().rows}
    assert "stochastic" in warned["0.weight"]
    assert warned["0.bias"] == "its learning rate is 0"
    assert LAMB(net.named_parameters(), lr=1e-9, rounding="stochastic").explain().warnings == []
    # a warm-up from zero is one line for all
    told = LAMB(model().named_parameters(), lr=0.0).explain().warnings
    assert told == ["all 4 parameters: its learning rate is 0"]
