"""What is around a rule, in torch: averages in place, groups, mixtures, checkpoints; ``eval()`` and ``train()``."""

from __future__ import annotations

import contextlib
import copy
import importlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composed import STEPS, case_of, draw
from networks import equal, model, values
from networks import train as train_net
from spiked import KINDS
from tolerances import FLOAT64

import thalweg.torch
from thalweg import OptionError, ResumeWarning, StateError
from thalweg.check.state import through_a_file


def error(found: Any, wanted: Any) -> float:
    return float(np.max(np.abs(found.detach().numpy() - wanted)) / np.max(np.abs(wanted - draw(0))))


def name_params(count: int = 1) -> list[tuple[str, Any]]:
    return [(f"w{i}", torch.nn.Parameter(torch.from_numpy(draw(0)))) for i in range(count)]


def train(optimizer: Any, named: Any, steps: range = range(1, STEPS + 1)) -> None:
    for t in steps:
        for _, p in named:
            p.grad = torch.from_numpy(draw(t)).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize(("name", "what"), [("AdamW", "averaged"), ("SGD", "schedule-free"), ("Kron", "mean")])
def test_what_is_put_in_place_is_what_a_plain_loop_has(name: str, what: str) -> None:
    rule, lr, options, wanted = case_of(name, what)
    named = name_params(2)  # which go as one stack, where a rule has stacks
    optimizer = thalweg.torch.optimizer(type(rule))(named, lr=lr, **options)
    train(optimizer, named)
    (evaluated,) = wanted.keys() & {"average", "x"}
    for _, p in named:
        assert error(p, wanted["p"]) < FLOAT64
        with optimizer.averaged():
            assert error(p, wanted[evaluated]) < FLOAT64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_averages_are_put_in_place_and_taken_out_to_the_bit(dtype: Any) -> None:
    named = [(name, torch.nn.Parameter(p.detach().to(dtype))) for name, p in name_params(2)]
    optimizer = thalweg.torch.AdamW(
        named, lr=0.1, averaged=0.9, rounding="compensated", overrides=[("w1", dict(averaged=None))]
    )
    with optimizer.averaged():  # before the first step, the average is the parameter
        pass
    train(optimizer, named)
    before = [p.detach().clone() for _, p in named]
    place, record = named[0][1].data_ptr(), copy.deepcopy(optimizer.state[named[0][1]].get("rounding_error"))
    with contextlib.suppress(ZeroDivisionError), optimizer.averaged():
        assert optimizer.state[named[0][1]]["average"].dtype is torch.float32
        assert not torch.equal(named[0][1], before[0])
        assert torch.equal(named[1][1], before[1])
        raise ZeroDivisionError
    assert all(torch.equal(p, own) for (_, p), own in zip(named, before, strict=True))
    assert named[0][1].data_ptr() == place
    assert record is None or torch.equal(record, optimizer.state[named[0][1]]["rounding_error"])
    optimizer.step()


def test_a_model_of_averages_is_exported() -> None:
    layer = torch.nn.Linear(4, 6)
    first = layer.weight.detach().clone()
    optimizer = thalweg.torch.AdamW(layer.named_parameters(), lr=0.1, averaged=0.5)
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved, before = optimizer.averaged_state_dict(layer), copy.deepcopy(layer.state_dict())
    assert torch.allclose(saved["weight"], 0.5 * (first + layer.weight), rtol=1e-6)
    assert torch.equal(layer.weight, before["weight"])
    with pytest.raises(OptionError, match="no parameter has an average"):
        thalweg.torch.AdamW(layer.parameters(), lr=0.1).averaged_state_dict(layer)


# ---- groups, mixtures, checkpoints


def test_groups_and_mixtures_have_their_own() -> None:
    named = name_params(2)
    optimizer = thalweg.torch.AdamW([dict(params=[named[0]], cautious=True), dict(params=[named[1]])])
    assert [group.get("cautious") for group in optimizer.param_groups] == [True, None]
    averaged = thalweg.torch.AdamW.options(lr=0.05, weight_decay=0.1, averaged=0.7)
    mixture = thalweg.torch.Mixture(named, [("w0", averaged), ("*", thalweg.torch.SGD.options(lr=0.1))])
    train(mixture, named)
    with mixture.averaged():
        assert error(named[0][1], case_of("AdamW", "averaged")[3]["average"]) < FLOAT64
    assert "average" not in mixture.state[named[1][1]]


@pytest.mark.parametrize("what", ["averaged", "cautious", "grafted", "schedule-free"])
def test_checkpoints_carry_it(what: str) -> None:
    _, lr, options, wanted = case_of("AdamW", what)
    named = name_params()
    optimizer = thalweg.torch.AdamW(named, lr=lr, **options)
    train(optimizer, named, range(1, 4))
    again = thalweg.torch.AdamW(named, lr=lr)  # options come with the state, as all do
    again.load_state_dict(through_a_file(optimizer.state_dict(), weights_only=True))
    train(again, named, range(4, STEPS + 1))
    assert error(named[0][1], wanted["p"]) < FLOAT64
    assert copy.deepcopy(again).param_groups[0].keys() == again.param_groups[0].keys()


