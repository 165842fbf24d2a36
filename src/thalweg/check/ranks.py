"""Replicas and shards: checks that every rank of a world runs, on DTensors as FSDP2 makes them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

from thalweg.check.problem import Shapes, close, fresh, give, shapes_for, stepped, train, values, weights
from thalweg.check.registry import Failed, holds
from thalweg.check.subject import Subject


def sharded(tensor: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def module_of(params: list[Parameter]) -> torch.nn.Module:
    found = torch.nn.Module()
    for place, p in enumerate(params):
        found.register_parameter(f"p{place}", p)
    return found


def train_sharded(optimizer: Any, params: list[Parameter], shapes: Shapes, steps: int) -> list[torch.Tensor]:
    """Steps with the gradients that one process would have; the whole parameters after them."""
    for t in range(steps):
        whole = weights(shapes)
        give(whole, t)
        for p, q in zip(params, whole, strict=True):
            assert q.grad is not None
            p.grad = sharded(q.grad) if isinstance(p, DTensor) else q.grad
        optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in values(params)]


def equals_one_process(s: Subject, shapes: Shapes, plain: int = 0) -> None:
    """Fail unless shards step as one process does, the first ones of them plain tensors; seeds differ by rank."""
    whole = weights(shapes)
    params = [p if place < plain else Parameter(sharded(p.detach())) for place, p in enumerate(whole)]
    optimizer = s.make(params)
    torch.manual_seed(dist.get_rank())
    found = train_sharded(optimizer, params, shapes, 3)
    close(found, stepped(s, shapes, 3), weights(shapes), "sharded and in one process", 1e-4)


@holds("ranks", "ranks")
def replicas_stay_together(s: Subject) -> None:
    """Replicas whose ranks have different seeds, as under DDP, stay equal to the bit."""
    params, optimizer = fresh(s)
    torch.manual_seed(dist.get_rank())
    for place, mine in enumerate(train(optimizer, params, 5)):
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        if apart := max(float((other - every[0]).abs().max()) for other in every):
            raise Failed(f"parameter {place} differs by {apart:.3g} between ranks after five steps")


@holds("ranks", "ranks")
def shards_equal_one_process(s: Subject) -> None:
    """Parameters sharded by rows, as FSDP2 does, step as in one process: norms and factors are of whole tensors."""
    equals_one_process(s, shapes_for(s))


@holds("ranks", "ranks")
def uneven_and_empty_shards(s: Subject) -> None:
    """Rows that the ranks cannot share evenly, or too few of them, step as in one process."""
    equals_one_process(s, [(5, 4), (1, 6)])


@holds("ranks", "ranks")
def mixed_with_plain_tensors(s: Subject) -> None:
    """Plain tensors beside sharded ones step as in one process: some layers are left whole."""
    equals_one_process(s, [(6, 4), (6, 4)], plain=1)


@holds("ranks", "ranks")
def checkpoint_at_another_world_size(s: Subject) -> None:
    """A state that is saved by all ranks and loaded by one continues the run as if it had never been sharded."""
    shapes = shapes_for(s)
    params = [Parameter(sharded(p.detach())) for p in weights(shapes)]
    optimizer = s.make(params)
    reached = train_sharded(optimizer, params, shapes, 3)
    saved = get_optimizer_state_dict(module_of(params), optimizer, options=StateDictOptions(full_state_dict=True))
    others = [Parameter(p.clone()) for p in reached]
    other = s.make(others)
    set_optimizer_state_dict(module_of(others), other, copy.deepcopy(saved), options=StateDictOptions())
    close(train(other, others, 2, first=3), stepped(s, steps=5), weights(s), "two steps after loading", 1e-4)
