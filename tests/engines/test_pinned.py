"""Calls of `agree` in which some engine was once wrong, or that numbers drawn at random do not reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from agree import Arrays, agree, draw, dtype_of
from composed import Damped
from own_rules import (
    Centred,
    Doubled,
    Layerwise,
    Margins,
    Narrowed,
    Outer,
    Powers,
    Pushed,
    Remembering,
    Rounds,
    Signed,
    Sized,
    Trailing,
)
from spiked import KINDS

from thalweg.rules import Adafactor, AdamW, Kron, Muon, around

Spoil = Callable[[Arrays, list[Arrays]], None]

CPU = ("numpy native", "torch native")
ARRAYS = ("torch lists", "optax xla")
GPU = ("torch triton", "torch cuda")
NATIVE, LISTS = CPU[:1], ("torch lists",)
TORCH = ("torch native", *LISTS, *GPU)
EVERY_TORCH = ("torch reference", *TORCH)

#: Smaller and larger than what a kernel loads at a time, with axes before and behind those that may be factored.
SHAPES = {"number": (), "vector": (1030,), "matrix": (70, 40), "conv": (9, 7, 3, 2)}
#: The same for kernels of GPUs, of which every program is interpreted.
FEW = {"vector": (2100,), "matrix": (34, 20), "conv": (5, 4, 3, 2)}
#: Around what one program of a kernel sums.
CHUNKS = {str(n): (n,) for n in (1, 2049, 8192, 16_401)}
#: Around widths of vectors, tiles, tasks and what one thread does alone.
SIZES = {str(n): (n,) for n in (0, 1, 2, 7, 8, 15, 17, 33, 63, 65, 127, 129, 1023, 1025, 2049, 16385, 65537, 200_003)}
TILES = {
    str(s): s for s in ((31, 5), (33, 5), (64, 5), (129, 5), (5, 63), (5, 1025), (5, 2049), (4200, 1), (130, 2050))
}
AXES = [(3, 40, 50), (40, 50, 3), (2, 40, 3, 50), (40, 2, 50, 3), (2, 33, 2, 65, 3), (96, 3, 7, 7), (70, 300, 7)]
AROUND = {str(s): s for s in [*AXES, (1, 40, 50), (40, 50, 1), (130, 2050), (17, 2, 1025), (20, 20, 2, 2, 2)]}
#: Elements behind the columns, in axes that are too short to be factored: as many as there is room for.
BEHIND = {str(b): (14, 160, *b) for b in ((2,), (7,), (4, 4), (3, 3, 7), (8, 8), (5, 5, 5), (8, 4, 4))}
STACKS = {"one": (1, 6, 5), "vectors": (5, 40), "matrices": (7, 33, 20), "conv": (3, 9, 4, 8), "numbers": (6,)}
LARGE_STACKS = {"large": (2, 300, 250), "many": (300, 17), "between": (3, 16385)}
#: Groups of 64, 32 and 16 codes, several blocks of a tensor, and tensors that have none.
CODED = {"matrix": (136, 256), "thin": (64, 96), "filter": (48, 16, 3, 3), "odd": (70, 125), "vector": (100,)}
#: One parameter: for torch, a gradient that is not finite is a reason to step none.
MATRIX = {"matrix": (34, 20)}
MATRICES = {"a": (34, 20), "b": (34, 20), "wide": (20, 34), "conv": (5, 4, 3, 2)}
OF_KRON = {"bias": (5,), "a": (12, 9), "b": (12, 9), "conv": (4, 3, 2, 2)}
#: Of which Kron's noise is seen: several of a shape, which may be one stack.
NOISY = {"a": (12, 9), "b": (12, 9), "v": (40,), "cube": (3, 5, 2)}
#: Several of a shape for native code, some too large to be stacked with others.
BATCHES = {**{f"m{i}": (6, 4) for i in range(4)}, "v0": (7,), "v1": (7,), "n0": (), "n1": (), "large": (150, 120)}
IMAGES = {"conv": (8, 6, 3, 5), "other": (4, 3, 2, 2)}
EDGE = {"edge": (4, 6), "inside": (4, 6)}
WIDE = {"w": (20, 300)}
BLOCKS = {"m": (64, 128)}
SIDES = {"rows": (8, 3), "thin": (9, 3), "wide": (2, 7)}
SIZED = {"n": (), "short": (3,), "long": (40,), "a": (6, 4), "b": (4, 6), "c": (2, 3)}
FACTORS = Adafactor(min_dim_size_to_factor=3)
CODED_STACKS = {"s": (3, 64, 128), "v": (64, 128)}
WIDE_AND_SQUARE = {"w": (2, 1000), "v": (600, 600)}
TINY = {f"t{i}": (1 + i % 3,) for i in range(12)}
CHANGING = [draw(SHAPES, dtype, seed) for seed, dtype in enumerate(("float64", "float16", "float32"), 1)]
WIDE_VALUES = (np.nan, np.inf, -np.inf, 3e38, 1e30, 2e19, 1e15, 1e-15, 1e-30, 1e-42, 0.0)

LARS: dict[str, Any] = dict(lr=5.0, weight_decay=0.1)
LAMB: dict[str, Any] = dict(lr=0.02, weight_decay=0.1)
PLAIN: dict[str, Any] = dict(trust=False, momentum=0.0)
FACTORED: dict[str, Any] = dict(lr=0.05, weight_decay=0.1, momentum=0.9, min_dim_size_to_factor=2)
#: The rules that differ in passes and in state.
THREE = {"LARS": LARS, "LAMB": LAMB, "Adafactor": FACTORED}
EXACT: dict[str, Any] = dict(lr=0.02, weight_decay=0.1, ns_dtype=None)
OVERRIDES: dict[str, Any] = dict(
    overrides=[
        ("matrix", dict(lr_scale=0.3, weight_decay=0.0)),
        ("vector", dict(lr_scale=0.0)),
        ("conv", dict(stacked_axes=1, weight_decay=0.5)),
    ]
)
SCHEDULES: dict[str, Any] = dict(lr=lambda t: 0.1 / t, weight_decay=lambda t: 0.01 * t)
THROUGH_0: dict[str, Any] = dict(lr=lambda t: 0.1 / t, weight_decay=lambda t: (0.0, 0.2, 0.4, 0.0)[t % 4])
NORMED: dict[str, Any] = dict(lr=0.1, max_grad_norm=1.0)
SKIPS: dict[str, Any] = dict(on_nonfinite="skip")
EIGHT_BITS: dict[str, Any] = dict(state_dtype="int8")
RECORDED: dict[str, Any] = dict(EIGHT_BITS, rounding="compensated", steps=2)
HALF: dict[str, Any] = dict(state_dtype="float16")
BY_CHANCE: dict[str, Any] = dict(rounding="stochastic", seed=5)
#: Memory in which an engine may leave a parameter to others.
ANYWHERE: dict[str, Any] = dict(strict=False, steps=2)
ALL = slice(None)
RANDOM: dict[str, Any] = dict(state_rounding="stochastic", seed=3)


# ---- what is spoiled


def puts(value: float, where: Any = -1, *names: str, of: str = "gradients", step: int = -1) -> Spoil:
    """One number, or a slice of them, of a gradient or of a parameter."""

    def spoil(params: Arrays, grads: list[Arrays]) -> None:
        tree = params if of == "params" else grads[step]
        for name in names or tree:
            tree[name].reshape(-1)[where] = value

    return spoil


def zeros(params: Arrays, grads: list[Arrays]) -> None:
    """Parameters of zero, gradients of zero, and both, until the last step."""
    for name in ("parameter", "both"):
        params[name][...] = 0
    for step in grads[:-1]:
        step["gradient"][...] = step["both"][...] = 0


def zero_lines(params: Arrays, grads: list[Arrays]) -> None:
    """A row and a column that never have a gradient."""
    for step in grads:
        step["matrix"][5] = step["matrix"][:, 7] = 0


def zero_slices(params: Arrays, grads: list[Arrays]) -> None:
    for tree in (params, *grads):
        for x in tree.values():
            x[len(x) // 2] = 0


def absent(params: Arrays, grads: list[Arrays]) -> None:
    """Gradients that are not there in some steps."""
    for step, name in zip(grads, ("matrix", "vector", None, "conv", "matrix"), strict=False):
        step.pop(name or "", None)


def scattered(params: Arrays, grads: list[Arrays]) -> None:
    """Elements of very different size in one tensor, zeros and the smallest numbers among them."""
    random = np.random.default_rng(0)
    exponents = {"float64": 60, "float16": 3}
    for tree in (params, *grads):
        for x in tree.values():
            most = exponents.get(x.dtype.name, 12)
            x[...] = x * 10.0 ** random.uniform(-most, min(most, 6), x.shape) * (random.random(x.shape) < 0.8)


def throws(params: Arrays, grads: list[Arrays]) -> None:
    """A parameter that its momentum throws out of float16, with gradients of zero."""
    params["w"][...] = 0
    for t, step in enumerate(grads):
        step["w"][...] = 1000.0 if t < 3 else 0.0


def edge(params: Arrays, grads: list[Arrays]) -> None:
    """A parameter that a step would throw out of float16, beside one that it does not."""
    params["edge"][...], grads[0]["edge"] = -65_000.0, np.abs(grads[0]["edge"])


def in_one_slice(params: Arrays, grads: list[Arrays]) -> None:
    grads[-1]["w"][2] = np.inf


def large_row(params: Arrays, grads: list[Arrays]) -> None:
    """Squares that float16 cannot hold, of a gradient that it can."""
    grads[-1]["w"][17] = 300.0


def special_groups(params: Arrays, grads: list[Arrays]) -> None:
    """Groups of zeros and of tiny squares, and two in which something is not finite."""
    g = grads[0]["m"]
    g[0, :64], g[1, 3], g[2, 70] = 0, np.inf, np.nan
    g[0, 64:] *= 1e-18


def later(params: Arrays, grads: list[Arrays]) -> None:
    """Parameters whose gradients begin in the third step."""
    for step in grads[:2]:
        del step["a"], step["b"]


def spikes(params: Arrays, grads: list[Arrays]) -> None:
    for g in grads[9].values():
        g *= 50.0


def unused_rows(params: Arrays, grads: list[Arrays]) -> None:
    for step in grads:
        step["rows"][[0, 1, 6, 7]] = 0


def below(params: Arrays, grads: list[Arrays]) -> None:
    """A step whose gradients are below the bound of the others."""
    for g in grads[2].values():
        g *= 1e-3


def lies(layout: Callable[[Any], Any], *, of: str = "both") -> Spoil:
    """Parameters, gradients or both lie in another order, or with gaps."""

    def spoil(params: Arrays, grads: list[Arrays]) -> None:
        for tree in [params] if of == "params" else grads if of == "gradients" else [params, *grads]:
            tree.update({name: layout(x) for name, x in tree.items()})

    return spoil


channels_last = lies(lambda x: np.ascontiguousarray(np.moveaxis(x, 1, -1)).transpose(0, 3, 1, 2))
transposed = lies(np.asfortranarray)
with_gaps = lies(lambda x: np.repeat(x, 2, axis=-1)[..., ::2])
strange_gradients = lies(np.asfortranarray, of="gradients")
slices = lies(lambda x: np.pad(x, 2)[2:-2, 2:-2], of="gradients")
backwards = lies(lambda x: x[::-1].copy()[::-1], of="gradients")


SPECIAL: dict[str, Any] = dict(EIGHT_BITS, lr=0.01, steps=2, spoil=special_groups)


# ---- the table


def pin(what: str, engines: Sequence[str], rule: Any, shapes: Any, dtype: str = "float32", **given: Any) -> list[Any]:
    """A row for each engine: what is pinned, and how `agree` is called."""
    name = rule if isinstance(rule, str) else rule.__name__
    return [
        pytest.param(
            engine,
            rule,
            shapes,
            dtype,
            given,
            id=f"{engine}: {what}, {name}, {dtype}",
            marks=pytest.mark.gpu if engine == "torch cuda" else (),
        )
        for engine in engines
    ]


def of_three(what: str, engines: Sequence[str], shapes: Any, dtype: str = "float32", **given: Any) -> list[Any]:
    return [row for rule, own in THREE.items() for row in pin(what, engines, rule, shapes, dtype, **{**own, **given})]


ZEROS = dict.fromkeys(("parameter", "gradient", "both", "neither"), (40, 30))
PINNED = [
    # sizes at the seams of tiles, tasks and threads
    *of_three("every size", CPU, SIZES, steps=2),
    *of_three("every size", NATIVE, SIZES, "bfloat16", steps=2),
    *pin("seams of tiles", NATIVE, "Adafactor", TILES, "float64", steps=2, lr=0.05, min_dim_size_to_factor=1),
    *pin("axes around", CPU, "Adafactor", AROUND, steps=2, **FACTORED, clip_threshold=0.5),
    *pin("last two axes", NATIVE, "Adafactor", AROUND, steps=2, **FACTORED, factor_dims="last2"),
    *pin("elements behind columns", NATIVE, "Adafactor", BEHIND, steps=2, **FACTORED),
    *pin("too many behind columns", NATIVE, "Adafactor", {"w": (12, 11, 5, 5, 6)}, strict=False, **FACTORED),
    *pin("nothing", CPU, "Adafactor", {"rows": (0, 4), "columns": (4, 0), "w": (5, 6)}, strict=False, **FACTORED),
    *pin("nothing at all", GPU, "LAMB", {"none": (0,), "no rows": (0, 4), "w": (5,)}, **LAMB),
    *pin("many tiny tensors", GPU, "LAMB", TINY, **LAMB),
    # zeros
    *(row for d in ("float64", "float32", "float16") for row in of_three("zeros", NATIVE, ZEROS, d, spoil=zeros)),
    *of_three("zeros", LISTS, ZEROS, spoil=zeros),
    *of_three("zeros", GPU, ZEROS, spoil=zeros, steps=2),
    *of_three("rows without gradient", CPU, SHAPES, spoil=zero_lines),
    *of_three("rows without gradient", GPU, FEW, spoil=zero_lines, steps=2),
    *pin("no eps, without gradient", NATIVE, "Adafactor", SHAPES, spoil=zero_lines, **FACTORED, eps=(0.0, 1e-3)),
    *of_three("slices of zero", CPU, {"w": (5, 20, 10)}, stacked_axes=1, spoil=zero_slices),
    # what is around a rule
    *of_three("overrides", (*CPU, *LISTS), SHAPES, "float16", **OVERRIDES),
    *of_three("overrides", GPU, FEW, steps=2, **OVERRIDES),
    *of_three("schedules", NATIVE, SHAPES, "float64", **SCHEDULES),
    *of_three("numbers that pass through 0", NATIVE, SHAPES, "float64", steps=7, **THROUGH_0),
    *(
        row
        for scale in (1e-25, 1e-22, 1e-20, 1e-3, 1e15, 1e18, 1e25)
        for row in pin(
            f"joint norm of {scale}",
            NATIVE,
            "LARS",
            {"a": (70_000,), "b": (3,)},
            **dict(PLAIN, scale=scale, max_grad_norm=scale / 10, lr=1 / scale),
        )
    ),
    *of_three("gradients that are not there", CPU, SHAPES, "float64", steps=7, spoil=absent),
    *of_three("gradients that are not there", GPU, FEW, steps=4, spoil=absent),
    *of_three("one count for all", NATIVE, SHAPES, "float64", steps=7, spoil=absent, global_step=True),
    *of_three("stacks", CPU, STACKS, stacked_axes=1),
    *of_three("large stacks", NATIVE, LARGE_STACKS, "bfloat16", stacked_axes=1, steps=2),
    *of_three("two axes", NATIVE, {"one": (1, 1, 6, 5), "m": (3, 2, 33, 20), "n": (2, 5)}, stacked_axes=2),
    *of_three("stacks of nothing", NATIVE, {"none": (0, 6, 5), "w": (3, 5)}, strict=False, stacked_axes=1),
    *of_three("stacks", GPU, {"a": (3, 8, 10), "b": (2, 5), "c": (4, 6, 7, 3)}, stacked_axes=1, steps=2),
    *pin("averaged", GPU, "AdamW", FEW, averaged=0.7, lr=0.02, weight_decay=0.1, steps=2),
    *pin("cautious", GPU, "AdamW", FEW, cautious="both", lr=0.02, weight_decay=0.1, steps=2),
    *pin("schedule-free", GPU, "AdamW", FEW, schedule_free=True, betas=(0.0, 0.9), lr=0.02, steps=2),
    *pin("grafted", GPU, "AdamW", FEW, graft=AdamW(), averaged=0.5, lr=0.01, steps=2),
    *pin("averaged", GPU, "Muon", MATRICES, averaged=0.7, **EXACT, steps=2),
    *pin("what kernels leave out", GPU, "Muon", MATRICES, strict=False, cautious=True, averaged=0.5, **EXACT, steps=2),
    *pin("a bound", GPU, "LAMB", FEW, **LAMB, max_grad_norm=0.5, steps=4, spoil=below),
    *pin("a bound", GPU, "Muon", MATRICES, **EXACT, max_grad_norm=0.5, steps=4, spoil=below),
    *(
        row
        for dtype in ("float32", "bfloat16", "float16")
        for row in pin("a bound over many sizes", GPU, "AdamW", CHUNKS, dtype, lr=0.01, max_grad_norm=0.5, steps=2)
    ),
    *(
        row
        for kind, own in KINDS.items()
        for engines in (EVERY_TORCH[:3] if own.quantile else EVERY_TORCH,)  # kernels see no limit, but what it does
        for row in pin(f"spikes, {kind}", engines, "AdamW", MATRIX, lr=0.01, steps=12, spikes=own, spoil=spikes)
    ),
    # what is not finite is no spike, and of a step that raises no norm is kept
    *(
        row
        for policy in ("skip", "raise")
        for row in pin(
            f"not finite among spikes, {policy}",
            EVERY_TORCH[:3],
            "AdamW",
            MATRIX,
            lr=0.01,
            steps=12,
            spikes=KINDS["skip"],
            on_nonfinite=policy,
            spoil=puts(np.nan, 0, step=9),
        )
    ),
    *(
        row
        for dtype, scale in (("float64", 1e30), ("float16", 300.0))
        for row in pin(f"a norm beyond {dtype}", EVERY_TORCH[:3], "LARS", MATRIX, dtype, **PLAIN, scale=scale, **NORMED)
    ),
    # options that bind
    *pin("phi from below", CPU, "LAMB", SHAPES, **LAMB, phi=(1000.0, 2000.0)),
    *pin("phi from above", CPU, "LAMB", SHAPES, **LAMB, phi=(0.0, 1e-3)),
    *pin("a ratio that is bounded", CPU, "LAMB", SHAPES, **LAMB, trust_clip=(2.0, 3.0)),
    *pin("decay as large as p", CPU, "LAMB", SHAPES, lr=0.02, weight_decay=70.0, weight_decay_mode="decoupled"),
    *pin("LARC that clips", CPU, "LARS", SHAPES, lr=0.001, clip=True, trust_coefficient=0.02, weight_decay=0.1),
    *pin("tight clip", (*CPU, *GPU), "Adafactor", FEW, **FACTORED, clip_threshold=0.1, steps=2),
    *pin("clamp that binds", (*CPU, *GPU), "Adafactor", FEW, **FACTORED, eps=(0.7, 1e-3), eps_mode="clamp", steps=2),
    *pin("relative steps", NATIVE, "Adafactor", SHAPES, lr=None, warmup_init=True, min_dim_size_to_factor=2),
    # how numbers are stored
    *of_three("state in 16 bits", GPU, FEW, "float16", state_dtype="float16", steps=2),
    *of_three("gradients of one dtype, then of another", NATIVE, SHAPES, gradients=CHANGING),
    *of_three("by chance", GPU, FEW, "bfloat16", **BY_CHANCE, steps=2),
    *of_three("by chance, stacks", NATIVE, STACKS, "float16", rounding="stochastic", stacked_axes=1),
    *of_three("sizes that differ", NATIVE, SHAPES, "bfloat16", spoil=scattered),
    *of_three("sizes that differ", NATIVE, SHAPES, "float64", spoil=scattered),
    *(
        row
        for rule, own in {**THREE, "AdamW": dict(lr=0.02, amsgrad=True)}.items()
        for row in [
            *pin("eight bits", NATIVE, rule, CODED, **own, state_dtype="int8", strict=False),
            *pin("eight bits by chance", NATIVE, rule, CODED, **own, **RANDOM, state_dtype="int8", strict=False),
        ]
    ),
    *pin("eight bits of stacks", CPU, "LAMB", CODED_STACKS, **LAMB, **EIGHT_BITS, **RANDOM, stacked_axes=1),
    *pin("records", CPU, "LAMB", CODED, "bfloat16", **LAMB, rounding="compensated", state_dtype="int8"),
    *pin("records", NATIVE, "LAMB", CODED, "float16", **LAMB, rounding="compensated"),
    *pin(
        "eight bits of stacks", GPU, "LAMB", {"s": (2, 64, 64)}, **LAMB, **EIGHT_BITS, **SKIPS, stacked_axes=1, steps=2
    ),
    *pin("eight bits by chance", GPU, "AdamW", BLOCKS, "bfloat16", lr=0.01, **RECORDED, **RANDOM),
    *pin("16 bits by chance", GPU, "LAMB", BLOCKS, **LAMB, state_dtype="bfloat16", momentum_dtype="int8", **RANDOM),
    *pin("eight bits, records", GPU, "Adafactor", {"m": (33, 160)}, "bfloat16", **FACTORED, **RECORDED),
    *pin("eight bits, records", GPU, "Muon", BLOCKS, "bfloat16", **EXACT, **RECORDED),
    *pin("special groups of eight bits", (*CPU, *GPU), "AdamW", BLOCKS, **SPECIAL),
    *pin("special groups of eight bits, by chance", (*CPU, *GPU), "AdamW", BLOCKS, **SPECIAL, **RANDOM),
    # where elements lie
    *pin("channels last", TORCH, "LAMB", IMAGES, **LAMB, **ANYWHERE, spoil=channels_last),
    *pin("channels last, factored", TORCH, "Adafactor", IMAGES, **FACTORED, **ANYWHERE, spoil=channels_last),
    *pin("channels last, stacks", TORCH, "LAMB", IMAGES, **LAMB, **ANYWHERE, stacked_axes=1, spoil=channels_last),
    *pin("channels last", TORCH, "LAMB", IMAGES, "bfloat16", **LAMB, **ANYWHERE, **BY_CHANCE, spoil=channels_last),
    *(
        row
        for what, spoil in {"transposed": transposed, "with gaps": with_gaps, "gradients": strange_gradients}.items()
        for rule, own in {**THREE, "Muon": EXACT}.items()
        for row in pin(what, TORCH, rule, {"w": (40, 33)}, **own, **ANYWHERE, spoil=spoil)
    ),
    *of_three("gradients in Fortran order", NATIVE, {"w": (40, 33)}, spoil=strange_gradients, max_grad_norm=1.0),
    *of_three("gradients that are slices", CPU, {"w": (40, 33)}, spoil=slices, max_grad_norm=0.5),
    *of_three("gradients that are slices", CPU, {"w": (40, 33)}, spoil=slices, on_nonfinite="skip"),
    *of_three("gradients backwards", NATIVE, {"w": (40, 33)}, spoil=backwards),
    # what is not finite, and what overflows
    *(
        row
        for value in WIDE_VALUES
        for where in (0, -1, ALL)
        for policy in ("propagate", "skip", "raise")
        for row in of_three(
            f"{value} at {'all' if where == ALL else where}, {policy}",
            NATIVE,
            {"vector": (1500,), "matrix": (40, 30), "bystander": (33,)},
            spoil=puts(value, where, "vector", "matrix"),
            on_nonfinite=policy,
            steps=2,
        )
    ),
    *(
        row
        for dtype, value in (("float64", 1e300), ("float64", np.nan), ("float16", 6e4), ("bfloat16", 3e38))
        for policy in ("skip", "raise")
        for row in of_three(
            f"{value}, {policy}", CPU, {"m": (70, 40)}, dtype, spoil=puts(value, 3), on_nonfinite=policy, steps=2
        )
    ),
    *(
        row
        for value in (np.nan, 3e38, 1e19, 1e-42)
        for row in of_three(f"parameters of {value}", NATIVE, SHAPES, spoil=puts(value, 0, of="params"), moves=False)
    ),
    *of_three("one slice", NATIVE, {"w": (4, 20, 10), "b": (4, 3)}, **SKIPS, stacked_axes=1, spoil=in_one_slice),
    *pin("a sum beyond float32", NATIVE, "LAMB", {"w": (70_000,)}, **LAMB, **SKIPS, spoil=puts(1e18, ALL)),
    *pin("large sums", NATIVE, "Adafactor", WIDE_AND_SQUARE, **FACTORED, **SKIPS, spoil=puts(1e18, ALL, step=0)),
    *of_three("not finite", GPU, MATRIX, **SKIPS, spoil=puts(np.nan, 64, step=1)),
    *of_three("not finite", GPU, FEW, on_nonfinite="raise", steps=2, spoil=puts(np.nan, 0, "conv")),
    *pin("bounded", GPU, "AdamW", MATRIX, lr=0.01, **SKIPS, max_grad_norm=2.0, spoil=puts(np.inf, 64, step=1)),
    *pin("no finite squares", GPU, "AdamW", BLOCKS, lr=0.01, steps=2, **EIGHT_BITS, spoil=puts(np.inf, 70, step=0)),
    *pin("beyond float16", CPU, "LARS", {"w": (500,)}, "float16", lr=10.0, trust=False, steps=6, **SKIPS, spoil=throws),
    *(
        row
        for policy in ("skip", "raise")
        for row in pin(
            f"codes and a record, {policy}",
            TORCH,
            "LAMB",
            BLOCKS,
            "bfloat16",
            **LAMB,
            **RECORDED,
            on_nonfinite=policy,
            spoil=puts(np.inf, 130),
        )
    ),
    *of_three("edge of float16", (*CPU, *GPU), EDGE, "float16", lr=1e4, **SKIPS, steps=1, spoil=edge),
    *pin("large state", CPU, "Adafactor", WIDE, **FACTORED, **SKIPS, **HALF, spoil=large_row),
    *pin("large state", GPU, "Adafactor", WIDE, **FACTORED, **SKIPS, **HALF, spoil=large_row, steps=2),
    # rules of one's own
    *(
        row
        for rule, given in ((Signed, dict(weight_decay=0.1)), (Remembering, {}), (Margins, {}), (Rounds, {}))
        for row in pin("one's own", CPU, rule, {"w": (300, 70), "v": (128, 128)}, lr=0.1, **given)
    ),
    *(
        row
        for rule, given in ((AdamW, {}), (Muon, EXACT), (Kron, dict(damping_mode="expected")))
        for row in pin(
            "around it, one's own", TORCH[:2], around(rule, Damped), MATRICES, strict=False, **{"lr": 0.02, **given}
        )
    ),
    *pin("one's own, not finite", CPU, Signed, MATRIX, lr=0.1, **SKIPS, spoil=puts(np.nan, 5, step=1)),
    *pin("a mutant", (*CPU, *GPU), Doubled, {"matrix": (12, 10)}, **FACTORED),
    *pin("a mutant", (*CPU, *GPU), Pushed, {"matrix": (12, 10)}, **LARS),
    *(
        row
        for rule in (Layerwise, Remembering, Trailing, Outer)
        for row in pin("one's own", GPU, rule, {"matrix": (5, 7), "cube": (3, 4, 5)}, lr=0.01, on_nonfinite="skip")
    ),
    *pin("one's own, by sizes", (*CPU, "optax native", *ARRAYS, *GPU), Sized, SIZED, lr=0.01, strict=False),
    *pin("powers", (*CPU, "optax native", *ARRAYS, *LISTS, *GPU), Powers, SHAPES, lr=0.001),
    *pin("powers", (*CPU, *GPU), Powers, SHAPES, lr=0.001, whole=2.0, on_nonfinite="skip"),
    *pin("derived, by sizes", ("torch native", *LISTS, *GPU), Narrowed, SIZED, strict=False, **FACTORED),
    *pin("grafted by sizes", (*ARRAYS, *TORCH), "AdamW", SIZED, lr=0.01, strict=False, graft=FACTORS),
    *pin("one's own, stacks", GPU, Outer, {"cube": (3, 4, 5)}, lr=0.01, stacked_axes=1, steps=2),
    *pin("one's own, whole", (*LISTS, "torch native"), Centred, MATRICES, lr=0.01, strict=False),
    # Muon
    *pin("Gram", GPU, "Muon", MATRICES, **EXACT, ns_method="gram", cautious_decay=True, steps=2),
    *pin("sum", GPU, "Muon", MATRICES, **EXACT, momentum_mode="sum", scaling="match_rms_adamw", steps=2),
    *pin("split", GPU, "Muon", {"a": (34, 20)}, **EXACT, split=(20, 8, 6), nesterov=False, steps=2),
    *pin("split, transposed", GPU, "Muon", {"w": (20, 34)}, **EXACT, split=(30, 4), split_axis=1, transposed=True),
    *pin("a number", GPU, "Muon", {"w": ()}, strict=False, **EXACT, vectors="row", transposed=True),
    *pin("a number", GPU, "Muon", {"w": ()}, strict=False, **EXACT, vectors="row", scaling="match_rms_adamw"),
    *pin("rows", GPU, "Muon", MATRICES, **EXACT, normalize="rows", bias_correction=True, maximize=True, steps=2),
    *pin("stacks", GPU, "Muon", {"conv": (5, 4, 3, 2), "a": (3, 7, 5)}, **EXACT, stacked_axes=1, vectors="row"),
    *pin("gradients that come later", GPU, "Muon", MATRICES, **EXACT, spoil=later),
    # Kron
    *pin("batches", CPU, "Kron", BATCHES, "float64", lr=0.02, steps=4),
    *pin("not finite", NATIVE, "Kron", BATCHES, lr=0.02, **SKIPS, spoil=puts(np.nan, 0, "m2", step=1)),
    *pin("decay", GPU, "Kron", OF_KRON, lr=0.05, damping_mode="expected", weight_decay=0.1, weight_decay_mode="update"),
    *pin("blocks", GPU, "Kron", OF_KRON, lr=0.05, block_size=5, precond_update_probability=0.6, averaged=0.9),
    *pin("blocks in parts", GPU, "Kron", OF_KRON, lr=0.05, damping_mode="expected", block_size=4, clip_mode="value"),
    *pin("blocks of one row", ARRAYS, "Kron", {"a": (7, 9), "b": (13, 14)}, lr=0.05, block_size=6, steps=2),
    *pin("geometry eq", GPU, "Kron", OF_KRON, lr=0.05, geometry="eq", precond_update_probability=0.4),
    *pin("quad", GPU, "Kron", {"a": (12, 10), "v": (40,)}, lr=0.05, geometry="quad", max_skew=None, clip=0.3, steps=2),
    *pin("polyak", LISTS, "Kron", {"a": (12, 10), "v": (40,)}, lr=0.05, variant="polyak", weight_decay=0.1, steps=2),
    *pin("stacks", GPU, "Kron", {"s": (2, 12, 9)}, lr=0.05, stacked_axes=1, steps=2),
    *pin("gradients that come later", GPU, "Kron", {"a": (6, 5), "b": (7,), "c": (6, 5)}, lr=0.05, spoil=later),
    *pin("noise", (*CPU, *LISTS, *GPU), "Kron", NOISY, lr=0.05, damping=0.5, seed=-5, steps=2),
    *pin("noise of tasks", CPU, "Kron", {"v": (16_385,), "w": (100_003,)}, lr=0.05, damping=0.5, seed=2**40 + 3),
    # SOAP: no library chooses among eigenvectors of equal eigenvalues
    *pin("few directions", ARRAYS, "SOAP", SIDES, lr=0.01, steps=2, spoil=unused_rows),
    *pin("no gradient", LISTS, "SOAP", {"w": (4, 3)}, lr=0.01, steps=2, spoil=puts(0.0, ALL, step=0)),
    *pin("alike", ARRAYS, "SOAP", {"w": (2, 7, 16)}, lr=0.01, steps=2, spoil=puts(1.0, ALL, step=0)),
    *pin("tiny", LISTS, "SOAP", {"w": (5, 2)}, lr=0.01, steps=2, scale=1e-25),
    *pin("large", LISTS, "SOAP", {"w": (5, 2)}, lr=0.01, steps=2, scale=1e15),
    # in one list, a tensor that is due for a refresh and one that is not
    *pin("some are due", LISTS, "Kron", MATRICES, lr=0.05, precond_update_probability=0.4, steps=6, spoil=later),
]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "rule", "shapes", "dtype", "given"), PINNED)
def test_an_engine_that_steps_as_the_reference(
    engine: str, rule: Any, shapes: Any, dtype: str, given: dict[str, Any]
) -> None:
    for name in (dtype, given.get("state_dtype"), given.get("momentum_dtype")):
        if name == "bfloat16":
            dtype_of(name)
    agree(engine, rule, shapes, dtype, **{"strict": True, **given})
