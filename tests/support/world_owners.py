"""Owners of whole tensors and replicas that divide their work: what they send, keep and do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from measured_peaks import allocator_peak  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: E402
from world_layouts import DTensor, plain  # noqa: E402
from world_layouts import layout as laid_out  # noqa: E402
from world_steps import Run, local, stepped  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.rules import RULES  # noqa: E402
from thalweg.torch.engines.lists import Lists  # noqa: E402
from thalweg.torch.sharding import collectives  # noqa: E402


def bits(run: Run, layout: str) -> dict[str, Any]:
    """By entry, which block of it this rank has and its numbers; and how much this rank transformed."""
    rule, elements = RULES[run.rule], [0]
    original = rule.transform

    def counted(self: Any, xp: Any, tensors: Any, *args: Any, **named: Any) -> Any:
        elements[0] += tensors[0].numel()
        return original(self, xp, tensors, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule, "transform", counted)
        got = stepped(run, laid_out(layout))
    entries = {(name, "p"): p for name, p in got.params.items()}
    entries |= {(name, key): entry for name, state in got.states.items() for key, entry in state.items()}
    held = {place: (block_of(entry), local(entry).tolist()) for place, entry in entries.items()}
    return {"held": held, "elements": elements[0]}


def block_of(x: Any) -> Any:
    """Which block of a tensor this rank has."""
    if not isinstance(x, DTensor):
        return tuple(x.shape)
    return compute_local_shape_and_global_offset(tuple(x.shape), x.device_mesh, x.placements)


def explained(run: Run, layout: str) -> str:
    if not run.interpreted:
        return str(stepped(run, laid_out(layout)).optimizer.explain())
    from interpreter import serving

    with serving():
        return str(stepped(run, laid_out(layout)).optimizer.explain())


def errors_without_a_gradient(run: Run) -> list[str]:
    """The errors of a run in which all ranks but the first have no gradient of the last parameter."""
    absent = {0: run.names[-1:]} if torch.distributed.get_rank() else {}
    return stepped(replace(run, absent=absent), plain).errors


def peak_of_a_step(slot: int, on_nonfinite: str = "propagate") -> tuple[int, int]:
    """Bytes that a step of Muon on plain matrices needs at its peak, and bytes of the parameters."""
    named = [(f"p{i}", torch.nn.Parameter(torch.ones(64, 64))) for i in range(64)]
    for _, p in named:
        p.grad = torch.ones_like(p)
    shared: Any = dict(replicas=torch.distributed.group.WORLD, divide_work=True, on_nonfinite=on_nonfinite)
    optimizer = thalweg.torch.Muon(named, lr=0.01, **shared)
    optimizer._engines["lists"] = Lists(slot=slot)
    return allocator_peak(optimizer.step, warm_up=2), sum(p.nbytes for _, p in named)


def dtypes_sent(run: Run, layout: str) -> list[str]:
    """Of all messages to owners and from them, on this rank."""
    sent, send = [], collectives.Exchange

    def watched(*pieces: Any, dtype: Any, **rest: Any) -> Any:
        sent.append(str(dtype))
        return send(*pieces, dtype=dtype, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "Exchange", watched)
        stepped(run, laid_out(layout))
    return sent


def bytes_in_exchanges(step: Callable[[], object]) -> int:
    """What this rank hands to others in a step."""
    sent, send = 0, collectives.all_to_all

    def all_to_all(received: Any, given: Any, incoming: Any, outgoing: Any, group: Any) -> Any:
        nonlocal sent
        sent += (given.numel() - outgoing[dist.get_rank(group)]) * given.element_size()
        return send(received, given, incoming, outgoing, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_to_all", all_to_all)
        step()
    return sent


def bytes_sent(rule: str, shape: tuple[int, int], count: int) -> tuple[int, int]:
    """What this rank sends in a second step, and the elements of the model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    named = []
    for i in range(count):
        p = torch.nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)]))
        p.grad = distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
        named.append((f"w{i}", p))
    optimizer = getattr(thalweg.torch, rule)(named, lr=0.01)
    optimizer.step()
    return bytes_in_exchanges(optimizer.step), count * shape[0] * shape[1]
