"""How the state of a sharded parameter is laid out over ranks: like the parameter, and factors by rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.arrays import Shape, State
from thalweg.codecs import grouping, scale_key
from thalweg.errors import ParameterError
from thalweg.rules import Rule
from thalweg.rules.entries import Factor, Spread
from thalweg.settings import Numerics
from thalweg.spaces import foreach
from thalweg.spaces import torch as xp
from thalweg.spaces.foreach import TensorList
from thalweg.spaces.sharded import Part, Sharded
from thalweg.storage import arithmetic, coded_groups, coded_keys, encoded, first_record, storage
from thalweg.torch.private import local_block, make_dtensor
from thalweg.torch.sharding.shards import place_like


def place_state(state: Mapping[str, TensorList], p: Tensor, rule: Rule) -> dict[str, Tensor]:
    """State as DTensors laid out like its parameter; scales along the axes that rows of groups leave."""
    shape, groups = tuple(p.shape), grouping(tuple(p.shape), rule.stacked_axes)
    scales = [scale_key(key) for key in coded_keys(foreach, dict(state))]
    placed = {}
    for key, entry in state.items():
        if key in scales and groups is not None:
            mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
            placed[key] = make_dtensor(entry.tensors[0], mesh, placements, groups.scales(shape))
        else:
            placed[key] = place_like(entry.tensors[0], p, getattr(entry, "axes", ()))
    return placed


def check_groups(name: str, p: Tensor, rule: Rule, numerics: Numerics) -> None:
    """Refuse a parameter that is sharded within a group: scales are of positions in the whole tensor."""
    shape = tuple(p.shape)
    groups = coded_groups(rule, numerics, shape)
    if groups is None:
        return
    mesh, sizes = p.device_mesh, list(shape)  # type: ignore[attr-defined]
    for dimension, placement in enumerate(p.placements):  # type: ignore[attr-defined]
        if (axis := getattr(placement, "dim", None)) is not None:
            sizes[axis] = -(-sizes[axis] // mesh.size(dimension))
    row = math.prod(sizes[groups.axis :])
    if sizes[groups.axis + 1 :] != list(shape[groups.axis + 1 :]) or row % groups.size:
        raise ParameterError(
            f"parameter {name!r} of shape {shape} is sharded with {p.placements}, which cuts the groups of "  # type: ignore[attr-defined]
            f"{groups.size} neighbours that share a scale in eight bits: shard it along its first axis, or keep its "
            f"state in more bits with overrides=[({name!r}, dict(state_dtype='bfloat16', momentum_dtype=None))]"
        )


# ---- factors, of which each rank keeps some rows


@dataclass(frozen=True)
class Block:
    """The place of a shard in the whole: its shape, and where it begins."""

    shape: Shape
    offset: Shape

    @functools.cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @functools.cached_property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.shape, strict=True))

    def cut(self, whole: Tensor) -> Tensor:
        """The shard of a whole tensor, sharing its memory."""
        return whole[self.slices]


def placements_of_factors(part: Part) -> tuple[Any, list[Any]]:
    """Shard factors by rows, over the same mesh dimensions as their parameter."""
    from torch.distributed.tensor import Replicate, Shard

    groups = part.across(None)
    mesh, dimensions = groups[0].mesh, {group.dimension for group in groups}
    return mesh, [Shard(0) if dimension in dimensions else Replicate() for dimension in range(mesh.ndim)]


def block_of_factor(shape: Shape, part: Part) -> Block:
    """This rank's rows of a factor; all of them if the parameter is whole."""
    if not part.across(None):
        return Block(shape, (0,) * len(shape))
    held, offset = local_block(shape, *placements_of_factors(part))
    return Block(tuple(held), tuple(offset))


def factor_shapes(rule: Rule, shape: Shape) -> dict[str, Shape]:
    """The shapes of a parameter's factors as wholes."""
    entries = rule.entries(shape).items()
    return {key: entry.shape(shape, rule.stacked_axes) for key, entry in entries if isinstance(entry, Factor)}


def make_owned_state(p: Tensor, held: Tensor, part: Part, rule: Rule, numerics: Numerics) -> State[Tensor]:
    """The state of a distributed parameter before its first step: momentum like itself, and rows of every factor."""
    # a whole tensor that takes no memory: factors follow its shape, dtype and device alone
    like = torch.zeros((), dtype=getattr(torch, arithmetic(xp.dtype(held))), device=held.device).expand(p.shape)
    state: State[Tensor] = {}
    space, held_list = Sharded([part]), TensorList([held])
    for key, entry in rule.entries(tuple(p.shape)).items():
        if isinstance(entry, Spread):
            first = entry.first(space, space.astype(held_list, arithmetic(xp.dtype(held))), rule.stacked_axes)
            state.update(place_state(encoded(space, rule, numerics, held_list, {key: first}), p, rule))
            continue
        value = xp.astype(entry.first(xp, like, rule.stacked_axes), storage(entry, xp.dtype(held), numerics))
        state[key] = divide_factor(value, part) if isinstance(entry, Factor) and any(part.groups) else value
    return {**state, **place_state(first_record(space, numerics, held_list), p, rule)}


def divide_factor(factor: Tensor, part: Part) -> Tensor:
    """A whole factor as a DTensor, of which each rank keeps its rows."""
    rows = block_of_factor(tuple(factor.shape), part).cut(factor).clone()
    return make_dtensor(rows, *placements_of_factors(part), factor.shape)
