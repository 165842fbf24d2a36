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
from cases import OPTION_IDS, OPTIONS, Case
from lanes import by_turns, one_in
from tolerances import ROUNDED_STEP

torch = pytest.importorskip("torch")

from networks import EVERY, backward, equal, make, model, train, values  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.errors import NonFiniteError, OptionError, ParameterError, UnusedOverrideWarning  # noqa: E402
from thalweg.torch import LAMB, step_in_backward  # noqa: E402

ENGINES = pytest.mark.parametrize("engine", ["reference", "foreach", "auto"])


# ---- overrides


@by_turns("pattern")
@ENGINES
@EVERY
@pytest.mark.parametrize(
    "pattern", ["*.bias", re.compile(r"bias$"), lambda name, p: p.ndim == 1], ids=["glob", "regex", "function"]
)
def test_overrides(case: Case, engine: str, pattern: Any) -> None:
    net, frozen, plain = model(), model(), model()
    train(net, make(case, net.named_parameters(), engine, overrides=[(pattern, dict(lr_scale=0.0))]), 1)
    train(plain, make(case, plain.named_parameters(), engine), 1)
    for (name, p), before, stepped in zip(net.named_parameters(), values(frozen), values(plain), strict=True):
        assert torch.equal(p, before if name.endswith("bias") else stepped)


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


@by_turns()
@ENGINES
@EVERY
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("norm", [None, 1.0], ids=["no clipping", "clipping"])
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_step_that_is_not_finite_leaves_everything(
    case: Case, engine: str, value: float, norm: float | None, policy: str
) -> None:
    """At the very first step too."""
    net, other = model(), model()
    guarded: dict[str, Any] = dict(on_nonfinite=policy, max_grad_norm=norm)
    optimizer, plain = (make(case, each.named_parameters(), engine, **guarded) for each in (net, other))
    for step in (0, 2):
        before, state = values(net), state_of(optimizer)
        optimizer.zero_grad()
        backward(net, step)
        for p in (net[0].bias, net[2].weight):
            p.grad.view(-1)[0] = value
        if policy == "raise":
            with pytest.raises(NonFiniteError) as caught:
                optimizer.step()
            assert re.findall(r"'([^']+)'", str(caught.value)) == ["0.bias", "2.weight"]
        else:
            optimizer.step()
            assert optimizer.nonfinite() == ["0.bias", "2.weight"]
        assert equal(values(net), before)
        assert not state or equal(state_of(optimizer), state)
        assert policy == "skip" or state or not optimizer.state
        for each, own in ((net, optimizer), (other, plain)):
            train(each, own, 2, first=step)
        assert equal(values(net), values(other))
        assert optimizer.nonfinite() == (["0.bias", "2.weight"] if policy == "skip" else []), "of the last skipped step"
    assert optimizer.skipped == (2 if policy == "skip" else 0)


@by_turns()
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


@by_turns(first=1)
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


class Watched(list[Any]):
    """A list that counts how many of its elements were looked at."""

    looks = 0

    def __getitem__(self, place: Any) -> Any:
        self.looks += len(super().__getitem__(place)) if isinstance(place, slice) else 1
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.looks += 1
            yield each


def test_a_step_in_backward_does_not_look_at_all_parameters_for_each_one() -> None:
    counts = []
    for size in (100, 200):
        net = torch.nn.ParameterList(torch.ones(2) for _ in range(size))
        optimizer = thalweg.torch.SGD(net.named_parameters(), lr=0.25)
        (group,) = optimizer.param_groups
        watched = group["params"] = Watched(group["params"])
        with step_in_backward(net, optimizer):
            for _ in range(2):  # the first of which lays out the steps
                watched.looks = 0
                sum(p.sum() for p in net).backward()
                counts.append(watched.looks)
        assert all(torch.equal(p, torch.full((2,), 0.5)) for p in net)
    assert all(more <= 2.5 * fewer for fewer, more in zip(counts[:2], counts[2:], strict=True)), counts


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


@by_turns()
@pytest.mark.parametrize(("case", "description", "options"), one_in(6, OPTIONS), ids=OPTION_IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chosen", [{}, dict(state_dtype="bfloat16")], ids=str)
def test_explained_bytes_are_those_allocated(
    case: Case, description: str, options: dict, dtype: Any, chosen: dict
) -> None:
    net = model().to(dtype)
    net.register_parameter("scale", torch.nn.Parameter(torch.ones((), dtype=dtype)))
    net.register_parameter("kernel", torch.nn.Parameter(torch.ones(4, 3, 2, 2, dtype=dtype)))
    optimizer = make(case, net.named_parameters(), **{**options, **chosen})
    explanation = optimizer.explain()
    assert not optimizer.state
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.explain().state_bytes == explanation.state_bytes
    for row, p in zip(explanation.rows, net.parameters(), strict=True):
        kept = optimizer.state[p].values()
        assert row.state_bytes == sum(entry.numel() * entry.element_size() for entry in kept), row.name


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


@by_turns("case")
@EVERY
@pytest.mark.parametrize("engine", ["foreach", "auto"])
def test_stats_of_engines_agree(case: Case, engine: str) -> None:
    found = []
    for each in ("reference", engine):
        net = model()
        optimizer = make(case, net.named_parameters(), each)
        assert optimizer.stats() == {}
        train(net, optimizer, 2)
        found.append(optimizer.stats())
    assert list(found[0]) == list(found[1]) == [name for name, _ in net.named_parameters()]
    for name, figures in found[0].items():
        assert figures
        assert all(isinstance(value, (bool, int, float)) for value in figures.values()), figures
        assert figures == pytest.approx(found[1][name])
