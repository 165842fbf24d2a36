"""Launching compiled kernels without Triton's layers: that its versions take arguments as they are given.

tests/gpu/test_torch_cuda.py has that profilers see every launch.
"""

from __future__ import annotations

import inspect
import warnings

import pytest
import triton
from triton.backends.nvidia.driver import CudaLauncher

from thalweg.errors import FallbackWarning
from thalweg.kernels.triton import launching


def test_the_launcher_takes_what_it_is_given() -> None:
    """The source of Triton is what there is to go by without a GPU."""
    assert triton.__version__.startswith(launching.KNOWN)
    named = list(inspect.signature(CudaLauncher.__call__).parameters)
    assert named[:6] == ["self", "gridX", "gridY", "gridZ", "stream", "function"]
    rest = named[6:]
    assert rest in (["args"], ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "args"])
    runs = inspect.getsource(triton.runtime.jit.JITFunction.run)
    given = runs[runs.rindex("kernel.run(") :]
    order = [
        "stream",
        "kernel.function",
        "kernel.packed_metadata",
        "launch_metadata",
        "launch_enter_hook",
        "bound_args",
    ]
    places = [given.index(each) for each in order]
    assert places == sorted(places)


def test_an_unknown_version_is_told_once() -> None:
    launching.warn_of_version.cache_clear()
    with pytest.warns(FallbackWarning, match="3.5 to 3.9"):
        assert launching.direct(object(), is_known=False) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launching.direct(object(), is_known=False) is None
    launching.warn_of_version.cache_clear()
