"""How the parameters of one small model are laid out over ranks, and its gradients with them."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

Place: TypeAlias = Callable[[str, Any], Any]

#: Axes that divide by the number of ranks and such that do not, some shorter than there are ranks.
SHAPES: Mapping[str, tuple[int, ...]] = {
    "scalar": (),
    "one": (1,),
    "short": (3,),
    "vector": (9,),
    "row": (1, 6),
    "column": (6, 1),
    "matrix": (7, 5),
    "even": (4, 8),
    "cube": (4, 3, 6),
    "kernel": (4, 3, 2, 5),
    "large": (130, 140),
}
#: Beside those, for tests that name them: of the last three, two may be kept in codes, whose rows no two ranks share.
MORE: Mapping[str, tuple[int, ...]] = {
    "experts": (5, 4, 6),
    "coded": (66, 256),
    "coded kernel": (70, 128, 3, 3),
    "bias": (66,),
    "cut": (64, 192),
    "uncut": (64, 128),
}


def drawn(name: str, seed: int, dtype: str) -> Any:
    """Numbers that depend on the name and the seed alone."""
    generator = torch.Generator().manual_seed(seed * 1000 + sum(name.encode()))
    return torch.randn({**SHAPES, **MORE}[name], generator=generator, dtype=torch.float64).to(getattr(torch, dtype))


#: Where the parts of parameters are, of those that are divided.
home = ["cpu"]


def mesh(*sizes: int) -> Any:
    return mesh_of(home[0], *sizes)


@functools.cache
def mesh_of(device: str, *sizes: int) -> Any:
    return init_device_mesh(device, sizes, mesh_dim_names=("outer", "inner")[: len(sizes)])


def ranks() -> int:
    return int(torch.distributed.get_world_size())


def plain(name: str, x: Any) -> Any:
    """As in one process."""
    return x.to(home[0], copy=True)


def placed(x: Any, over: Any, placements: Sequence[Any]) -> Any:
    return distribute_tensor(x, over, list(placements), src_data_rank=None)


def divided(x: Any, over: Any, *axes: int | None) -> Any:
    """An axis for each dimension of a mesh, counted round for tensors that have fewer; None is a copy on each rank."""
    return placed(x, over, [Replicate() if axis is None or not x.ndim else Shard(axis % x.ndim) for axis in axes])


def along(*axes: int | None) -> Place:
    """All parameters over one mesh of as many dimensions."""

    def place(name: str, x: Any) -> Any:
        sizes = (ranks(),) if len(axes) == 1 else (2, ranks() // 2)
        return divided(x, mesh(*sizes), *axes)

    return place


def strided(name: str, x: Any) -> Any:
    """As tensor parallelism and then FSDP2 divide the first axis: the inner dimension of the mesh comes first."""
    if not x.ndim:
        return divided(x, mesh(2, 2), None, None)
    return placed(x, mesh(2, 2), [_StridedShard(0, split_factor=2), Shard(0)])


def mixed(name: str, x: Any) -> Any:
    """Plain tensors, copies and shards beside each other, as tensor parallelism has them."""
    kind = list(SHAPES).index(name) % 4
    if kind == 0 and x.ndim:
        return x.clone()
    return divided(x, mesh(ranks()), None if kind == 1 else kind)


def meshes(name: str, x: Any) -> Any:
    """Parameters of one model over five meshes, and some over none."""
    both = mesh(2, 2)
    ways = (
        lambda: divided(x, mesh(4), 0),
        lambda: divided(x, both, 0, 1),
        lambda: divided(x, both["outer"], 0),
        lambda: divided(x, both["inner"], 1),
        lambda: x.clone(),
        lambda: divided(x, both, 1, None),
        lambda: divided(x, mesh(4), None),
    )
    return ways[list(SHAPES).index(name) % len(ways)]()  # type: ignore[no-untyped-call]


def odd_memory(name: str, x: Any) -> Any:
    """Divided by rows, and on every rank but the first laid out by columns."""
    p = divided(x, mesh(ranks()), 0) if x.ndim else x.clone()
    if p.ndim != 2 or torch.distributed.get_rank() == 0:
        return p
    held = p.to_local().t().contiguous().t()
    return DTensor.from_local(held, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())


def by_chance(seed: int) -> Place:
    """Every parameter over a mesh and along axes that are drawn, or over none."""

    def place(name: str, x: Any) -> Any:
        draw = random.Random(f"{seed} {name}")
        axes = [None, *range(x.ndim)]
        kind = draw.choice(("plain", "line", "line", "grid", "grid", "grid", "outer", "inner"))
        if kind == "plain":
            return x.clone()
        if kind == "line":
            return divided(x, mesh(4), draw.choice(axes))
        if kind == "grid":
            return divided(x, mesh(2, 2), draw.choice(axes), draw.choice(axes))
        return divided(x, mesh(2, 2)[kind], draw.choice(axes))

    return place


#: For any number of ranks; those of two axes and more for four.
LAYOUTS: Mapping[str, Place] = {
    "plain": plain,
    "copies": along(None),
    "first axis": along(0),
    "second axis": along(1),
    "third axis": along(2),
    "last axis": along(-1),
    "mixed": mixed,
    "odd memory": odd_memory,
    "two axes": along(0, 1),
    "strided": strided,
    "copies of shards": along(None, 0),
    "meshes": meshes,
}


def layout(name: str) -> Place:
    """A layout by its name, or one drawn by a seed: "by chance 17". Under a wrapper, parameters begin as plain ones."""
    if name in WRAPPERS:
        return plain
    return by_chance(int(name.split()[-1])) if name.startswith("by chance") else LAYOUTS[name]


def fully_sharded(net: Any, *sizes: int, offloaded: bool = False) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    policy = dict(offload_policy=CPUOffloadPolicy(pin_memory=False)) if offloaded else {}
    return fully_shard(net, mesh=mesh(*(sizes or (ranks(),))), **policy)


#: torch's own wrappers, under which gradients come from a backward pass.
WRAPPERS: Mapping[str, Callable[[Any], Any]] = {
    "DDP": torch.nn.parallel.DistributedDataParallel,
    "FSDP2": fully_sharded,
    "FSDP2, offloaded": functools.partial(fully_sharded, offloaded=True),
    "HSDP": lambda net: fully_sharded(net, 2, 2),
}


@contextmanager
def quiet() -> Iterator[None]:
    """What torch says of its own wrappers is not ours to judge."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\b.*")
        yield


def gradient(kind: str, x: Any, p: Any) -> Any:
    """The gradient of a placed parameter, itself laid out in one of several ways."""
    if not isinstance(p, DTensor):
        return x.to(p.device, copy=True)
    over = p.device_mesh
    if kind == "partial":  # sums are due over every dimension of the mesh
        return DTensor.from_local(x * share_of_this_rank(over), over, [Partial()] * over.ndim, run_check=False)
    elsewhere = Shard(x.ndim - 1) if x.ndim else Replicate()
    kinds = {"alike": p.placements, "copies": [Replicate()] * over.ndim, "elsewhere": [elsewhere] * over.ndim}
    return placed(x, over, kinds[kind])


def share_of_this_rank(over: Any) -> int:
    """One rank has too much, the next one too little, others nothing: sums of some are exact, in whatever order."""
    place = over.mesh.flatten().tolist().index(torch.distributed.get_rank())
    return 1 if over.size() == 1 else (2, -1, *[0] * over.size())[place]


def whole(x: Any) -> Any:
    """A tensor with the parts of all ranks."""
    return x.full_tensor() if isinstance(x, DTensor) else x
