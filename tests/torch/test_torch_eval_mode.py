"""``eval()`` and ``train()`` of torch's optimizers: what is in place, what is refused, what is saved and loaded."""

from __future__ import annotations

import copy
import importlib
import io
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg import OptionError, StateError  # noqa: E402

OPTIONS: dict[str, dict[str, Any]] = {
    "averaged": dict(averaged=0.7),
    "mean": dict(averaged="mean", averaged_from=2),
    "schedule-free": dict(schedule_free=True, betas=(0.0, 0.999)),
}
AVERAGED = OPTIONS["averaged"]


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def optimizer_of(net: Any, **options: Any) -> Any:
    return thalweg.torch.AdamW(net.named_parameters(), lr=0.05, **options)


def train(net: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        net(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()


def weights(net: Any) -> list[Any]:
    return [p.detach().clone() for p in net.parameters()]


def are_equal(some: list[Any], others: list[Any]) -> bool:
    return all(map(torch.equal, some, others))


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("what", OPTIONS)
def test_eval_puts_in_place_what_averaged_does_and_train_takes_it_out(what: str) -> None:
    net = network()
    optimizer = optimizer_of(net, **OPTIONS[what])
    optimizer.train()  # as schedulefree wants before the first step
    train(net, optimizer, range(5))
    before = weights(net)
    with optimizer.averaged():
        wanted = weights(net)
    optimizer.eval()
    optimizer.eval()
    assert are_equal(weights(net), wanted)
    assert not are_equal(wanted, before)
    with optimizer.averaged():
        assert are_equal(weights(net), wanted)
    assert are_equal(weights(net), wanted), "averaged() leaves what it found"
    for refused in (optimizer.step, optimizer.make_state, optimizer.clear_state):
        with pytest.raises(OptionError, match=r"in eval mode: parameters are averages there; call train\(\)"):
            refused()
    optimizer.train()
    optimizer.train()
    assert are_equal(weights(net), before)
    train(net, optimizer, range(5, 6))


def test_without_averages_trainers_may_call_both() -> None:
    net = network()
    optimizer = optimizer_of(net)
    train(net, optimizer, range(2))
    before = weights(net)
    optimizer.eval()
    assert are_equal(weights(net), before)
    train(net, optimizer, range(2, 3))
    optimizer.train()
    assert not are_equal(weights(net), before)


def test_an_average_that_cannot_be_computed_leaves_the_weights() -> None:
    net = network()
    optimizer = optimizer_of(net, **AVERAGED)
    train(net, optimizer, range(2))
    before = weights(net)
    optimizer.state[net[2].bias]["average"] = torch.zeros(7)
    with pytest.raises(RuntimeError):
        optimizer.eval()
    assert are_equal(weights(net), before)
    assert not any("weights" in state for state in optimizer.state.values())


# ---- saved and loaded


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("what", OPTIONS)
def test_a_run_that_is_saved_in_eval_mode_goes_on_from_its_weights(what: str, first: str) -> None:
    net = network()
    optimizer = optimizer_of(net, **OPTIONS[what])
    train(net, optimizer, range(3))
    with optimizer.averaged():
        saved = through_a_file([net.state_dict(), optimizer.state_dict()])
        averages = weights(net)
    train(net, optimizer, range(3, 5))
    again = network()
    resumed = optimizer_of(again, **OPTIONS[what])
    loads = [(again, saved[0]), (resumed, saved[1])]
    for target, state in loads if first == "model" else reversed(loads):
        target.load_state_dict(state)
    assert are_equal(weights(again), averages)
    with pytest.raises(OptionError, match="in eval mode"):
        resumed.step()
    resumed.train()
    train(again, resumed, range(3, 5))
    assert are_equal(weights(again), weights(net))
    assert [group["layout"] for group in resumed.state_dict()["param_groups"]] == [1]


def test_weights_are_never_lost_by_a_load() -> None:
    net = network()
    optimizer = optimizer_of(net, **AVERAGED)
    train(net, optimizer, range(2))
    saved, before = copy.deepcopy(optimizer.state_dict()), weights(net)
    optimizer.eval()
    with pytest.raises(StateError, match=r"in eval mode, and its weights would be lost: call train\(\)"):
        optimizer.load_state_dict(saved)
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does for the device
    copied = copy.deepcopy(optimizer)
    optimizer.train()
    assert are_equal(weights(net), before)
    assert not are_equal(list(copied.parameters()), before)
    copied.train()
    assert are_equal([p.detach() for p in copied.parameters()], before)


def test_a_loader_that_reads_what_a_new_optimizer_asks_for_does_not_lose_the_weights(tmp_path: Path) -> None:
    """torch.distributed.checkpoint reads those entries that the state dict to be filled has."""
    net = network()
    optimizer = optimizer_of(net, **AVERAGED)
    train(net, optimizer, range(3))
    before = weights(net)
    optimizer.eval()
    checkpoint = importlib.import_module("torch.distributed.checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        checkpoint.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
        for prepared in (False, True):
            again = network()
            resumed = optimizer_of(again, **AVERAGED)
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
            assert are_equal(weights(again), before)


# ---- schedules


def test_schedule_free_with_a_schedule_warns_once() -> None:
    net = network()
    optimizer = optimizer_of(net, **OPTIONS["schedule-free"], engine="reference")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 3 else 0.5)
    for step in range(3):
        train(net, optimizer, range(step, step + 1))
        schedule.step()
    with pytest.warns(UserWarning, match=r"schedule_free takes .* lr went from 0\.05 to 0\.025") as told:
        train(net, optimizer, range(3, 4))
    assert told[0].filename == __file__
    optimizer.param_groups[0]["lr"] = 0.01
    train(net, optimizer, range(4, 5))
    plain = optimizer_of(net)
    train(net, plain, range(1))
    plain.param_groups[0]["lr"] = 0.01
    train(net, plain, range(1))


# ---- parameters that rest


@pytest.mark.parametrize("what", ["averaged", "schedule-free"])
def test_a_parameter_without_a_gradient_has_the_average_of_its_own_steps(what: str) -> None:
    """And one whose state is deleted, for it is frozen for good, is evaluated as it is."""
    layers = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = thalweg.torch.AdamW(layers, lr=0.1, **OPTIONS[what])
    averages = []
    for step in range(6):
        layers[0].grad = torch.full((3,), step + 1.0)
        layers[1].grad = None if step > 1 else torch.full((3,), step + 1.0)
        optimizer.step()
        with optimizer.averaged():
            averages.append(layers[1].detach().clone())
    assert not torch.equal(averages[0], averages[1])
    assert are_equal(averages[2:], [averages[1]] * 4)
    assert not torch.equal(averages[1], layers[1])
    del optimizer.state[layers[1]]
    before = layers[1].detach().clone()
    optimizer.eval()
    assert torch.equal(layers[1], before)
