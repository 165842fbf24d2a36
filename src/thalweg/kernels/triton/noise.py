"""The random numbers of ``rules/noise.py`` on GPUs, for stacks of tensors: one pass that writes them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.triton.numbers import normal
from thalweg.rules.noise import NORMAL_STREAMS, stream_key

BLOCK = 1024


@triton.jit
def noise_kernel(out, keys, t, size, BLOCK: tl.constexpr):
    tensor, at = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key_of_u = tl.load(keys + 2 * tensor).to(tl.uint32)
    key_of_v = tl.load(keys + 2 * tensor + 1).to(tl.uint32)
    tl.store(out + tensor * size + at, normal(key_of_u, key_of_v, tl.load(t).to(tl.uint32), at), at < size)


@functools.lru_cache(maxsize=4096)
def keys_of(seed: int, tensors: tuple[int, ...], device: torch.device) -> Tensor:
    """Both keys of each tensor, copied to the device once."""
    keys = [stream_key(seed, tensor, stream) for tensor in tensors for stream in NORMAL_STREAMS]
    return torch.tensor(keys, dtype=torch.int64, device=device)


def draw_normal(out: Tensor, *, seed: int, tensors: Sequence[int], t: int | Tensor) -> Tensor:
    """Fill a stack in float32 with standard normal numbers.

    tensors: the number of each, of its name. t: the step, or where the device has its number, in int64.
    """
    size = out[0].numel()
    if size:
        keys = keys_of(seed, tuple(tensors), out.device)
        step = t if isinstance(t, Tensor) else torch.full((), t, dtype=torch.int64, device=out.device)
        noise_kernel[triton.cdiv(size, BLOCK), len(out)](out, keys, step, size, BLOCK=BLOCK)
    return out