@pytest.mark.parametrize(
    ("option", "value", "off", "entry"),
    [("averaged", 0.7, None, "average"), ("spikes", KINDS["skip"], False, "spikes"), ("cautious", True, False, "")],
)
def test_a_run_gains_and_drops_what_is_around_a_rule_and_says_so(option: str, value: Any, off: Any, entry: str) -> None:
    named = name_params()
    p = named[0][1]
    optimizer = thalweg.torch.AdamW(named, lr=0.05)
    train(optimizer, named, range(1, 4))
    again = thalweg.torch.AdamW(named, lr=0.05, **{option: value})
    with pytest.warns(ResumeWarning, match=f"was saved without {option}, and the run goes on with it") as told:
        again.load_state_dict(through_a_file(optimizer.state_dict(), weights_only=True))
    assert told[0].filename == __file__
    assert again.param_groups[0][option]
    before = p.detach().clone()
    if entry == "average":
        with again.averaged():
            assert torch.equal(p, before)
    with pytest.warns(ResumeWarning, match=f"'{entry}' of 'w0' is new") if entry else contextlib.nullcontext():
        train(again, named, range(4, 5))
    without = thalweg.torch.AdamW(named, lr=0.05)
    without.load_state_dict(again.state_dict())  # what is in the state comes from there, as every option does
    assert without.param_groups[0][option]
    without.param_groups[0][option] = off
    with pytest.warns(ResumeWarning, match=f"'{entry}' of 'w0' is dropped") if entry else contextlib.nullcontext():
        train(without, named, range(5, 6))
    assert entry not in without.state[p]
    without.param_groups[0][option] = value
    train(without, named, range(6, 7))
    assert not entry or entry in without.state[p]


@pytest.mark.parametrize("options", [{"cautious": True}, {"averaged": 0.9}], ids=str)
def test_blocks_of_fused_weights(options: dict[str, Any]) -> None:
    """Each block has a norm of its own, which is no fault of a rule with something around it."""
    p = torch.nn.Parameter(torch.eye(12, 4))
    p.grad = torch.ones(12, 4) + torch.eye(12, 4)
    thalweg.torch.Muon([p], lr=0.1, split=3, **options).step()
    assert bool(torch.isfinite(p).all())


@pytest.mark.parametrize("change", ["cast", "replaced", "channels_last"])
def test_weights_come_back_whatever_became_of_a_parameter_within(change: str) -> None:
    layer = torch.nn.Conv2d(3, 4, 3)
    optimizer = thalweg.torch.AdamW(layer.named_parameters(), lr=0.1, averaged=0.5)
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = layer.weight.detach().clone()
    with optimizer.averaged():
        if change == "cast":
            layer.bfloat16()
        elif change == "replaced":
            layer.weight.data = torch.zeros(2)
        else:
            layer.to(memory_format=torch.channels_last)
    assert torch.equal(layer.weight, before.to(layer.weight.dtype))
    assert layer.weight.dtype is (torch.bfloat16 if change == "cast" else torch.float32)


def test_autocast_sees_averages_and_weights_again() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    optimizer = thalweg.torch.SGD(layer.named_parameters(), lr=1.0, averaged=0.5)
    layer.weight.grad = torch.ones(4, 4)
    x = torch.eye(4)
    with torch.autocast("cpu", torch.bfloat16):
        optimizer.step()
        outputs = [layer(x)]
        with optimizer.averaged():
            outputs.append(layer(x))
        outputs.append(layer(x))
    assert torch.equal(outputs[0], outputs[2])
    assert torch.allclose(outputs[1].float(), outputs[0].float() + 0.5, atol=0.02)


# ---- eval() and train()


OPTIONS: dict[str, dict[str, Any]] = {
    "averaged": dict(averaged=0.7),
    "mean": dict(averaged="mean", averaged_from=2),
    "schedule-free": dict(schedule_free=True, betas=(0.0, 0.999)),
}
EVERY = pytest.mark.parametrize("what", OPTIONS)


def start(what: str, steps: int, **options: Any) -> tuple[Any, Any]:
    """A network and its optimizer after some steps."""
    net = model()
    optimizer = thalweg.torch.AdamW(net.named_parameters(), lr=0.05, **OPTIONS.get(what, {}), **options)
    train_net(net, optimizer, steps)
    return net, optimizer


