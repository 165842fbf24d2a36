"""Sharded parameters: DTensors, and this rank's shards of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ParameterError
from thalweg.spaces.sharded import Part
from thalweg.storage import SPIKES
from thalweg.torch.private import local_block, make_dtensor


def is_distributed(p: Tensor) -> bool:
    """Whether a tensor is a DTensor; asked without loading torch.distributed."""
    return type(p).__name__ == "DTensor" or hasattr(p, "device_mesh")


def count_ranks() -> int:
    """How many processes train together; 1 where torch.distributed is not at work."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if together else 1


def local(p: Tensor) -> Tensor:
    """This rank's shard of a tensor, sharing its memory; a plain tensor as it is."""
    return p.to_local() if is_distributed(p) else p  # type: ignore[attr-defined]


def is_whole(p: Tensor) -> bool:
    """Whether every rank has all of a tensor."""
    return not is_distributed(p) or all(placement.is_replicate() for placement in p.placements)  # type: ignore[attr-defined]


class MeshGroup:
    """The ranks that differ from this one in one dimension of a mesh alone."""

    def __init__(self, mesh: Any, dimension: int) -> None:
        self.mesh, self.dimension = mesh, dimension

    @functools.cached_property
    def process_group(self) -> Any:
        return self.mesh.get_group(self.dimension)

    @property
    def device(self) -> str:
        """Where its messages have to be."""
        return str(self.mesh.device_type)

    @property
    def order(self) -> tuple[Any, ...]:
        """By which ranks sort their groups alike."""
        return self.mesh.ndim, tuple(self.mesh.shape), self.dimension, tuple(self.mesh.mesh_dim_names or ())

    # the same ranks are the same group, in whichever of several meshes they are met: then one message serves all
    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshGroup) and self.process_group is other.process_group

    def __hash__(self) -> int:
        return hash(self.process_group)


def part_of(name: str, p: Tensor) -> Part:
    """Which shard of a parameter this rank has; it may be empty or the whole."""
    shape = tuple(p.shape)
    if not is_distributed(p):
        return Part(shape, (0,) * len(shape), ((),) * len(shape))
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    groups: list[list[MeshGroup]] = [[] for _ in shape]
    for dimension, placement in enumerate(placements):
        if isinstance(placement, Replicate) or mesh.size(dimension) == 1:
            continue
        if not isinstance(placement, Shard) and not hasattr(placement, "split_factor"):
            raise ParameterError(f"parameter {name!r} has placement {placement}: it must be Shard or Replicate")
        groups[placement.dim % len(shape)].append(MeshGroup(mesh, dimension))
    held, offset = local_block(shape, mesh, placements)
    if tuple(held) != tuple(local(p).shape):
        actual = tuple(local(p).shape)
        raise ParameterError(
            f"parameter {name!r}: the local shard has shape {actual}, and by its placements it must have {tuple(held)}"
        )
    return Part(shape, tuple(offset), tuple(map(tuple, groups)))


def place_like(entry: Tensor, p: Tensor, reduced: Sequence[int]) -> Tensor:
    """A state entry as a DTensor: laid out like its parameter, and whole on every rank along axes it does not have."""
    if not is_distributed(p):
        return entry
    from torch.distributed.tensor import Replicate

    placements = [
        Replicate() if getattr(placement, "dim", None) in reduced else placement
        for placement in p.placements  # type: ignore[attr-defined]
    ]
    shape = torch.Size(1 if axis in reduced else size for axis, size in enumerate(p.shape))
    return make_dtensor(entry, p.device_mesh, placements, shape)  # type: ignore[attr-defined]


def meta_like(p: Tensor) -> Tensor:
    """A tensor without memory that is shaped, typed and laid out like another."""
    held = torch.empty(local(p).shape, dtype=p.dtype, device="meta")
    if not is_distributed(p):
        return held
    return make_dtensor(held, p.device_mesh, p.placements, p.shape)  # type: ignore[attr-defined]


def lay_out(entry: Tensor, like: Tensor) -> Tensor:
    """A tensor sharded like another of its shape, or whole if that one is. Every rank has to call it."""
    if not is_distributed(like):
        return whole(entry)
    from torch.distributed.tensor import Replicate

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    if is_distributed(entry) and entry.device_mesh != mesh:  # type: ignore[attr-defined]
        entry = entry.full_tensor()  # type: ignore[attr-defined]
    if not is_distributed(entry):
        entry = make_dtensor(entry, mesh, [Replicate()] * mesh.ndim, entry.shape)
    return entry.redistribute(mesh, placements)  # type: ignore[attr-defined, no-any-return]


def whole(x: Tensor) -> Tensor:
    """A tensor as a whole, on every rank; every rank has to call it."""
    if not is_distributed(x):
        return x
    mesh = x.device_mesh.device_type  # type: ignore[attr-defined]
    if x.device.type == mesh:
        return x.full_tensor()  # type: ignore[attr-defined, no-any-return]
    return x.to(mesh).full_tensor().to(x.device)  # type: ignore[attr-defined, no-any-return]


def local_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What engines see of a parameter's state."""
    return {key: local(entry) for key, entry in state.items() if key != SPIKES}
