"""What schedulers, trainers and configuration libraries do to an optimizer, with their own code where it is here."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from networks import backward, equal, train, values
from networks import model as network_of
from published_runs import peer
from torch.optim import lr_scheduler as schedulers

from thalweg.errors import OptimError, OptionError, ResumeWarning, StateError
from thalweg.torch import LAMB, LARS, Adafactor, Kron

ENGINES = pytest.mark.parametrize("engine", ["auto", "foreach", "reference"])


def model() -> Any:
    return network_of(torch.float32)


def moved(net: Any, optimizer: Any, step: int = 0) -> list[Any]:
    """By how much one step moves each parameter."""
    before = values(net)
    train(net, optimizer, 1, first=step)
    return [p.detach() - b for p, b in zip(net.parameters(), before, strict=True)]


# ---- keys of other tools


def test_a_scheduler_of_timm_applies_lr_scale_and_the_step_does_not_again() -> None:
    """lr_scale in a group belongs to the scheduler that reads it."""
    timm = peer("timm.scheduler.step_lr")
    net = model()
    groups = [{"params": net[0].parameters(), "lr_scale": 0.5}, {"params": net[2].parameters()}]
    optimizer = LAMB(groups, lr=0.1, engine="reference")
    timm.StepLRScheduler(optimizer, decay_t=2.0, decay_rate=0.5).step(0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]
    shown = optimizer.explain().groups
    assert "lr 0.05; lr_scale 0.5 is for a scheduler" in str(shown[0])
    assert str(shown[1]) == ": 2 stepped, lr 0.1"


FOREIGN = {
    **{"name": "decay", "fused": True, "foreach": False, "moe": False, "use_fallback": False, "group_names": ["a"]},
    **{"initial_lr": 0.1, "lr_mult": 2.0, "is_last_layer": True, "apply": lambda: None, "max_momentum": 0.9},
    "lr_scale": 0.5,  # of timm's layer decay, for a scheduler that has not been there yet
}


def test_keys_of_other_tools_are_kept_and_ignored() -> None:
    net, alone = model(), model()
    optimizer, other = LAMB([{"params": net.parameters(), **FOREIGN}]), LAMB(alone.parameters())
    train(net, optimizer, 2)
    train(alone, other, 2)
    assert equal(values(net), values(alone))
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["group_names"] == ["a"]
    optimizer.load_state_dict(saved)
    assert {key: optimizer.param_groups[0][key] for key in FOREIGN} == FOREIGN
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["group_names"] == ["a"], "what the saved state does not have stays"


@pytest.mark.parametrize(
    ("given", "engine"),
    [
        (dict(fused=None, foreach=None, differentiable=False), "auto"),
        (dict(foreach=True), "foreach"),
        (dict(fused=False, foreach=True), "foreach"),
        (dict(fused=False, foreach=False), "reference"),
        (dict(fused=False), "auto"),
        (dict(foreach=False), "auto"),
        (dict(foreach=True, engine="foreach"), "foreach"),
    ],
    ids=str,
)
def test_arguments_of_torchs_optimizers_choose_an_engine(given: Any, engine: str) -> None:
    assert LAMB(model().parameters(), **given).engine == engine


# ---- Adafactor without lr


@ENGINES
def test_adafactor_without_lr_has_one_in_its_groups_and_the_same_steps_as_before(engine: str) -> None:
    net, alone = model(), model()
    optimizer, other = (Adafactor(each.parameters(), engine=engine) for each in (net, alone))
    assert [group["lr"] for group in optimizer.param_groups] == [1.0]
    other.param_groups[0]["lr"] = None  # which a step takes as it always did
    train(net, optimizer, 3)
    train(alone, other, 3)
    assert equal(values(net), values(alone))
    optimizer.param_groups[0]["lr"] = 0.5
    for scaled, whole in zip(moved(net, optimizer, 3), moved(alone, other, 3), strict=True):
        torch.testing.assert_close(scaled, 0.5 * whole, rtol=1e-4, atol=1e-7)
    assert optimizer.stats()["0"]["step_size"] > 0
    assert "lr multiplies the step size that the rule computes" in str(optimizer.explain())


def test_groups_of_adafactor_choose_for_themselves_what_lr_means() -> None:
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))

    def told(optimizer: Any) -> list[tuple[float, bool]]:
        return [(group["lr"], group["lr_is_scale"]) for group in optimizer.param_groups]

    relative = Adafactor([{"params": [first]}, {"params": [second], "lr": 0.5}, {"params": [third], "lr": None}])
    assert told(relative) == [(1.0, True), (0.5, False), (1.0, True)]
    assert told(Adafactor([{"params": [first]}, {"params": [second], "lr": None}], lr=0.5)) == [
        (0.5, False),
        (1.0, True),
    ]
    absolute = Adafactor([{"params": [first]}, {"params": [second]}], lr=0.5)
    absolute.lr = None
    assert told(absolute) == [(1.0, True), (1.0, True)]
    assert told(Adafactor([{**group} for group in relative.param_groups])) == told(relative)


def test_a_state_whose_groups_say_none_is_read_as_it_was_meant() -> None:
    net = model()
    optimizer = Adafactor(net.parameters())
    moved(net, optimizer)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:  # as version 0.1.0 wrote it
        group.update(lr=None, momentum=None)
        del group["lr_is_scale"], group["made_with"]
    optimizer.load_state_dict(saved)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["lr_is_scale"]) == (1.0, True)
    assert "momentum" not in optimizer.param_groups[0]


def test_the_schedule_that_transformers_has_for_adafactor_shows_its_steps() -> None:
    optimization = peer("transformers.optimization")
    net, alone = model(), model()
    optimizer, plain = Adafactor(net.parameters(), variant="hf"), Adafactor(alone.parameters(), variant="hf")
    scheduler = optimization.AdafactorSchedule(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.0
    for step in range(3):
        assert equal(moved(net, optimizer, step), moved(alone, plain, step))
        scheduler.step()
        assert scheduler.get_last_lr() == [pytest.approx(optimizer.stats()["0"]["step_size"])]
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 1.0, "what is shown is not what a resumed run reads"
    assert "a scheduler displays the step size as lr" in str(optimizer.explain())
    with_lr = Adafactor(net.parameters(), lr=0.1)
    backward(net)
    with pytest.raises(OptionError, match="AdafactorSchedule shows the steps of Adafactor without lr"):
        optimization.AdafactorSchedule(with_lr)


@pytest.mark.parametrize("lr", [None, 0.1])
@pytest.mark.parametrize(
    "cycle",
    [
        lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=4),
        lambda o: schedulers.CyclicLR(o, base_lr=0.1, max_lr=0.2),
    ],
)
def test_schedulers_give_adafactor_no_momentum(lr: float | None, cycle: Callable[[Any], Any]) -> None:
    net = model()
    optimizer = Adafactor(net.parameters(), lr=lr)
    assert "momentum" not in optimizer.defaults
    assert "momentum" not in optimizer.param_groups[0]
    with pytest.raises(ValueError, match="momentum"):  # torch's own words, as for its own Adafactor
        cycle(optimizer)
    moved(net, optimizer)
    assert all("exp_avg" not in state for state in optimizer.state.values())


def test_a_momentum_that_was_asked_for_is_shown_and_cycled() -> None:
    net = model()
    optimizer = Adafactor(
        [{"params": net[0].parameters()}, {"params": net[2].parameters(), "momentum": None}], momentum=0.9
    )
    assert [group.get("momentum") for group in optimizer.param_groups] == [0.9, None]
    assert "momentum" not in optimizer.param_groups[1]
    moved(net, optimizer)
    assert ["exp_avg" in optimizer.state[p] for p in net.parameters()] == [True, True, False, False]
    resumed = Adafactor([{"params": net[0].parameters()}, {"params": net[2].parameters()}], momentum=0.9)
    resumed.load_state_dict(optimizer.state_dict())
    assert [group.get("momentum") for group in resumed.param_groups] == [0.9, None]
    schedulers.OneCycleLR(Adafactor(net.parameters(), momentum=0.9), 0.1, total_steps=4)


# ---- named checkpoints, overrides and engine of a resumed run


def pairs_of(*names: str) -> list[Any]:
    """Parameters by name, drawn by their last letter."""
    drawn = (torch.randn(3, 3, generator=torch.Generator().manual_seed(ord(name[-1]))) for name in names)
    return [(name, torch.nn.Parameter(p)) for name, p in zip(names, drawn, strict=True)]


@pytest.mark.parametrize("saved_as", [("a", "b"), ("module.a", "module._orig_mod.b")])
def test_names_decide_where_saved_state_goes(saved_as: tuple[str, str]) -> None:
    """Whatever wrappers of a model have put into them."""
    first, second = pairs_of(*saved_as), pairs_of("b", "a")
    optimizer, other = LAMB(first), LAMB(second)
    for _, p in first:
        p.grad = p.detach().clone()
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["param_names"] == ["b", "a"]
    for (_, p), (_, q) in zip(first, reversed(second), strict=True):
        assert all(torch.equal(entry, other.state[q][key]) for key, entry in optimizer.state[p].items())


def test_groups_are_found_by_the_names_in_them() -> None:
    a, b, c, d = pairs_of("a", "b", "c", "d")
    optimizer = LAMB([{"params": [a, b], "lr": 0.1}, {"params": [c, d], "lr": 0.2}])
    turned = LAMB([{"params": [d, c]}, {"params": [b, a]}])
    turned.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in turned.param_groups] == [0.2, 0.1]
    other = LAMB([{"params": [a, c]}, {"params": [b, d]}])
    with pytest.raises(StateError, match="the same parameters in other groups"):
        other.load_state_dict(optimizer.state_dict())


def test_other_names_are_refused() -> None:
    optimizer, other = LAMB(pairs_of("a", "b")), LAMB(pairs_of("a", "c"))
    words = r"state lacks 'c', and the optimizer lacks 'b'; to match by position .* 'param_names'"
    with pytest.raises(StateError, match=words):
        other.load_state_dict(optimizer.state_dict())
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["param_names"]
    other.load_state_dict(saved)


def test_a_run_that_is_resumed_with_other_overrides_or_another_engine_is_told() -> None:
    net = model()
    given = dict(overrides=[("*.bias", dict(weight_decay=0.0)), (lambda name, p: p.ndim == 2, dict(lr_scale=0.5))])
    optimizer = LAMB(net.named_parameters(), **given)
    saved = optimizer.state_dict()
    assert "made_with" not in optimizer.param_groups[0]
    LAMB(net.named_parameters(), **given).load_state_dict(saved)
    words = r"saved with engine='auto', overrides=\[\('\*.bias', weight_decay=0.0\)"
    for options in ({}, dict(**given, engine="foreach"), dict(overrides=[("*.bias", dict(weight_decay=0.5))])):
        other = LAMB(net.named_parameters(), **options)
        with pytest.warns(ResumeWarning, match=words):
            other.load_state_dict(saved)
        assert "made_with" not in other.param_groups[0]


# ---- what is explained


def test_frozen_parameters_are_counted_and_groups_have_the_names_that_trainers_give() -> None:
    net = model()
    net[0].requires_grad_(False)
    explanation = LAMB(net.named_parameters(), lr=0.1).explain()
    assert [row.name for row in explanation.rows] == ["2.weight", "2.bias"]
    assert explanation.state_bytes == 2 * 4 * (18 + 3) + 2 * 4
    assert str(explanation).splitlines()[-1] == "group 0: 2 stepped and 2 frozen, lr 0.1"
    net[0].requires_grad_(True)
    groups = [{"params": net[0].parameters(), "name": "body"}, {"params": net[2].parameters(), "lr": torch.tensor(0.5)}]
    shown = str(LAMB(groups, lr=0.1).explain()).splitlines()[-2:]
    assert shown == ["group 0 'body': 2 stepped, lr 0.1", "group 1: 2 stepped, lr a tensor"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_weights_that_are_frozen_are_let_be(dtype: Any) -> None:
    net = model()
    net[0].weight = torch.nn.Parameter(torch.ones(6, 5).to(dtype), requires_grad=False)
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = LAMB(net.named_parameters())
    for p in trainable:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert set(optimizer.state) == set(trainable)


def test_pairs_may_be_lists_of_any_kind() -> None:
    """As configuration libraries have them: OmegaConf's ListConfig is one like UserList."""
    kinds = ((0.8, 0.9), [0.8, 0.9], UserList([0.8, 0.9]), (np.float64(0.8), np.float32(0.9)))
    for pair_of_numbers in kinds:
        optimizer = LAMB(model().parameters(), betas=pair_of_numbers)
        kept = optimizer.param_groups[0]["betas"]
        assert type(kept) is tuple
        assert [type(number) for number in kept] == [float, float]
        assert kept == pytest.approx((0.8, 0.9))
    overrides = UserList([UserList(["*.bias", dict(betas=UserList([0.5, 0.5]))])])
    assert LAMB(model().named_parameters(), overrides=overrides).explain().warnings == []
    grouped = LAMB([{"params": model().parameters(), "betas": UserList([0.8, 0.9])}])
    assert grouped.param_groups[0]["betas"] == (0.8, 0.9)


