"""Train a small transformer on text with tensor parallelism: matrices by columns and then by rows, heads by ranks.

With more ranks than --parallel, FSDP2 shards the rest over the other ranks, on a mesh of two dimensions.
Usage: torchrun --nproc-per-node 4 examples/tensor_parallel.py --optimizer LAMB --parallel 2
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from fsdp2 import HEADS, Transformer, batch, begin, loss_of, parsed, tell, text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import thalweg.torch


def main() -> None:
    given = parsed(__doc__, parallel=dict(type=int, help="ranks that share a matrix (default: all)"))
    device, letters, ranks = begin(), text(), dist.get_world_size()
    parallel = given.parallel or ranks
    if ranks % parallel or HEADS % parallel:
        sys.exit(f"--parallel must divide {ranks} ranks and {HEADS} heads, got {parallel}")
    mesh = init_device_mesh(device, (ranks // parallel, parallel), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = Transformer().to(device)
    for layer in model.layers:
        plan = {
            "qkv": ColwiseParallel(),
            "out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(layer, mesh["tensor"], plan)
        if mesh["data"].size() > 1:
            fully_shard(layer, mesh=mesh["data"])
    if mesh["data"].size() > 1:
        fully_shard(model, mesh=mesh["data"])
    # one optimizer steps plain tensors, which every rank holds whole, and sharded ones
    optimizer = getattr(thalweg.torch, given.optimizer)(model.named_parameters(), given.lr)
    for step in range(given.steps):
        optimizer.lr = given.lr * (1 - step / given.steps)
        loss = loss_of(model, batch(letters, step, mesh["data"].get_local_rank(), mesh["data"].size()).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in (1, given.steps) or (step + 1) % 50 == 0:
            tell(step + 1, loss.detach())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
