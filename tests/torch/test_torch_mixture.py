"""Mixtures: one optimizer for torch that steps by several rules is each of them for its own parameters."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from own_rules import Signed

import thalweg.torch
from thalweg.errors import NonFiniteError, OptimError, OptionError, StateError, UnusedOverrideWarning
from thalweg.torch import LAMB, Adafactor, AdamW, Kron, Mixture, step_in_backward

nn = torch.nn
ENGINES = pytest.mark.parametrize("engine", ["auto", "reference", "foreach"])


def model(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)


def loss_of(net: Any, step: int) -> Any:
    words = torch.randint(7, (4,), generator=torch.Generator().manual_seed(step))
    return net(words).square().sum()


def is_matrix(name: str, p: Any) -> bool:
    return p.ndim == 2


KRON_AND_ADAMW = [("*.weight", Kron.options(lr=0.1)), ("*", AdamW.options())]
OPTIONS: dict[str, Any] = dict(weight_decay=0.1, overrides=[("*.bias", dict(weight_decay=0.0))])


def entries(**changed: Any) -> list[Any]:
    """The embedding by Adafactor, matrices by Kron, all else by AdamW."""
    return [
        ("0.*", Adafactor.options(min_dim_size_to_factor=2)),
        (re.compile("[13].weight"), Kron.options(lr=0.01, precond_update_probability=0.5)),
        (lambda name, p: p.ndim < 2, AdamW.options(**{"lr": 0.05, **OPTIONS, **changed})),
    ]


def apart(net: Any, **arguments: Any) -> list[Any]:
    """The same as separate optimizers."""
    named = dict(net.named_parameters())
    matrices = [(name, named.pop(name)) for name in ("1.weight", "3.weight")]
    return [
        Adafactor([("0.weight", named.pop("0.weight"))], min_dim_size_to_factor=2, **arguments),
        Kron(matrices, lr=0.01, precond_update_probability=0.5, **arguments),
        AdamW(named.items(), lr=0.05, **OPTIONS, **arguments),
    ]


def train(net: Any, optimizers: Any, steps: Any = range(5)) -> None:
    for step in steps:
        net.zero_grad()
        loss_of(net, step).backward()
        for each in optimizers:
            each.step()


def assert_same(one: Any, other: Any) -> None:
    assert all(map(torch.equal, one.parameters(), other.parameters()))


# ---- steps


@ENGINES
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_steps_are_those_of_separate_optimizers(engine: str, dtype: Any) -> None:
    ours, theirs = model(dtype), model(dtype)
    optimizer, separate = Mixture(ours.named_parameters(), entries(), engine=engine), apart(theirs, engine=engine)
    for step in range(5):
        train(ours, [optimizer], [step])
        train(theirs, separate, [step])
        assert_same(ours, theirs)
    assert optimizer.engine == " + ".join(sorted({each for own in separate for each in own.engine.split(" + ")}))
    states = {name: state for own in separate for name, state in thalweg.torch.export_state(own)["state"].items()}
    found = thalweg.torch.export_state(optimizer)["state"]
    for name, state in states.items():
        assert all((found[name][key] == entry).all() for key, entry in state.items()), name
    assert optimizer.stats() == {name: figures for own in separate for name, figures in own.stats().items()}


@ENGINES
def test_one_norm_for_all_rules(engine: str) -> None:
    ours, theirs = model(), model()
    train(ours, [Mixture(ours.named_parameters(), entries(), engine=engine, max_grad_norm=0.1)], [0])
    loss_of(theirs, 0).backward()
    nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    for each in apart(theirs, engine=engine):
        each.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@ENGINES
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_one_decision_about_what_is_not_finite(engine: str, policy: str) -> None:
    net = model()
    optimizer = Mixture(net.named_parameters(), entries(), engine=engine, on_nonfinite=policy)
    train(net, [optimizer], [0])
    before, saved = copy.deepcopy(net), copy.deepcopy(optimizer.state_dict())
    loss_of(net, 1).backward()
    net[3].bias.grad[0] = float("nan")  # AdamW's, and Kron stands still as well
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=r"'3\.bias'"):
            optimizer.step()
    else:
        optimizer.step()
        assert (optimizer.skipped, optimizer.nonfinite()) == (1, ["3.bias"])
    assert_same(net, before)
    steps = [own["step"] for own in optimizer.state_dict()["state"].values()]
    assert steps == [own["step"] for own in saved["state"].values()]


def test_in_the_backward_pass() -> None:
    ours, theirs = model(), model()
    optimizer = Mixture(ours.named_parameters(), entries())
    with step_in_backward(ours, optimizer):
        for step in range(3):
            loss_of(ours, step).backward()
    train(theirs, apart(theirs), range(3))
    assert_same(ours, theirs)


# ---- groups


def test_groups_of_a_trainer_are_divided_and_their_options_win() -> None:
    named = list(model().named_parameters())
    groups = [
        {"params": [pair for pair in named if pair[1].ndim == 2], "weight_decay": 0.2, "name": "decayed"},
        {"params": [pair for pair in named if pair[1].ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = Mixture(groups, [("*.weight", Kron.options(lr=0.01)), ("*", AdamW.options())])
    told = [(g["rule"], g["weight_decay"], g["param_names"], g.get("name")) for g in optimizer.param_groups]
    assert told == [
        ("Kron", 0.2, ["0.weight", "1.weight", "3.weight"], "decayed"),
        ("Kron", 0.0, ["2.weight"], None),
        ("AdamW", 0.0, ["1.bias", "2.bias", "3.bias"], None),
    ]


def test_groups_are_added_by_their_rule_or_by_the_patterns() -> None:
    net, more = model(), nn.Linear(2, 2)
    optimizer = Mixture(net.named_parameters(), [("*.weight", Kron.options(lr=0.01)), ("*", AdamW.options(lr=0.5))])
    optimizer.add_param_group({"params": more.named_parameters(prefix="more"), "weight_decay": 0.3})
    vector, scalar = (nn.Parameter(torch.ones(size)) for size in ((3,), ()))
    own = thalweg.torch.optimizer(Signed)
    optimizer.add_param_group({"params": [("x", vector)], "rule": own.options(lr=0.2), "weight_decay": 0.25})
    optimizer.add_param_group({"params": [("y", scalar)], "rule": "AdamW", "lr": 0.75})
    told = [(g["rule"], g["lr"], g["weight_decay"], g["param_names"]) for g in optimizer.param_groups[2:]]
    assert told == [
        ("Kron", 0.01, 0.3, ["more.weight"]),
        ("AdamW", 0.5, 0.3, ["more.bias"]),
        ("Signed", 0.2, 0.25, ["x"]),
        ("AdamW", 0.75, 0.01, ["y"]),
    ]
    vector.grad = torch.ones(3)
    optimizer.step()
    other = own([("x", reference := nn.Parameter(torch.ones(3)))], lr=0.2, weight_decay=0.25)
    reference.grad = torch.ones(3)
    other.step()
    assert torch.equal(vector, reference)


def test_an_optimizer_of_one_rule_is_a_mixture_of_one_entry() -> None:
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = AdamW([("first", first)], lr=0.1, weight_decay=0.5, averaged=0.9, on_nonfinite="skip")
    optimizer.add_param_group({"params": [("second", second)], "rule": LAMB.options(lr=0.2)})
    expected = {"rule": "LAMB", "lr": 0.2, "on_nonfinite": "skip", "weight_decay": 0.0, "averaged": None}
    for _ in range(2):
        assert {key: optimizer.param_groups[1].get(key) for key in expected} == expected
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(StateError, match="with one rule"):
        thalweg.torch.import_peer(optimizer, torch.optim.AdamW([first, second]).state_dict())


def test_a_group_that_is_refused_changes_nothing() -> None:
    optimizer = Mixture(model().named_parameters(), KRON_AND_ADAMW)
    with pytest.raises(OptionError, match="weight_decay must be"):
        optimizer.add_param_group({"params": nn.Linear(2, 2).named_parameters(prefix="more"), "weight_decay": -1})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [("x", nn.Parameter(torch.ones(3)))], "rule": LAMB.options()})
    assert [group["rule"] for group in optimizer.param_groups] == ["Kron", "AdamW", "LAMB"]


def test_a_group_has_nothing_of_one_that_was_refused_in_its_place() -> None:
    rate, (vector, matrix) = 0.1, (nn.Parameter(torch.ones(size)) for size in ((3,), (3, 2)))
    optimizer = Mixture(model().named_parameters(), KRON_AND_ADAMW)
    doubled = thalweg.torch.Muon.options(lr=rate, overrides=[("*", dict(lr_scale=2.0))])
    with pytest.raises(OptimError, match="'x' has shape"):
        optimizer.add_param_group({"params": [("x", vector)], "rule": doubled})
    optimizer.add_param_group({"params": [("x", matrix)], "rule": thalweg.torch.Muon.options(lr=rate)})
    assert optimizer.explain().rows[-1].lr_scale == 1.0


def test_groups_of_another_mixture() -> None:
    other = Mixture(model().named_parameters(), entries())
    groups = [
        {**group, "params": list(zip(group["param_names"], group["params"], strict=True))}
        for group in other.param_groups
    ]
    again = Mixture(groups, entries())
    told = [(group["rule"], group["entry"]) for group in again.param_groups]
    assert told == [("Adafactor", 0), ("Kron", 1), ("AdamW", 2)]
    with pytest.raises(OptionError, match="entry=2 in a parameter group is no entry of this optimizer, which has 1"):
        AdamW(groups[2:])


# ---- options and patterns


#: Another rule of that name.
TWIN = thalweg.torch.optimizer(dataclass(frozen=True, kw_only=True)(type("AdamW", (Signed,), {})))


def mix(given: Any) -> Callable[[], Any]:
    return lambda: Mixture(model().named_parameters(), given)


def grown(**group: Any) -> Callable[[], Any]:
    """A group that a mixture is given later."""
    more = {"params": nn.Linear(2, 2).named_parameters(prefix="more"), **group}
    return lambda: Mixture(model().named_parameters(), KRON_AND_ADAMW).add_param_group(more)


#: Calls, and what is said of them.
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: AdamW.options(lr=0.1, betta=1), "AdamW has no option 'betta': did you mean 'betas'"),
    (lambda: AdamW.options(lr=0.1, weight_decay=-1), "weight_decay must be"),
    (lambda: AdamW.options(max_grad_norm=1.0), "max_grad_norm concerns the whole step: give it to the mixture"),
    (lambda: AdamW.options(spikes=True), "spikes concerns the whole step: give it to the mixture"),
    (lambda: Mixture.options(lr=0.1), r"options\(\) is for the class of one rule"),
    (lambda: thalweg.torch.optimizer(Signed).options(beta=0.5), "Signed needs a learning rate"),
    (mix([]), "a mixture is a list of"),
    (mix(AdamW.options()), "a mixture is a list of"),
    (mix([("*", AdamW)]), "got the entry"),
    (mix([("*", dict(lr=0.1))]), "got the entry"),
    (mix([(3, AdamW.options())]), "a pattern must be a glob"),
    (mix([(lambda p: True, AdamW.options())]), "takes .name, parameter."),
    (mix([("*.weight", AdamW.options())]), r"mixture matches '1\.bias', '2\.bias', '3\.bias': add a"),
    (mix([("*.weight", AdamW.options()), ("*", TWIN.options(lr=0.1))]), "two rules are named AdamW"),
    (
        lambda: Mixture(model().parameters(), [("*.weight", Kron.options()), ("*", AdamW.options())]),
        r"entries by name \('\*.weight'\) need a name for every parameter",
    ),
    (grown(betas=(0.5, 0.5)), "Kron has no option 'betas': AdamW has it"),
    (grown(rule="LARS"), "rule='LARS' is not a rule of this optimizer, which has Kron, AdamW"),
    (grown(rule=LAMB.options(), lr=-1.0), "lr must be"),
    (grown(max_grad_norm=1.0), "max_grad_norm concerns the whole step"),
    (grown(params=[("z", "no tensor")]), "parameter 'z' must be a tensor, got str"),
    (grown(params=[torch.ones(2)]), "entries by name"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_options_and_entries_that_are_refused_at_once(call: Any, message: str) -> None:
    with pytest.raises(OptimError, match=message):
        call()


def test_options_are_a_value() -> None:
    made = AdamW.options(weight_decay=0.5)
    assert (made.rule.__name__, made.lr, made.given) == ("AdamW", 1e-3, {"weight_decay": 0.5})
    assert repr(made) == "AdamW.options(lr=0.001, weight_decay=0.5)"
    with pytest.raises(AttributeError):
        made.lr = 1.0  # type: ignore[misc]


def test_an_entry_without_parameters_is_reported_once() -> None:
    net = model()
    optimizer = Mixture(net.named_parameters(), [("*", AdamW.options()), ("*.weight", Kron.options())])
    assert "entries: '*.weight' matches no parameter" in str(optimizer.explain())
    with pytest.warns(UnusedOverrideWarning, match="entries of the mixture that match no parameter: '\\*.weight'"):
        train(net, [optimizer], [0])
    train(net, [optimizer], [1])  # warnings are errors here


def test_overrides_of_one_rule_and_of_all() -> None:
    net = model()
    own = AdamW.options(overrides=[("1.*", dict(betas=(0.5, 0.5)))])
    for_all = [("*.bias", dict(weight_decay=0.0)), ("1.*", dict(lr_scale=0.5)), ("nothing", dict(lr_scale=2.0))]
    optimizer = Mixture(
        net.named_parameters(), [("*.weight", Kron.options(weight_decay=0.3)), ("*", own)], overrides=for_all
    )
    rows = {row.name: row for row in optimizer.explain().rows}
    decayed = {name: row.weight_decay for name, row in rows.items() if row.weight_decay}
    assert decayed == dict.fromkeys(("0.weight", "1.weight", "2.weight", "3.weight"), 0.3)
    assert {name for name, row in rows.items() if row.lr_scale == 0.5} == {"1.weight", "1.bias"}
    assert optimizer.explain().unused_overrides == ["nothing"]
    with pytest.warns(UnusedOverrideWarning, match="overrides that match no parameter: 'nothing'"):
        train(net, [optimizer], [0])
    with pytest.raises(OptionError, match=r"entry '\*.weight': overrides, entry '1.\*': Kron has no option 'betas'"):
        Mixture(
            net.named_parameters(), [("*.weight", Kron.options()), ("*", own)], overrides=[("1.*", dict(betas=(0, 0)))]
        )


# ---- copies and checkpoints


def picklable() -> list[Any]:
    return [
        (is_matrix, Kron.options(lr=0.01)),
        ("*", AdamW.options(lr=0.05, overrides=[("*.bias", dict(lr_scale=0.5))])),
    ]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_have_the_overrides_of_all_rules(copied: Any) -> None:
    optimizer = Mixture(
        model().named_parameters(), picklable(), engine="foreach", overrides=[("3.*", dict(lr_scale=0.5))]
    )
    twins = copied(optimizer)
    twins.add_param_group({"params": [("3.more", nn.Parameter(torch.ones(2)))], "rule": LAMB.options()})
    assert twins.explain().rows[-1].lr_scale == 0.5
    assert twins.explain().rows[:-1] == optimizer.explain().rows
    assert twins.engine == optimizer.engine == "foreach"
    assert len(optimizer.param_groups) == 2


def test_a_state_of_other_rules_is_refused_whole() -> None:
    named = list(model().named_parameters())
    mixed, plain = Mixture(named, KRON_AND_ADAMW), AdamW(named)
    mixed.make_state()
    with_lamb = Mixture(named, [("*.weight", Kron.options(lr=0.1)), ("*", LAMB.options())])
    by_bias = Mixture(named, [("*.bias", Kron.options(lr=0.1)), ("*", AdamW.options())])
    both = "a mixture of Kron and AdamW"
    for target, state, message in (
        (mixed, plain, f"this is a state of AdamW and cannot be loaded into {both}"),
        (plain, mixed, f"this is a state of {both} and cannot be loaded into AdamW"),
        (with_lamb, mixed, f"this is a state of {both} and cannot be loaded into a mixture of Kron and LAMB"),
        (by_bias, mixed, "parameter group 0 of this state was stepped by AdamW, and here it is stepped by Kron"),
    ):
        before = str(target.state_dict())
        with pytest.raises(StateError, match=message):
            target.load_state_dict(state.state_dict())
        assert str(target.state_dict()) == before


def test_schedulers_that_divide_by_the_default_rate_find_it_and_groups_keep_their_own() -> None:
    """As those of transformers with a least rate do."""
    optimizer = thalweg.torch.muon_adamw(model()[1:], lr=0.02, adamw_lr=3e-4)
    assert optimizer.defaults["lr"] == optimizer.param_groups[0]["lr"]
    before = [(group["rule"], group["lr"]) for group in optimizer.param_groups]
    optimizer.add_param_group({"params": [("extra", nn.Parameter(torch.ones(3)))], "rule": "AdamW"})
    assert [(group["rule"], group["lr"]) for group in optimizer.param_groups] == [*before, ("AdamW", 3e-4)]
    least = 1e-4 / optimizer.defaults["lr"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(least, 1 - step / 10))
    optimizer.step()
    scheduler.step()
    wanted = [0.9 * lr for _, lr in before] + [2.7e-4]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(wanted)