@EVERY
def test_eval_puts_in_place_what_averaged_does_and_train_takes_it_out(what: str) -> None:
    net, optimizer = start(what, 0)
    optimizer.train()  # as schedulefree wants before the first step
    train_net(net, optimizer, 5)
    before = values(net)
    with optimizer.averaged():
        wanted = values(net)
    optimizer.eval()
    optimizer.eval()
    assert equal(values(net), wanted)
    assert not equal(wanted, before)
    with optimizer.averaged():
        assert equal(values(net), wanted)
    assert equal(values(net), wanted), "averaged() leaves what it found"
    for refused in (optimizer.step, optimizer.make_state, optimizer.clear_state):
        with pytest.raises(OptionError, match=r"in eval mode: parameters are averages there; call train\(\)"):
            refused()
    optimizer.train()
    optimizer.train()
    assert equal(values(net), before)
    train_net(net, optimizer, 1)


def test_without_averages_trainers_may_call_both() -> None:
    net, optimizer = start("plain", 2)
    before = values(net)
    optimizer.eval()
    assert equal(values(net), before)
    train_net(net, optimizer, 1)
    optimizer.train()
    assert not equal(values(net), before)


def test_an_average_that_cannot_be_computed_leaves_the_weights() -> None:
    net, optimizer = start("averaged", 2)
    before = values(net)
    optimizer.state[net[2].bias]["average"] = torch.zeros(7)
    with pytest.raises(RuntimeError):
        optimizer.eval()
    assert equal(values(net), before)
    assert not any("weights" in state for state in optimizer.state.values())


@pytest.mark.parametrize("first", ["model", "optimizer"])
@EVERY
def test_a_run_that_is_saved_in_eval_mode_goes_on_from_its_weights(what: str, first: str) -> None:
    net, optimizer = start(what, 3)
    with optimizer.averaged():
        saved = through_a_file([net.state_dict(), optimizer.state_dict()], weights_only=True)
        averages = values(net)
    train_net(net, optimizer, 2, first=3)
    again, resumed = start(what, 0)
    loads = [(again, saved[0]), (resumed, saved[1])]
    for target, state in loads if first == "model" else reversed(loads):
        target.load_state_dict(state)
    assert equal(values(again), averages)
    with pytest.raises(OptionError, match="in eval mode"):
        resumed.step()
    resumed.train()
    train_net(again, resumed, 2, first=3)
    assert equal(values(again), values(net))
    assert [group["layout"] for group in resumed.state_dict()["param_groups"]] == [1]


def test_weights_are_never_lost_by_a_load() -> None:
    net, optimizer = start("averaged", 2)
    saved, before = copy.deepcopy(optimizer.state_dict()), values(net)
    optimizer.eval()
    with pytest.raises(StateError, match=r"in eval mode, and its weights would be lost: call train\(\)"):
        optimizer.load_state_dict(saved)
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does for the device
    copied = copy.deepcopy(optimizer)
    optimizer.train()
    assert equal(values(net), before)
    assert not equal(list(copied.parameters()), before)
    copied.train()
    assert equal([p.detach() for p in copied.parameters()], before)


def test_a_loader_that_reads_what_a_new_optimizer_asks_for_does_not_lose_the_weights(tmp_path: Path) -> None:
    """torch.distributed.checkpoint reads those entries that the state dict to be filled has."""
    net, optimizer = start("averaged", 3)
    before = values(net)
    optimizer.eval()
    checkpoint = importlib.import_module("torch.distributed.checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        checkpoint.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
        for prepared in (False, True):
            again, resumed = start("averaged", 0)
            resumed.make_state()
            if prepared:
                resumed.eval()
            read = {"model": again.state_dict(), "optimizer": resumed.state_dict()}
            checkpoint.load(read, checkpoint_id=tmp_path)
            if not prepared:
                with pytest.raises(StateError, match=r"saved in eval mode, .* call make_state\(\) and eval\(\) before"):
                    resumed.load_state_dict(read["optimizer"])
                continue
            resumed.load_state_dict(read["optimizer"])
            resumed.train()
            assert equal(values(again), before)


def test_schedule_free_with_a_schedule_warns_once() -> None:
    net, optimizer = start("schedule-free", 0, engine="reference")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 3 else 0.5)
    for step in range(3):
        train_net(net, optimizer, 1, first=step)
        schedule.step()
    with pytest.warns(UserWarning, match=r"schedule_free takes .* lr went from 0\.05 to 0\.025"):
        train_net(net, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 0.01
    train_net(net, optimizer, 1)
    net, plain = start("plain", 1)
    plain.param_groups[0]["lr"] = 0.01
    train_net(net, plain, 1)


def test_a_parameter_whose_state_is_deleted_is_evaluated_as_it_is() -> None:
    """For it is frozen for good. One that is without a gradient for a while: tests/rules/test_composed.py."""
    net, optimizer = start("averaged", 2)
    del optimizer.state[net[2].bias]
    before = net[2].bias.detach().clone()
    optimizer.eval()
    assert torch.equal(net[2].bias, before)
    assert not torch.equal(net[0].bias, optimizer.state[net[0].bias]["weights"])
