"""The memory that fused kernels for GPUs need. Which parameters they step, they say in ``kernels.triton.served``.

They work in place. What they need are tables of where everything is and sums on their way, and for Kron's products room
for operands and results; all of it is kept from step to step. That there is Triton where steps are taken is assumed.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from thalweg.arrays import Shape
from thalweg.plan.items import Entry, Item, state_entries
from thalweg.rules import Kron
from thalweg.rules.entries import Factor
from thalweg.settings import Setting

#: CUDA's memory is given out in multiples of this.
BLOCK = 512
#: Elements of tensors that are laid out together, about: tables of larger models would fill memory here.
MOST_AT_ONCE = 2**29
#: Elements that torch's norms of a list of tensors add up in one piece.
NORMED = 2**16
#: Where kernels cannot be asked, what they keep is taken to be one in so many bytes of the parameters in float32. For
#: Kron: so many times a parameter and its factors, of one shape as many together as this memory holds.
SHARE, KRON_SHARE, KRON_TOGETHER = 1 / 200, 2.5, 256 * 2**20


class Shown(NamedTuple):
    """A parameter, or what a rank holds of it, as kernels are shown it."""

    shape: Shape
    dtype: str
    state: Mapping[str, Entry]
    #: Of the whole parameter, if it is sharded.
    whole: Shape | None = None


def shown(item: Item) -> Shown:
    return Shown(item.tensor.shape, item.tensor.dtype, state_entries(item.setting, item.tensor))


#: Parameters that kernels step together, and what holds for them.
Bucket = tuple[Setting, Sequence[Shown]]


def scratch_bytes(buckets: Sequence[Bucket]) -> int:
    """What kernels keep from step to step: they say so themselves where torch and Triton are installed."""
    if not buckets:
        return 0
    if any(importlib.util.find_spec(name) is None for name in ("torch", "triton")):
        return estimated(buckets)
    from thalweg.torch.engines import triton_memory as scratch

    return scratch.scratch_bytes(
        [
            (replace(setting, rule=setting.rule_at(1)), some)
            for setting, bucket in buckets
            for some in laid_out_together(setting, bucket)
        ]
    )


def estimated(buckets: Sequence[Bucket]) -> int:
    """The same without asking."""
    total, shared = 0.0, 0.0
    for setting, bucket in buckets:
        if isinstance(setting.rule, Kron):
            needed = KRON_SHARE * bytes_of_products(setting, bucket[0])
            shared = max(shared, needed * min(len(bucket), max(1, KRON_TOGETHER // needed)))
        else:
            total += SHARE * 4 * sum(math.prod(one.shape) for one in bucket)
    return round(total + shared)


def bytes_of_products(setting: Setting, one: Shown) -> int:
    """In float32, of a parameter and its factors."""
    factors = setting.rule_at(1).keys(one.shape, Factor)
    return 4 * (math.prod(one.shape) + sum(math.prod(one.state[key][0]) for key in factors))


def laid_out_together(setting: Setting, bucket: Sequence[Shown]) -> Iterator[Sequence[Shown]]:
    """Pieces of about equal size, each of whole tensors. Kron's tables are small."""
    *starts, total = itertools.accumulate((math.prod(one.shape) for one in bucket), initial=0)
    pieces = 1 if isinstance(setting.rule, Kron) else max(1, -(-total // MOST_AT_ONCE))
    # tensors without elements at the end belong to the last piece
    numbers = [min(start * pieces // max(1, total), pieces - 1) for start in starts]
    for _, some in itertools.groupby(zip(numbers, bucket, strict=True), lambda pair: pair[0]):
        yield [one for _, one in some]


def joint_bytes(buckets: Sequence[Sequence[Item]]) -> int:
    """What it takes to know the joint norm of all gradients before a step, list after list; 0 if no option needs it."""
    handlings = [bucket[0].setting.handling for bucket in buckets]
    if not any(handling.max_grad_norm is not None or handling.on_nonfinite == "skip" for handling in handlings):
        return 0
    # a number for each piece of each tensor, as if all had as many as the largest, and then one for each tensor
    pieces = [max(-(-item.tensor.elements // NORMED) for item in bucket) for bucket in buckets]
    return max(rounded_up(4 * len(b) * most) + BLOCK * len(b) for b, most in zip(buckets, pieces, strict=True))


def rounded_up(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
