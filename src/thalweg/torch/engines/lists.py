"""How a bucket of parameters is stepped: tensor by tensor, as one list, or by native code.

The engines here take a :class:`Bucket` and answer with new values; they write nothing. Native code,
which writes in place, is in ``fused.py``.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from thalweg.boundary import advance, slice_of
from thalweg.errors import OptionError
from thalweg.kernels import triton
from thalweg.kernels.chunks import SMALL, STACK
from thalweg.kernels.cpu.library import reason_missing, warn_once
from thalweg.kernels.cpu.noise import fill_normal
from thalweg.kernels.threads import num_threads
from thalweg.rules.noise import tensor_id
from thalweg.spaces import foreach
from thalweg.spaces import torch as single
from thalweg.spaces.foreach import PerTensor, TensorList
from thalweg.spaces.sharded import Sharded
from thalweg.torch.engines import triton as gpu
from thalweg.torch.engines.bucket import Bucket, Result
from thalweg.torch.sharding.lockstep import together
from thalweg.torch.sharding.owners import Owned, Owners

Engine: TypeAlias = Literal["auto", "reference", "foreach", "fused"]


def by_tensor(bucket: Bucket, *, native_noise: bool = False) -> Iterator[Result]:
    """The reference engine: one tensor after the other."""
    for index, (name, p, g, s) in enumerate(zip(bucket.names, bucket.params, bucket.grads, bucket.states, strict=True)):
        t = bucket.t if bucket.t is not None else s["step"] + 1
        entries = {key: entry for key, entry in s.items() if key != "step"}
        result = advance(
            single,
            bucket.setting.rule_at(t),
            bucket.setting.handling,
            p,
            g,
            entries,
            t=t,
            lr=bucket.lr,
            lr_scale=bucket.lr_scale,
            tensor=tensor_id(name),
            grad_scale=bucket.grad_scale,
            allowed=bucket.allowed,
            noise=functools.partial(normals, bucket, [index]) if native_noise else None,
        )
        finite = None if result.finite is None else [result.finite]
        stats = {key: [value] for key, value in result.stats.items()}
        yield Result(bucket.part(index, index + 1), [result.p], [result.state], finite, stats)


def by_shape(bucket: Bucket) -> Iterator[Result]:
    """Kron on CPUs: noise by native code, products by BLAS, small tensors of equal shape as one batch."""
    handling, count = bucket.setting.handling, len(bucket.params)
    apart = handling.on_nonfinite != "propagate" or handling.rounding == "stochastic"
    if count == 1 or apart or bucket.params[0].numel() > SMALL:
        yield from by_tensor(bucket, native_noise=True)
        return
    batches: dict[float, list[int]] = defaultdict(list)
    for index, s in enumerate(bucket.states):  # those that are refreshed together
        batches[float(s["refresh"])].append(index)
    for members in batches.values():
        for part in bucket.chosen(members).chunks(STACK):
            yield as_stack(part)


def as_stack(bucket: Bucket) -> Result:
    """Tensors of equal shape, advanced as one with a leading axis more."""
    assert bucket.t is not None
    states, count = bucket.states, len(bucket.params)
    rule = bucket.setting.rule_at(bucket.t)
    result = advance(
        single,
        replace(rule, stacked_axes=rule.stacked_axes + 1),
        bucket.setting.handling,
        torch.stack(list(bucket.params)),
        torch.stack(list(bucket.grads)),
        {
            key: entry if key == "refresh" else torch.stack([s[key] for s in states])
            for key, entry in states[0].items()
            if key != "step"
        },
        t=bucket.t,
        lr=bucket.lr,
        lr_scale=bucket.lr_scale,
        tensor=0,
        grad_scale=bucket.grad_scale,
        noise=functools.partial(normals, bucket, range(count)),
    )
    slices = [slice_of(result, i) for i in range(count)]
    stats = {key: [s.stats[key] for s in slices] for key in result.stats}
    return Result(bucket, [s.p for s in slices], [s.state for s in slices], None, stats)


def normals(bucket: Bucket, members: Sequence[int]) -> Tensor:
    """The noise of some parameters of a bucket, stacked if they are several."""
    assert bucket.t is not None
    shape = bucket.params[0].shape
    precision = torch.float64 if bucket.params[0].dtype == torch.float64 else torch.float32
    noise = torch.empty((len(members), *shape), dtype=precision)
    for own, index in zip(noise, members, strict=True):
        fill_normal(
            own.data_ptr(),
            "float64" if precision == torch.float64 else "float32",
            own.numel(),
            seed=bucket.setting.handling.seed,
            tensor=tensor_id(bucket.names[index]),
            t=bucket.t,
            threads=num_threads(torch.get_num_threads),
        )
    return noise[0] if len(members) == 1 else noise


def by_list(bucket: Bucket) -> Iterator[Result]:
    """The foreach engine: one launch an operation for a list of tensors."""
    for chunk in bucket.chunks():
        yield listed(foreach, chunk)


def by_shards(buckets: Sequence[tuple[Bucket, str]], owners: Owners) -> list[Result]:
    """Lists of which this rank holds parts: the sums of all of them go in one message for each group of ranks.

    Each with the name of its engine: owners of whole tensors may have kernels, though parts are stepped as lists.
    """

    def computation(bucket: Bucket, engine: str) -> Callable[[Any], Result]:
        return lambda exchange: listed(Sharded(bucket.parts, exchange), bucket, by_kernels=engine == "fused")

    return together([computation(bucket, engine) for bucket, engine in buckets], owners)


def listed(space: Any, bucket: Bucket, *, by_kernels: bool = False) -> Result:
    """A list of tensors, advanced in a space of lists. by_kernels: what is done by owners."""
    device = bucket.params[0].device
    t: Any = bucket.t
    if t is None:
        t = PerTensor(torch.stack([s["step"] for s in bucket.states]) + 1)
    ids: Any = 0
    if bucket.setting.rule.needs_noise or bucket.setting.handling.rounding == "stochastic":
        ids = PerTensor(tensor_ids(tuple(bucket.names), device))
    keys = [key for key in bucket.states[0] if key != "step"]
    rule: Any = bucket.setting.rule_at(t)
    if bucket.parts and rule.needs_whole:
        rule = Owned(rule, bucket, by_kernels=by_kernels)
    result = advance(
        space,
        rule,
        bucket.setting.handling,
        TensorList(bucket.params),
        TensorList(bucket.grads),
        {key: TensorList([s[key] for s in bucket.states]) for key in keys},
        t=t,
        lr=bucket.lr,
        lr_scale=bucket.lr_scale,
        tensor=ids,
        grad_scale=bucket.grad_scale,
        allowed=bucket.allowed,
    )
    count = len(bucket.params)
    states = [{key: result.state[key].tensors[i] for key in keys} for i in range(count)]
    finite = None if result.finite is None else entries_of(result.finite, count)
    stats = {key: entries_of(value, count) for key, value in result.stats.items()}
    return Result(bucket, result.p.tensors, states, finite, stats)


@torch.compiler.disable
@functools.lru_cache(maxsize=4096)
def tensor_ids(names: tuple[str, ...], device: torch.device) -> Tensor:
    """Numbers for random bits, copied to the device once: not at each step, nor into a CUDA graph."""
    return torch.tensor([tensor_id(name) for name in names], device=device)


def entries_of(value: Any, count: int) -> Sequence[Any]:
    if isinstance(value, PerTensor):
        return value.values.unbind()
    return value.tensors if isinstance(value, TensorList) else [value] * count


#: Engines that answer with new values. "fused" is Kron's: other rules have native code that writes in place.
ENGINES: dict[str, Callable[[Bucket], Iterator[Result]]] = {
    "reference": by_tensor,
    "foreach": by_list,
    "fused": by_shape,
}


def is_in_place(engine: str, bucket: Bucket) -> bool:
    """Whether native code or kernels write new values themselves; all else answers with them."""
    if bucket.on_gpu:  # owners of whole tensors send them back
        return engine == "fused" and not (bucket.parts and bucket.setting.rule.needs_whole)
    return engine == "fused" and not bucket.setting.rule.needs_whole


def engine_for(wanted: Engine, bucket: Bucket, *, compiling: bool) -> str:
    """The name of the engine that steps a bucket; raise if an explicitly requested one cannot."""
    if wanted in ("reference", "foreach"):
        return wanted
    missing = gpu.reason_missing(bucket.params[0].device) if bucket.on_gpu else reason_missing()
    unknown = "the host does not know the step count" if bucket.t is None and not bucket.on_gpu else ""
    reason = unknown or bucket.unserved or missing
    if not reason:
        return "fused"
    if wanted == "fused":
        raise OptionError(
            f"engine='fused' cannot run for parameter {bucket.names[0]!r}: {reason}; "
            "use engine='auto', which takes the fastest engine that can run"
        )
    if not bucket.unserved and missing is not None:
        (triton.warn_once if bucket.on_gpu else warn_once)(missing)
    # a compiler fuses what it can see, and it sees through single tensors
    return "reference" if not bucket.parts and (compiling or len(bucket.params) == 1) else "foreach"
