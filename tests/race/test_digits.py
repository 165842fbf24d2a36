"""The embedded digits are the ones scikit-learn ships, split for good."""

from __future__ import annotations

import hashlib

import numpy as np

from thalweg.race import digits


def test_shapes_types_and_range() -> None:
    data = digits.load()
    assert data.train_images.shape == (1437, 64)
    assert data.test_images.shape == (360, 64)
    assert data.train_labels.shape == (1437,)
    assert data.test_labels.shape == (360,)
    for images in (data.train_images, data.test_images):
        assert images.dtype == np.float32
        assert (images.min(), images.max()) == (0, 1)


def test_counts_by_class() -> None:
    data = digits.load()
    labels = np.concatenate([data.train_labels, data.test_labels])
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.bincount(data.test_labels).min() >= 25


def test_checksum() -> None:
    data = digits.load()
    pixels = np.concatenate([data.train_images, data.test_images]) * 16
    labels = np.concatenate([data.train_labels, data.test_labels])
    assert (pixels == pixels.astype(np.uint8)).all()
    content = pixels.astype(np.uint8).tobytes() + labels.astype(np.uint8).tobytes()
    assert hashlib.sha256(content).hexdigest() == "0113aa32bd8e58750a54bcdae2a9bf5194cfb4bae3ad71eb5b1be3553b9c0c54"
