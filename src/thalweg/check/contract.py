"""What code around ``torch.optim.Optimizer`` relies on."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import optimizer as hooks

from thalweg.check import expect
from thalweg.check.problem import TorchSubject, give, require_option, train, values


def test_is_an_optimizer(s: TorchSubject) -> None:
    """It derives from torch.optim.Optimizer, which trainers, schedulers and profilers test for."""
    if not isinstance(made := s.make(s.weights()), torch.optim.Optimizer):
        pytest.fail(f"it is a {type(made).__name__}")


def test_step_moves_parameters(s: TorchSubject) -> None:
    """A step moves every parameter that has a gradient."""
    expect.moved(s.run_steps(steps=3), s.weights(), "after three steps")


def test_closure_loss(s: TorchSubject) -> None:
    """step(closure) evaluates the closure and returns its loss; without one the step is the same and returns None."""
    params, optimizer = s.make_fresh()
    give(params, 0)
    loss = optimizer.step(lambda: torch.tensor(7.0))
    if loss is None or float(loss) != 7.0:
        pytest.fail(f"the loss was 7 and step returned {loss}")
    expect.usual(s, params, 1, "after step(closure)")
    give(params, 1)
    if (loss := optimizer.step()) is not None:
        pytest.fail(f"without a closure step returned {loss}")


def test_closure_with_gradients(s: TorchSubject) -> None:
    """A closure can call backward(), also where step is called under no_grad()."""
    params = s.weights()
    optimizer, seen = s.make(params), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        seen.append(torch.is_grad_enabled())
        loss = torch.stack([(p * p).sum() for p in params]).sum()
        if seen[-1]:
            loss.backward()
        return loss.detach()

    with torch.no_grad():
        for _ in range(2):  # the first may do no more than to prepare, as that of SOAP
            optimizer.step(closure)
    if seen != [True] * len(seen) or not seen:
        pytest.fail("gradients are off within the closure" if seen else "the closure was not called")
    expect.moved(params, s.weights(), "after step(closure)")


def test_groups_have_their_own_lr(s: TorchSubject) -> None:
    """Each group's lr holds for its parameters alone: layers are trained at different rates."""
    params = s.weights()
    optimizer = s.make([{"params": params[:1]}, {"params": params[1:]}])
    rate = optimizer.param_groups[0]["lr"] or 1e-2
    optimizer.param_groups[0]["lr"] = 8 * rate
    fast = train(optimizer, params, 2)
    plain = s.run_steps(steps=2)
    expect.same(fast[1:], plain[1:], "the lr of another group was changed")
    expect.changed(fast[:1], plain[:1], "lr of the first group times 8")


def test_lr_is_read_in_each_step(s: TorchSubject) -> None:
    """A change of group["lr"] between steps holds from the next step on: schedulers do just that."""
    params, optimizer = s.begin()
    for group in optimizer.param_groups:
        group["lr"] = 8 * (group["lr"] or 1e-2)
    changed = train(optimizer, params, 1, first=3)
    expect.changed(changed, s.run_steps(steps=4), "lr times 8 after three steps")


def test_options_are_read_in_each_step(s: TorchSubject) -> None:
    """A change of an option of a group, such as weight_decay, holds from the next step on."""
    params, optimizer = s.make_fresh()
    require_option(optimizer, "weight_decay")
    train(optimizer, params, 1)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.5
    changed = train(optimizer, params, 1, first=1)
    expect.changed(changed, s.run_steps(steps=2), "weight_decay 0.5 after a step")


def test_defaults_fill_groups(s: TorchSubject) -> None:
    """Every group has every option: schedulers and loggers read them there."""
    params = s.weights()
    optimizer = s.make([{"params": params[:1]}, {"params": params[1:], "lr": 0.5}])
    for place, group in enumerate(optimizer.param_groups):
        if missing := [key for key in optimizer.defaults if key not in group]:
            pytest.fail(f"group {place} lacks {', '.join(missing)}")
    if float(optimizer.param_groups[1]["lr"]) != 0.5:
        pytest.fail(f"a group with lr 0.5 has lr {optimizer.param_groups[1]['lr']}")


