"""What our optimizers have beside what torch promises, which tests/check/test_ours.py holds every one of them to."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from tolerances import FLOAT64

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


def test_maximize_may_be_said_for_all_groups() -> None:
    net, other = model(), model()
    train(net, make([{"params": net.parameters(), "maximize": True}]), 1)
    train(other, make(other.parameters(), maximize=True), 1)
    assert equal(values(net), values(other))


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


def test_copies_have_overrides_and_engines_too() -> None:
    net = model()
    optimizer = make(net.named_parameters(), engine="foreach", overrides=[("*bias", dict(weight_decay=0.1))])
    train(net, optimizer, 3)
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        other, twin = copied((net, optimizer))
        assert twin.engine == optimizer.engine
        assert twin.explain().rows == optimizer.explain().rows
        assert twin.param_groups[0]["params"][0] is next(other.parameters())


def test_repr_shows_groups_and_options() -> None:
    text = repr(make(model().parameters(), weight_decay=0.125))
    assert text.startswith("LAMB (")
    assert "weight_decay: 0.125" in text
    assert f"lr: {LR}" in text


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
