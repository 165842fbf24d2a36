"""What a rank really keeps and sends: steps of sharded parameters, measured."""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.plan.optimizers import USUAL  # noqa: E402
from thalweg.torch.sharding import collectives  # noqa: E402

#: Meshes by name: their sizes by number of ranks, and the axis that each of their dimensions divides (None: none).
LAYOUTS: dict[str, tuple[dict[int, tuple[int, ...]], tuple[int | None, ...]]] = {
    "fsdp2": ({2: (2,), 4: (4,)}, (0,)),
    "columns": ({2: (2,), 4: (4,)}, (1,)),
    "hsdp": ({4: (2, 2)}, (None, 0)),
    "copies": ({2: (2,), 4: (4,)}, (None,)),
    "fsdp over tp": ({4: (2, 2)}, (0, 1)),
    "twice": ({4: (2, 2)}, (0, 0)),
}


@dataclass(frozen=True)
class Case:
    """Steps of one optimizer on tensors of some shapes, in one layout."""

    optimizer: str
    options: dict[str, Any] = field(default_factory=dict)
    layout: str = "fsdp2"
    dtypes: tuple[str, ...] = ("float32",)
    engine: str = "auto"
    shapes: tuple[tuple[int, ...], ...] = ((7, 5), (9,), (130, 140), (1, 6), (3, 130, 140), (4, 3, 2, 5), (32, 32))

    def tensors(self) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes; dtypes take turns."""
        return [(shape, self.dtypes[i % len(self.dtypes)]) for i, shape in enumerate(self.shapes)]


@dataclass(frozen=True)
class Sent:
    """One collective of a step, as one rank sees it."""

    name: str
    #: The mesh dimension it goes over; -1: several.
    dimension: int
    #: What this rank hands over to be summed, or to others.
    payload: int
    #: What it is given by others; of sums nothing is known.
    received: int = 0


@dataclass(frozen=True)
class Measured:
    """What a rank kept, factors that it owns included, and what it handed over in its second step and its third."""

    parameter_bytes: int
    state_bytes: int
    sent: tuple[tuple[Sent, ...], ...]


def placements(case: Case, ndim: int) -> list[Any]:
    """Axes that a tensor does not have are not divided."""
    axes = LAYOUTS[case.layout][1]
    return [Replicate() if axis is None or axis >= ndim else Shard(axis) for axis in axes]


class Listener(TorchDispatchMode):
    """Counts collectives below the functions that are wrapped, so that none goes unnoticed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.count += 1
        return func(*args, **(kwargs or {}))


@functools.cache
def mesh_of(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes)


def measure(case: Case) -> Measured:
    """Three steps; the first makes the state. Every rank has to call it."""
    mesh = mesh_of(*LAYOUTS[case.layout][0][dist.get_world_size()])
    return measure_steps(case.optimizer, distribute(case, mesh), mesh, **options_of(case))


def options_of(case: Case) -> dict[str, Any]:
    return {"engine": case.engine, **USUAL.get(case.optimizer, {}), **case.options}


def distribute(case: Case, mesh: Any) -> list[tuple[str, Any]]:
    """Parameters with gradients."""
    random = torch.Generator().manual_seed(0)
    named = []
    for i, (shape, dtype) in enumerate(case.tensors()):
        p, g = (torch.empty(shape).normal_(generator=random).to(getattr(torch, dtype)) for _ in range(2))
        p = torch.nn.Parameter(distribute_tensor(p, mesh, placements(case, len(shape))))
        p.grad = distribute_tensor(g, mesh, placements(case, len(shape)))
        named.append((f"p{i}", p))
    return named


def measure_parallel(rule: str, options: dict[str, Any]) -> Measured:
    """The same for a block that torch divides by tensor parallelism, and FSDP2 then."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = torch.nn.Sequential(OrderedDict((name, make()) for name, make in BLOCK.items()))
    columns, rows = ColwiseParallel(), RowwiseParallel()
    how = {"embed_tokens": rows, "q_proj": columns, "o_proj": rows, "up_proj": columns, "down_proj": rows}
    parallelize_module(model, mesh["tp"], how)
    fully_shard(model, mesh=mesh["fsdp"])
    named = list(model.named_parameters())
    for _, p in named:
        p.grad = p.detach().clone()
    return measure_steps(rule, named, mesh, engine="foreach", **options)


#: Modules whose sizes not all divide evenly.
BLOCK = {
    "embed_tokens": lambda: torch.nn.Embedding(21, 10),
    "q_proj": lambda: torch.nn.Linear(10, 14),
    "o_proj": lambda: torch.nn.Linear(14, 10),
    "norm": lambda: torch.nn.LayerNorm(10),
    "up_proj": lambda: torch.nn.Linear(10, 130, bias=False),
    "down_proj": lambda: torch.nn.Linear(130, 10, bias=False),
}


def measure_steps(rule: str, named: Any, mesh: Any, **options: Any) -> Measured:
    rate = {} if rule == "Adafactor" else {"lr": 1e-3}
    optimizer = getattr(thalweg.torch, rule)(named, **rate, **options)
    optimizer.step()
    steps = tuple(listened(optimizer.step, mesh) for _ in range(2))
    entries = [entry for state in optimizer.state.values() for entry in state.values()]
    owned = [factors for team in optimizer._engines["lists"].owners.teams.values() for factors in team.whole.values()]
    entries += [factor for factors in owned for factor in factors.values()]
    return Measured(sum(bytes_of(p) for _, p in named), sum(map(bytes_of, entries)), steps)


def bytes_of(tensor: Any) -> int:
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(held.numel() * held.element_size())


def listened(step: Any, mesh: Any) -> tuple[Sent, ...]:
    """The collectives of a step."""
    heard: list[Sent] = []
    groups = {id(mesh.get_group(dimension)): dimension for dimension in range(mesh.ndim)}
    originals = dist.all_reduce, collectives.all_to_all

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
        heard.append(Sent("all_reduce", groups.get(id(group), -1), tensor.numel() * tensor.element_size()))
        return originals[0](tensor, op, group=group, **options)

    def all_to_all(received: Any, given: Any, incoming: Any, outgoing: Any, group: Any) -> Any:
        rank = dist.get_rank(group)
        payload, came = (
            (flat.numel() - splits[rank]) * flat.element_size()
            for flat, splits in ((given, outgoing), (received, incoming))
        )
        heard.append(Sent("all_to_all", groups.get(id(group), -1), payload, came))
        return originals[1](received, given, incoming, outgoing, group)

    dist.all_reduce, collectives.all_to_all = all_reduce, all_to_all
    try:
        with Listener() as listener:
            step()
    finally:
        dist.all_reduce, collectives.all_to_all = originals
    assert listener.count == len(heard), f"{listener.count} collectives, and {len(heard)} of them known"
    return tuple(heard)
