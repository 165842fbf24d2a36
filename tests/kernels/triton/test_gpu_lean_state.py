"""GPU kernels beside the rules: state in eight bits, rounded at random, and records of what rounding has cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from on_device import DEVICE, parameters, train
from tolerances import FLIPPED

import thalweg.torch
from thalweg.codecs import CODECS, Grouping
from thalweg.errors import NonFiniteError
from thalweg.kernels.triton.coded import decoded, read_codes, store_coded
from thalweg.spaces import torch as xp

pytestmark = pytest.mark.slow  # programs are interpreted

MATRIX = {"matrix": (64, 128)}
COUNT = 2048


@triton.jit
def converted(x, chance, codes, scales, numbers, GROUP: tl.constexpr, STOCHASTIC: tl.constexpr, COUNT: tl.constexpr):
    """Numbers to codes, and codes to numbers."""
    index, groups = tl.arange(0, COUNT), tl.arange(0, COUNT // GROUP)
    given, own = tl.load(x + index), tl.load(chance + index)
    store_coded(codes + index, scales + groups, given, own, None, None, GROUP, STOCHASTIC)
    tl.debug_barrier()
    again, of_groups = read_codes(codes + index, scales + groups, None, None)
    tl.store(numbers + index, decoded(again, of_groups, GROUP))


@pytest.mark.parametrize("group", [16, 64])
@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_codes_are_those_of_the_codec(codec: Any, is_random: bool, group: int) -> None:
    generator, groups = torch.Generator().manual_seed(0), Grouping(1, group)
    x = torch.randn(COUNT, generator=generator) * torch.exp(3 * torch.randn(COUNT, generator=generator))
    if not codec.signed:
        x = x * x
    x[:group] = 0.0
    x[group : 2 * group] *= 1e-36
    x[2 * group], x[3 * group + 5] = torch.inf, torch.nan
    chance = torch.randint(2**16, (COUNT,), generator=generator, dtype=torch.int32)
    rows = x.reshape(-1, group)
    wanted, scales = codec.encode(xp, rows, groups, (chance.reshape(-1, group) + 0.5) / 2**16 if is_random else None)
    codes = torch.empty(COUNT, dtype=wanted.dtype, device=DEVICE)
    own, numbers = torch.empty(COUNT // group, device=DEVICE), torch.empty(COUNT, device=DEVICE)
    converted[(1,)](
        x.to(DEVICE), chance.to(DEVICE), codes, own, numbers, GROUP=group, STOCHASTIC=is_random, COUNT=COUNT
    )
    apart = (codes.cpu().int() - wanted.flatten().int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() <= FLIPPED / 50
    assert torch.equal(own.cpu().nan_to_num(-1.0), scales.flatten().nan_to_num(-1.0))
    exact = codec.decode(xp, codes.cpu().reshape(-1, group), scales, groups).flatten()
    assert torch.equal(numbers.cpu().nan_to_num(-1.0), exact.nan_to_num(-1.0))


def make(rule: str, named: Any, engine: str, **options: Any) -> Any:
    return getattr(thalweg.torch, rule)(named, lr=0.01, engine=engine, **options)


def gradients(shapes: Mapping[str, Any], t: int, dtype: torch.dtype) -> dict[str, Any]:
    """Of sizes that differ within every group."""
    generator = torch.Generator().manual_seed(t)
    draws = {name: [torch.randn(shape, generator=generator) for _ in "gs"] for name, shape in shapes.items()}
    return {name: (g * torch.exp(size)).to(DEVICE, dtype) for name, (g, size) in draws.items()}


@pytest.mark.parametrize("what", ["skip", "raise"])
def test_a_gradient_that_is_not_finite_leaves_codes_and_record_as_they_were(what: str) -> None:
    named = parameters("bfloat16", MATRIX)
    optimizer = make("LAMB", named, "fused", state_dtype="int8", rounding="compensated", on_nonfinite=what)
    step = gradients(MATRIX, 0, torch.bfloat16)
    train(optimizer, named, [step])
    p = named[0][1]
    before = {key: entry.clone() for key, entry in optimizer.state[p].items()}
    step["matrix"][1, 2] = torch.inf
    if what == "raise":
        with pytest.raises(NonFiniteError, match="matrix"):
            train(optimizer, named, [step])
    else:
        train(optimizer, named, [step])
        assert optimizer.skipped == 1
    assert all(torch.equal(entry, optimizer.state[p][key]) for key, entry in before.items())
