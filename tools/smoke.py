"""Step four optimizers of the installed package, away from the source tree.

python -I tools/smoke.py native   the native core must be there
python -I tools/smoke.py pure     it must be missing, and nothing else may be
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np

import thalweg
from thalweg.kernels.cpu import library
from thalweg.numpy import LAMB, LARS, Adafactor, Kron

SHAPES = {"matrix": (17, 5), "vector": (33,), "scalar": ()}


def step_all() -> None:
    numbers = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        for make in (Adafactor, LAMB, LARS, Kron):
            optimizer = make(lr=0.01, engine="auto")
            params = {name: np.ones(shape, dtype) for name, shape in SHAPES.items()}
            for _ in range(3):
                grads = {name: numbers.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}
                optimizer.step(params, grads)
            for name, p in params.items():
                assert p.dtype == dtype, (make.__name__, name, p.dtype)
                assert np.isfinite(p).all(), (make.__name__, name)
                assert (p != 1).all(), (make.__name__, name)


def main(expected: str) -> None:
    source = Path(__file__).resolve().parents[1] / "src"
    assert source not in Path(thalweg.__file__).resolve().parents, "this is the source tree"
    try:
        library.load()
        found, why = "native", ""
    except library.Unavailable as reason:
        found, why = "pure", f": {reason}"
    assert found == expected, f"expected {expected}, found {found}{why}"

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step_all()
    said = [warning.category for warning in caught]
    assert said == ([thalweg.FallbackWarning] if found == "pure" else []), said
    sys.stdout.write(f"thalweg {thalweg.__version__}: four optimizers step, {found}{why}\n")


if __name__ == "__main__":
    main(sys.argv[1])
