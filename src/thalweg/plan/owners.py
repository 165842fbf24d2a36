"""Kron on parameters that are divided: each has an owner, who works on it as a whole.

Gradients travel to the owners and what they made of them travels back. What is said here follows ``torch/team.py``.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from thalweg.arrays import Shape
from thalweg.boundary import arithmetic
from thalweg.plan.costs import shard
from thalweg.plan.items import Entry, Item, state_entries
from thalweg.plan.models import Tensor
from thalweg.plan.parts import OnParts, Part, nameless
from thalweg.plan.peaks import Held, listed, torch_peak
from thalweg.rules import Kron
from thalweg.rules.blocks import is_zero
from thalweg.settings import Setting
from thalweg.spaces.shape_arrays import BYTES, ORDER, Ledger


def owners(setting: Setting, tensors: Sequence[Tensor], world: int) -> tuple[int | None, ...]:
    """Who owns which: the dearest first, each to the rank that has least to do. None: it has no axes, all do it."""
    assert isinstance(setting.rule, Kron)
    dear = [cost(setting.rule, tensor.shape) for tensor in tensors]
    load = [0] * world
    found: list[int | None] = [None] * len(tensors)
    for index in sorted(range(len(tensors)), key=lambda i: (-dear[i], tensors[i].name)):
        if tensors[index].shape:
            found[index] = owner = min(range(world), key=load.__getitem__)
            load[owner] += dear[index]
    return tuple(found)


def cost(rule: Kron, shape: Shape) -> int:
    """In multiplications, about: products with every dense factor, and of the factors with one another."""
    sizes = rule.sizes(shape)
    dense = [n for n, diagonal in zip(sizes, rule.diagonals(sizes), strict=True) if not diagonal]
    return math.prod(shape) * (1 + sum(dense)) + sum(n**3 for n in dense)


def kept_entries(setting: Setting, part: Part, world: int, rank: int) -> dict[str, Entry]:
    """What a rank keeps of a parameter's state: momentum like the parameter, and rows of every factor."""
    if not part.whole.shape:
        return state_entries(setting, part.whole)
    kept = {}
    for key, (shape, dtype) in state_entries(setting, part.whole).items():
        if key.startswith("Q_"):
            shape = (shard(shape[0], world, rank), *shape[1:])
        kept[key] = part.held.shape if key == "momentum_buffer" else shape, dtype
    return kept


def whole_factors(setting: Setting, tensor: Tensor) -> int:
    """Bytes of the factors that an owner puts together, in the precision of the arithmetic."""
    return word([tensor]) * sum(counts(setting, tensor, "Q_").values())


def is_remembered(setting: Setting) -> bool:
    """Whether owners keep whole factors from step to step: not if a step may turn out not to be taken."""
    return setting.handling.on_nonfinite == "propagate"


def counts(setting: Setting, tensor: Tensor, prefix: str) -> dict[str, int]:
    entries = state_entries(setting, tensor)
    return {key: math.prod(shape) for key, (shape, _) in entries.items() if key.startswith(prefix)}


def word(tensors: Sequence[Tensor]) -> int:
    """Bytes of a number in a message: all of it is in the widest precision of its tensors."""
    return BYTES[max((arithmetic(tensor.dtype) for tensor in tensors), key=ORDER.index, default="float32")]


def shown(rule: Kron) -> int:
    """How many tensors of a parameter's size an owner has to see: an average to precondition, a gradient to learn."""
    averaged = rule.momentum_mode == "ema" and not is_zero(rule.momentum)
    return 2 if averaged and rule.whiten == "gradient" else 1


def exchanged_bytes(
    setting: Setting, parts: Sequence[Part], owned: Sequence[int | None], world: int, rank: int, *, refresh: bool
) -> int:
    """What a rank sends in the two messages of a step; a refresh sends every rank its rows of the factors."""
    assert isinstance(setting.rule, Kron)
    sent = 0
    for part, owner in zip(parts, owned, strict=True):
        if owner is None:
            continue
        rows = kept_entries(setting, part, world, rank)
        if owner != rank:
            sent += shown(setting.rule) * part.held.elements
            if not is_remembered(setting):
                sent += sum(math.prod(shape) for key, (shape, _) in rows.items() if key.startswith("Q_"))
            continue
        stack = math.prod(part.whole.shape[: setting.rule.stacked_axes])
        sent += part.whole.elements - part.held.elements + (world - 1) * stack  # and the mean of squares, by slice
        if refresh:
            factors = counts(setting, part.whole, "Q_")
            sent += sum(count - math.prod(rows[key][0]) for key, count in factors.items())
            sent += (world - 1) * sum(counts(setting, part.whole, "L_").values())
    return sent * word([part.whole for part, owner in zip(parts, owned, strict=True) if owner is not None])


# ---- memory during a step


def owner_peak(
    setting: Setting, parts: Sequence[Part], owned: Sequence[int | None], world: int, rank: int
) -> tuple[int, str]:
    """Bytes at the peak of a step that refreshes; a message is there twice while it is put together."""
    assert isinstance(setting.rule, Kron)
    size, seen = word([part.whole for part in parts]), shown(setting.rule)
    waiting, after = peaks_on_parts(setting, parts, world, rank)
    mine = [part.whole for part, owner in zip(parts, owned, strict=True) if owner == rank]
    given, whole = (size * sum(tensor.elements for tensor in some) for some in ([part.held for part in parts], mine))
    factors = sum(whole_factors(setting, tensor) for tensor in mine)
    rows = size * sum(
        math.prod(shape)
        for part in parts
        for key, (shape, _) in kept_entries(setting, part, world, rank).items()
        if key.startswith("Q_")
    )
    going, came = seen * given, seen * whole
    if not is_remembered(setting):
        going, came = going + rows, came + 2 * factors  # as they came, and as they became
    # one tensor after the other, from what came to what goes back
    working = came + whole + max((work_peak(setting, nameless(tensor)) for tensor in mine), default=0)
    returning = came + whole + 2 * (whole + factors) + given + rows
    return max(waiting + max(2 * going + came, working, returning), after), "foreach"


@functools.lru_cache(maxsize=4096)
def work_peak(setting: Setting, tensor: Tensor) -> int:
    """What an owner needs for one tensor, which it first puts together."""
    assert isinstance(setting.rule, Kron)
    bare = replace(setting, rule=replace(setting.rule, momentum=0.0))
    put_together = shown(setting.rule) * word([tensor]) * tensor.elements
    return put_together + torch_peak([Item(tensor, bare)], engine="reference", device="cpu")[0]


def peaks_on_parts(setting: Setting, parts: Sequence[Part], world: int, rank: int) -> tuple[int, int]:
    """What lists of parts hold while owners work, and the most they need afterwards, all of them at once."""
    waiting = after = 0
    buckets: dict[Any, list[Part]] = defaultdict(list)
    for part in parts:
        buckets[part.whole.shape, part.whole.dtype].append(part)
    for bucket in buckets.values():
        ledger = Ledger("torch")
        jobs = []
        for part in bucket:
            p, g = (ledger.array(part.held.shape, part.held.dtype) for _ in range(2))
            entries = kept_entries(setting, part, world, rank)
            state = {key: ledger.array(*entry) for key, entry in entries.items()}
            jobs.append(Held(Item(part.held, setting), p, g, state))
        ledger.begin()
        rule = OnParts(setting.rule_at(1), ledger)
        listed(ledger, jobs, rule)
        waiting += rule.waiting
        after += ledger.extra
    return waiting, after
