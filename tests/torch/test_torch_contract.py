"""What our optimizers have beside what torch promises, which tests/check/test_ours.py holds them to."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from cases import CASES, Case
from lanes import by_turns

torch = pytest.importorskip("torch")

from networks import EVERY, backward, equal, make, model, train, values  # noqa: E402
from torch.optim import lr_scheduler as schedulers  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.errors import OptimError, OptionError, ParameterError  # noqa: E402

ENGINES = pytest.mark.parametrize("engine", ["reference", "foreach"])


# ---- parameters and groups


@by_turns()
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


@by_turns()
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


@by_turns()
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
        (dict(variant="nothing"), "variant must be one of|has no variants"),
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


@by_turns()
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


# ---- copies


@EVERY
def test_copies_have_overrides_and_engines_too(case: Case) -> None:
    net = model()
    optimizer = make(case, net.named_parameters(), overrides=[("*bias", dict(weight_decay=0.1))])
    train(net, optimizer, 3)
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        other, twin = copied((net, optimizer))
        assert twin.engine == optimizer.engine
        assert twin.explain().rows == optimizer.explain().rows
        assert twin.param_groups[0]["params"][0] is next(other.parameters())


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


@by_turns()
@ENGINES
@EVERY
@pytest.mark.parametrize(("option", "value"), [("lr", float("nan")), ("weight_decay", -1.0)])
def test_a_wrong_option_written_into_a_group_is_refused_at_the_step(
    case: Case, engine: str, option: str, value: float
) -> None:
    net = model()
    optimizer = make(case, net.parameters(), engine)
    train(net, optimizer, 1)
    optimizer.param_groups[0][option] = value
    backward(net)
    before = values(net)
    with pytest.raises(OptionError, match=f"parameter group 0: {option} must be"):
        optimizer.step()
    assert equal(values(net), before)


@EVERY
def test_parameters_and_their_number(case: Case) -> None:
    net = model()
    optimizer = make(case, [{"params": net[0].parameters()}, {"params": net[2].parameters()}])
    assert optimizer.num_parameters == 4
    assert all(a is b for a, b in zip(optimizer.parameters(), net.parameters(), strict=True))


@by_turns()
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
