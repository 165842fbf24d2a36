"""How a bucket of parameters is stepped: tensor by tensor, or as one list.

An engine takes a :class:`Bucket` and answers with new values; it writes nothing. Fused kernels
will be two more rows in ``ENGINES``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from thalweg.boundary import advance
from thalweg.errors import OptionError
from thalweg.rules.noise import tensor_id
from thalweg.settings import Setting
from thalweg.spaces import foreach
from thalweg.spaces import torch as single
from thalweg.spaces.foreach import PerTensor, TensorList

Engine: TypeAlias = Literal["auto", "reference", "foreach", "fused"]

#: Elements of a list that are stepped together, so that temporaries stay under 256 MiB: LAMB has ten of
#: float32 alive at a time, and Kron's random integers count for more.
CHUNK = 256 * 2**20 // (20 * 4)


@dataclass(frozen=True)
class Bucket:
    """Parameters that are stepped together: of one setting, kind, place, dtype, lr and step."""

    names: Sequence[str]
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Mapping[str, Tensor]]
    setting: Setting
    lr: float | Tensor | None
    #: The number of this step where the host knows it; None: it is in the states, on the device.
    t: int | None
    #: Multiplies all gradients.
    grad_scale: Tensor | None = None
    #: Whether the whole step may be taken, where that is decided by all gradients together.
    allowed: Tensor | None = None

    def chunks(self) -> Iterator[Bucket]:
        """Parts of at most CHUNK elements, or of one tensor that is larger."""
        start, elements = 0, 0
        for index, p in enumerate(self.params):
            if index > start and elements + p.numel() > CHUNK:
                yield self.part(start, index)
                start, elements = index, 0
            elements += p.numel()
        yield self.part(start, len(self.params))

    def part(self, start: int, end: int) -> Bucket:
        cut = slice(start, end)
        lists = (self.names[cut], self.params[cut], self.grads[cut], self.states[cut])
        return Bucket(*lists, self.setting, self.lr, self.t, self.grad_scale, self.allowed)


@dataclass(frozen=True)
class Result:
    """New values for a bucket, or for a part of it."""

    #: The part that is stepped, of the same bucket.
    part: Bucket
    params: Sequence[Tensor]
    states: Sequence[Mapping[str, Tensor]]
    #: One truth value for each parameter; None under ``on_nonfinite="propagate"``.
    finite: Sequence[Tensor] | None
    stats: Mapping[str, Any]


def by_tensor(bucket: Bucket) -> Iterator[Result]:
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
            lr_scale=bucket.setting.lr_scale,
            tensor=tensor_id(name),
            grad_scale=bucket.grad_scale,
            allowed=bucket.allowed,
        )
        finite = None if result.finite is None else [result.finite]
        stats = {key: [value] for key, value in result.stats.items()}
        yield Result(bucket.part(index, index + 1), [result.p], [result.state], finite, stats)


def by_list(bucket: Bucket) -> Iterator[Result]:
    """The foreach engine: one launch an operation for a list of tensors."""
    for chunk in bucket.chunks():
        device = chunk.params[0].device
        t: Any = chunk.t
        if t is None:
            t = PerTensor(torch.stack([s["step"] for s in chunk.states]) + 1)
        ids: Any = 0
        if chunk.setting.rule.needs_noise or chunk.setting.handling.rounding == "stochastic":
            ids = PerTensor(tensor_ids(tuple(chunk.names), device))
        keys = [key for key in chunk.states[0] if key != "step"]
        result = advance(
            foreach,
            chunk.setting.rule_at(t),
            chunk.setting.handling,
            TensorList(chunk.params),
            TensorList(chunk.grads),
            {key: TensorList([s[key] for s in chunk.states]) for key in keys},
            t=t,
            lr=chunk.lr,
            lr_scale=chunk.setting.lr_scale,
            tensor=ids,
            grad_scale=chunk.grad_scale,
            allowed=chunk.allowed,
        )
        count = len(chunk.params)
        states = [{key: result.state[key].tensors[i] for key in keys} for i in range(count)]
        finite = None if result.finite is None else entries_of(result.finite, count)
        stats = {key: entries_of(value, count) for key, value in result.stats.items()}
        yield Result(chunk, result.p.tensors, states, finite, stats)


@torch.compiler.disable
@functools.lru_cache(maxsize=4096)
def tensor_ids(names: tuple[str, ...], device: torch.device) -> Tensor:
    """Numbers for random bits, copied to the device once: not at each step, nor into a CUDA graph."""
    return torch.tensor([tensor_id(name) for name in names], device=device)


def entries_of(value: Any, count: int) -> Sequence[Any]:
    if isinstance(value, PerTensor):
        return value.values.unbind()
    return value.tensors if isinstance(value, TensorList) else [value] * count


ENGINES: dict[str, Callable[[Bucket], Iterator[Result]]] = {"reference": by_tensor, "foreach": by_list}


def engine_for(wanted: Engine, rule_name: str, *, alone: bool) -> str:
    """The name of the engine that serves a bucket; an explicit wish that cannot be met raises."""
    if wanted == "auto":
        return "reference" if alone else "foreach"
    if wanted == "fused":
        raise OptionError(
            f"engine='fused': there is no fused kernel for {rule_name} yet; engine='auto' takes the fastest there is"
        )
    return wanted
