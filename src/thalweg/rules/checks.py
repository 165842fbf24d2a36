"""Range checks for options. Each message says which option, what it was, what would be right."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from thalweg.errors import OptionError


def require(condition: bool, message: str) -> None:
    if not condition:
        raise OptionError(message)


def is_known(value: Any) -> bool:
    """Whether the value can be checked now: what a framework traces, or keeps on a device, cannot."""
    return not (hasattr(value, "dtype") and hasattr(value, "shape")) or type(value).__module__.startswith("numpy")


def check_number(
    name: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """A finite number between low and high; ``open_*`` leaves that end out."""
    if not is_known(value):
        return
    lower = [f"{'>' if open_low else '>='} {low:g}"] if low > -math.inf else []
    upper = [f"{'<' if open_high else '<='} {high:g}"] if high < math.inf else []
    ends = lower + upper
    message = f"{name} must be a finite number{' ' if ends else ''}{' and '.join(ends)}, got {value!r}"
    require(isinstance(value, Real) and not isinstance(value, bool), message)
    above = value > low if open_low else value >= low
    below = value < high if open_high else value <= high
    require(math.isfinite(value) and above and below, message)


def check_fraction(name: str, value: Any) -> None:
    """A number in [0, 1), as averaging coefficients are."""
    check_number(name, value, low=0.0, high=1.0, open_high=True)


def check_several(name: str, value: Any, count: int) -> tuple[Any, ...]:
    """A tuple or a list of so many entries; returned as a tuple."""
    wanted = "a pair of numbers" if count == 2 else f"{count} numbers"
    require(isinstance(value, (tuple, list)) and len(value) == count, f"{name} must be {wanted}, got {value!r}")
    return tuple(value)


def check_pair(name: str, value: Any) -> tuple[Any, Any]:
    first, second = check_several(name, value, 2)
    return first, second


def check_bounds(name: str, value: Any) -> None:
    """None, or (low, high) with 0 <= low < high; high may be infinite."""
    if value is None:
        return
    low, high = check_pair(name, value)
    check_number(f"{name}[0]", low, low=0.0)
    if is_known(high) and high != math.inf:
        check_number(f"{name}[1]", high, low=0.0, open_low=True)
    if is_known(low) and is_known(high):
        require(low < high, f"{name} must be (low, high) with low < high, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    require(isinstance(value, bool), f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: Any, *choices: Any) -> None:
    wanted = ", ".join(map(repr, choices))
    require(
        any(type(value) is type(c) and value == c for c in choices),
        f"{name} must be one of {wanted}, got {value!r}",
    )


def check_count(name: str, value: Any, low: float | None = 0, below: float | None = None) -> None:
    """A whole number, of at least ``low`` and less than ``below``."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    ends = [*([] if low is None else [f">= {low:g}"]), *([] if below is None else [f"< {below:g}"])]
    fits = is_whole and (low is None or value >= low) and (below is None or value < below)
    require(fits, f"{name} must be a whole number{' ' if ends else ''}{' and '.join(ends)}, got {value!r}")
