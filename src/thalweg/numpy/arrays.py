"""What arrays and options numpy can serve, and what is said of those that it cannot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thalweg.arrays import Shape
from thalweg.dtypes import DTYPES
from thalweg.errors import OptionError, ParameterError, say_where
from thalweg.given import plain
from thalweg.rules.checks import is_known
from thalweg.settings import STORAGE, RuleOptions
from thalweg.spaces import numpy as xp

Arr: TypeAlias = npt.NDArray[Any]
Name: TypeAlias = str | int
#: A number, a function of the step (counted from 1), or None where the rule has its own.
Rate: TypeAlias = float | Callable[[int], float] | None

#: Said of what is no array of numpy.
ELSEWHERE = "thalweg.torch steps tensors of torch, and thalweg.optax arrays of JAX"


def checked_name(name: Any) -> Name:
    """The name as Python's own string or whole number."""
    if isinstance(name, str):
        return str(name)
    if isinstance(name, (int, np.integer)) and not isinstance(name, bool):
        return int(name)
    raise ParameterError(f"a parameter's name must be a string or a whole number, got {name!r}")


def checked_pair(name: Name, weights: Any, gradient: Any, shape: Shape | None) -> tuple[Arr, Arr]:
    """The parameter and its gradient in the shape they are to be seen in; the parameter as a view, never a copy."""
    gradient = np.asarray(gradient) if isinstance(gradient, np.generic) else gradient
    check_array("parameter", name, weights)
    check_array("the gradient of", name, gradient)
    flags = weights.flags
    if not flags.writeable:
        raise ParameterError(f"parameter {name!r} is read-only, and a step changes it in place: pass a writable array")
    if not (flags.c_contiguous or flags.f_contiguous):
        raise ParameterError(
            f"parameter {name!r} is not contiguous (strides {weights.strides} for shape {weights.shape}): "
            "pass the array that owns the memory, or pass numpy.ascontiguousarray of it and copy the result back"
        )
    # subclasses may compute in their own way; their memory is what is wanted
    weights, gradient = np.asarray(weights), np.asarray(gradient)
    if shape is not None:
        weights = unflattened("parameter", name, weights, shape)
        gradient = unflattened("the gradient of", name, gradient, shape)
    if weights.shape != gradient.shape:
        raise ParameterError(
            f"the gradient of {name!r} has shape {gradient.shape}, and its parameter {weights.shape}: "
            "they must be equal"
        )
    return weights, gradient


def check_array(what: str, name: Name, x: Any) -> None:
    """Refuse what is no array that can be stepped. what: "parameter" or "the gradient of", for the message."""
    if not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray):
        raise ParameterError(f"{what} {name!r} must be a numpy array, got {type(x).__name__}; {ELSEWHERE}")
    if xp.dtype(x) not in DTYPES or not x.dtype.isnative:
        raise ParameterError(
            f"{what} {name!r} has dtype {x.dtype}: it must be float32, float64, float16 or bfloat16, in the byte order "
            "of this machine; convert it, with .astype(numpy.float32) for example"
        )


def unflattened(what: str, name: Name, x: Arr, shape: Any) -> Arr:
    """A flat buffer as a view in the shape of the parameter that it holds."""
    is_tuple = isinstance(shape, (tuple, list))
    if not is_tuple or not all(isinstance(n, (int, np.integer)) and type(n) is not bool and n >= 0 for n in shape):
        raise ParameterError(f"shape must be a tuple of whole numbers >= 0, got {shape!r}")
    shape = tuple(int(n) for n in shape)
    if x.shape != shape and (x.ndim != 1 or x.size != math.prod(shape)):
        raise ParameterError(
            f"{what} {name!r} has shape {x.shape}: for shape={shape} it must be flat with {math.prod(shape)} elements"
        )
    return x.reshape(shape)


def pairs(params: Any, grads: Any) -> list[tuple[Name, Any, Any]]:
    """(name, parameter, gradient) for each parameter of a model that has a gradient."""
    if all(isinstance(x, Sequence) and not isinstance(x, str) for x in (params, grads)):
        if len(params) != len(grads):
            raise ParameterError(
                f"{len(params)} parameters and {len(grads)} gradients: there must be one gradient for each parameter, "
                "or None"
            )
        params, grads = dict(enumerate(params)), dict(enumerate(grads))
    if not (isinstance(params, Mapping) and isinstance(grads, Mapping)):
        kinds = f"{type(params).__name__} and {type(grads).__name__}"
        raise ParameterError(
            f"params and grads must be two mappings by name or two sequences, got {kinds}; {ELSEWHERE}"
        )
    for name in grads:
        if name not in params:
            raise ParameterError(
                f"there is a gradient for {name!r} and no parameter of that name: grads must use the names of params"
            )
    given = ((name, weights, grads.get(name)) for name, weights in params.items())
    return [(name, weights, gradient) for name, weights, gradient in given if gradient is not None]


def address(x: Arr) -> int:
    """Where the array's first element lies."""
    start: int = x.__array_interface__["data"][0]
    return start


def apart(x: Arr, *others: Arr) -> Arr:
    """An array in memory of its own: a copy, if it may share that of others."""
    return x.copy() if any(np.may_share_memory(x, other) for other in others) else x


def span(x: Arr) -> tuple[int, int]:
    """Where an array lies in memory: its first byte, and the one behind its last."""
    if x.flags.c_contiguous:
        start = address(x)
        return start, start + x.nbytes
    low, high = np.lib.array_utils.byte_bounds(x)
    return low, high


# ---- options


def checked_rate(lr: Any, settings: RuleOptions) -> Rate:
    """A learning rate in Python's own numbers, and no parameters: constructors of other libraries begin with them."""
    several = isinstance(lr, (Mapping, list, tuple, Iterator)) or getattr(lr, "shape", ()) != ()
    if several or hasattr(lr, "parameters"):
        raise OptionError(
            f"lr must be a finite number >= 0 or a function of the step, got {type(lr).__name__}; pass parameters to "
            f"step(params, grads), not to the constructor; {ELSEWHERE}"
        )
    settings.validate_lr(value_at("lr", lr, 1))
    rate: Rate = plain(lr)
    return rate


def value_at(name: str, value: Any, t: int) -> Any:
    """An option at step t, in Python's own numbers; raise if it is an array or a tensor of another framework."""
    value = plain(value(t) if callable(value) else value)
    if not is_known(value):
        raise OptionError(f"{name} must be a Python number here, got {type(value).__name__}")
    return value


def check_served(settings: RuleOptions) -> None:
    """Say now, and not at the first step, what numpy cannot serve: tensors, or bfloat16 without its package."""
    for options in (settings.options, *(options for _, options in settings.overrides)):
        for name, value in options.items():
            value_at(name, value, 1)
            if name in STORAGE and value is not None:
                with say_where(f"{name}={value!r}"):
                    xp.named_dtype(value)
