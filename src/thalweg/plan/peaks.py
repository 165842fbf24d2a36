"""How much memory a step needs beyond parameters, gradients and state, at its peak.

Engines that work in place say themselves what they keep. Those that answer with new values need the temporaries of the
rule (``programs.liveness``), for as many parameters at a time as ``kernels.chunks`` allows. State is there already:
these are the peaks of a step after the first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.kernels.chunks import CHUNK, SMALL, STACK, WHOLE_CHUNK, extent, pieces
from thalweg.kernels.cpu.library import reason_missing
from thalweg.kernels.cpu.served import reason_unserved
from thalweg.kernels.triton.served import reason_against
from thalweg.plan import gpus, native
from thalweg.plan.items import Item
from thalweg.programs import liveness
from thalweg.programs.liveness import Lifetimes
from thalweg.rules import WholeRule
from thalweg.settings import Setting
from thalweg.spaces import shapes
from thalweg.spaces.shape_arrays import Ledger, ShapeOnly
from thalweg.storage import kind

# ---- torch


def torch_peak(items: Sequence[Item], *, engine: str, device: str) -> tuple[int, str]:
    """Bytes at the peak, and the engines that serve these parameters."""
    buckets: dict[Any, list[Item]] = defaultdict(list)
    for item in items:
        alike = kind(item.setting.rule_at(1), item.setting.handling, item.whole or item.tensor.shape)
        buckets[item.setting, item.tensor.dtype, alike, torch_unserved(item, device)].append(item)
    chosen = {key: torch_engine(engine, len(bucket), key[-1]) for key, bucket in buckets.items()}
    fused = [key for key, name in chosen.items() if name == "fused"]
    if device == "cuda":
        in_place = fused
        scratch = gpus.scratch_bytes([(key[0], [gpus.shown(item) for item in buckets[key]]) for key in in_place])
        joint = gpus.joint_bytes(list(buckets.values()))
    else:
        in_place = [key for key in fused if native.is_served(key[0])]
        scratch, joint = native.scratch_bytes([item for key in in_place for item in buckets[key]]), 0
    policy = items[0].setting.handling.on_nonfinite if items else "propagate"
    selects = device == "cuda" and policy == "skip"
    steps = (
        step
        for key, bucket in buckets.items()
        if key not in in_place
        for step in STEPS[chosen[key]](bucket, selects=selects, **limits(key[0], chosen[key], bucket[0], device))
    )
    most = liveness.in_turn(steps, together=policy == "raise")
    return scratch + max(most, joint), " + ".join(sorted(set(chosen.values())))


def torch_unserved(item: Item, device: str) -> str | None:
    """Why native code, or a fused kernel on a GPU, cannot step a parameter; None or "" if it can."""
    if device == "cuda":
        return reason_against(item.setting, item.whole or item.tensor.shape, item.tensor.dtype, item.entries)
    return native_unserved(item) or reason_missing()


def torch_engine(wanted: str, count: int, unserved: str | None) -> str:
    if wanted != "auto":
        return wanted
    if not unserved:
        return "fused"
    return "reference" if count == 1 else "foreach"


def of(item: Item, **ways: Any) -> Lifetimes:
    return liveness.lifetimes(item.setting, item.tensor.shape, item.tensor.dtype, whole=item.whole, **ways)


def by_tensor(bucket: Sequence[Item], **ways: Any) -> Iterator[Lifetimes]:
    return (of(item, **ways) for item in bucket)


def by_list(bucket: Sequence[Item], limit: int = CHUNK, **ways: Any) -> Iterator[Lifetimes]:
    for chunk in chunks(bucket, limit):
        yield liveness.listed(of(item, **ways) for item in chunk)


def limits(setting: Setting, engine: str, item: Item, device: str) -> dict[str, int]:
    """How many elements of a list on a GPU go together if a rule sees them whole, as one stack."""
    rule = setting.rule_at(1)
    whole = isinstance(rule, WholeRule) and rule.is_stackable(item.whole or item.tensor.shape)
    return {"limit": WHOLE_CHUNK} if whole and engine == "foreach" and device == "cuda" else {}


def by_shape(bucket: Sequence[Item], **ways: Any) -> Iterator[Lifetimes]:
    """Kron on CPUs: noise by native code, small tensors of equal shape as one batch."""
    together: dict[Any, list[Item]] = defaultdict(list)
    for index, item in enumerate(bucket):
        handling = item.setting.handling
        apart = handling.on_nonfinite != "propagate" or handling.is_random
        alone = apart or item.tensor.elements > SMALL
        together[index if alone else (item.setting, item.tensor.shape, item.tensor.dtype)].append(item)
    for batch in together.values():
        for part in chunks(batch, STACK):
            yield of(part[0], given_noise=True, stack=0 if len(part) == 1 else len(part), **ways)


STEPS = {"reference": by_tensor, "foreach": by_list, "fused": by_shape}


def chunks(bucket: Sequence[Item], limit: int) -> Iterator[Sequence[Item]]:
    """Parts of at most so many elements, or of one tensor that is larger."""
    extents = (extent(one.tensor.elements, (math.prod(shape) for shape, _ in one.entries.values())) for one in bucket)
    for members in pieces(extents, limit):
        yield [bucket[i] for i in members]


# ---- numpy


def numpy_peak(items: Sequence[Item], *, engine: str) -> tuple[int, str]:
    """Bytes at the peak, and the engines that serve these parameters."""
    by_native = [engine != "reference" and is_native(item, engine) for item in items]
    fused = [item for item, native in zip(items, by_native, strict=True) if native]
    others = [item for item, native in zip(items, by_native, strict=True) if not native]
    in_place = fused if items and native.is_served(items[0].setting) else []
    handling = items[0].setting.handling if items else None
    steps = [*by_tensor(others, library="numpy"), *by_shape([] if in_place else fused, library="numpy")]
    most = liveness.in_turn(steps, committed=True, together=handling is not None and handling.on_nonfinite == "raise")
    if handling is not None and handling.max_grad_norm is not None and (engine == "reference" or reason_missing()):
        # before that the squares of each gradient, in float64
        most = max(most, 8 * max(item.tensor.elements for item in items))
    used = " + ".join(name for name, some in (("fused", fused), ("reference", others)) if some)
    return native.scratch_bytes(in_place) + most, used


def is_native(item: Item, engine: str) -> bool:
    return engine == "fused" or not (reason_missing() or native_unserved(item))


def native_unserved(item: Item) -> str | None:
    setting, tensor = item.setting, item.tensor
    return reason_unserved(setting.rule_at(1), setting.handling, tensor.shape, tensor.dtype)


# ---- parts of Kron's parameters, beside their owners


@dataclass
class Held:
    """A parameter, its gradient and its state, in a ledger."""

    item: Item
    p: ShapeOnly
    g: ShapeOnly
    state: dict[str, ShapeOnly]


def listed(ledger: Ledger, bucket: Sequence[Held], rule: Any) -> None:
    """Parameters of equal shape, stepped together."""
    first, ledger.times = bucket[0], len(bucket)
    liveness.stepped(shapes, rule, first.item.setting, first.p, first.g, first.state)
