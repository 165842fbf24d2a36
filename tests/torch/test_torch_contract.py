"""What torch promises of an optimizer: groups, schedulers, hooks, closures, scaling, copies, errors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from cases import CASES, Case

torch = pytest.importorskip("torch")

from torch.optim import lr_scheduler as schedulers  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.errors import OptimError, OptionError, ParameterError  # noqa: E402

pytestmark = pytest.mark.in_turn

EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
ENGINES = pytest.mark.parametrize("engine", ["reference", "foreach"])


def make(case: Case, params: Any, engine: str = "reference", **options: Any) -> Any:
    return getattr(thalweg.torch, case.name)(params, **{"lr": case.lr, "engine": engine, **options})


def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()


def backward(net: Any, step: int = 0) -> Any:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    loss = net(x).square().mean()
    loss.backward()
    return loss


def train(net: Any, optimizer: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()


def values(net: Any) -> list[Any]:
    return [p.detach().clone() for p in net.parameters()]


def equal(first: list[Any], second: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- parameters and groups


@EVERY
def test_is_an_optimizer_of_torch(case: Case) -> None:
    assert isinstance(make(case, model().parameters()), torch.optim.Optimizer)


@ENGINES
@EVERY
@pytest.mark.parametrize(
    "given",
    [
        lambda net: net.parameters(),
        lambda net: list(net.parameters()),
        lambda net: tuple(net.parameters()),
        lambda net: {"params": list(net.parameters())}.values().__iter__().__next__(),
        lambda net: [{"params": net.parameters()}],
        lambda net: [{"params": p} for p in net.parameters()],
        lambda net: iter([{"params": iter(list(net.parameters()))}]),
        lambda net: net.named_parameters(),
        lambda net: [{"params": list(net.named_parameters())}],
    ],
    ids=["iterator", "list", "tuple", "values", "group", "a group each", "iterators", "named", "named group"],
)
def test_ways_to_give_parameters(case: Case, engine: str, given: Callable[[Any], Any]) -> None:
    net, other = model(), model()
    # names choose the random numbers, so they must be equal for Kron
    names = dict(damping_mode="expected") if case.name == "Kron" else {}
    train(net, make(case, given(net), engine, **names), 3)
    train(other, make(case, list(other.parameters()), engine, **names), 3)
    for a, b in zip(values(net), values(other), strict=True):
        torch.testing.assert_close(a, b)
    assert not equal(values(net), values(model()))


@EVERY
def test_names_are_kept(case: Case) -> None:
    net = model()
    optimizer = make(case, net.named_parameters())
    names = [name for name, _ in net.named_parameters()]
    assert optimizer.param_groups[0]["param_names"] == names
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == names
    backward(net)
    optimizer.step()
    assert list(optimizer.stats()) == names


@EVERY
@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (lambda: torch.nn.Parameter(torch.ones(3)), TypeError),
        (list, ValueError),
        (lambda: [torch.ones(3, requires_grad=True) * 2], ValueError),
        (lambda: [3.0], TypeError),
        (lambda: [{"params": {torch.nn.Parameter(torch.ones(3))}}], TypeError),
    ],
    ids=["one tensor", "nothing", "not a leaf", "no tensor", "a set"],
)
def test_refused_as_torch_refuses(case: Case, given: Callable[[], Any], kind: type[Exception]) -> None:
    with pytest.raises(kind) as theirs:
        torch.optim.SGD(given(), lr=1.0)
    with pytest.raises(kind) as ours:
        make(case, given())
    assert str(ours.value) == str(theirs.value)


@EVERY
def test_duplicates(case: Case) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate"):
        make(case, [p, p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        make(case, [{"params": [p]}, {"params": [p]}])


@ENGINES
@EVERY
def test_groups_have_options_of_their_own(case: Case, engine: str) -> None:
    def grouped(net: Any) -> Any:
        first, second = net[0], net[2]
        return make(
            case,
            [{"params": first.parameters(), "weight_decay": 0.3, "lr": case.lr / 2}, {"params": second.parameters()}],
            engine,
        )

    net, left, right = model(), model(), model()
    both = grouped(net)
    assert [group["weight_decay"] for group in both.param_groups] == [0.3, case.rule().weight_decay]
    train(net, both, 1)
    train(left, make(case, left.parameters(), engine, weight_decay=0.3, lr=case.lr / 2), 1)
    train(right, make(case, right.parameters(), engine), 1)
    for a, b in zip(values(net), values(left)[:2] + values(right)[2:], strict=True):
        torch.testing.assert_close(a, b)
    assert not equal(values(left)[:2], values(right)[:2])


@ENGINES
@EVERY
def test_a_changed_group_option_takes_effect(case: Case, engine: str) -> None:
    net, other = model(), model()
    changed, fixed = make(case, net.parameters(), engine), make(case, other.parameters(), engine, weight_decay=0.3)
    changed.param_groups[0]["weight_decay"] = 0.3
    train(net, changed, 2)
    train(other, fixed, 2)
    assert equal(values(net), values(other))
    changed.param_groups[0]["weight_decay"] = -1.0
    before = values(net)
    with pytest.raises(OptionError, match=r"parameter group 0: weight_decay must be"):
        train(net, changed, 1)
    assert equal(values(net), before)


@ENGINES
@EVERY
def test_add_param_group(case: Case, engine: str) -> None:
    net = model()
    optimizer = make(case, net[0].parameters(), engine)
    train(net, optimizer, 2)
    optimizer.add_param_group({"params": net[2].parameters(), "lr": case.lr * 2})
    assert optimizer.num_parameters == 4
    assert optimizer.param_groups[1]["lr"] == case.lr * 2
    before = values(net)
    train(net, optimizer, 1, first=2)
    assert not any(torch.equal(a, b) for a, b in zip(values(net), before, strict=True))
    assert [int(optimizer.state[p]["step"]) for p in optimizer.parameters()] == [3, 3, 1, 1]


@EVERY
@pytest.mark.parametrize(
    ("group", "told"),
    [
        (dict(weight_decy=0.1), "did you mean 'weight_decay'"),
        (dict(weight_decay=-0.1), "weight_decay must be"),
        (dict(lr=-1.0), "lr must be"),
        (dict(lr=float("nan")), "lr must be"),
        (dict(lr=lambda t: 0.1), "lr cannot be a function"),
        (dict(weight_decay=lambda t: 0.1), "weight_decay cannot be a function"),
        (dict(params=[torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))]), "complex"),
        (dict(params=[torch.nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.int64)]), "int64"),
    ],
    ids=["typo", "range", "lr", "nan", "lr function", "function", "complex", "integers"],
)
def test_a_refused_group_changes_nothing(case: Case, group: dict, told: str) -> None:
    net = model()
    optimizer = make(case, net[0].parameters())
    with pytest.raises(OptimError, match=told):
        optimizer.add_param_group({"params": list(net[2].parameters()), **group})
    assert len(optimizer.param_groups) == 1
    train(net, optimizer, 1)
    optimizer.add_param_group({"params": list(net[2].parameters())})
    assert optimizer.num_parameters == 4


@EVERY
@pytest.mark.parametrize("option", [dict(max_grad_norm=0.01), dict(on_nonfinite="raise"), dict(on_nonfinite="skip")])
def test_options_of_the_whole_step_cannot_differ_between_groups(case: Case, option: dict) -> None:
    net = model()
    with pytest.raises(OptionError, match="whole step"):
        make(case, [{"params": net[0].parameters()}, {"params": net[2].parameters(), **option}])


@EVERY
def test_maximize_may_be_said_for_all_groups(case: Case) -> None:
    net, other = model(), model()
    train(net, make(case, [{"params": net.parameters(), "maximize": True}]), 1)
    train(other, make(case, other.parameters(), maximize=True), 1)
    assert equal(values(net), values(other))


# ---- errors


@EVERY
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (dict(lr=-0.1), "lr must be"),
        (dict(lr=float("nan")), "lr must be"),
        (dict(lr=float("inf")), "lr must be"),
        (dict(lr="0.1"), "lr must be"),
        (dict(lr=torch.ones(2)), "one element"),
        (dict(lr=lambda t: 0.1), "scheduler"),
        (dict(weight_decy=0.1), "did you mean 'weight_decay'"),
        (dict(engine="fast"), "engine must be one of"),
        (dict(capturable=1), "capturable must be True or False"),
        (dict(maximize="yes"), "maximize must be True or False"),
        (dict(variant="nothing"), "variant must be one of"),
        (dict(state_dtype="uint8"), "state_dtype must be one of"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_refused_options(case: Case, options: dict, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        make(case, model().parameters(), **options)


@pytest.mark.parametrize(
    ("case", "options", "told"), [(c, o, t) for c in CASES for o, t in c.refused], ids=lambda x: getattr(x, "name", "")
)
def test_options_that_the_rule_refuses(case: Case, options: dict, told: str) -> None:
    with pytest.raises(OptionError) as caught:
        make(case, model().parameters(), **options)
    assert told in str(caught.value)


@EVERY
def test_refused_parameters_are_named(case: Case) -> None:
    for tensor, told in [
        (torch.ones(2, dtype=torch.complex64), "complex"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, dtype=torch.float8_e4m3fn), "float8"),
    ]:
        with pytest.raises(ParameterError, match=f"'guilty'.*{told}"):
            make(case, [("fine", torch.nn.Parameter(torch.ones(2))), ("guilty", tensor)])


@ENGINES
@EVERY
def test_refused_gradients_are_named_and_nothing_is_stepped(case: Case, engine: str) -> None:
    fine, guilty = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(4, 2))
    optimizer = make(case, [("fine", fine), ("guilty", guilty)], engine)
    fine.grad = torch.ones(4, 2)
    guilty.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(ParameterError, match=r"'guilty' is sparse"):
        optimizer.step()
    guilty.grad = None
    guilty.data = torch.ones(4, 3)
    guilty.grad = torch.ones(4, 3)
    guilty.data = torch.ones(4, 2)
    with pytest.raises(ParameterError, match=r"'guilty' has shape \(4, 3\)"):
        optimizer.step()
    assert torch.equal(fine, torch.ones(4, 2))
    assert not optimizer.state


# ---- closures, hooks, schedulers, scaling


@ENGINES
@EVERY
def test_closure(case: Case, engine: str) -> None:
    net, other = model(), model()
    optimizer = make(case, net.parameters(), engine)

    def closure() -> Any:
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        return backward(net)

    loss = optimizer.step(closure)
    train(other, make(case, other.parameters(), engine), 1)
    assert loss == backward(model())
    assert equal(values(net), values(other))
    with torch.no_grad():
        optimizer.step(closure)
    assert make(case, other.parameters()).step() is None


@EVERY
def test_zero_grad(case: Case) -> None:
    net = model()
    optimizer = make(case, net.parameters())
    backward(net)
    optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in net.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: schedulers.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, o.lr, total_steps=8, cycle_momentum=moves_momentum(o)),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.1 * o.lr, o.lr, 2, cycle_momentum=moves_momentum(o)),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=2), schedulers.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, total_iters=2), schedulers.ExponentialLR(o, 0.5)]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, 3),
}


def moves_momentum(optimizer: Any) -> bool:
    return optimizer.rule.__name__ != "Adafactor"


def test_numbers_that_a_scheduler_changes_do_not_have_states_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = thalweg.torch.LAMB([p], lr=0.1)
    scheduler = schedulers.OneCycleLR(optimizer, 0.1, total_steps=8)
    checked = []
    monkeypatch.setattr(optimizer, "_fit_state", lambda *given: checked.append(given))
    for _ in range(4):
        p.grad = torch.ones(4, 4)
        optimizer.step()
        scheduler.step()
    assert len(checked) == 1
    optimizer.param_groups[0]["betas"] = (0.0, 0.999)  # off, and not a number like others
    optimizer.step()
    assert len(checked) == 2


@EVERY
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(case: Case, name: str) -> None:
    net, other = model(), model()
    optimizer = make(case, net.parameters(), engine="foreach")
    scheduler = SCHEDULERS[name](optimizer)
    by_hand = make(case, other.parameters(), engine="foreach")
    seen = set()
    for step in range(5):
        seen.add(optimizer.lr)
        for option in ("lr", "momentum", "betas"):
            if option in optimizer.param_groups[0]:
                by_hand.param_groups[0][option] = optimizer.param_groups[0][option]
        train(net, optimizer, 1, step)
        train(other, by_hand, 1, step)
        scheduler.step(*([float(step)] if name == "ReduceLROnPlateau" else []))
    assert len(seen) > 1
    assert equal(values(net), values(other))


@EVERY
def test_a_scheduler_with_lr_as_a_tensor(case: Case) -> None:
    net = model()
    optimizer = make(case, net.parameters(), lr=torch.tensor(case.lr, dtype=torch.float64))
    scheduler = schedulers.ExponentialLR(optimizer, 0.5)
    train(net, optimizer, 1)
    scheduler.step()
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert float(optimizer.lr) == case.lr / 2
    train(net, optimizer, 1)


@EVERY
def test_step_hooks(case: Case) -> None:
    from torch.optim import optimizer as hooks

    net = model()
    optimizer = make(case, net.parameters())
    seen = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("pre")),
        optimizer.register_step_post_hook(lambda *_: seen.append("post")),
        hooks.register_optimizer_step_pre_hook(lambda *_: seen.append("global pre")),
        hooks.register_optimizer_step_post_hook(lambda *_: seen.append("global post")),
    ]
    try:
        train(net, optimizer, 1)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["global pre", "pre", "post", "global post"]
    train(net, optimizer, 1)
    assert len(seen) == 4


@EVERY
def test_state_dict_hooks(case: Case) -> None:
    net = model()
    optimizer = make(case, net.parameters())
    train(net, optimizer, 1)
    seen = []

    def rename(optimizer: Any, state: dict) -> dict:
        seen.append("load pre")
        return {**state, "param_groups": [{**group, "weight_decay": 0.25} for group in state["param_groups"]]}

    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["weight_decay"]))
    state = optimizer.state_dict()
    assert state["extra"] == 1
    optimizer.load_state_dict(state)
    assert seen == ["save pre", "load pre", 0.25]
    optimizer.load_state_dict(state)
    assert seen[3:] == ["load pre", 0.25]


@ENGINES
@EVERY
def test_grad_scaler_skips_a_step_with_infinity(case: Case, engine: str) -> None:
    net = model().float()
    optimizer = make(case, net.parameters(), engine)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def one(poison: bool) -> None:
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2, 5)).square().mean()).backward()
        if poison:
            next(net.parameters()).grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()

    one(False)
    before = values(net)
    one(True)
    assert equal(values(net), before)
    assert scaler.get_scale() == 512.0
    one(False)
    assert not equal(values(net), before)
    assert int(optimizer.state[next(net.parameters())]["step"]) == 2


# ---- copies


@pytest.fixture(params=["deepcopy", "pickle"])
def copied(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return copy.deepcopy if request.param == "deepcopy" else lambda pair: pickle.loads(pickle.dumps(pair))


@ENGINES
@EVERY
def test_copies_go_on_alike_and_apart(case: Case, engine: str, copied: Callable[[Any], Any]) -> None:
    net = model()
    options = dict(overrides=[("*bias", dict(weight_decay=0.1))])
    optimizer = make(case, net.named_parameters(), engine, **options)
    train(net, optimizer, 3)
    other, twin = copied((net, optimizer))
    before = values(net)
    train(other, twin, 3, first=3)
    assert equal(values(net), before)
    train(net, optimizer, 3, first=3)
    assert equal(values(net), values(other))
    assert twin.engine == optimizer.engine
    assert twin.explain().rows == optimizer.explain().rows
    assert twin.param_groups[0]["params"][0] is next(other.parameters())


@EVERY
def test_saving_the_whole_optimizer(case: Case) -> None:
    net = model()
    optimizer = make(case, net.parameters())
    train(net, optimizer, 1)
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@EVERY
def test_repr_shows_groups_and_options(case: Case) -> None:
    text = repr(make(case, model().parameters(), weight_decay=0.125))
    assert text.startswith(f"{case.name} (")
    assert "weight_decay: 0.125" in text
    assert f"lr: {case.lr}" in text


# ---- conveniences


@EVERY
def test_lr_of_all_groups(case: Case) -> None:
    net = model()
    optimizer = make(case, [{"params": net[0].parameters()}, {"params": net[2].parameters()}])
    assert optimizer.lr == case.lr
    optimizer.lr = 0.125
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    for wrong in (-1.0, float("nan"), "0.1", lambda t: 0.1, torch.ones(3)):
        with pytest.raises(OptionError, match="lr"):
            optimizer.lr = wrong
    assert optimizer.lr == 0.125
    optimizer.param_groups[1]["lr"] = 0.5
    with pytest.raises(OptionError, match="different learning rates"):
        _ = optimizer.lr


@EVERY
def test_a_wrong_lr_written_into_a_group_is_refused_at_the_step(case: Case) -> None:
    net = model()
    optimizer = make(case, net.parameters())
    optimizer.param_groups[0]["lr"] = float("nan")
    backward(net)
    before = values(net)
    with pytest.raises(OptionError, match="parameter group 0: lr must be"):
        optimizer.step()
    assert equal(values(net), before)


@EVERY
def test_parameters_and_their_number(case: Case) -> None:
    net = model()
    optimizer = make(case, [{"params": net[0].parameters()}, {"params": net[2].parameters()}])
    assert optimizer.num_parameters == 4
    assert all(a is b for a, b in zip(optimizer.parameters(), net.parameters(), strict=True))


@ENGINES
@EVERY
def test_clear_state_begins_anew(case: Case, engine: str) -> None:
    net, other = model(), model()
    optimizer = make(case, net.parameters(), engine, weight_decay=0.1)
    train(net, optimizer, 3)
    net.load_state_dict(other.state_dict())
    optimizer.clear_state()
    assert not optimizer.state
    assert optimizer.stats() == {}
    train(net, optimizer, 2)
    train(other, make(case, other.parameters(), engine, weight_decay=0.1), 2)
    assert equal(values(net), values(other))
