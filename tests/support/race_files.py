"""Files as Fashion-MNIST has them, of few and small pictures."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np


def idx(array: np.ndarray[Any, Any]) -> bytes:
    return (
        bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    )


def write_clothes(folder: Path, *, train: int = 40, test: int = 20) -> Path:
    """The four files; labels are not gzipped."""
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("t10k", test)):
        labels = rng.integers(0, 10, count)
        images = rng.integers(0, 50, (count, 12, 12)) + 20 * labels[:, None, None]
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    return folder
