"""What arrays and options numpy can serve, and what is said of those that it cannot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thalweg.arrays import Shape
from thalweg.dtypes import DTYPES
from thalweg.errors import OptionError, ParameterError
from thalweg.given import plain
from thalweg.rules.checks import is_known
from thalweg.settings import STORAGE, Settings
from thalweg.spaces.numpy import named_dtype

Arr: TypeAlias = npt.NDArray[Any]
Name: TypeAlias = str | int
#: A number, a function of the step (counted from 1), or None where the rule has its own.
Rate: TypeAlias = float | Callable[[int], float] | None

#: What to do with what belongs to another framework, by the packages it comes from.
ELSEWHERE = {
    "torch": "needs thalweg.torch; x.detach().numpy() is an array that shares its memory",
    "jax": "needs thalweg.optax; numpy.array(x) is an array with a copy of it",
    "jaxlib": "needs thalweg.optax; numpy.array(x) is an array with a copy of it",
}
#: Names of the dtypes seen so far: numpy takes microseconds to make one.
_NAMES: dict[np.dtype[Any], str] = {}


def dtype_name(x: Arr) -> str:
    name = _NAMES.get(x.dtype)
    return _NAMES.setdefault(x.dtype, x.dtype.name) if name is None else name


def checked_name(name: Any) -> Name:
    """The name as Python's own string or whole number."""
    if isinstance(name, str):
        return str(name)
    if isinstance(name, (int, np.integer)) and not isinstance(name, bool):
        return int(name)
    raise ParameterError(f"a parameter's name must be a string or a whole number, got {name!r}")


def checked_pair(name: Name, weights: Any, gradient: Any, shape: Shape | None) -> tuple[Arr, Arr]:
    """The parameter and its gradient in the shape they are to be seen in; views, never copies."""
    if shape is None and is_usual(weights) and is_usual(gradient) and weights.shape == gradient.shape:
        check_writable(name, weights)
        return weights, gradient
    check_array(f"parameter {name!r}", weights)
    gradient = np.asarray(gradient) if isinstance(gradient, np.generic) else gradient
    check_array(f"the gradient of {name!r}", gradient)
    check_writable(name, weights)
    # subclasses may compute in their own way; their memory is what is wanted
    weights, gradient = weights.view(np.ndarray), gradient.view(np.ndarray)
    if shape is not None:
        weights = view_as(f"parameter {name!r}", weights, shape)
        gradient = view_as(f"the gradient of {name!r}", gradient, shape)
    if weights.shape != gradient.shape:
        raise ParameterError(
            f"the gradient of {name!r} has shape {gradient.shape}, and its parameter {weights.shape}: "
            "they must be equal"
        )
    return weights, gradient


def is_usual(x: Any) -> bool:
    """Whether an array needs no second look."""
    return type(x) is np.ndarray and x.dtype.isnative and dtype_name(x) in DTYPES


def check_array(what: str, x: Any) -> None:
    if not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray):
        raise ParameterError(f"{what} must be a numpy array, got {kind_of(x)}{advice(x)}")
    if dtype_name(x) not in DTYPES:
        raise ParameterError(
            f"{what} has dtype {x.dtype}: it must be float32, float64, float16 or bfloat16; "
            "convert it, with .astype(numpy.float32) for example"
        )
    if not x.dtype.isnative:
        raise ParameterError(
            f"{what} has foreign byte order ({x.dtype.str}): convert it with .astype(x.dtype.newbyteorder('='))"
        )


