"""Values of options: numbers, arrays of jax, traced values and schedules.

A schedule is a function of the count of steps taken, from 0, as optax has it; rules count steps from 1.
"""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp

from thalweg.dtypes import DTYPES
from thalweg.errors import OptionError
from thalweg.rules import Rule
from thalweg.settings import EIGHT_BITS, numbers_of


def concrete(value: Any) -> Any:
    """The value as Python has it, where it is known already; what is traced stays as it is."""
    if isinstance(value, tuple):
        return tuple(map(concrete, value))
    if callable(value):
        return lambda t: concrete(value(t))
    known = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return value.item() if known and value.size == 1 and value.is_fully_addressable else value


def by_step(value: Any) -> Any:
    """A schedule by count as one by step; anything else as it is."""
    return (lambda t: at_count(value, t - 1)) if callable(value) else value


def at_count(value: Any, count: Any) -> Any:
    """What a schedule says, told the count as an array, as it will be in every update; anything else as it is."""
    return value(jnp.asarray(count, jnp.int32) if isinstance(count, int) else count) if callable(value) else value


def join(values: tuple[Any, ...]) -> Any:
    """Several values, or schedules, as one."""

    def at(count: Any) -> tuple[Any, ...]:
        return tuple(at_count(value, count) for value in values)

    return at if any(map(callable, values)) else values


def in_precision(value: Any, precision: str) -> Any:
    """Arrays in the precision of the arithmetic, so that none of them widens it."""
    if isinstance(value, tuple):
        return tuple(in_precision(part, precision) for part in value)
    return jnp.asarray(value).astype(precision) if hasattr(value, "dtype") else value


def rule_in_precision(rule: Rule, precision: str) -> Rule:
    options = {f.name: getattr(rule, f.name) for f in fields(rule)}
    arrays = {name: v for name, v in options.items() if hasattr(v, "dtype") or isinstance(v, tuple)}
    return replace(rule, **{name: in_precision(v, precision) for name, v in arrays.items()}) if arrays else rule


def dtype_name(option: str, dtype: Any) -> str | None:
    """The name of a dtype that state can be kept in."""
    if dtype is None:
        return None
    name = None
    if not isinstance(dtype, jax.Array):
        with contextlib.suppress(TypeError):
            name = str(jnp.dtype(dtype).name)
    known = (*DTYPES, EIGHT_BITS)
    if name not in known:
        raise OptionError(
            f"{option} must be one of {', '.join(known)}, got {dtype!r}; "
            f"under optax.inject_hyperparams, name {option!r} in static_args"
        )
    return name


def check_static(owner: str, options: dict[str, Any], rule: type[Rule]) -> None:
    """Say which options decide about shapes and programs, and so must be known when these are made."""
    numbers = numbers_of(rule) | {"learning_rate", "max_grad_norm"}
    for name, value in options.items():
        if isinstance(value, jax.Array) and name not in numbers:
            raise OptionError(
                f"{name} of {owner} must be a plain Python value, got {type(value).__name__}; "
                f"under optax.inject_hyperparams, name it in static_args"
            )
        for part in value if isinstance(value, tuple) else (value,):
            if getattr(part, "shape", ()) != ():
                raise OptionError(f"{name} of {owner} must be a single number, got an array of shape {part.shape}")


def has_array(value: Any) -> bool:
    return any(map(has_array, value)) if isinstance(value, tuple) else isinstance(value, jax.Array)
