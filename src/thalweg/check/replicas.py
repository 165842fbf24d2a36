"""Replicas: every rank has the whole model, as under DDP, and nothing may drive them apart."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from thalweg.check import expect
from thalweg.check.problem import TorchSubject, give, tensors_of, train
from thalweg.check.sharded import assert_same_on_all_ranks, assert_trains_as_one_process, model_for
from thalweg.check.state import restore


def test_replicas_stay_together(s: TorchSubject) -> None:
    """Replicas whose ranks have different seeds, as under DDP, stay equal to the bit."""
    params, optimizer = s.make_fresh()
    torch.manual_seed(dist.get_rank())
    reached = train(optimizer, params, 5)
    assert_same_on_all_ranks({f"parameter {place}": p for place, p in enumerate(reached)}, "after five steps")


def test_replicas_have_the_same_state(s: TorchSubject) -> None:
    """The state is the same on every rank: one of them saves it for all."""
    params, optimizer = s.make_fresh()
    torch.manual_seed(dist.get_rank())
    train(optimizer, params, 5)
    assert_same_on_all_ranks(tensors_of(optimizer), "after five steps")


def test_replicas_resume(s: TorchSubject) -> None:
    """A state that the first rank saved and every rank loads continues the run to the bit."""
    params, optimizer = s.begin()
    box = [copy.deepcopy(optimizer.state_dict()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    others, other = restore(s, params, box[0])
    torch.manual_seed(dist.get_rank())
    expect.usual(s, train(other, others, 3, first=3), 6, "three steps after resuming")


def test_replicas_send_nothing(s: TorchSubject) -> None:
    """Replicas are stepped without messages: their gradients are already the same on every rank."""
    if s.facts.collectives is not None:
        pytest.skip("messages are declared")
    params, optimizer = s.begin(steps=1)
    give(params, 1)
    with CommDebugMode() as seen:
        optimizer.step()
    if number := seen.get_total_counts():
        pytest.fail(f"{number} collectives in a step of plain tensors")


def test_ddp_equals_one_process(s: TorchSubject) -> None:
    """Under DDP, with a share of the batch each, ranks step as one process with the whole batch does."""
    assert_trains_as_one_process(s, DistributedDataParallel(model_for(s)), "under DDP", share=True)


def test_ddp_with_bucket_views(s: TorchSubject) -> None:
    """Under DDP with gradients that are views of its buckets, which are filled again, steps are the same."""
    model = DistributedDataParallel(model_for(s), gradient_as_bucket_view=True)
    assert_trains_as_one_process(s, model, "under DDP", share=True)
