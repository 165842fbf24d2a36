"""What arrays can be stepped, and what is said of those that cannot."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thalweg.arrays import Shape
from thalweg.errors import ParameterError

Arr: TypeAlias = npt.NDArray[Any]
Name: TypeAlias = str | int

SERVED = ("float32", "float64", "float16", "bfloat16")


def checked_name(name: Any) -> Name:
    """The name as Python's own string or whole number."""
    if isinstance(name, str):
        return str(name)
    if isinstance(name, (int, np.integer)) and not isinstance(name, bool):
        return int(name)
    raise ParameterError(f"a parameter's name must be a string or a whole number, got {name!r}")


def checked_pair(name: Name, weights: Any, gradient: Any, shape: Shape | None) -> tuple[Arr, Arr]:
    """The parameter and its gradient in the shape they are to be seen in; views, never copies."""
    check_array(f"parameter {name!r}", weights)
    gradient = np.asarray(gradient) if isinstance(gradient, np.generic) else gradient
    check_array(f"the gradient of {name!r}", gradient)
    check_writable(name, weights)
    # subclasses may compute in their own way; their memory is what is wanted
    weights, gradient = weights.view(np.ndarray), gradient.view(np.ndarray)
    if shape is not None:
        weights = shaped(f"parameter {name!r}", weights, shape)
        gradient = shaped(f"the gradient of {name!r}", gradient, shape)
    if weights.shape != gradient.shape:
        raise ParameterError(
            f"the gradient of {name!r} has shape {gradient.shape}, and its parameter {weights.shape}: must be equal"
        )
    return weights, gradient


def check_array(what: str, x: Any) -> None:
    if not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray):
        kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
        raise ParameterError(f"{what} must be a numpy array, got {kind}")
    if x.dtype.name not in SERVED:
        raise ParameterError(
            f"{what} has dtype {x.dtype}: float32, float64, float16 and bfloat16 can be stepped; "
            "convert it, with .astype(numpy.float32) for example"
        )
    if not x.dtype.isnative:
        raise ParameterError(
            f"{what} has foreign byte order ({x.dtype.str}): convert it with .astype(x.dtype.newbyteorder('='))"
        )


def check_writable(name: Name, weights: Arr) -> None:
    if not weights.flags.writeable:
        raise ParameterError(f"parameter {name!r} is read-only and is to be changed in place: pass a writable array")
    if not (weights.flags.c_contiguous or weights.flags.f_contiguous):
        raise ParameterError(
            f"parameter {name!r} is not contiguous (strides {weights.strides} for shape {weights.shape}): "
            "pass the array that owns the memory, or step numpy.ascontiguousarray of it and copy the result back"
        )


def address(x: Arr) -> int:
    """Where the array's first element lies."""
    start: int = x.__array_interface__["data"][0]
    return start


def is_size(n: Any) -> bool:
    return isinstance(n, (int, np.integer)) and not isinstance(n, bool) and bool(n >= 0)


def shaped(what: str, x: Arr, shape: Shape) -> Arr:
    """A flat buffer, seen in the shape of the parameter it holds."""
    sizes = isinstance(shape, (tuple, list)) and all(is_size(n) for n in shape)
    if not sizes:
        raise ParameterError(f"shape must be a tuple of whole numbers >= 0, got {shape!r}")
    shape = tuple(int(n) for n in shape)
    if x.shape == shape:
        return x
    if x.ndim != 1 or x.size != math.prod(shape):
        raise ParameterError(
            f"{what} has shape {x.shape}: for shape={shape} it must be flat with {math.prod(shape)} elements"
        )
    if not x.flags.c_contiguous:
        raise ParameterError(
            f"{what} is a flat buffer with gaps (strides {x.strides}): for shape={shape} it must be contiguous"
        )
    return x.reshape(shape)


def pairs(params: Any, grads: Any) -> list[tuple[Name, Any, Any]]:
    """(name, parameter, gradient) of a whole model, without those that have no gradient."""
    if isinstance(params, Mapping) and isinstance(grads, Mapping):
        for name in grads:
            if name not in params:
                raise ParameterError(f"there is a gradient for {name!r} and no parameter of that name")
        triples = [(name, weights, grads.get(name)) for name, weights in params.items()]
    elif all(isinstance(x, Sequence) and not isinstance(x, str) for x in (params, grads)):
        if len(params) != len(grads):
            raise ParameterError(
                f"{len(params)} parameters and {len(grads)} gradients: must be as many (None where there is none)"
            )
        triples = [(index, *both) for index, both in enumerate(zip(params, grads, strict=True))]
    else:
        kinds = f"{type(params).__name__} and {type(grads).__name__}"
        raise ParameterError(f"params and grads must be two mappings by name or two sequences, got {kinds}")
    return [(name, weights, gradient) for name, weights, gradient in triples if gradient is not None]


def is_aliased(weights: Sequence[Arr], gradients: Sequence[Arr]) -> bool:
    """Whether writing one parameter might change another's gradient."""
    spans = sorted((address(x), x.nbytes, i) for i, x in enumerate(weights) if x.size)
    starts = [start for start, _, _ in spans]
    for i, gradient in enumerate(gradients):
        low, high = np.lib.array_utils.byte_bounds(gradient) if gradient.size else (0, 0)
        for start, length, owner in spans[
            max(0, bisect.bisect_right(starts, low) - 1) : bisect.bisect_left(starts, high)
        ]:
            if owner != i and low < start + length:
                return True
    return False


def check_apart(arrays: Mapping[Name, Arr]) -> None:
    """Parameters that share memory would be stepped twice there."""
    spans = [(address(x), name, x.nbytes) for name, x in arrays.items() if x.size]
    starts = sorted(spans, key=lambda span: span[0])
    for (start, other, length), (following, name, _) in itertools.pairwise(starts):
        if following < start + length:
            raise ParameterError(
                f"parameters {other!r} and {name!r} share memory: pass it once, with the sum of the gradients"
            )
