"""1,797 handwritten digits of 8 x 8 pixels: small enough to embed, hard enough to race on.

"Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository (1998), https://doi.org/10.24432/C50P49, CC BY 4.0; its test part, as distributed with
scikit-learn. ``DATA_LICENSE.md`` says what was changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

#: The images are stored in random order, so the first of them are a fair sample.
TRAIN_COUNT = 1437
BRIGHTEST = 16


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 float32 in [0, 1]; labels 0 to 9."""

    train_images: Array
    train_labels: Array
    test_images: Array
    test_labels: Array


def load() -> Digits:
    """The embedded digits, split into 1,437 to train on and 360 to test on; always the same split."""
    with (resources.files(__package__) / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as stored:
        images = stored["images"].reshape(-1, 64).astype(np.float32) / BRIGHTEST
        labels = stored["labels"].astype(np.int64)
    return Digits(images[:TRAIN_COUNT], labels[:TRAIN_COUNT], images[TRAIN_COUNT:], labels[TRAIN_COUNT:])
