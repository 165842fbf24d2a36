"""How the parameters of one small model are laid out over ranks."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

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


#: Beside those, for tests that name them.
MORE: Mapping[str, tuple[int, ...]] = {"experts": (5, 4, 6)}


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
    """Plain tensors, copies and shards beside each other."""
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


#: By number of ranks.
LAYOUTS: Mapping[int, Mapping[str, Place]] = {
    2: {
        "plain": plain,
        "copies": along(None),
        "first axis": along(0),
        "second axis": along(1),
        "third axis": along(2),
        "last axis": along(-1),
        "mixed": mixed,
    },
    4: {
        "first axis": along(0),
        "last axis": along(-1),
        "mixed": mixed,
        "two axes": along(0, 1),
        "two axes reversed": along(1, 0),
        "first axis twice": along(0, 0),
        "last axis twice": along(-1, -1),
        "strided": strided,
        "copies of shards": along(None, 0),
        "shards of copies": along(1, None),
        "copies of copies": along(None, None),
        "meshes": meshes,
    },
}


#: Of any other number of ranks.
MANY: Mapping[str, Place] = {"first axis": along(0), "two axes": along(0, 1), "copies of shards": along(None, 0)}


def layout(name: str) -> Place:
    """A layout of as many ranks as there are, or one drawn by a seed: "by chance 17"."""
    if name == "plain":
        return plain
    return by_chance(int(name.split()[-1])) if name.startswith("by chance") else LAYOUTS.get(ranks(), MANY)[name]


def gradient(kind: str, x: Any, p: Any) -> Any:
    """The gradient of a placed parameter, itself laid out in one of several ways."""
    if not isinstance(p, DTensor):
        return x.to(p.device, copy=True)
    if kind == "alike":
        return placed(x, p.device_mesh, p.placements)
    if kind == "copies":
        return placed(x, p.device_mesh, [Replicate()] * p.device_mesh.ndim)
    if kind == "elsewhere":
        return placed(x, p.device_mesh, [Shard(x.ndim - 1) if x.ndim else Replicate()] * p.device_mesh.ndim)
    assert (
        kind == "partial"
    )  # sums are due over every dimension of the mesh: one rank has too much, the others too little
    shares = p.device_mesh.size()
    first = p.device_mesh.get_rank() == int(p.device_mesh.mesh.flatten()[0])
    return DTensor.from_local(
        x * shares if first else -x, p.device_mesh, [Partial()] * p.device_mesh.ndim, run_check=False
    )


def whole(x: Any) -> Any:
    """A tensor with the parts of all ranks."""
    return x.full_tensor() if isinstance(x, DTensor) else x
