"""Small models under FSDP2 and tensor parallelism themselves, with forward and backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from thalweg.check.problem import WEIGHT, TorchSubject, assert_close, draw, values
from thalweg.check.registry import holds
from thalweg.check.sharded import grid, holds_for_shards, line, tolerance_for, whole_of

WIDTH = 6


def model_for(s: TorchSubject) -> nn.Sequential:
    """Two layers, the same on every rank; with biases where vectors are taken."""
    bias, hidden = not s.facts.needs_matrices, 2 * dist.get_world_size()  # which tensor parallelism must share evenly
    model = nn.Sequential(nn.Linear(WIDTH, hidden, bias=bias), nn.Tanh(), nn.Linear(hidden, 5, bias=bias))
    with torch.no_grad():
        for place, p in enumerate(model.parameters()):
            p.copy_(3 * WEIGHT * draw(p.shape, 0, place))
    return model


def batch(t: int) -> Tensor:
    """Rows for every rank, the same number for each."""
    return draw((4 * dist.get_world_size(), WIDTH), 3, t).float()


def assert_trains_as_one_process(s: TorchSubject, model: nn.Module, where: str, *, share: bool = False) -> None:
    """Fail unless a model over ranks and a whole one step alike. share: each rank gets its part of every batch."""
    whole = model_for(s)
    start = values(list(whole.parameters()))
    runs = []
    for each in (whole, model):
        optimizer = s.make(each.parameters())
        for t in range(4):
            given = batch(t)
            if share and each is model:
                given = given.chunk(dist.get_world_size())[dist.get_rank()]
            optimizer.zero_grad()
            each(given).square().mean().backward()
            optimizer.step()
        runs.append(whole_of(list(each.parameters())))
    assert_close(runs[1], runs[0], start, f"{where} and in one process", tolerance_for(s))


def in_parallel(model: nn.Module, columns: DeviceMesh) -> nn.Module:
    plan: dict[str, ParallelStyle] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, columns, plan)


@holds("shards")
def fsdp2(s: TorchSubject) -> None:
    """A model under fully_shard trains as in one process."""
    model = model_for(s)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=line())
    assert_trains_as_one_process(s, model, "under FSDP2")


@holds_for_shards("shards")
def tensor_parallel(s: TorchSubject) -> None:
    """A model whose layers are sharded by columns and by rows, as tensor parallelism does, trains as in one process."""
    assert_trains_as_one_process(s, in_parallel(model_for(s), line()), "under tensor parallelism")


@holds_for_shards("shards")
def fsdp2_and_tensor_parallel(s: TorchSubject) -> None:
    """A model under both, on a mesh of two dimensions, trains as in one process."""
    model = in_parallel(model_for(s), grid()["columns"])
    fully_shard(model, mesh=grid()["rows"])
    assert_trains_as_one_process(s, model, "under FSDP2 and tensor parallelism")
