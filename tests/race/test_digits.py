"""Handwritten digits: the embedded data are those that scikit-learn ships, and the backward pass is the slope."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from thalweg.race import digits

RANDOM = np.random.default_rng(1)
BATCH = RANDOM.uniform(0, 1, (7, 64)), RANDOM.integers(0, 10, 7)


def test_the_data_are_scikit_learns() -> None:
    (train_images, train_labels), (test_images, test_labels) = digits.load()
    assert (train_images.shape, test_images.shape) == ((1437, 64), (360, 64))
    assert np.bincount(test_labels).min() >= 25
    pixels = np.concatenate([train_images, test_images]) * 16
    content = pixels.astype(np.uint8).tobytes() + np.concatenate([train_labels, test_labels]).astype(np.uint8).tobytes()
    assert hashlib.sha256(content).hexdigest() == "0113aa32bd8e58750a54bcdae2a9bf5194cfb4bae3ad71eb5b1be3553b9c0c54"


@pytest.mark.parametrize("name", sorted(digits.init(0)))
def test_the_gradient_is_the_slope_of_the_loss(name: str) -> None:
    params = {key: value.astype(np.float64) for key, value in digits.init(0).items()}
    gradients = digits.compute_gradients(params, *BATCH)
    assert np.any(gradients[name] != 0)
    step = 1e-6  # short of the next kink of a ReLU
    for direction in np.random.default_rng(2).standard_normal((5, *params[name].shape)):
        unit = direction / np.linalg.norm(direction)
        ahead, behind = (
            digits.evaluate({**params, name: params[name] + sign * step * unit}, *BATCH)[0] for sign in (1, -1)
        )
        assert (ahead - behind) / (2 * step) == pytest.approx((gradients[name] * unit).sum(), rel=1e-5, abs=1e-8)


def test_gradients_keep_their_dtype_and_huge_logits_do_not_overflow() -> None:
    images, labels = BATCH
    params = {name: value * 1e4 for name, value in digits.init(0).items()}
    gradients = digits.compute_gradients(params, images.astype(np.float32), labels)
    assert np.isfinite(digits.evaluate(params, images, labels)[0])
    assert all(g.dtype == np.float32 and np.isfinite(g).all() for g in gradients.values())
