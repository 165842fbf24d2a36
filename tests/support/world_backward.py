"""Stepping in the backward pass on several ranks: whose gradients are reduced before, and whose are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from world_layouts import torch
from world_training import WRAPPERS, compared, model, named, numbers, quiet, trained

import thalweg.torch
from thalweg.errors import ParameterError
from thalweg.torch import step_in_backward

nn = torch.nn


def furthest_in_backward(wrapper: str, rule: str, lr: float, pieces: int, options: Mapping[str, Any]) -> Any:
    """How far losses and parameters are from those of one process that steps after the backward pass."""
    make = getattr(thalweg.torch, rule)
    alone = model()
    wanted = trained(alone, make(named(alone), lr, engine="reference", **options))
    with quiet():
        net, shares, share = WRAPPERS[wrapper]()
        optimizer = make(named(net), lr, **options)
        with step_in_backward(net, optimizer):
            losses = numbers(trained(net, optimizer, shares, share, pieces))
        assert {int(optimizer.state[p]["step"]) for p in net.parameters()} == {3}, "not every backward pass stepped"
        return compared(net, losses, alone, numbers(wanted))


def backward(net: Any) -> None:
    """A backward pass whose gradient differs between ranks."""
    torch.manual_seed(torch.distributed.get_rank())
    net(torch.randn(2, 3)).square().sum().backward()


def linear() -> Any:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def optimizer_of(net: Any) -> Any:
    return thalweg.torch.LAMB(net.parameters(), 0.1)


def refusal(given: str) -> tuple[str, bool]:
    """What is said of a model under DistributedDataParallel, and whether its parameters are as they were."""
    inner = linear()
    before = [p.detach().clone() for p in inner.parameters()]
    said = ""
    try:
        with quiet():
            if given == "wrapped afterwards":
                step_in_backward(inner, optimizer_of(inner))
                backward(nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=True))
            else:
                wrapper = nn.parallel.DistributedDataParallel(inner)
                seen = {"wrapper": wrapper, "module": inner, "around": nn.Sequential(wrapper)}[given]
                step_in_backward(seen, optimizer_of(inner))
                backward(wrapper)
    except ParameterError as error:
        said = str(error)
    return said, all(torch.equal(p, old) for p, old in zip(inner.parameters(), before, strict=True))


def beside_other_wrappers() -> int:
    """Steps of a model beside wrappers of another model, of one rank alone, and of the past."""
    net, other = linear(), linear()
    with quiet():
        alone = torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)
        kept = [
            nn.parallel.DistributedDataParallel(other),
            nn.parallel.DistributedDataParallel(net, process_group=alone),
        ]
        past = nn.parallel.DistributedDataParallel(net)
        past.itself = [past]  # such that the collector alone ends it
        del past
    optimizer = optimizer_of(net)
    with step_in_backward(net, optimizer):
        backward(net)
    assert len(kept) == 2
    return int(optimizer.state[net.weight]["step"])
