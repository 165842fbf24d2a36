"""Replicas: every rank has the whole model, as under DDP, and nothing may drive them apart."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from thalweg.check.models import batch, model_for
from thalweg.check.problem import assert_close, assert_usual, begin, give, make_fresh, tensors_of, train, values
from thalweg.check.registry import Failed, NotOffered, holds
from thalweg.check.sharded import assert_same_on_all_ranks, tolerance_for
from thalweg.check.subject import Subject


@holds("replicas", "ranks")
def replicas_stay_together(s: Subject) -> None:
    """Replicas whose ranks have different seeds, as under DDP, stay equal to the bit."""
    params, optimizer = make_fresh(s)
    torch.manual_seed(dist.get_rank())
    found = train(optimizer, params, 5)
    assert_same_on_all_ranks({f"parameter {place}": p for place, p in enumerate(found)}, "after five steps")


@holds("replicas", "ranks")
def replicas_have_the_same_state(s: Subject) -> None:
    """The state is the same on every rank: one of them saves it for all."""
    params, optimizer = make_fresh(s)
    torch.manual_seed(dist.get_rank())
    train(optimizer, params, 5)
    assert_same_on_all_ranks(tensors_of(optimizer), "after five steps")


@holds("replicas", "ranks")
def replicas_resume(s: Subject) -> None:
    """A state that the first rank saved and every rank loads continues the run to the bit."""
    params, optimizer = begin(s)
    box = [copy.deepcopy(optimizer.state_dict()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    others = [torch.nn.Parameter(p) for p in values(params)]
    other = s.make(others)
    torch.manual_seed(dist.get_rank())
    other.load_state_dict(box[0])
    assert_usual(s, train(other, others, 3, first=3), 6, "three steps after resuming")


@holds("replicas", "ranks")
def replicas_send_nothing(s: Subject) -> None:
    """Replicas are stepped without messages: their gradients are already the same on every rank."""
    if s.facts.collectives is not None:
        raise NotOffered("messages are declared")
    params, optimizer = begin(s, steps=1)
    give(params, 1)
    with CommDebugMode() as seen:
        optimizer.step()
    if number := seen.get_total_counts():
        raise Failed(f"{number} collectives in a step of plain tensors")


def train_replicas(s: Subject, **how: Any) -> None:
    """Fail unless replicas with a share of the batch each step as one process with all of it does."""
    runs = []
    for share in (False, True):
        model = model_for(s)
        run = DistributedDataParallel(model, **how) if share else model
        optimizer = s.make(model.parameters())
        for t in range(4):
            given = batch(t)
            mine = given.chunk(dist.get_world_size())[dist.get_rank()] if share else given
            optimizer.zero_grad()
            run(mine).square().mean().backward()
            optimizer.step()
        runs.append(values(list(model.parameters())))
    assert_close(
        runs[1], runs[0], values(list(model_for(s).parameters())), "under DDP and in one process", tolerance_for(s)
    )


@holds("replicas", "ranks")
def ddp_equals_one_process(s: Subject) -> None:
    """Under DDP, with a share of the batch each, ranks step as one process with the whole batch does."""
    train_replicas(s)


@holds("replicas", "ranks")
def ddp_with_bucket_views(s: Subject) -> None:
    """Under DDP with gradients that are views of its buckets, which are filled again, steps are the same."""
    train_replicas(s, gradient_as_bucket_view=True)
