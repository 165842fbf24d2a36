"""State of sharded parameters, numbers and codes: laid out over ranks so that no group of codes is cut."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from thalweg.codecs import grouping, scale_key
from thalweg.errors import ParameterError
from thalweg.rules import Rule
from thalweg.settings import Handling
from thalweg.spaces import foreach
from thalweg.spaces.foreach import TensorList
from thalweg.storage import coded_groups, coded_keys
from thalweg.torch.sharding.shards import distributed, placed_like


def placed(state: Mapping[str, TensorList], p: Tensor, rule: Rule) -> dict[str, Tensor]:
    """State as DTensors laid out like its parameter; scales along the axes that rows of groups leave."""
    shape, groups = tuple(p.shape), grouping(tuple(p.shape), rule.stacked_axes)
    scales = [scale_key(key) for key in coded_keys(foreach, dict(state))]
    found = {}
    for key, entry in state.items():
        if key in scales and groups is not None:
            mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
            found[key] = distributed(entry.tensors[0], mesh, placements, groups.scales(shape))
        else:
            found[key] = placed_like(entry.tensors[0], p, getattr(entry, "axes", ()))
    return found


def check_groups(name: str, p: Tensor, rule: Rule, handling: Handling) -> None:
    """Refuse a parameter that is sharded within a group: scales are of positions in the whole tensor."""
    shape = tuple(p.shape)
    groups = coded_groups(rule, handling, shape)
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
