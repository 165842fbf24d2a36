"""Launching compiled kernels without Triton's layers. tests/gpu/test_torch_cuda.py has that they are launched."""

from __future__ import annotations

import warnings

import pytest

from thalweg.errors import FallbackWarning
from thalweg.kernels.triton import launching


def test_an_unknown_version_is_told_once() -> None:
    launching.warn_of_version.cache_clear()
    with pytest.warns(FallbackWarning, match="3.5 to 3.9"):
        assert launching.direct(object(), is_known=False) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launching.direct(object(), is_known=False) is None
    launching.warn_of_version.cache_clear()
