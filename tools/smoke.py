"""Step every optimizer of the installed package, away from the source tree.

python -I tools/smoke.py native   the native core must be there
python -I tools/smoke.py pure     it must be missing, and nothing else may be
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np

import thalweg
import thalweg.numpy
from thalweg.kernels.cpu import library
from thalweg.rules import RULES


def step_all() -> None:
    shapes, numbers = {"matrix": (17, 5), "square": (8, 8)}, np.random.default_rng(0)
    for name in RULES:
        for dtype in (np.float32, np.float64):
            optimizer = getattr(thalweg.numpy, name)(lr=0.01)
            params = {key: np.ones(shape, dtype) for key, shape in shapes.items()}
            for _ in range(3):
                grads = {key: numbers.standard_normal(shape).astype(dtype) for key, shape in shapes.items()}
                optimizer.step(params, grads)
            for key, p in params.items():
                assert p.dtype == dtype, (name, key, p.dtype)
                assert np.isfinite(p).all(), (name, key)
                assert (p != 1).mean() > 0.9, (name, key)  # steps of an element may cancel


def main(expected: str) -> None:
    source = Path(__file__).resolve().parents[1] / "src"
    assert source not in Path(thalweg.__file__).resolve().parents, "this is the source tree"
    try:
        library.load()
        core, why = "native", ""
    except library.Unavailable as reason:
        core, why = "pure", f": {reason}"
    assert core == expected, f"expected {expected}, it is {core}{why}"

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step_all()
    categories = {warning.category for warning in caught}
    assert categories == ({thalweg.FallbackWarning} if core == "pure" else set()), categories
    print(f"thalweg {thalweg.__version__}: {len(RULES)} optimizers step, {core}{why}")


if __name__ == "__main__":
    main(sys.argv[1])
