"""What kernels for GPUs keep between steps, told without a GPU: they are laid out over tensors without memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.kernels.chunks import FACTORS_CHUNK, WHOLE_CHUNK, extent
from thalweg.kernels.triton.served import steps_by_hand
from thalweg.programs.footprint import middle_peak
from thalweg.rules import WholeRule
from thalweg.rules.entries import PerSlice
from thalweg.settings import Setting
from thalweg.spaces.sharded import Part
from thalweg.storage import Kept
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.engines.replay import NUMBERS
from thalweg.torch.engines.squares import Squares
from thalweg.torch.engines.triton import passes_for


class Ghost(NamedTuple):
    """A parameter without memory, or the part of it that a rank holds."""

    shape: Shape
    dtype: str
    state: tuple[tuple[str, Kept], ...]
    #: Of the whole parameter, if this is a part.
    whole: Shape | None = None


def scratch_bytes(buckets: Sequence[tuple[Setting, Sequence[Ghost]]]) -> int:
    """What kernels keep on a GPU for buckets of parameters, each with what holds for it."""
    from thalweg.kernels.triton.uploads import in_blocks

    total, stacks, batches = 0, 0, []
    # addresses of gradients, and rates, of all that is not sharded are one table
    moving, is_sharded = 0, any(ghost.whole is not None for _, ghosts in buckets for ghost in ghosts)
    for setting, ghosts in buckets:
        rule: Any = setting.stored_rule
        first = ghosts[0]
        if steps_by_hand(setting, first.shape, first.dtype, dict(first.state)):
            from thalweg.kernels.triton.kron_batch import Batch

            names, params, states = made_of(ghosts)
            batches.append(Batch(names, params, states, params[0].dtype, rule, setting.handling.seed))
            moving += len(names) + NUMBERS
        elif isinstance(rule, WholeRule):
            shape, most = first.shape, FACTORS_CHUNK if rule.has_factors else WHOLE_CHUNK
            kept = [entry for entry in rule.entries(shape).values() if isinstance(entry, PerSlice)]
            copied = [math.prod(entry.shape(shape, rule.stacked_axes)) for entry in kept]
            count = min(len(ghosts), max(1, most // extent(math.prod(shape), copied)))
            stacks = max(stacks, count * (4 * sum(copied) + middle_peak(rule, shape, "float32", widens=False)))
        else:
            total += kept_by_passes(setting, tuple(ghosts))
            if not is_sharded:
                rows = sum(math.prod(ghost.shape[: rule.stacked_axes]) for ghost in ghosts)
                total -= in_blocks(8 * rows)
                moving += rows + 1
    handlings = [setting.handling for setting, _ in buckets]
    if not is_sharded and any(handling.needs_norm or handling.may_skip for handling in handlings):
        names, params, _ = made_of([ghost for _, ghosts in buckets for ghost in ghosts])
        total += Squares(params).kept_bytes
        moving += len(names)
    if batches:
        from thalweg.kernels.triton import kron

        total += kron.scratch_bytes(batches)
    return total + stacks + (0 if is_sharded else in_blocks(8 * moving))


@functools.lru_cache(maxsize=1024)
def kept_by_passes(setting: Setting, ghosts: tuple[Ghost, ...]) -> int:
    names, params, states = made_of(ghosts)
    parts = [Part(g.whole, (0,) * len(g.whole), ((),) * len(g.whole)) for g in ghosts if g.whole is not None]
    bucket = Bucket(names, params, params, states, setting, None, None, parts=parts)
    kept: int = passes_for(bucket).uploads.kept_bytes
    return kept


def made_of(ghosts: Sequence[Ghost]) -> tuple[list[str], list[Tensor], list[dict[str, Tensor]]]:
    """Names, parameters and states of tensors without memory."""
    params = [empty(ghost.shape, ghost.dtype) for ghost in ghosts]
    states = [{"step": empty(()), **{key: empty(*entry) for key, entry in ghost.state}} for ghost in ghosts]
    return [str(i) for i in range(len(ghosts))], params, states


def empty(shape: Shape, dtype: str = "float32") -> Tensor:
    return torch.empty(shape, dtype=cast(torch.dtype, getattr(torch, dtype)), device="meta")