def test_options_stay_as_given(s: TorchSubject) -> None:
    """A step does not overwrite options of groups, which belong to the user and to schedulers."""
    params, optimizer = s.make_fresh()
    keys = [key for key in optimizer.defaults if key != "step"]
    before = {key: copy.deepcopy(optimizer.param_groups[0][key]) for key in keys}
    train(optimizer, params, 3)
    for key in keys:
        is_plain = isinstance(before[key], (bool, int, float, str, tuple))
        if is_plain and optimizer.param_groups[0][key] != before[key]:
            pytest.fail(f"{key} was {before[key]} and is {optimizer.param_groups[0][key]} after three steps")


def test_foreign_keys(s: TorchSubject) -> None:
    """Keys that others put into groups, such as initial_lr, are kept and change nothing."""
    params = s.weights()
    optimizer = s.make([{"params": params, "foreign_key": "kept"}])
    optimizer.param_groups[0]["initial_lr"] = 123.0
    expect.usual(s, train(optimizer, params, 3), 3, "with foreign keys in the group")
    if optimizer.param_groups[0].get("foreign_key") != "kept":
        pytest.fail("the foreign key is gone")


def test_added_group_is_stepped(s: TorchSubject) -> None:
    """Parameters of add_param_group are stepped from then on: layers are unfrozen in the middle of a run."""
    params = s.weights()
    optimizer = s.make(params[:1])
    train(optimizer, params[:1], 2)
    optimizer.add_param_group({"params": params[1:]})
    train(optimizer, params, 2, first=2)
    expect.moved(params, s.weights(), "after add_param_group")


def test_names_are_kept(s: TorchSubject) -> None:
    """named_parameters() can be given, and names are saved with the groups: checkpoints go by them."""
    params = s.weights()
    optimizer = s.make([(f"layer.{place}", p) for place, p in enumerate(params)])
    places: dict[str, int] = {}
    for group, saved in zip(optimizer.param_groups, optimizer.state_dict()["param_groups"], strict=True):
        places |= dict(zip(saved.get("param_names") or (), map(id, group["params"]), strict=False))
    if places != {f"layer.{place}": id(p) for place, p in enumerate(params)}:
        pytest.fail(f"param_names of the state dict are {', '.join(places) or 'missing'}, or in another order")
    # Not to the bit: noise of an optimizer's own may follow names.
    expect.usual(s, train(optimizer, params, 2), 2, "with names", 1e-4)


def test_parameters_from_an_iterator(s: TorchSubject) -> None:
    """model.parameters() is an iterator that can be read once; all of it is stepped."""
    params = s.weights()
    expect.usual(s, train(s.make(iter(params)), params, 1), 1, "from an iterator")


def test_groups_from_iterators(s: TorchSubject) -> None:
    """Parameters may come as a tuple, or as groups that are iterators themselves, with names or without."""
    ways: dict[str, Callable[[list[Parameter]], Any]] = {
        "a tuple": tuple,
        "a group with an iterator": lambda params: [{"params": iter(params)}],
        "an iterator of groups": lambda params: iter([{"params": tuple(params)}]),
    }
    for name, way in ways.items():
        params = s.weights()
        expect.usual(s, train(s.make(way(params)), params, 1), 1, f"from {name}")
    params = s.weights()
    optimizer = s.make([{"params": [(f"layer.{place}", p) for place, p in enumerate(params)]}])
    expect.usual(s, train(optimizer, params, 2), 2, "from a group with names", 1e-4)


