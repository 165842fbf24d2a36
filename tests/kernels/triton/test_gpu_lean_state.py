"""GPU kernels beside the rules: state in eight bits, rounded at random, and records of what rounding has cost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from lanes import one_in
from on_device import DEVICE, PRODUCTS, assert_near, copy_into, parameters, train
from side_by_side import assert_close, assert_figures
from side_by_side_torch import array_of
from tolerances import FLIPPED

import thalweg.torch
from thalweg.codecs import CODECS, Grouping
from thalweg.errors import NonFiniteError, OptionError
from thalweg.kernels.triton.coded import decoded, read_codes, store_coded
from thalweg.spaces import torch as xp
from thalweg.storage import RECORD

pytestmark = pytest.mark.slow  # programs are interpreted

#: Groups of 64 in more than one chunk, of 32 and of 16, with an end that is no whole chunk, and one without codes.
ELEMENTS = {"matrix": (34, 128), "thin": (64, 96), "filter": (32, 16, 3, 3), "vector": (70,)}
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


def assert_alike(fused: Any, ours: Any, reference: Any, theirs: Any) -> None:
    """Numbers to rounding; codes and records to one step, and that seldom."""
    figures, expected = fused.stats(), reference.stats()
    for (name, p), (_, q) in zip(ours, theirs, strict=True):
        assert_close(name, array_of(p), array_of(q), "float32")
        assert_figures(name, figures[name], expected[name], "float32")
        assert list(fused.state[p]) == list(reference.state[q])
        for key, entry in reference.state[q].items():
            own = fused.state[p][key]
            if entry.is_floating_point():
                assert_close(f"{name}, {key}", array_of(own), array_of(entry), "float32")
                continue
            assert own.dtype == entry.dtype
            apart = (own.int() - entry.int()).abs()
            assert (apart > 1).sum() <= (apart.numel() // 1000 if key == RECORD else 0), f"{name}, {key}"
            assert (apart > 0).float().mean() <= FLIPPED / 10, f"{name}, {key}"


EIGHT_BITS: dict[str, Any] = dict(state_dtype="int8")
RANDOM: dict[str, Any] = dict(state_rounding="stochastic", seed=3)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rule", "dtype", "shapes", "options"),
    [
        ("LAMB", "bfloat16", ELEMENTS, dict(EIGHT_BITS, weight_decay=0.1)),
        ("LAMB", "float32", {"stack": (2, 64, 64)}, dict(EIGHT_BITS, stacked_axes=1, on_nonfinite="skip")),
        ("LARS", "float16", MATRIX, dict(EIGHT_BITS, rounding="compensated", on_nonfinite="raise")),
        ("AdamW", "bfloat16", MATRIX, dict(EIGHT_BITS, **RANDOM, rounding="compensated")),
        ("LAMB", "float32", MATRIX, dict(RANDOM, state_dtype="bfloat16", momentum_dtype="int8", on_nonfinite="skip")),
        ("SGD", "float32", MATRIX, dict(EIGHT_BITS, momentum=0.9)),
        ("Lion", "bfloat16", MATRIX, dict(EIGHT_BITS)),
        ("Adafactor", "bfloat16", {"matrix": (32, 128)}, dict(EIGHT_BITS, momentum=0.9, rounding="compensated")),
        (
            *("Adafactor", "float32", {"matrix": (33, 160)}),
            dict(EIGHT_BITS, **RANDOM, momentum=0.9, on_nonfinite="skip"),
        ),
        ("Muon", "bfloat16", MATRIX, dict(EIGHT_BITS, rounding="compensated", ns_dtype=None)),
    ],
    ids=str,
)
def test_lean_state_is_that_of_the_rule(rule: str, dtype: str, shapes: Any, options: dict[str, Any]) -> None:
    if rule == "Adafactor":
        options = dict(options, min_dim_size_to_factor=32)
    ours, theirs = (parameters(dtype, shapes) for _ in range(2))
    fused, reference = make(rule, ours, "fused", **options), make(rule, theirs, "reference", **options)
    for t in range(2):
        step = gradients(shapes, t, ours[0][1].dtype)
        train(fused, ours, [step])
        train(reference, theirs, [step])
        assert_alike(fused, ours, reference, theirs)
        copy_into(fused, ours, reference, theirs)
    assert fused.engine == "fused"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dtype", "shapes", "options"),
    [
        ("bfloat16", {"matrix": (34, 128), "thin": (64, 96), "vector": (70,)}, EIGHT_BITS),
        ("float32", {"stack": (2, 64, 80)}, dict(EIGHT_BITS, stacked_axes=1, on_nonfinite="skip")),
        ("float32", {"long": (3, 1536)}, dict(EIGHT_BITS, variant="polyak", max_size_dense=64)),
    ],
    ids=str,
)
def test_the_momentum_of_kron(dtype: str, shapes: Any, options: dict[str, Any]) -> None:
    """Codes to one step where no product has gone before them; all else as far as products agree."""
    ours, theirs = (parameters(dtype, shapes) for _ in range(2))
    fused, reference = make("Kron", ours, "fused", **options), make("Kron", theirs, "reference", **options)
    for t in range(2):
        step = gradients(shapes, t, ours[0][1].dtype)
        train(fused, ours, [step])
        train(reference, theirs, [step])
        for (name, p), (_, q) in zip(ours, theirs, strict=True):
            assert_near(name, p, q, PRODUCTS["float32"])
            rms, wanted = (each.stats()[name]["update_rms"] for each in (fused, reference))
            assert rms == pytest.approx(wanted, rel=PRODUCTS["float32"])
            for key, entry in reference.state[q].items():
                own = fused.state[p][key]
                if entry.is_floating_point():
                    assert_near(f"{name}, {key}", own, entry, PRODUCTS["float32"])
                    continue
                apart = (own.int() - entry.int()).abs()
                if "variant" not in options:
                    assert apart.max() <= 1, f"{name}, {key}"
                assert (apart > 1).float().mean() <= FLIPPED / 10, f"{name}, {key}"
                assert (apart > 0).float().mean() <= FLIPPED, f"{name}, {key}"
        copy_into(fused, ours, reference, theirs)
    assert fused.engine == "fused"


@pytest.mark.parametrize("what", one_in(2, ["skip", "raise"]))
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


@pytest.mark.parametrize(
    ("rule", "shape", "options", "reason"),
    [
        ("Kron", (64, 64), RANDOM, "there is no fused kernel of Kron for state_rounding='stochastic'"),
        (
            *("Kron", (64, 64), dict(rounding="compensated", whiten="gradient")),
            "there is no fused kernel of Kron for rounding='compensated'",
        ),
        (
            *("Kron", (96, 16, 3, 3), dict(momentum_dtype="int8", merge="squeeze", whiten="gradient")),
            "cut its groups of codes",
        ),
        ("Muon", (64, 64), RANDOM, "there is no fused kernel of Muon for state_rounding='stochastic'"),
        (
            "Adafactor",
            (64, 64, 3, 3),
            dict(momentum=0.9, momentum_dtype="int8", min_dim_size_to_factor=32),
            "tiles of rows and columns .* cut its groups of codes",
        ),
    ],
    ids=str,
)
def test_what_is_not_served_goes_as_lists(rule: str, shape: Any, options: dict[str, Any], reason: str) -> None:
    named, step = parameters("float32", {"w": shape}), gradients({"w": shape}, 0, torch.float32)
    with pytest.raises(OptionError, match=reason):
        train(make(rule, named, "fused", **options), named, [step])
    optimizer = make(rule, named, "auto", **options)
    train(optimizer, named, [step])
    assert optimizer.engine != "fused"
    assert re.search(reason, str(optimizer.explain(code=True)))
