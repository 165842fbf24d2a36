"""Step every optimizer of the installed package, away from the source tree.

python -I tools/smoke.py native   the native core must be there
python -I tools/smoke.py pure     it must be missing, and nothing else may be
"""

from __future__ import annotations

import itertools
import sys
import warnings

import numpy as np

import thalweg.numpy
from thalweg.errors import refusal
from thalweg.kernels.cpu.library import load
from thalweg.rules import RULES

assert "site-packages" in thalweg.__file__, "this is the source tree"
why_not = refusal(load)
assert sys.argv[1:] == ["pure" if why_not else "native"], why_not or "the native core is here"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for name, dtype in itertools.product(RULES, ("float32", "float64")):
        optimizer, numbers = getattr(thalweg.numpy, name)(lr=0.01), np.random.default_rng(0)
        params = {"matrix": np.ones((17, 5), dtype), "square": np.ones((8, 8), dtype)}
        for _ in range(3):
            optimizer.step(params, {key: numbers.standard_normal(p.shape).astype(dtype) for key, p in params.items()})
        for key, p in params.items():  # steps of an element may cancel
            assert p.dtype == dtype and np.isfinite(p).all() and (p != 1).mean() > 0.9, (name, key, dtype)  # noqa: PT018
assert {warning.category for warning in caught} == ({thalweg.FallbackWarning} if why_not else set()), caught
print(f"thalweg {thalweg.__version__}: {len(RULES)} optimizers step, {sys.argv[1]}")
