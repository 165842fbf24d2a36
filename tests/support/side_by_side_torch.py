"""Native code and the reference engine over the same torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from cases import FUSED_CASES
from side_by_side import assert_close, assert_figures, draw, draw_gradients, kind

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402

SHAPES = {"number": (), "vector": (1030,), "matrix": (70, 40), "conv": (9, 7, 3, 2)}
FULL: dict[str, dict[str, Any]] = {"LARS": {}, "LAMB": {}, "Adafactor": dict(min_dim_size_to_factor=2, momentum=0.9)}


def make(rule: str, params: Any, engine: str = "fused", **options: Any) -> Any:
    return getattr(thalweg.torch, rule)(params, **{"lr": FUSED_CASES[rule].lr, **options}, engine=engine)


def tensor_of(x: Any) -> Any:
    """A tensor with the numbers of an array; torch knows no bfloat16 of numpy."""
    if x.dtype.name == "bfloat16":
        return torch.tensor(x.astype("float32")).bfloat16()
    return torch.tensor(x)


def array_of(x: Any) -> Any:
    x = x.detach().cpu().contiguous()
    return x.float().numpy().astype(kind("bfloat16")) if x.dtype == torch.bfloat16 else x.numpy()


def parameters(dtype: str = "float32", shapes: Any = SHAPES, seed: int = 0) -> list[tuple[str, Any]]:
    return [(name, torch.nn.Parameter(tensor_of(x))) for name, x in draw(shapes, dtype, seed).items()]


def gradients(steps: int, dtype: str = "float32", shapes: Any = SHAPES) -> list[dict[str, Any]]:
    return [{name: tensor_of(g) for name, g in step.items()} for step in draw_gradients(shapes, dtype, steps)]


def train(optimizer: Any, named: Sequence[tuple[str, Any]], steps: Sequence[dict[str, Any]]) -> None:
    for step in steps:
        for name, p in named:
            p.grad = step.get(name)
        optimizer.step()


def agree(fused: Any, ours: Sequence[tuple[str, Any]], reference: Any, theirs: Sequence[tuple[str, Any]]) -> None:
    """Parameters, all of the state and all figures are equal, to rounding."""
    figures, expected = fused.stats(), reference.stats()  # of all parameters at once: on a GPU each waits for it
    for (name, p), (_, q) in zip(ours, theirs, strict=True):
        precision = "float64" if p.dtype == torch.float64 else "float32"
        assert p.stride() == q.stride(), name
        assert_close(name, array_of(p), array_of(q), precision)
        assert list(fused.state[p]) == list(reference.state[q])
        for key, entry in reference.state[q].items():
            assert_close(f"{name}, {key}", array_of(fused.state[p][key]), array_of(entry), precision)
        if name in expected:
            assert_figures(name, figures[name], expected[name], precision)


def side_by_side(
    rule: str,
    steps: Sequence[dict[str, Any]],
    dtype: str = "float32",
    shapes: Any = SHAPES,
    *,
    engine: str = "fused",
    prepare: Callable[[Any], Any] = lambda p: p,
    **options: Any,
) -> tuple[Any, Any]:
    """Step the same model by both engines, and compare."""
    both = []
    for wanted in (engine, "reference"):
        named = [(name, prepare(p)) for name, p in parameters(dtype, shapes)]
        before = [p.detach().clone() for _, p in named]
        optimizer = make(rule, named, wanted, **options)
        train(optimizer, named, steps)
        assert any(not torch.equal(p, start) for (_, p), start in zip(named, before, strict=True))
        both.append((optimizer, named))
    (fused, ours), (reference, theirs) = both
    assert reference.engine == "reference"
    if engine == "fused":
        assert fused.engine == "fused"
    agree(fused, ours, reference, theirs)
    return fused, ours
