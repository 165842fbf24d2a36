"""Kernels for GPUs on tensors of the CPU, by Triton's interpreter, without what it repeats.

For every call of a device function, the interpreter looks through all members of `triton.language` for those that it
has to replace. The launch has replaced them already, so that a third of all time went into finding none. For every
tensor it makes the shape anew and describes its type, and for many it writes a table of dtypes: half of what is left.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from day import BY_DAY
from triton.runtime import interpreter

from thalweg.kernels import triton as kernels

replace_builtins, numpy_dtype = interpreter._patch_lang, functools.cache(interpreter._get_np_dtype)


def replace_once(fn: Any) -> Any:
    """Replace builtins in the modules that a function sees, unless they are replaced already."""
    seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    samples = [tl.tensor.__add__, *(module.load for module in seen)]
    return replace_builtins(fn) if not seen or any(map(tl.core.is_builtin, samples)) else interpreter._LangPatchScope()


@functools.cache
def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """The shape of a block, and the number of its elements, as Triton has them."""
    return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def make_tensor(self: Any, handle: Any, kind: Any) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = shape_of(kind.shape if kind.is_block() else ())


def dtype_of_elements(kind: Any) -> Any:
    """What numpy has for a dtype, or for that of a block."""
    return np.dtype(np.uint64) if isinstance(kind.scalar, tl.pointer_type) else numpy_dtype(kind.scalar)


if triton.__version__.startswith("3.6."):  # whose interpreter this was written for
    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = dtype_of_elements
    tl.tensor.__init__ = make_tensor
if BY_DAY:
    # looking for overflows of integers takes a quarter of the time, and is left to make test-all
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


@contextmanager
def serving(device: str = "cpu") -> Iterator[None]:
    """Within: kernels for GPUs step tensors of this device too."""
    before = set(kernels.DEVICES)
    kernels.DEVICES.add(device)
    try:
        with np.errstate(all="ignore"):  # the interpreter computes with numpy, which warns of what is meant
            yield
    finally:
        kernels.DEVICES.clear()
        kernels.DEVICES.update(before)
