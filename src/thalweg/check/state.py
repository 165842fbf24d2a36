"""State: saved, loaded, continued."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch

from thalweg.check import expect
from thalweg.check.problem import TorchSubject, copy_state, leaves, module_of, tensors_of, train


def through_a_file(state: Any, *, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def restore(s: TorchSubject, params: Any, state: Any) -> tuple[list[torch.nn.Parameter], Any]:
    """Other parameters with the same values, and an optimizer with that state."""
    others, optimizer = s.make_again(params)
    optimizer.load_state_dict(state)
    return others, optimizer


def test_resumes_to_the_bit(s: TorchSubject) -> None:
    """A run that is saved and resumed in the middle ends as one that was never stopped."""
    params, optimizer = s.begin()
    others, other = restore(s, params, through_a_file(optimizer.state_dict(), weights_only=False))
    expect.usual(s, train(other, others, 3, first=3), 6, "three steps after resuming")


def test_resumes_with_weights_only(s: TorchSubject) -> None:
    """torch.load(weights_only=True), its default, takes the state: no code is run by loading it."""
    _, optimizer = s.begin()
    through_a_file(optimizer.state_dict(), weights_only=True)


def test_resumes_16_bits(s: TorchSubject) -> None:
    """A run in bfloat16 resumes to the bit too: loading must not round the state."""
    params, optimizer = s.begin(torch.bfloat16)
    others, other = restore(s, params, copy_state(optimizer))
    expect.same(train(other, others, 3, first=3), train(optimizer, params, 3, first=3), "three steps after resuming")


def test_loading_keeps_dtypes(s: TorchSubject) -> None:
    """Loading keeps the dtype of every tensor of the state: torch's base class casts to the parameter's."""
    params, optimizer = s.begin(torch.bfloat16)
    before = copy_state(optimizer)
    _, other = restore(s, params, copy.deepcopy(before))
    after = tensors_of(other)
    for path, leaf in leaves(before["state"]):
        if isinstance(leaf, torch.Tensor) and after[path].dtype != leaf.dtype:
            pytest.fail(f"{path} was {leaf.dtype} and is {after[path].dtype} after loading")


def test_loading_twice(s: TorchSubject) -> None:
    """A state dict can be loaded again after the optimizer that took it has stepped: it is not shared."""
    params, optimizer = s.begin()
    state = copy_state(optimizer)
    before = copy.deepcopy(state)
    others, other = restore(s, params, state)
    train(other, others, 2, first=3)
    expect.same(state["state"], before["state"], "the state dict that was loaded, two steps later")


def test_loading_replaces(s: TorchSubject) -> None:
    """Loading into an optimizer that has stepped leaves nothing of its own state behind."""
    params, optimizer = s.begin()
    others = s.weights()
    other = s.make(others)
    train(other, others, 5, first=20)
    other.load_state_dict(copy_state(optimizer))
    with torch.no_grad():
        for p, q in zip(others, params, strict=True):
            p.copy_(q)
    expect.same(train(other, others, 2, first=3), train(optimizer, params, 2, first=3), "an optimizer that had stepped")


def test_loading_before_the_first_step(s: TorchSubject) -> None:
    """The state of an optimizer that has not stepped can be saved and loaded."""
    params = s.weights()
    others, other = restore(s, params, copy_state(s.make(params)))
    expect.usual(s, train(other, others, 2), 2, "after loading a fresh state")


def test_loading_unstepped_parameters(s: TorchSubject) -> None:
    """A parameter that had no gradient before saving begins after loading as one that is new."""
    s.require_not("couples_parameters")
    params, optimizer = s.make_fresh()
    train(optimizer, params, 2, without=[0])
    others, other = restore(s, params, through_a_file(optimizer.state_dict(), weights_only=False))
    expect.same(train(other, others, 2, first=2), train(optimizer, params, 2, first=2), "two steps after resuming")


def test_options_come_back(s: TorchSubject) -> None:
    """Options of groups are saved and restored: schedules continue where they were."""
    params, optimizer = s.begin()
    optimizer.param_groups[0]["lr"] = 0.123
    _, other = restore(s, params, copy_state(optimizer))
    if float(other.param_groups[0]["lr"]) != 0.123:
        pytest.fail(f"lr 0.123 came back as {other.param_groups[0]['lr']}")


def test_foreign_keys_come_back(s: TorchSubject) -> None:
    """Foreign keys of groups are saved and restored: schedulers keep initial_lr there."""
    params, optimizer = s.begin()
    optimizer.param_groups[0]["initial_lr"] = 0.25
    _, other = restore(s, params, copy_state(optimizer))
    if other.param_groups[0].get("initial_lr") != 0.25:
        pytest.fail("initial_lr is gone after loading")


def test_saving_changes_nothing(s: TorchSubject) -> None:
    """state_dict() in every step leaves the run as it is."""
    params, optimizer = s.make_fresh()
    for t in range(4):
        train(optimizer, params, 1, first=t)
        optimizer.state_dict()
    expect.usual(s, params, 4, "with state_dict() after every step")


def test_other_groups_refused(s: TorchSubject) -> None:
    """State for fewer parameters, more groups or groups of other sizes is refused, and nothing is changed by it."""
    params, others = s.weights(), s.weights()

    def in_two(params: list[torch.nn.Parameter], first: int) -> Any:
        return s.make([{"params": params[:first]}, {"params": params[first:]}])

    for optimizer, foreign in (
        (s.make(params), s.make(others[:-1])),
        (s.make(params), in_two(others, 1)),
        (in_two(params, 1), in_two(others, 2)),
    ):
        before = train(optimizer, params, 3)
        options = copy_state(optimizer)["param_groups"]
        expect.refused(
            partial(optimizer.load_state_dict, copy_state(foreign)), "state for others", (ValueError, KeyError)
        )
        expect.same(params, before, "parameters after a state that was refused")
        expect.same(copy_state(optimizer)["param_groups"], options, "groups after a state that was refused")
        train(optimizer, params, 1, first=3)


def test_other_shapes_refused(s: TorchSubject) -> None:
    """State of another shape is refused, by loading or by the next step: it must not be broadcast."""
    params, optimizer = s.make_fresh(shapes=[(6, 4)])
    others, foreign = s.make_fresh(shapes=[(6, 1)])
    train(foreign, others, 2)
    if all(leaf.numel() <= 1 for leaf in tensors_of(foreign).values()):
        pytest.skip("no tensor of the state has a shape")

    def load_and_step() -> None:
        optimizer.load_state_dict(copy_state(foreign))
        train(optimizer, params, 1)

    expect.refused(load_and_step, "state of another shape, then a step")


def test_loads_into_other_dtypes(s: TorchSubject) -> None:
    """A float32 run continues with parameters in bfloat16 or float64: models are converted between stages."""
    params, optimizer = s.begin()
    for dtype in (torch.float64, torch.bfloat16):
        others, other = restore(s, [p.detach().to(dtype) for p in params], copy_state(optimizer))
        reached = train(other, others, 1, first=3)
        if any(p.dtype != dtype or not p.isfinite().all() for p in reached):
            pytest.fail(f"a step in {dtype} with the state of a float32 run is not finite or has another dtype")


def test_state_dict_hooks(s: TorchSubject) -> None:
    """Hooks of state_dict() and load_state_dict() are called, and what they return is saved and loaded."""
    _, optimizer = s.begin()
    calls: list[str] = []

    def change_rate(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("before loading")
        return {**state, "param_groups": [{**group, "lr": 0.123} for group in state["param_groups"]]}

    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(change_rate)
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("after loading"))
    saved = copy.deepcopy(optimizer.state_dict())
    if saved.pop("extra", None) != 1:
        pytest.fail("what a hook after state_dict() returned is not what it returned")
    optimizer.load_state_dict(saved)
    if calls != ["before saving", "before loading", "after loading"]:
        pytest.fail(f"called were {', '.join(calls) or 'none'}")
    if float(optimizer.param_groups[0]["lr"]) != 0.123:
        pytest.fail("what a hook before load_state_dict() returned was not loaded")


def test_distributed_state_dict(s: TorchSubject) -> None:
    """torch.distributed.checkpoint's state dicts by name resume to the bit: FSDP checkpoints are made of them."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    first, second = module_of(s.weights()), module_of(s.weights())
    optimizer = s.make(first.parameters())
    train(optimizer, list(first.parameters()), 3)
    state = copy.deepcopy(get_optimizer_state_dict(first, optimizer))
    second.load_state_dict(first.state_dict())
    other = s.make(second.parameters())
    set_optimizer_state_dict(second, other, state)
    reached = train(other, list(second.parameters()), 2, first=3)
    expect.usual(s, reached, 5, "two steps after resuming by name")
