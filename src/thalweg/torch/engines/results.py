"""New values of a bucket, computed by torch's own operations: tensor by tensor, as one list, or as one stack."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.arrays import State
from thalweg.boundary import Advance, advance
from thalweg.kernels.chunks import CHUNK
from thalweg.rules.entries import Count, Factor, PerSlice
from thalweg.rules.noise import tensor_id
from thalweg.rules.whole import WholeRule, is_remembered
from thalweg.spaces import foreach
from thalweg.spaces import torch as single
from thalweg.spaces.foreach import PerTensor, TensorList
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.sharding.requests import Request
from thalweg.torch.stacks import InStacks, draw_noise, due_of_each, most_of_stack, tensor_ids


@dataclass(frozen=True)
class Result:
    """New values for a bucket, or for some tensors of one."""

    bucket: Bucket
    params: Sequence[Tensor]
    states: Sequence[Mapping[str, Tensor]]
    #: One truth value for each parameter; None under ``on_nonfinite="propagate"``.
    finite: Sequence[Tensor] | None
    stats: Mapping[str, Any]


def results_of(bucket: Bucket, most: int | None = None) -> Iterator[Result]:
    """The results of a bucket, part by part, so that few new values exist at once.

    most: elements of a stack of whole tensors; None: as many as the device should have.
    """
    if bucket.way == "reference":
        yield from by_tensor(bucket)
        return
    rule, device = bucket.setting.rule_at(1), bucket.params[0].device
    limit = (most or most_of_stack(rule, device)) if isinstance(rule, WholeRule) else CHUNK
    for chunk in bucket.chunks(limit):
        yield as_list(foreach, chunk)


def by_tensor(bucket: Bucket) -> Iterator[Result]:
    """The results of a bucket, one tensor after the other."""
    for index, (name, p, g, s) in enumerate(zip(bucket.names, bucket.params, bucket.grads, bucket.states, strict=True)):
        t = bucket.t if bucket.t is not None else s["step"] + 1
        entries = {key: entry for key, entry in s.items() if key != "step"}
        alone = bucket.chosen([index])
        result = advance(
            single,
            bucket.setting.rule_at(t),
            bucket.setting.numerics,
            p,
            g,
            entries,
            t=t,
            tensor=tensor_id(name),
            noise=functools.partial(draw_first, alone) if bucket.t is not None and not p.is_cpu else None,
            **bucket.given,
        )
        finite = None if result.finite is None else [result.finite]
        stats = {key: [value] for key, value in result.stats.items()}
        yield Result(alone, [result.p], [result.state], finite, stats)


# ---- lists of tensors, with one launch an operation


def as_list(space: Any, bucket: Bucket) -> Result:
    """A list of tensors, advanced in a space of lists."""
    operands = Operands.from_bucket(bucket)
    rule: Any = bucket.setting.rule_at(operands.t)
    is_whole = isinstance(rule, WholeRule)
    if is_whole:
        rule = InStacks(rule, most_of_stack(rule, bucket.params[0].device))
    result = advance(
        space,
        rule,
        bucket.setting.numerics,
        operands.p,
        operands.g,
        operands.s,
        t=operands.t,
        tensor=operands.ids,
        noise=(lambda: TensorList(draw(bucket))) if is_whole and bucket.t is not None else None,
        **bucket.given,
    )
    return unlisted(bucket, result)


@dataclass(frozen=True)
class Operands:
    """A bucket as lists."""

    p: TensorList
    g: TensorList
    s: dict[str, Any]
    t: Any
    #: Numbers of the tensors for random bits.
    ids: Any

    @classmethod
    def from_bucket(cls, bucket: Bucket) -> Operands:
        t: Any = bucket.t
        if t is None:
            t = PerTensor(torch.stack([s["step"] for s in bucket.states]) + 1)
        ids: Any = 0
        if bucket.setting.rule.needs_noise or bucket.setting.numerics.is_random:
            ids = PerTensor(tensor_ids(tuple(bucket.names), bucket.params[0].device))
        keys = [key for key in bucket.states[0] if key != "step"]
        counts = bucket.setting.rule.keys(bucket.shape, Count)
        state: dict[str, Any] = {key: TensorList([s[key] for s in bucket.states]) for key in keys}
        state |= {key: PerTensor(torch.stack(state[key].tensors)) for key in keys if key in counts}
        return cls(TensorList(bucket.params), TensorList(bucket.grads), state, t, ids)


def unlisted(bucket: Bucket, result: Advance) -> Result:
    count = len(bucket.params)
    by_key = {key: entries_of(entry, count) for key, entry in result.state.items()}
    states = [{key: entries[i] for key, entries in by_key.items()} for i in range(count)]
    finite = None if result.finite is None else entries_of(result.finite, count)
    stats = {key: entries_of(value, count) for key, value in result.stats.items()}
    return Result(bucket, result.p.tensors, states, finite, stats)


def entries_of(value: Any, count: int) -> Sequence[Any]:
    if isinstance(value, PerTensor):
        return value.values.unbind()
    return value.tensors if isinstance(value, TensorList) else [value] * count


# ---- noise


def draw(bucket: Bucket) -> Sequence[Tensor]:
    """The noise of a bucket's parameters, by thalweg's own code: at once if all have one shape."""
    if len({p.shape for p in bucket.params}) > 1:
        return [x for i in range(len(bucket.names)) for x in draw(bucket.chosen([i]))]
    first = bucket.params[0]
    like = first if first.dtype == torch.float64 else first.float()
    return draw_noise(like, seed=bucket.setting.numerics.seed, names=bucket.names, t=bucket.t).unbind()


def draw_first(bucket: Bucket) -> Tensor:
    return draw(bucket)[0]


# ---- what owners of whole tensors are asked


def has_whole_slices(rule: WholeRule, bucket: Bucket) -> bool:
    sharded = [axis for axis, groups in enumerate(bucket.parts[0].groups) if groups]
    return rule.has_whole_slices(bucket.shape, sharded)


def request_of(
    rule: WholeRule, bucket: Bucket, shown: Sequence[TensorList], s: State[TensorList], t: Any, due: Any
) -> Request:
    """A request to the owners of a bucket's whole tensors. shown: shards of the tensors that they transform."""
    by_kernels, numerics, count = bucket.way == "fused", bucket.setting.numerics, len(bucket.names)
    numbers: Sequence[Any] = t.values.unbind() if isinstance(t, PerTensor) else [t] * count
    per_slice, factors = (rule.keys(bucket.shape, role) for role in (PerSlice, Factor))
    parts = bucket.parts
    if has_whole_slices(rule, bucket):  # experts need no owner
        parts = [part.of_stack(tuple(p.shape), rule.stacked_axes) for part, p in zip(parts, bucket.params, strict=True)]
    return Request(
        names=bucket.names,
        rule=rule,
        parts=parts,
        tensors=[x.tensors for x in shown],
        factors={key: s[key].tensors for key in per_slice},
        matrices=factors,
        stored=bucket.states[0][factors[0]].dtype if factors else None,
        # a skipped step would leave the owner with factors that differ from the state of the other ranks, and
        # what is not sharded has whole factors in its state
        remembered=is_remembered(numerics.on_nonfinite) and bucket.allowed is None and any(parts[0].groups),
        by_kernels=by_kernels,
        due=due_of_each(due, count),
        seed=numerics.seed,
        t=numbers,
    )
