"""How much memory kernels for GPUs keep between steps, told without a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.kernels import triton as kernels
from thalweg.kernels.chunks import WHOLE_CHUNK
from thalweg.programs.liveness import made_peak
from thalweg.rules import Kron, WholeRule
from thalweg.settings import Setting
from thalweg.spaces.sharded import Part
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.engines.triton import passes_for


def scratch_bytes(
    buckets: Sequence[tuple[Setting, Sequence[tuple[Shape, str, Mapping[str, tuple[Shape, str]], Shape | None]]]],
) -> int:
    """What kernels keep on a GPU between steps for buckets of parameters, in the blocks that CUDA's memory comes in.

    A parameter is told by its shape and dtype, those of each entry of its state, and the shape of the whole if it is a
    part. Kernels are laid out over tensors without memory: no GPU is needed.
    """

    def ghost(shape: Shape, dtype: str = "float32") -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    def held(thing: Any) -> Iterator[Tensor]:
        if isinstance(thing, Tensor):
            yield thing if thing._base is None else thing._base
        elif isinstance(thing, (list, tuple)):
            yield from (tensor for each in thing if not isinstance(each, int) for tensor in held(each))
        elif isinstance(thing, dict):
            yield from held(list(thing.values()))
        elif type(thing).__module__.startswith(kernels.__name__):
            yield from held(list(vars(thing).values()))

    def size_of(keeper: Any, given: Sequence[Tensor]) -> int:
        found = {id(tensor): tensor for tensor in held(keeper)}
        for tensor in given:
            found.pop(id(tensor), None)
        return sum(-(-tensor.nbytes // 512) * 512 for tensor in found.values())

    total, stacks, kron = 0, 0, None
    for number, (setting, told) in enumerate(buckets):
        names = [f"{number}.{i}" for i in range(len(told))]
        params = [ghost(shape, dtype) for shape, dtype, _, _ in told]
        states = [{"step": ghost(()), **{key: ghost(*e) for key, e in state.items()}} for _, _, state, _ in told]
        if isinstance(setting.rule, Kron):
            from thalweg.kernels.triton.kron import KronKernels

            kron, rule = kron or KronKernels(), cast(Kron, setting.settled)
            kron.scratch_for(kron.batch(names, params, params, states, rule, setting.handling))
            continue
        if isinstance(setting.rule, WholeRule):
            rule_of_stacks = cast(WholeRule, setting.settled)
            shape = told[0][0]
            count = min(len(told), max(1, WHOLE_CHUNK // max(1, math.prod(shape))))
            stacks = max(stacks, made_peak(rule_of_stacks, shape, "float32", count, widens=False))
            continue
        parts = [Part(whole, (0,) * len(whole), ((),) * len(whole)) for *_, whole in told if whole is not None]
        passes = passes_for(Bucket(names, params, params, states, setting, None, None, parts=parts))
        total += size_of(passes, [*params, *(entry for state in states for entry in state.values())])
    return total + stacks + size_of(kron, [])  # memory that all of Kron's batches share is counted once
