"""Audits on ranks: what each says of a step under DDP, FSDP2 and tensor parallelism, and of a replica that is apart."""

from __future__ import annotations

from typing import Any

from world_layouts import quiet, torch

import thalweg.torch


def audited_on_ranks(layout: str, make: str, options: dict[str, Any], fault: str = "") -> list[str]:
    """The findings of an audit of the third step, and its text. fault: what is wrong on rank 1, or on all."""
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    width, differ = (
        (8, 0) if layout == "TP" else (5, rank)
    )  # which DTensor divides evenly; replicas have data of their own
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))
    with quiet():
        if layout == "DDP":
            model = torch.nn.parallel.DistributedDataParallel(model)
        elif layout == "FSDP2":
            from torch.distributed.fsdp import fully_shard
            from torch.distributed.tensor import init_device_mesh

            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        elif layout == "TP":
            from torch.distributed.tensor import init_device_mesh
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            mesh = init_device_mesh("cpu", (2,))
            model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        library, _, name = make.partition(".")
        optimizer = getattr(thalweg.torch if library == "thalweg" else torch.optim, name)(model.parameters(), **options)
        for t in range(3):
            optimizer.zero_grad()
            model(
                torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * t + differ))
            ).square().mean().backward()
            if t < 2:
                optimizer.step()
        if fault == "rate" and rank == 1:
            optimizer.param_groups[0]["lr"] *= 2
        with thalweg.torch.audit(optimizer, model) as audit:
            optimizer.step()
    return [*audit.findings, str(audit)]
