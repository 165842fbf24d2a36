"""What is used beside optimizers: schedulers, mixed precision, the compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler, swa_utils

from thalweg.check import expect
from thalweg.check.problem import TorchSubject, give, train, unless_refused, values
from thalweg.show.modules import describe_error

#: The step whose gradients overflow.
OVERFLOW = 9


def rate_of(optimizer: Any) -> float:
    """Its lr; not offered where there is none."""
    rate = optimizer.param_groups[0].get("lr")
    if rate is None:
        pytest.skip("lr is None")
    return float(rate)


#: Schedulers of torch, each made for an optimizer.
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1.0 / (1 + t)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, 3),
}
#: Those that change momentum or betas too, where there are any.
CYCLES: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8, cycle_momentum=has_momentum(o)),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=has_momentum(o)),
}
#: Options that schedulers change.
SCHEDULED = ("lr", "momentum", "betas")


def has_momentum(optimizer: Any) -> bool:
    return any(key in optimizer.defaults for key in ("momentum", "betas"))


def follow_schedule(s: TorchSubject, name: str, schedule: Callable[[Any], Any]) -> None:
    """Fail unless a scheduler steps as setting the options that it sets by hand does."""
    (params, scheduled), (others, by_hand) = (s.make_fresh(shapes=[(6, 4), (5, 6)]) for _ in range(2))
    rate_of(by_hand)
    try:
        scheduler = schedule(scheduled)
    except Exception as error:
        pytest.fail(f"{name} cannot be made for it: {describe_error(error)}")
    rates = set()
    for t in range(5):
        for group, other in zip(scheduled.param_groups, by_hand.param_groups, strict=True):
            other.update({key: group[key] for key in SCHEDULED if key in group})
        rates.add(rate_of(scheduled))
        train(scheduled, params, 1, first=t)
        train(by_hand, others, 1, first=t)
        scheduler.step(*([float(t)] if name == "ReduceLROnPlateau" else []))
    expect.same(params, others, f"with {name}")
    if len(rates) == 1:
        pytest.fail(f"{name} changes nothing")
    expect.finite(params, f"with {name}")


def test_schedulers(s: TorchSubject) -> None:
    """Schedulers of torch step as setting lr by hand does, and lr has an effect."""
    for name, schedule in SCHEDULERS.items():
        follow_schedule(s, name, schedule)
    params, optimizer = s.make_fresh()
    halving = lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 / (1 + t))
    for t in range(3):
        train(optimizer, params, 1, first=t)
        halving.step()
    expect.changed(params, s.run_steps(steps=3), "LambdaLR")


def test_schedulers_with_lr_as_a_tensor(s: TorchSubject) -> None:
    """Where lr may be a tensor, a scheduler changes its value, and it stays a tensor: compiled steps rely on that."""
    params = s.weights()
    rate = rate_of(s.make(params))
    with unless_refused("lr as a tensor"):
        optimizer = s.make(params, lr=torch.tensor(rate, dtype=torch.float64))
        train(optimizer, params, 1)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedule.step()
    halved = optimizer.param_groups[0]["lr"]
    if not isinstance(halved, Tensor) or float(halved) != rate / 2:
        pytest.fail(f"lr was a tensor of {rate} and is {halved} after it was halved")
    others = s.weights()
    plain = s.make(others, lr=rate)
    train(plain, others, 1)
    for group in plain.param_groups:
        group["lr"] = rate / 2
    expect.close(train(optimizer, params, 1, first=1), train(plain, others, 1, first=1), s.weights(), "lr halved", 1e-4)


def test_schedulers_resume(s: TorchSubject) -> None:
    """A scheduler and its optimizer are saved and resumed together."""
    runs = []
    for stop in (False, True):
        params = s.weights()
        optimizer = s.make(params)
        rate_of(optimizer)
        schedule = lr_scheduler.StepLR(optimizer, 2, 0.5)
        for t in range(6):
            if stop and t == 3:
                saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
                params = [Parameter(p.detach().clone()) for p in params]
                optimizer = s.make(params)
                schedule = lr_scheduler.StepLR(optimizer, 2, 0.5)
                optimizer.load_state_dict(saved[0])
                schedule.load_state_dict(saved[1])
            train(optimizer, params, 1, first=t)
            schedule.step()
        runs.append(values(params))
    expect.same(runs[1], runs[0], "resumed with StepLR")


def test_one_cycle(s: TorchSubject) -> None:
    """OneCycleLR and CyclicLR, which change momentum or betas too where there are any, step as doing so by hand."""
    for name, schedule in CYCLES.items():
        follow_schedule(s, name, schedule)


def test_grad_scaler(s: TorchSubject) -> None:
    """GradScaler's unscaled steps are those without it; a step that overflows writes nothing and does not count."""
    params, optimizer = s.make_fresh()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for t in (0, 1, OVERFLOW, 2):
        before = values(params)
        give(params, t)
        for p in params:
            assert p.grad is not None
            p.grad *= scaler.get_scale()
            if t == OVERFLOW:
                p.grad.fill_(float("inf"))
        scaler.scale(torch.tensor(0.0))
        scaler.step(optimizer)
        scaler.update()
        if t == OVERFLOW:
            expect.same(params, before, "after gradients that overflowed")
    expect.usual(s, params, 3, "through GradScaler", 1e-5)


def test_autocast_ignored(s: TorchSubject) -> None:
    """A step within autocast is the same as outside: its arithmetic is not lowered."""
    params, optimizer = s.make_fresh()
    with torch.autocast("cpu", torch.bfloat16):
        reached = train(optimizer, params, 3)
    expect.usual(s, reached, 3, "within autocast")


def test_deterministic_algorithms(s: TorchSubject) -> None:
    """Steps run under torch.use_deterministic_algorithms(True)."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        s.run_steps(steps=2)
    finally:
        torch.use_deterministic_algorithms(before)


def test_in_backward(s: TorchSubject) -> None:
    """An optimizer for each parameter, stepped by hooks within backward(), steps as one for all does."""
    s.require_not("couples_parameters")
    (params, optimizer), others = s.make_fresh(), s.weights()
    by_parameter = {p: s.make([p]) for p in others}

    def step_one(p: Any) -> None:
        by_parameter[p].step()
        by_parameter[p].zero_grad()

    for p in others:
        p.register_post_accumulate_grad_hook(step_one)
    for _ in range(3):
        for model in (params, others):
            torch.stack([(p * p).sum() for p in model]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    expect.close(others, params, s.weights(), "stepped within backward()", 1e-5)


def test_compiles(s: TorchSubject) -> None:
    """torch.compile of the step, without its code generation, gives the same steps."""
    params, others = s.weights(), s.weights()
    optimizer, plain = s.make(params), s.make(others)
    compiled = torch.compile(optimizer.step, backend="eager")
    torch.compiler.set_stance("default", force_backend="eager")  # also what it compiles itself
    for t in range(3):
        give(params, t)
        compiled()
        train(plain, others, 1, first=t)
    expect.close(params, others, s.weights(), "compiled", 1e-4)