def kind_of(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def advice(*given: Any) -> str:
    """For what belongs to another framework, or holds something that does, where it can be stepped."""
    for x in given:
        inside = x.values() if isinstance(x, Mapping) else x if isinstance(x, (list, tuple)) else ()
        for each in (x, *inside):
            packages = [kind.__module__.partition(".")[0] for kind in type(each).__mro__]
            known = next((package for package in packages if package in ELSEWHERE), None)
            if known is not None:
                return f": a {type(each).__name__} {ELSEWHERE[known]}"
    return ""


def check_writable(name: Name, weights: Arr) -> None:
    flags = weights.flags
    if not flags.writeable:
        raise ParameterError(f"parameter {name!r} is read-only, and a step changes it in place: pass a writable array")
    if not (flags.c_contiguous or flags.f_contiguous):
        raise ParameterError(
            f"parameter {name!r} is not contiguous (strides {weights.strides} for shape {weights.shape}): "
            "pass the array that owns the memory, or pass numpy.ascontiguousarray of it and copy the result back"
        )


def address(x: Arr) -> int:
    """Where the array's first element lies."""
    start: int = x.__array_interface__["data"][0]
    return start


def narrow_rms(x: Arr) -> float | None:
    """The root mean square of an array of 16 bits, which rounding depends on."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size and x.dtype.itemsize <= 2 else None


def view_as(what: str, x: Arr, shape: Shape) -> Arr:
    """A flat buffer, seen in the shape of the parameter it holds."""
    whole = isinstance(shape, (tuple, list)) and all(isinstance(n, (int, np.integer)) and n >= 0 for n in shape)
    if not whole or any(isinstance(n, bool) for n in shape):
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
                raise ParameterError(
                    f"there is a gradient for {name!r} and no parameter of that name: "
                    "grads must use the names of params"
                )
        triples = [(name, weights, grads.get(name)) for name, weights in params.items()]
    elif all(isinstance(x, Sequence) and not isinstance(x, str) for x in (params, grads)):
        if len(params) != len(grads):
            raise ParameterError(
                f"{len(params)} parameters and {len(grads)} gradients: there must be one gradient for each parameter, "
                "or None"
            )
        triples = [(index, *both) for index, both in enumerate(zip(params, grads, strict=True))]
    else:
        kinds = f"{type(params).__name__} and {type(grads).__name__}{advice(params, grads)}"
        raise ParameterError(f"params and grads must be two mappings by name or two sequences, got {kinds}")
    return [(name, weights, gradient) for name, weights, gradient in triples if gradient is not None]


def span(x: Arr, start: int) -> tuple[int, int]:
    """The memory between an array's first byte and its last; a start that is known need not be asked for."""
    if x.flags.c_contiguous or not x.size:
        return start, start + x.nbytes
    low, high = np.lib.array_utils.byte_bounds(x)
    return low, high


def is_aliased(weights: Sequence[tuple[int, int]], gradients: Sequence[tuple[int, int]]) -> bool:
    """Whether writing one parameter might change another's gradient. Parameters lie apart."""
    order = sorted(range(len(weights)), key=weights.__getitem__)
    starts, ends = np.array([weights[i] for i in order], np.int64).reshape(-1, 2).T
    low, high = np.array(gradients, np.int64).reshape(-1, 2).T
    first, last = np.searchsorted(ends, low, "right"), np.searchsorted(starts, high, "left")
    # a gradient reaches into the parameters from first up to last, which may be its own and no other
    return any(set(order[first[i] : last[i]]) - {i} for i in np.flatnonzero((last > first) & (high > low)))


def check_apart(spans: Mapping[Name, tuple[int, int]]) -> None:
    """Parameters that share memory would be stepped twice there."""
    ordered = sorted(((*span, name) for name, span in spans.items() if span[1] > span[0]), key=itemgetter(0, 1))
    for (_, end, other), (following, _, name) in itertools.pairwise(ordered):
        if following < end:
            raise ParameterError(
                f"parameters {other!r} and {name!r} share memory: pass it once, with the sum of the gradients"
            )


# ---- options


def check_rate(lr: Any) -> None:
    """Tell parameters from a learning rate: constructors of other libraries begin with them."""
    shown = [next(lr, None)] if isinstance(lr, Iterator) else lr
    several = isinstance(shown, (Mapping, list, tuple)) or getattr(shown, "shape", ()) != ()
    if several or hasattr(lr, "parameters"):
        raise OptionError(
            f"lr must be a finite number >= 0 or a function of the step, got {kind_of(lr)}; pass parameters to "
            f"step(params, grads), not to the constructor{advice(shown)}"
        )


def checked_rate(lr: Any, settings: Settings) -> Rate:
    """A learning rate in Python's own numbers."""
    check_rate(lr)
    value: Rate = plain(lr)
    first = plain(value(1)) if callable(value) else value
    check_plain("lr", first)
    settings.validate_lr(first)
    return value


def check_plain(name: str, value: Any) -> None:
    if not is_known(value):
        raise OptionError(f"{name} must be a Python number here, got {type(value).__name__}")


def check_served(settings: Settings) -> None:
    """Say now, and not at the first step, what numpy cannot serve: tensors, or bfloat16 without its package."""
    for options in (settings.options, *(options for _, options in settings.overrides)):
        for name, value in options.items():
            check_plain(name, plain(value(1)) if callable(value) else value)
        for name in STORAGE:
            try:
                named_dtype(options.get(name) or "float32")
            except ImportError:
                raise OptionError(
                    f"{name}={options[name]!r} needs a package that is not installed: pip install ml_dtypes"
                ) from None
