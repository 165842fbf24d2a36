"""Learning rates and options that numpy can serve, and what is said of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from thalweg.errors import OptionError
from thalweg.given import plain
from thalweg.numpy.arrays import advice, kind_of
from thalweg.rules.checks import is_known
from thalweg.settings import STORAGE, Settings
from thalweg.spaces import numpy as xp

#: A number, a function of the step (counted from 1), or None where the rule has its own.
Rate: TypeAlias = float | Callable[[int], float] | None


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
                xp.named_dtype(options.get(name) or "float32")
            except ImportError:
                raise OptionError(
                    f"{name}={options[name]!r} needs a package that is not installed: pip install ml_dtypes"
                ) from None
