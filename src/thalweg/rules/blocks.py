"""Formulas that more than one rule uses."""

from __future__ import annotations

import math

from thalweg.arrays import A, Scalar, Space, Truth, Value


def average(old: Value, new: Value, weight: Scalar) -> Value:
    """An exponential moving average that gives ``weight`` to the new value."""
    return (1 - weight) * old + weight * new


def one_minus_power(xp: Space[A], b: Scalar, t: Scalar) -> Scalar:
    """1 - b**t without cancellation: in float32, 1 - 0.999 alone is wrong by 5e-5."""
    return -xp.expm1(t * xp.log(b))


def ratio_unless(xp: Space[A], undefined: Truth, above: Scalar, below: Scalar, otherwise: Scalar) -> Scalar:
    """above / below, or ``otherwise`` where that is undefined; nothing is ever divided by zero."""
    return xp.where(undefined, otherwise, above / xp.where(undefined, 1.0, below))


def keep_norm(xp: Space[A], norm: Scalar, new_squares: Scalar) -> Scalar:
    """The factor that gives a tensor of this new sum of squares its former norm; 1 if either is 0 or overflows."""
    new_norm = xp.sqrt(xp.where(xp.isfinite(new_squares), new_squares, 0.0))
    return ratio_unless(xp, xp.minimum(norm, new_norm) <= 0, norm, new_norm, 1.0)


def regain_norm(xp: Space[A], lost: Scalar) -> tuple[Scalar, Scalar]:
    """What gives a tensor, which has lost this part of its squares, its former norm again; and that less 1.

    The first is 1 / sqrt(1 - lost), and the second has all of its digits where little is lost. Rounded sums do not tell
    a norm below a thousandth of the former one: it is taken for a thousandth.
    """
    lost = xp.minimum(lost, 1 - 2.0**-20)
    left = xp.sqrt(1 - lost)
    return 1 / left, lost / (left * (1 + left))


def clip(xp: Space[A], x: Value, bounds: tuple[Scalar, Scalar]) -> Value:
    """x kept within (low, high)."""
    low, high = bounds
    return xp.minimum(xp.maximum(x, low), high)


def sign(xp: Space[A], x: Value) -> Value:
    """-1, 0 or 1; what is NaN stays so."""
    return xp.where(x > 0, 1.0, xp.where(x < 0, -1.0, x))


def inverse_sqrt(xp: Space[A], x: Value) -> Value:
    """x**-1/2, and 0 at 0: what has never had a gradient does not move."""
    return 1 / xp.sqrt(xp.where(x <= 0, math.inf, x))


def where_shrinking(xp: Space[A], step: Value, p: Value, decay: Value) -> Value:
    """The decay, 0 for elements that the step moves away from 0 (Chen et al. 2025, arXiv:2510.12402)."""
    return xp.where(step * p <= 0, decay, 0.0)


def is_zero(option: object) -> bool:
    """Whether an option is off for good: None or the number 0, not something traced."""
    return option is None or (isinstance(option, (int, float)) and option == 0)
