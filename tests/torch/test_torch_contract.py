"""What our optimizers have beside what torch promises, which tests/check/test_ours.py holds every one of them to."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import EVERY, backward, equal, model, train, values
from networks import make as make_any
from tolerances import BFLOAT16_PRODUCTS, FLOAT64
from torch.optim.optimizer import register_optimizer_step_post_hook

import thalweg.numpy
import thalweg.torch
from thalweg.errors import OptimError, OptionError
from thalweg.rules import RULES
from thalweg.torch import LAMB, Muon

LR = 0.01


def make(params: Any, **options: Any) -> Any:
    return LAMB(params, **{"lr": LR, **options})


# ---- mistakes


def two_groups(**of_the_second: Any) -> Any:
    net = model()
    return [{"params": net[0].parameters()}, {"params": net[2].parameters(), **of_the_second}]


def given(params: Any = None, **options: Any) -> Callable[[], Any]:
    return lambda: make(params or model().parameters(), **options)


def added(*shape: int, dtype: Any = None, **group: Any) -> Callable[[], Any]:
    """A group that an optimizer is given later."""
    more = [torch.nn.Parameter(torch.ones(2)), torch.ones(shape, dtype=dtype)]
    return lambda: make(model().parameters()).add_param_group({"params": more, **group})


def guilty(tensor: Any) -> Callable[[], Any]:
    return given([("fine", torch.nn.Parameter(torch.ones(2))), ("guilty", tensor)])


def in_order(name: str, *arguments: Any, **options: Any) -> Callable[[], Any]:
    """Arguments by position, behind a matrix and a rate."""
    return lambda: getattr(thalweg.torch, name)([torch.nn.Parameter(torch.ones(2, 2))], 0.1, *arguments, **options)


def by_muon(*shape: int, **options: Any) -> Callable[[], Any]:
    matrix, other = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(shape))
    return lambda: Muon([("w", matrix), ("b", other)], **options)


#: Calls, and what is said of them.
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (given(lr=-0.1), "lr must be"),
    (given(lr=float("inf")), "lr must be"),
    (given(lr="0.1"), "lr must be"),
    (given(lr=torch.ones(2)), "one element"),
    (given(lr=lambda t: 0.1), "scheduler"),
    (given(overrides=[("*", dict(weight_decay=lambda t: 0.1))]), "weight_decay cannot be a function in torch"),
    (given(engine="fast"), "engine must be one of"),
    (given(capturable=1), "capturable must be True or False"),
    (given(maximize="yes"), "maximize must be True or False"),
    (given(variant="nothing"), "variant must be one of|has no variants"),
    (given(state_dtype="uint8"), "state_dtype must be one of .*'int8', None, got 'uint8'"),
    (given(state_dtype=torch.int32), "state_dtype must be one of"),
    *((given(two_groups(**own)), "whole step") for own in (dict(max_grad_norm=0.01), dict(spikes=True))),
    *((given(two_groups(on_nonfinite=own)), "on_nonfinite concerns the whole step") for own in ("raise", "skip")),
    (guilty(torch.ones(2, dtype=torch.complex64)), "'guilty'.*complex"),
    (guilty(torch.ones(2).to_sparse()), "'guilty'.*sparse"),
    (guilty(torch.ones(2, dtype=torch.float8_e4m3fn)), "'guilty'.*float8"),
    (added(weight_decy=0.1), "did you mean 'weight_decay'"),
    (added(weight_decay=-0.1), "weight_decay must be"),
    (added(lr=float("nan")), "lr must be"),
    (added(lr=lambda t: 0.1), "lr cannot be a function"),
    (added(weight_decay=lambda t: 0.1), "weight_decay cannot be a function"),
    (added(2, dtype=torch.complex64), "complex"),
    (added(2, dtype=torch.int64), "int64"),
    (in_order("LAMB", (0.9, 0.95)), "LAMB takes params, lr by position, and 3 were given: give all other options by"),
    (in_order("Adafactor", -0.8, (None, 1e-3)), "Adafactor takes params, lr, beta2_decay by position"),
    (in_order("Muon", 0.1, 0.9, True, (3.0, -4.0, 2.0), 1e-7, 5, None), "eps, ns_steps by position, and 9 were given"),
    (in_order("SGD", 0.9, 0, 0, False, True), "SGD takes params, lr, momentum, dampening, weight_decay, nesterov by"),
    (in_order("SGD", 0.9, momentum=0.8), "SGD got momentum twice, by position and by name"),
    (in_order("SGD", 1.5), "momentum must be"),
    (by_muon(3), r"parameter 'b' has shape .*: it is no matrix.*such as AdamW"),
    (by_muon(2, 3, split=3), r"parameter 'w' has shape .* 2 rows, which split=3 does not divide"),
    (
        lambda: by_muon(2, 3)().add_param_group({"params": [("c", torch.nn.Parameter(torch.ones(())))]}),
        r"parameter 'c' has shape",
    ),
]


@pytest.mark.parametrize(("call", "told"), REFUSED)
def test_refused(call: Any, told: str) -> None:
    with pytest.raises((OptimError, TypeError), match=told):
        call()


def test_a_vector_that_muon_was_given_frozen_is_refused_when_it_is_stepped() -> None:
    assert len(by_muon(3, overrides=[("b", dict(vectors="row"))])().param_groups) == 1
    vector = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = Muon([("b", vector)])
    vector.requires_grad_()
    vector.grad = torch.ones(3)
    with pytest.raises(OptimError, match=r"parameter 'b' has shape"):
        optimizer.step()


@pytest.mark.parametrize(("option", "value"), [("lr", float("nan")), ("weight_decay", -1.0), ("state_dtype", "uint8")])
def test_a_wrong_option_written_into_a_group_is_refused_at_the_step(option: str, value: Any) -> None:
    net = model()
    optimizer = make(net.parameters())
    train(net, optimizer, 1)
    optimizer.param_groups[0][option] = value
    backward(net)
    before = values(net)
    with pytest.raises(OptionError, match=f"parameter group 0: {option} must be"):
        optimizer.step()
    assert equal(values(net), before)


# ---- by position


AS_IN_TORCH: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("SGD", (0.1, 0.9, 0.1, 0.01), {}),
    ("SGD", (0.1, 0.9, 0, 0.01, True), {}),
    ("AdamW", (1e-3, (0.8, 0.95)), {}),
    ("AdamW", (1e-3, (0.8, 0.95), 1e-6, 0.1, True), {}),
    ("Adafactor", (1e-2, -0.7), {"variant": "torch", "eps": (2.0**-52, 1e-3)}),
    ("Muon", (0.02, 0.1, 0.9, False, (3.0, -4.0, 2.0), 1e-6, 3), {}),
]


@pytest.mark.parametrize(("name", "arguments", "beside"), AS_IN_TORCH)
def test_arguments_by_position_are_those_of_torch(
    name: str, arguments: tuple[Any, ...], beside: dict[str, Any]
) -> None:
    start, ends = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3), []
    for maker, options in ((getattr(thalweg.torch, name), beside), (getattr(torch.optim, name), {})):
        p = torch.nn.Parameter(start.clone())
        optimizer = maker([p], *arguments, **options)
        for _ in range(3):
            p.grad = p.detach().cos() - 0.5
            optimizer.step()
        ends.append(p.detach())
    bound = BFLOAT16_PRODUCTS if name == "Muon" else FLOAT64
    assert (ends[0] - ends[1]).abs().max() <= bound * (ends[1] - start).abs().max()


def test_what_is_given_by_position_is_remembered() -> None:
    optimizer = thalweg.torch.SGD([torch.nn.Parameter(torch.ones(2))], 0.1, 0.9)
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["momentum"] == 0.9


# ---- conveniences


@pytest.mark.parametrize("engine", ["reference", "foreach"])
@EVERY
def test_parameters_on_meta(rule: str, engine: str) -> None:
    params = [torch.nn.Parameter(torch.empty(6, 4, device="meta")) for _ in range(2)]
    optimizer = make_any(rule, params, engine)
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer.step()
    optimizer.step()
    assert all(p.device.type == "meta" for p in params)
    assert all(int(optimizer.state[p]["step"]) == 2 for p in params)


@pytest.mark.parametrize("engine", ["reference", "foreach"])
@EVERY
def test_capturable_gives_the_same_numbers(rule: str, engine: str) -> None:
    found = []
    for capturable in (False, True):
        net = model()
        named = net.named_parameters()
        train(net, make_any(rule, named, engine, capturable=capturable), 3)
        found.append(values(net))
    torch.testing.assert_close(*found, rtol=FLOAT64, atol=FLOAT64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bf16", "torch.bfloat16"], ids=str)
def test_a_dtype_is_understood_however_it_is_written(dtype: object) -> None:
    pytest.importorskip("ml_dtypes")  # numpy has no bfloat16 of its own
    assert make(model().parameters(), state_dtype=dtype).param_groups[0]["state_dtype"] == "bfloat16"
    assert thalweg.numpy.AdamW(state_dtype=dtype).options["state_dtype"] == "bfloat16"


@pytest.mark.parametrize("name", RULES)
def test_a_rate_that_nobody_gives_is_the_rules(name: str) -> None:
    rule = RULES[name]
    optimizer = getattr(thalweg.torch, name)([torch.nn.Parameter(torch.ones(2, 2))])
    assert optimizer.lr == (1.0 if rule.lr_optional else rule.default_lr)


def test_lr_of_all_groups() -> None:
    optimizer = make(two_groups())
    assert optimizer.lr == LR
    optimizer.lr = 0.125
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    for wrong in (-1.0, float("nan"), "0.1", lambda t: 0.1, torch.ones(3)):
        with pytest.raises(OptionError, match="lr"):
            optimizer.lr = wrong
    assert optimizer.lr == 0.125
    optimizer.param_groups[1]["lr"] = 0.5
    with pytest.raises(OptionError, match=r"different learning rates, \[0.125, 0.5\]: read and write them in"):
        _ = optimizer.lr
    with pytest.raises(OptionError, match="different learning rates"):
        optimizer.lr = 0.01
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.5]


@pytest.mark.parametrize("engine", ["reference", "foreach", "auto"])
def test_clear_state_begins_anew(engine: str) -> None:
    net, other = model(), model()
    optimizer = make(net.parameters(), engine=engine, weight_decay=0.1)
    train(net, optimizer, 3)
    net.load_state_dict(other.state_dict())
    optimizer.clear_state()
    assert not optimizer.state
    assert optimizer.stats() == {}
    train(net, optimizer, 2)
    train(other, make(other.parameters(), engine=engine, weight_decay=0.1), 2)
    assert equal(values(net), values(other))


def test_statistics_of_muon_are_norms_of_what_is_orthogonalized() -> None:
    p = torch.nn.Parameter(torch.zeros(4, 2))
    optimizer = Muon([("w", p)], split=2, ns_dtype=None, momentum=0.0)
    p.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0], [6.0, 8.0]])
    optimizer.step()
    assert optimizer.stats()["w"]["norm"].reshape(-1).tolist() == [5.0, 10.0]


class Counted(thalweg.torch.SGD):
    """One with a step of its own around ours."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_hooks_run_once_around_a_step_of_ones_own() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer, calls = Counted([p], lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("after all"))
    try:
        for _ in range(2):
            p.grad = torch.ones(3)
            optimizer.step()
    finally:
        handle.remove()
    assert calls == ["before", "after", "after all"] * 2
