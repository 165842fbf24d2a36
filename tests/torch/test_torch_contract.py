"""What our optimizers have beside what torch promises, which tests/check/test_ours.py holds every one of them to."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from tolerances import BFLOAT16_PRODUCTS, FLOAT64

torch = pytest.importorskip("torch")

from networks import EVERY, backward, equal, model, train, values  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

import thalweg.numpy  # noqa: E402
import thalweg.torch  # noqa: E402
from thalweg.errors import OptimError, OptionError  # noqa: E402
from thalweg.rules import RULES  # noqa: E402
from thalweg.torch import LAMB  # noqa: E402

LR = 0.01


def make(params: Any, **options: Any) -> Any:
    return LAMB(params, **{"lr": LR, **options})


# ---- mistakes


@pytest.mark.parametrize(
    ("group", "told"),
    [
        (dict(weight_decy=0.1), "did you mean 'weight_decay'"),
        (dict(weight_decay=-0.1), "weight_decay must be"),
        (dict(lr=float("nan")), "lr must be"),
        (dict(lr=lambda t: 0.1), "lr cannot be a function"),
        (dict(weight_decay=lambda t: 0.1), "weight_decay cannot be a function"),
        (dict(params=[torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))]), "complex"),
        (dict(params=[torch.nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.int64)]), "int64"),
    ],
    ids=["typo", "range", "nan", "lr function", "function", "complex", "integers"],
)
def test_a_refused_group_changes_nothing(group: dict, told: str) -> None:
    net = model()
    optimizer = make(net[0].parameters())
    with pytest.raises(OptimError, match=told):
        optimizer.add_param_group({"params": list(net[2].parameters()), **group})
    assert len(optimizer.param_groups) == 1
    train(net, optimizer, 1)
    optimizer.add_param_group({"params": list(net[2].parameters())})
    assert optimizer.num_parameters == 4
    assert all(a is b for a, b in zip(optimizer.parameters(), net.parameters(), strict=True))


def two_groups(**of_the_second: Any) -> Any:
    net = model()
    return [{"params": net[0].parameters()}, {"params": net[2].parameters(), **of_the_second}]


def guilty(tensor: Any) -> Any:
    return [("fine", torch.nn.Parameter(torch.ones(2))), ("guilty", tensor)]


#: Options, or parameters with the options of the whole step that only some groups have; and what is said of them.
REFUSED: list[tuple[Any, str]] = [
    (dict(lr=-0.1), "lr must be"),
    (dict(lr=float("inf")), "lr must be"),
    (dict(lr="0.1"), "lr must be"),
    (dict(lr=torch.ones(2)), "one element"),
    (dict(lr=lambda t: 0.1), "scheduler"),
    (dict(engine="fast"), "engine must be one of"),
    (dict(capturable=1), "capturable must be True or False"),
    (dict(maximize="yes"), "maximize must be True or False"),
    (dict(variant="nothing"), "variant must be one of|has no variants"),
    (dict(state_dtype="uint8"), "state_dtype must be one of"),
    (dict(state_dtype=torch.int32), "state_dtype must be one of"),
    (two_groups(max_grad_norm=0.01), "whole step"),
    (two_groups(on_nonfinite="raise"), "whole step"),
    (two_groups(on_nonfinite="skip"), "whole step"),
    (two_groups(spikes=True), "spikes concerns the whole step"),
    (guilty(torch.ones(2, dtype=torch.complex64)), "'guilty'.*complex"),
    (guilty(torch.ones(2).to_sparse()), "'guilty'.*sparse"),
    (guilty(torch.ones(2, dtype=torch.float8_e4m3fn)), "'guilty'.*float8"),
]


@pytest.mark.parametrize(("given", "told"), REFUSED, ids=lambda given: given if isinstance(given, str) else "")
def test_refused(given: Any, told: str) -> None:
    params, options = (model().parameters(), given) if isinstance(given, dict) else (given, {})
    with pytest.raises(OptimError, match=told):
        make(params, **options)


@pytest.mark.parametrize(("option", "value"), [("lr", float("nan")), ("weight_decay", -1.0)])
def test_a_wrong_option_written_into_a_group_is_refused_at_the_step(option: str, value: float) -> None:
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


@pytest.mark.parametrize(
    ("name", "arguments", "options", "words"),
    [
        ("LAMB", ((0.9, 0.95),), {}, "LAMB takes params, lr by position, and 3 were given: give all other options by"),
        ("Adafactor", (-0.8, (None, 1e-3)), {}, "Adafactor takes params, lr, beta2_decay by position"),
        ("Muon", (0.1, 0.9, True, (3.0, -4.0, 2.0), 1e-7, 5, None), {}, "eps, ns_steps by position, and 9 were given"),
        ("SGD", (0.9, 0, 0, False, True), {}, "SGD takes params, lr, momentum, dampening, weight_decay, nesterov by"),
        ("SGD", (0.9,), dict(momentum=0.8), "SGD got momentum twice, by position and by name"),
        ("SGD", (1.5,), {}, "momentum must be"),
    ],
)
def test_what_torch_has_not_or_means_otherwise_is_refused(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises((TypeError, OptionError), match=words):
        getattr(thalweg.torch, name)([torch.nn.Parameter(torch.ones(2, 2))], 0.1, *arguments, **options)


def test_what_is_given_by_position_is_remembered() -> None:
    optimizer = thalweg.torch.SGD([torch.nn.Parameter(torch.ones(2))], 0.1, 0.9)
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["momentum"] == 0.9


# ---- conveniences


@pytest.mark.parametrize("engine", ["reference", "foreach"])
@EVERY
def test_parameters_on_meta(case: Any, engine: str) -> None:
    params = [torch.nn.Parameter(torch.empty(6, 4, device="meta")) for _ in range(2)]
    optimizer = getattr(thalweg.torch, case.name)(params, lr=case.lr, engine=engine)
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer.step()
    optimizer.step()
    assert all(p.device.type == "meta" for p in params)
    assert all(int(optimizer.state[p]["step"]) == 2 for p in params)


@pytest.mark.parametrize("engine", ["reference", "foreach"])
@EVERY
def test_capturable_gives_the_same_numbers(case: Any, engine: str) -> None:
    found = []
    for capturable in (False, True):
        net = model()
        named = net.named_parameters()
        train(net, getattr(thalweg.torch, case.name)(named, lr=case.lr, engine=engine, capturable=capturable), 3)
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
