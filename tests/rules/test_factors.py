"""Arithmetic along the axes of a tensor: by the definition of each sum, whatever their sizes."""

from __future__ import annotations

import string

import numpy as np
import pytest
from numpy.typing import NDArray
from tolerances import FLOAT64

from thalweg.rules.factors import along, average_gram, gram, norm_bound
from thalweg.spaces import numpy as xp

SHAPES = [(2, 20), (3, 12, 5), (2, 8, 9), (2, 10, 9, 3, 3), (1, 3, 11, 10)]


def drawn(*shape: int) -> NDArray[np.float64]:
    return np.random.default_rng(0).standard_normal(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_along_each_axis(shape: tuple[int, ...]) -> None:
    x, letters = drawn(*shape), string.ascii_lowercase[: len(shape)]
    for axis, n in enumerate(shape[1:]):
        own = letters[1 + axis]
        q, turned = drawn(shape[0], n, n), letters.replace(own, "z")
        np.testing.assert_allclose(
            along(xp, q, x, axis), np.einsum(f"az{own},{letters}->{turned}", q, x), rtol=FLOAT64, atol=FLOAT64
        )
        products = np.einsum(f"{letters},{turned}->a{own}z", x, x)
        close = dict(rtol=FLOAT64, atol=FLOAT64 * x.size)
        np.testing.assert_allclose(gram(xp, x, axis, diagonal=False), products, **close)
        np.testing.assert_allclose(gram(xp, x, axis, diagonal=True), np.diagonal(products, 0, 1, 2), **close)
        np.testing.assert_allclose(average_gram(xp, q, x, axis, 0.25), 0.75 * q + 0.25 * products, **close)


@pytest.mark.parametrize("scale", [1.0, 1e-15, 1e30])
@pytest.mark.parametrize("sign", [1, -1], ids=["symmetric", "skew"])
def test_a_norm_is_bounded_from_below_whatever_its_magnitude(sign: int, scale: float) -> None:
    x = drawn(4, 15, 15).astype(np.float32)
    x = (x + sign * np.swapaxes(x, 1, 2)) * np.float32(scale)
    whole = np.linalg.norm(x.astype(np.float64), 2, axis=(1, 2))
    bound = norm_bound(xp, x).reshape(-1).astype(np.float64)
    assert (bound <= whole * (1 + 1e-5)).all()
    assert (bound >= whole / 2).all()