# ---- mistakes


def with_options(kind: Any = LAMB, **options: Any) -> Callable[[], Any]:
    return lambda: kind(model().parameters(), **options)


def in_group(kind: Any = LAMB, **options: Any) -> Callable[[], Any]:
    return lambda: kind([{"params": model().parameters(), **options}])


#: Names that other libraries use for an option of ours.
THEIRS = [
    *((LARS, "trust_coefficient", name) for name in ("trust_coeff", "eta")),
    *((LAMB, "betas", name) for name in ("beta1", "b2")),
    (LAMB, "lr", "learning_rate"),
    (Adafactor, "beta2_decay", "decay_rate"),
    *((Adafactor, "clip_threshold", name) for name in ("d", "clipping_threshold")),
    (Adafactor, "momentum", "beta1"),
    (Kron, "precond_lr", "preconditioner_lr"),
    (Kron, "max_size_dense", "max_size_triangular"),
]
#: Calls, and what is said of them.
REFUSED: list[tuple[Callable[[], Any], str]] = [
    *(
        (where(kind, **{theirs: 0.5}), f"{kind.__name__} has no option '{theirs}': here it is {ours}")
        for where in (with_options, in_group)
        for kind, ours, theirs in THEIRS
    ),
    (with_options(foreach=True, fused=True), "two engines"),
    (with_options(foreach=True, engine="reference"), "engine='foreach'.*engine='reference'"),
    (with_options(differentiable=True), "differentiable=True"),
    (with_options(fused="yes"), "fused must be one of None, True, False"),
    # keys of groups that resemble an option, or ask for another rule
    (in_group(use_fallback=True), "use_fallback=True asks for AdamW in place of LAMB"),
    *(
        (in_group(**{key: 0.1}), f"LAMB has no option '{key}': (did you mean|here it is)")
        for key in ("weight_decai", "weightdecay", "max_grad_nrom", "learning_rate", "stacked_axis")
    ),
    # parameters in another form
    (lambda: LAMB(model()), "params is a model: .*model.named_parameters()"),
    (lambda: LAMB(dict(model().named_parameters())), r"params is a dictionary: pass params.items\(\)"),
    (lambda: LAMB(model().state_dict()), "params is a dictionary"),
    (
        lambda: LAMB({"params": model().parameters()}),
        r"is one parameter group: pass a list of groups, \[group\]",
    ),
]


@pytest.mark.parametrize(("call", "told"), REFUSED)
def test_mistakes_are_told(call: Any, told: str) -> None:
    with pytest.raises(OptimError, match=told):
        call()
