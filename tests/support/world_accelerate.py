"""A small network trained through accelerate on every rank, and in one process."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thalweg.torch
from thalweg.torch.sharding.shards import is_distributed

OVERRIDES = [("*.bias", dict(trust=False, lr_scale=0.5))]
STEPS = 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(step: int) -> Any:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def optimizer_of(model: nn.Module) -> Any:
    return thalweg.torch.LAMB(model.named_parameters(), lr=0.1, averaged=0.5, overrides=OVERRIDES)


def alone() -> list[Any]:
    """What one process learns from whole batches: weights, and then averages."""
    model = network()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    learned = [p.detach().clone() for p in model.parameters()]
    optimizer.eval()
    return [*learned, *(p.detach() for p in model.parameters())]


def together(way: str, folder: str) -> tuple[bool, list[Any]]:
    """Whether parameters were sharded, and what ranks learn that evaluate, save and resume in the middle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of accelerate about the world it finds
        for place in (Path(folder) / "first", None):
            accelerator = accelerated(way)
            model = network()
            model, optimizer = accelerator.prepare(model, optimizer_of(model))
            steps = range(STEPS // 2)
            if place is None:
                optimizer.optimizer.make_state()  # or FSDP2's loader does not ask for the weights
                optimizer.eval()
                accelerator.load_state(str(Path(folder) / "first"))
                optimizer.train()
                steps = range(STEPS // 2, STEPS)
            for step in steps:
                optimizer.zero_grad()
                own = batch(step).chunk(accelerator.num_processes)[accelerator.process_index]
                accelerator.backward(model(own).square().mean())
                optimizer.step()
            if place is not None:
                optimizer.eval()
                accelerator.save_state(str(place))
                accelerator.wait_for_everyone()
        learned = whole_of(model)
        optimizer.eval()
        return any(map(is_distributed, model.parameters())), [*learned, *whole_of(model)]


def whole_of(model: nn.Module) -> list[Any]:
    return [(p.full_tensor() if is_distributed(p) else p).detach().clone() for p in model.parameters()]


def accelerated(way: str) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    rank, size = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="localhost", MASTER_PORT="0")
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    if way == "FSDP2":  # which accelerate offers for GPUs alone
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        accelerator.state.fsdp_plugin = plugin
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
    return accelerator