def test_prints_nothing(s: TorchSubject) -> None:
    """Nothing is printed: what a program prints is its own."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        s.begin()
    if printed.getvalue():
        pytest.fail(f"printed was {printed.getvalue().splitlines()[0][:80]!r}")


def test_zero_grad(s: TorchSubject) -> None:
    """zero_grad() drops gradients, and zero_grad(set_to_none=False) makes them zero."""
    params, optimizer = s.begin(steps=1)
    give(params, 1)
    optimizer.zero_grad(set_to_none=False)
    if any(p.grad is None or p.grad.any() for p in params):
        pytest.fail("set_to_none=False leaves a gradient that is not zero")
    optimizer.zero_grad()
    if any(p.grad is not None for p in params):
        pytest.fail("a gradient is still there")


def test_gradients_untouched(s: TorchSubject) -> None:
    """Gradients are read, never written: logging and accumulation read them after the step."""
    params, optimizer = s.make_fresh()
    for t in range(3):
        give(params, t)
        before = values([p.grad for p in params if p.grad is not None])
        optimizer.step()
        if any(p.grad is None for p in params):
            pytest.fail("a gradient is gone after the step")
        expect.same([p.grad for p in params if p.grad is not None], before, f"gradients after step {t + 1}")


def test_no_gradient_no_step(s: TorchSubject) -> None:
    """A parameter without a gradient stays as it is: it took no part in the loss."""
    params, optimizer = s.make_fresh()
    train(optimizer, params, 3, without=[0])
    expect.same(params[:1], s.weights()[:1], "a parameter without a gradient")
    expect.moved(params[1:], s.weights()[1:], "beside one without a gradient")


def test_step_hooks(s: TorchSubject) -> None:
    """Hooks before and after a step, its own and those of all optimizers, are each called once until removed."""
    params = s.weights()
    optimizer, calls = s.make(params), []
    handles = [
        hooks.register_optimizer_step_pre_hook(lambda *_: calls.append("before all")),
        optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
        optimizer.register_step_post_hook(lambda *_: calls.append("after")),
        hooks.register_optimizer_step_post_hook(lambda *_: calls.append("after all")),
    ]
    try:
        train(optimizer, params, 2)
    finally:
        for handle in handles:
            handle.remove()
    train(optimizer, params, 1, first=2)
    if calls != ["before all", "before", "after", "after all"] * 2:
        pytest.fail(f"in two steps, and one after their removal, hooks were called: {', '.join(calls) or 'never'}")


def test_pickling(s: TorchSubject) -> None:
    """A pickle of parameters and optimizer continues as they do: whole trainers are pickled."""
    params, optimizer = s.begin()
    others, other = pickle.loads(pickle.dumps((params, optimizer)))
    expect.same(train(other, others, 2, first=3), train(optimizer, params, 2, first=3), "two steps after unpickling")


def test_deep_copies(s: TorchSubject) -> None:
    """A deep copy continues as the original does, and neither changes the other."""
    params, optimizer = s.begin()
    before = values(params)
    others, other = copy.deepcopy((params, optimizer))
    copied = train(other, others, 2, first=3)
    expect.same(params, before, "the original after steps of its copy")
    expect.same(train(optimizer, params, 2, first=3), copied, "the original beside its copy")


def test_instances_are_apart(s: TorchSubject) -> None:
    """Two optimizers share nothing: GANs, ensembles and tests have several in one process."""
    params, others = s.weights(), s.weights()
    optimizer, other = s.make(params), s.make(others, lr=0.5)
    for t in range(3):
        train(other, others, 1, first=t + 50)
        train(optimizer, params, 1, first=t)
    expect.usual(s, params, 3, "beside another instance")


def test_state_by_parameter(s: TorchSubject) -> None:
    """State is kept under parameters: distributed checkpoints take nothing else."""
    params, optimizer = s.begin()
    if strangers := [key for key in optimizer.state if not any(key is p for p in params)]:
        pytest.fail(f"state has an entry for {strangers[0]!r}"[:120])


def test_autograd_sees_the_write(s: TorchSubject) -> None:
    """A step counts as a write: backward() through values from before it raises instead of using the new ones."""
    params, optimizer = s.make_fresh()
    give(params, 0)
    loss = (params[0] * params[0]).sum()
    optimizer.step()
    expect.refused(loss.backward, "backward() through a parameter that a step has written since", (RuntimeError,))


def test_parameters_stay_leaves(s: TorchSubject) -> None:
    """Parameters require gradients and have no history after a step, and neither has the state."""
    params, optimizer = s.begin()
    if any(not p.is_leaf or not p.requires_grad for p in params):
        pytest.fail("a parameter is no leaf any more, or requires no gradient")
    for leaf in (entry for state in optimizer.state.values() for entry in state.values()):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            pytest.fail("a tensor of the state requires gradients")


def test_replaced_data(s: TorchSubject) -> None:
    """After p.data = other, as module.to() does, the step writes what the module now has."""
    params, optimizer = s.begin()
    for p in params:
        p.data = p.data.clone()
    expect.usual(s, train(optimizer, params, 1, first=3), 4, "after p.data was replaced")


def test_replaced_parameters(s: TorchSubject) -> None:
    """Groups are the truth about what is stepped: FSDP and quantization put other parameters there."""
    params, optimizer = s.make_fresh()
    others = [Parameter(p.detach().clone()) for p in params]
    instead = dict(zip(params, others, strict=True))
    for group in optimizer.param_groups:
        group["params"] = [instead[p] for p in group["params"]]
    reached = train(optimizer, others, 2)
    expect.usual(s, reached, 2, "parameters that were put into the group")
    expect.same(params, s.weights(), "parameters that were taken out of the group")
