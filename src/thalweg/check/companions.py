"""What is used beside optimizers: schedulers, mixed precision, the compiler."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler

from thalweg.check.problem import close, fresh, give, same, stepped, train, values, weights
from thalweg.check.registry import Failed, NotOffered, holds
from thalweg.check.subject import Subject


def rate_of(optimizer: Any) -> float:
    """Its lr; not offered where there is none."""
    rate = optimizer.param_groups[0].get("lr")
    if rate is None:
        raise NotOffered("lr is None")
    return float(rate)


@holds("companions")
def schedulers(s: Subject) -> None:
    """A scheduler of torch steps as setting lr by hand does."""
    params, others = weights(s), weights(s)
    scheduled, by_hand = s.make(params), s.make(others)
    rate = rate_of(by_hand)
    schedule = lr_scheduler.LambdaLR(scheduled, lambda t: 1.0 / (1 + t))
    for t in range(4):
        by_hand.param_groups[0]["lr"] = rate / (1 + t)
        train(scheduled, params, 1, first=t)
        schedule.step()
        train(by_hand, others, 1, first=t)
    same(values(params), values(others), "with LambdaLR")
    if all(map(torch.equal, values(params), stepped(s, steps=4))):
        raise Failed("LambdaLR changes nothing")


@holds("companions")
def schedulers_resume(s: Subject) -> None:
    """A scheduler and its optimizer are saved and resumed together."""
    runs = []
    for stop in (False, True):
        params = weights(s)
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
    same(runs[1], runs[0], "resumed with StepLR")


@holds("companions")
def one_cycle(s: Subject) -> None:
    """OneCycleLR, which cycles momentum or betas too where there are any, drives it."""
    params, optimizer = fresh(s)
    rate_of(optimizer)
    cycles = any(key in optimizer.defaults for key in ("momentum", "betas"))
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6, cycle_momentum=cycles)
    for t in range(5):
        train(optimizer, params, 1, first=t)
        schedule.step()
    if not all(p.isfinite().all() for p in params):
        raise Failed("parameters are not finite after a cycle")


@holds("companions")
def grad_scaler(s: Subject) -> None:
    """GradScaler's unscaled steps are those without it, and after overflow nothing is written."""
    params, optimizer = fresh(s)
    before: list[Tensor] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for t in range(4):
        give(params, t)
        for p in params:
            assert p.grad is not None
            p.grad *= scaler.get_scale()
            if t == 3:
                p.grad.fill_(float("inf"))
        before = values(params)
        scaler.scale(torch.tensor(0.0))
        scaler.step(optimizer)
        scaler.update()
    same(values(params), before, "after gradients that overflowed")
    close(params, stepped(s, steps=3), weights(s), "through GradScaler", 1e-5)


@holds("companions")
def autocast_ignored(s: Subject) -> None:
    """A step within autocast is the same as outside: its arithmetic is not lowered."""
    params, optimizer = fresh(s)
    with torch.autocast("cpu", torch.bfloat16):
        found = train(optimizer, params, 3)
    same(found, stepped(s, steps=3), "within autocast")


@holds("companions")
def deterministic_algorithms(s: Subject) -> None:
    """Steps run under torch.use_deterministic_algorithms(True)."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        stepped(s, steps=2)
    finally:
        torch.use_deterministic_algorithms(before)


@holds("companions")
def in_backward(s: Subject) -> None:
    """An optimizer for each parameter, stepped by hooks within backward(), steps as one for all does."""
    s.refuses("couples_parameters", "steps depend on other parameters")
    runs = []
    for hooked in (False, True):
        params = weights(s)
        made = {p: s.make([p]) for p in params} if hooked else {}
        whole = None if hooked else s.make(params)

        def step_one(p: Any, made: dict[Parameter, Any] = made) -> None:
            made[p].step()
            made[p].zero_grad()

        for p in made:
            p.register_post_accumulate_grad_hook(step_one)
        for _ in range(3):
            torch.stack([(p * p).sum() for p in params]).sum().backward()
            if whole is not None:
                whole.step()
                whole.zero_grad()
        runs.append(values(params))
    close(runs[1], runs[0], weights(s), "stepped within backward()", 1e-5)


@holds("companions")
def compiles(s: Subject) -> None:
    """torch.compile of the step, without its code generation, gives the same steps."""
    params, others = weights(s), weights(s)
    optimizer, plain = s.make(params), s.make(others)
    compiled = torch.compile(optimizer.step, backend="eager")
    torch.compiler.set_stance("default", force_backend="eager")  # also what it compiles itself
    for t in range(3):
        give(params, t)
        compiled()
        train(plain, others, 1, first=t)
    close(params, values(others), weights(s), "compiled", 1e-4)
