"""Handwritten digits: the embedded data are those that scikit-learn ships, and the backward pass is the slope."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from thalweg.race import digits


def test_the_data_are_scikit_learns() -> None:
    (train_images, train_labels), (test_images, test_labels) = digits.load()
    assert (train_images.shape, test_images.shape) == ((1437, 64), (360, 64))
    assert np.bincount(test_labels).min() >= 25
    parts = (np.concatenate([train_images, test_images]) * 16, np.concatenate([train_labels, test_labels]))
    content = b"".join(part.astype(np.uint8).tobytes() for part in parts)
    assert hashlib.sha256(content).hexdigest() == "0113aa32bd8e58750a54bcdae2a9bf5194cfb4bae3ad71eb5b1be3553b9c0c54"


@pytest.mark.parametrize("name", sorted(digits.init(0)))
def test_the_gradient_is_the_slope_of_the_loss(name: str) -> None:
    rng, step = np.random.default_rng(1), 1e-6  # short of the next kink of a ReLU
    batch = rng.uniform(0, 1, (7, 64)), rng.integers(0, 10, 7)
    params = {key: value.astype(np.float64) for key, value in digits.init(0).items()}
    gradient = digits.compute_gradients(params, *batch)[name]
    assert np.any(gradient != 0)
    for direction in rng.standard_normal((5, *gradient.shape)):
        unit = step * direction / np.linalg.norm(direction)
        ahead, behind = (digits.evaluate({**params, name: params[name] + d}, *batch)[0] for d in (unit, -unit))
        assert (ahead - behind) / 2 == pytest.approx((gradient * unit).sum(), rel=1e-5, abs=1e-14)
