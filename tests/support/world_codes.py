"""Training with messages of eight bits, beside the same with wider ones."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from sharded_costs import listened  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402
from world_layouts import whole  # noqa: E402

import thalweg.torch  # noqa: E402


def network(seed: int) -> Any:
    """Two layers whose teacher has the same shapes, and inputs."""
    random = torch.Generator().manual_seed(seed)
    weights = [torch.randn(48, 32, generator=random) / 32**0.5, torch.randn(24, 48, generator=random) / 48**0.5]
    teacher = [torch.randn(w.shape, generator=random) / w.shape[1] ** 0.5 for w in weights]
    return weights, teacher, random


def loss_of(first: Any, second: Any, teacher: Any, x: Any) -> Any:
    wanted = torch.tanh(x @ teacher[0].T) @ teacher[1].T
    return (torch.tanh(x @ first.T) @ second.T - wanted).square().mean()


def trained(rule: str, message_dtype: str | None, layout: str, steps: int, seed: int) -> list[float]:
    """The losses of a run, on inputs that it has not seen, every tenth of the steps."""
    weights, teacher, random = network(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if layout == "shards":
        params = [torch.nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])) for w in weights]
    else:
        params = [torch.nn.Parameter(w) for w in weights]
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    how: dict[str, Any] = dict(replicas=dist.group.WORLD, divide_work=True, message_dtype=message_dtype)
    rate = 0.02 if rule == "Muon" else 0.005
    optimizer = getattr(thalweg.torch, rule)(named, lr=rate, **how)
    test, losses = torch.randn(256, 32, generator=random), []
    for step in range(steps):
        x = torch.randn(64, 32, generator=random)
        own = [whole(p.detach()).requires_grad_() for p in params]
        for p, g in zip(params, torch.autograd.grad(loss_of(*own, teacher, x), own), strict=True):
            p.grad = distribute_tensor(g, mesh, [Shard(0)]) if layout == "shards" else g
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)
        optimizer.step()
        if (step + 1) % max(1, steps // 10) == 0:
            losses.append(float(loss_of(*(whole(p.detach()) for p in params), teacher, test)))
    return losses


def bytes_sent(rule: str, message_dtype: str | None, shape: tuple[int, int], count: int) -> tuple[int, int]:
    """What this rank sends in a second step, and the elements of the model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    named = []
    for i in range(count):
        p = torch.nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)]))
        p.grad = distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
        named.append((f"w{i}", p))
    optimizer = getattr(thalweg.torch, rule)(named, lr=0.01, message_dtype=message_dtype)
    optimizer.step()
    sent = listened(optimizer.step, mesh)
    return sum(each.payload for each in sent), count * shape[0] * shape[1]
