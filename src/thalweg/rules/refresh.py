"""One refresh of Kron's factors: a step of each towards whitening what it is shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from thalweg.arrays import A, Scalar, Shape, Space, Squares, Value, is_number
from thalweg.dtypes import DTYPES
from thalweg.rules.blocks import average
from thalweg.rules.factors import (
    apply,
    apply_inverse_transpose,
    balance,
    gram,
    is_diagonal,
    norm_bound,
    per_slice,
    precondition,
    rotate_to_symmetric,
    transposed,
)
from thalweg.rules.rule import Noise

if TYPE_CHECKING:
    from thalweg.rules.kron import Kron

#: Factors and the smoothed norms of their gradients, one of each for every axis.
Factors = tuple[list[A], list[A]]


class Lesson(NamedTuple):
    """What a stack of blocks teaches its factors."""

    factors: list[Any]
    norms: list[Any]
    y: Any
    noise: Noise[Any] | None


class FactorStep(NamedTuple):
    """A step of one factor: what :func:`one_step` is given."""

    q: Any
    norm: Any
    left: Any
    right: Scalar


def refresh_all(xp: Space[A], rule: Kron, lessons: Sequence[Lesson], *, together: bool) -> list[Factors[A]]:
    """One step of every factor towards whitening y. Nothing learned is lost to a bad y.

    together: take the steps of factors of one shape as one, in fewer and larger products.
    """
    if not together:
        return [refresh_factors(xp, rule, lesson) for lesson in lessons]
    learned = [learn(xp, rule, lesson) for lesson in lessons]
    stepped = iter(step_alike(xp, rule, [step for steps, _ in learned for step in steps]))
    return [
        conclude(xp, lesson, [next(stepped) for _ in steps], largest)
        for lesson, (steps, largest) in zip(lessons, learned, strict=True)
    ]


def refresh_factors(xp: Space[A], rule: Kron, lesson: Lesson) -> Factors[A]:
    steps, largest = learn(xp, rule, lesson)
    return conclude(xp, lesson, [one_step(xp, rule, *step) for step in steps], largest)


def learn(xp: Space[A], rule: Kron, lesson: Lesson) -> tuple[list[FactorStep], Scalar]:
    """The step of every factor, and the largest magnitude in y."""
    factors, norms, y, noise = lesson
    own = tuple(range(1, len(xp.shape(y))))
    largest = xp.amax(xp.abs(y), own)
    if rule.init_scale is None:
        factors = scale_to(xp, rule, factors, norms, y, largest)
    (magnitude,) = xp.means((xp.abs(y), own))
    strength = strength_of(rule, magnitude)
    probe = None
    if rule.damping_mode == "noise":
        assert noise is not None
        probe = xp.reshape(noise(), xp.shape(y))
        y = y + strength * probe
        if rule.geometry != "eq":  # whose solves are of this noise
            probe = None
    grams = equilibrium(xp, rule, factors, y, probe, strength)
    return [FactorStep(q, norm, *pair) for q, norm, pair in zip(factors, norms, grams, strict=True)], largest


def conclude(xp: Space[A], lesson: Lesson, stepped: list[tuple[A, A]], largest: Scalar) -> Factors[A]:
    """Factors after their steps.

    A slice of y that is all zero teaches nothing, and a step that ends in NaN or infinity
    is not taken.
    """
    batch = xp.shape(lesson.y)[0]
    factors, norms = balance(xp, [q for q, _ in stepped]), [norm for _, norm in stepped]
    total: Scalar = 0.0
    for x in (*factors, *norms):
        total = total + xp.reshape(xp.sums((x, tuple(range(1, len(xp.shape(x))))))[0], (batch,))
    good = xp.isfinite(total) & xp.reshape(largest > 0, (batch,))

    def keep_good(new: list[A], old: list[A]) -> list[A]:
        return [xp.where(per_slice(xp, good, a), a, b) for a, b in zip(new, old, strict=True)]

    return keep_good(factors, lesson.factors), keep_good(norms, lesson.norms)


def step_alike(xp: Space[A], rule: Kron, steps: Sequence[FactorStep]) -> list[tuple[A, A]]:
    """The steps of all factors, those of one shape as one."""
    alike: dict[Shape, list[int]] = {}
    for index, step in enumerate(steps):
        alike.setdefault(xp.shape(step.q)[1:], []).append(index)
    found: dict[int, tuple[A, A]] = {}
    for members in alike.values():
        own = [steps[i] for i in members]
        if len(own) == 1:
            found[members[0]] = one_step(xp, rule, *own[0])
            continue
        counts = tuple(xp.shape(step.q)[0] for step in own)
        rights = [xp.full(xp.shape(s.norm), s.right, s.norm) if is_number(s.right) else s.right for s in own]
        columns = [s.q for s in own], [s.norm for s in own], [s.left for s in own], rights
        made = one_step(xp, rule, *(xp.join(column, 0) for column in columns))
        found.update(zip(members, zip(*(xp.cut(x, 0, counts) for x in made), strict=True), strict=True))
    return [found[i] for i in range(len(steps))]


def strength_of(rule: Kron, magnitude: Scalar) -> Scalar:
    """The standard deviation of noise, from the mean magnitude of what it is added to."""
    relative = DTYPES["float32"].rounding if rule.relative_damping is None else rule.relative_damping
    return rule.damping + relative * magnitude


def scale_to(xp: Space[A], rule: Kron, factors: list[A], norms: list[A], y: A, largest: Scalar) -> list[A]:
    """Before the first refresh: give Q the scale (mean of y**4)**(-1/8) that whitens y."""
    small = y / unit_of(xp, largest)
    (fourth,) = xp.means((small * small * small * small, tuple(range(1, len(xp.shape(y))))))
    fourth, largest, norm = (xp.reshape(each, (xp.shape(y)[0],)) for each in (fourth, largest, norms[0]))
    scale = first_scale(xp, rule, len(factors), fourth, largest, norm)
    return [q * per_slice(xp, scale, q) for q in factors]


def unit_of(xp: Space[A], largest: Scalar) -> Scalar:
    """What y is divided by so that its fourth powers neither overflow nor vanish."""
    return xp.where(largest > 0, largest, 1.0)


def first_scale(xp: Space[A], rule: Kron, count: int, fourth: A, largest: A, norm: A) -> Value:
    """What each of ``count`` factors is multiplied by: 1 once there is a norm. fourth: in units of the largest."""
    unit = unit_of(xp, largest)
    scale = ((fourth + (rule.damping / unit) ** 4) ** -0.125 * unit**-0.5) ** (1 / count)
    return xp.where(norm <= 0, scale, 1.0)


def equilibrium(
    xp: Space[A], rule: Kron, factors: list[A], y: A, probe: A | None, strength: Scalar
) -> list[tuple[A, Scalar]]:
    """For each axis the two sides that are equal once y is white.

    "eq" compares Q y with Q^-T of white noise; the other geometries compare P y with the
    noise's own expectation, so that no inverse is needed.
    """
    diagonals = [is_diagonal(xp, q) for q in factors]
    if rule.geometry == "eq":
        assert probe is not None
        a, b = apply(xp, factors, y), apply_inverse_transpose(xp, factors, probe)
        return [(gram(xp, a, i, diagonal=d), gram(xp, b, i, diagonal=d)) for i, d in enumerate(diagonals)]
    white = precondition(xp, factors, y)
    left = [gram(xp, white, i, diagonal=d) for i, d in enumerate(diagonals)]
    if rule.damping_mode == "expected":
        left = [a + b for a, b in zip(left, expected_damping(xp, factors, strength), strict=True)]
    sizes = xp.shape(y)[1:]
    return [(a, math.prod(sizes) / max(1, n)) for a, n in zip(left, sizes, strict=True)]


def one_step(xp: Space[A], rule: Kron, q: A, norm: A, left: A, right: Scalar) -> tuple[A, A]:
    """A factor after one step that brings left closer to right, and its smoothed norm."""
    size = norm_bound(xp, left + right) if rule.geometry == "eq" else norm_bound(xp, left) + right
    norm, rate = paced(xp, rule, norm, size)
    if is_diagonal(xp, q):
        return moved(rule, q, left, right, rate), norm
    if rule.geometry == "eq":
        return q - rate * xp.matmul(xp.upper(left - right), q), norm
    if rule.geometry == "procrustes":
        return rotate_to_symmetric(xp, q - rate * (xp.matmul(left, q) - right * q)), norm
    half = rate / 2  # (1 - e) q (1 - e) with e = half (left - right), made symmetric again
    q = q - half * (xp.matmul(left, q) - right * q)
    q = q - half * (xp.matmul(q, left) - right * q)
    return (q + transposed(xp, q)) / 2, norm


def paced(xp: Space[A], rule: Kron, norm: A, size: Scalar) -> tuple[A, Scalar]:
    """The smoothed norm, from that before and the size now, and how far a step goes."""
    norm = xp.maximum(average(norm, size, 1 - rule.lipschitz_beta), size)
    return norm, rule.precond_lr / xp.maximum(norm, rule.eps)


def moved(rule: Kron, q: A, left: A, right: Scalar, rate: Scalar) -> Value:
    """A diagonal factor after one step."""
    gain = rate * (left - right)
    return q * (1 - gain if rule.geometry != "quad" else (1 - gain / 2) * (1 - gain / 2))


def expected_damping(xp: Space[A], factors: list[A], strength: Scalar) -> list[A]:
    """What white noise of this strength adds to each gram matrix of P y, on average.

    For axis i: strength**2 * P_i**2 * product over the other axes j of trace(P_j**2).
    """
    batch = xp.shape(factors[0])[0]
    squares, traces = [], []
    for q in factors:
        if is_diagonal(xp, q):
            squares.append(q * q * q * q)
            (trace,) = xp.sums((squares[-1], (1,)))
        else:
            p = xp.matmul(transposed(xp, q), q)
            squares.append(xp.matmul(p, p))
            (trace,) = xp.sums(Squares(p, (1, 2)))
        traces.append(xp.reshape(trace, (batch,)))
    strength = xp.reshape(strength, (batch,))
    added = []
    for i, square in enumerate(squares):
        weight = strength * strength
        for j, trace in enumerate(traces):
            weight = weight * trace if j != i else weight
        added.append(square * per_slice(xp, weight, square))
    return added
