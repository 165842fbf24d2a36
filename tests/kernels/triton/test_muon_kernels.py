"""Muon on GPUs: fused kernels before and after its products have the numbers of the rule."""

from __future__ import annotations

from typing import Any

import pytest
from on_device import DEVICE, gradients, parameters, train

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402

pytestmark = pytest.mark.slow  # programs are interpreted

#: Three of one shape, turned ones, and one of more axes.
SHAPES = {"a": (34, 20), "b": (34, 20), "c": (34, 20), "wide": (20, 34), "conv": (5, 4, 3, 2)}
#: Where products are symmetric or have an addend, tiles of both sizes.
LARGE = {"tall": (1536, 768), "wide": (768, 1536), "square": (1024, 1024)}


def make(named: Any, engine: str, **options: Any) -> Any:
    return thalweg.torch.Muon(named, engine=engine, **options)


@pytest.mark.skipif(DEVICE == "cpu", reason="matrices that are large enough for kernels of their own")
@pytest.mark.parametrize("method", ["plain", "auto"])
def test_products_by_kernels(method: str) -> None:
    """As near to exact steps as the library's products in bfloat16 are."""
    shapes = {f"{kind} {i}": shape for kind, shape in LARGE.items() for i in range(8)}
    starts, found = [p.detach().clone() for _, p in parameters("float32", shapes)], {}
    for name, engine, options in (
        ("exact", "reference", dict(ns_dtype=None)),
        ("library", "reference", {}),
        ("kernels", "fused", dict(ns_method=method)),
    ):
        named = parameters("float32", shapes)
        train(make(named, engine, **options), named, gradients(5, "float32", shapes))
        found[name] = [p.detach() for _, p in named]
    for exact, library, kernels, start in zip(*found.values(), starts, strict=True):
        assert (kernels - exact).norm() < 1.1 * (library - exact).norm() + 1e-3 * (exact - start).norm()


@pytest.mark.skipif(DEVICE == "cpu", reason="steps are recorded on GPUs")
def test_recorded_steps_follow_the_precision_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, found = {f"{i}": (1024, 1024) for i in range(8)}, []
    before = torch.get_float32_matmul_precision()
    try:
        for replays, last in (("1", "highest"), ("0", "highest"), ("0", "high")):
            monkeypatch.setenv("THALWEG_REPLAY", replays)
            named, steps = parameters("float32", shapes), gradients(7, "float32", shapes)
            optimizer = make(named, "fused", ns_dtype="float32")
            for precision, given in (("high", steps[:6]), (last, steps[6:])):
                torch.set_float32_matmul_precision(precision)
                train(optimizer, named, given)
            found.append(torch.stack([p.detach() for _, p in named]))
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_the_code_that_is_made_is_shown() -> None:
    shown = str(make(parameters("float32", SHAPES), "auto").explain(code=True))
    assert "read p, g and write p, shown" in shown
    assert "between them: matrix products by library calls" in shown
