"""Kernels for GPUs on tensors of the CPU, by Triton's interpreter, without what it repeats.

For every call of a device function, the interpreter looks through all members of `triton.language` for those that it
has to replace. The launch has replaced them already, so that a third of all time went into finding none. For every
tensor it describes the type of its shape anew, and for many it writes a table of dtypes: a fifth of what is left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

from thalweg.kernels import triton as kernels

replace_builtins = interpreter._patch_lang
type_of_tuple, numpy_dtype = tl.core._type_for_tuple_values, interpreter._get_np_dtype
known_types: dict[Any, Any] = {}


def replace_once(fn: Any) -> Any:
    """Replace builtins in the modules that a function sees, unless they are replaced already."""
    seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    samples = [tl.tensor.__add__, *(module.load for module in seen)]
    return replace_builtins(fn) if not seen or any(map(tl.core.is_builtin, samples)) else interpreter._LangPatchScope()


def type_of_shape(values: list[Any], fields: Any = None) -> Any:
    """The type of a tuple, remembered where it is a shape."""
    if fields is not None or not all(type(value) is tl.constexpr and type(value.value) is int for value in values):
        return type_of_tuple(values, fields)
    shape = tuple(value.value for value in values)
    return known_types.get(shape) or known_types.setdefault(shape, type_of_tuple(values))


def dtype_of_elements(dtype: Any) -> Any:
    """What numpy has for a dtype, or for that of a block, remembered."""
    scalar = dtype.scalar
    if isinstance(scalar, tl.pointer_type):
        return numpy_dtype(scalar)
    return known_types.get(scalar) or known_types.setdefault(scalar, numpy_dtype(scalar))


if triton.__version__.startswith("3.6."):  # whose interpreter this was written for
    interpreter._patch_lang = replace_once
    tl.core._type_for_tuple_values = type_of_shape
    interpreter._get_np_dtype = dtype_of_elements
if "THALWEG_TESTS_SOON" in os.environ:
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
