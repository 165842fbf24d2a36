"""Sharded parameters whose state is on "the host", beside the same with state on their device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from simulated_lanes import simulated  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402
from world_layouts import mesh, placed  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.torch.step.turns import Turns  # noqa: E402

#: Rows that ranks do not share evenly, or that one of them alone has, and one that is whole on each.
SHAPES = {"matrix": (65, 64), "row": (1, 96), "other": (67, 64), "whole": (64, 64), "bias": (65,)}


def drawn(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ranks = mesh(torch.distributed.get_world_size())
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: x if name == "whole" else placed(x, ranks, [Shard(0)]) for name, x in found.items()}


def local(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x


def run(rule: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    params = {name: torch.nn.Parameter(x) for name, x in drawn(0).items()}
    optimizer = getattr(thalweg.torch, rule)(list(params.items()), lr=0.01, **options)
    optimizer._turns = Turns(6_000)
    for step in range(4):
        for name, g in drawn(100 + step).items():
            params[name].grad = g
        optimizer.step()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    found = {name: local(p.detach()) for name, p in params.items()}
    for name, p in params.items():
        found |= {f"{name}.{key}": local(entry) for key, entry in optimizer.state[p].items()}
    return found, optimizer


def offloaded_apart(rule: str, options: Mapping[str, Any]) -> tuple[list[str], int, str]:
    """What differs in any bit; the number of chunks, which every rank has to have; and what explain() says."""
    with simulated():
        expected, _ = run(rule, options)
        found, optimizer = run(rule, {**options, "offload_state": True})
        apart = [key for key in expected if not torch.equal(found[key], expected[key])]
        return apart, len(optimizer._turns.chunks), str(optimizer.explain())
