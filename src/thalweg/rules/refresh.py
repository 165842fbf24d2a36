"""One refresh of Kron's factors: a step of each towards whitening what it is shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from thalweg.arrays import A, Scalar, Space, Squares, Value, is_number
from thalweg.dtypes import DTYPES
from thalweg.rules.blocks import average
from thalweg.rules.factors import (
    apply,
    apply_inverse_transpose,
    cut_stack,
    gram,
    is_diagonal,
    join_stacks,
    norm_bound,
    per_slice,
    rotate_to_symmetric,
    square,
    transposed,
)
from thalweg.rules.rule import Noise

if TYPE_CHECKING:
    from thalweg.rules.kron import Kron

#: Factors and the smoothed norms of their gradients, one of each for every axis.
Factors = tuple[list[A], list[A]]


class FactorGradient(NamedTuple):
    """The gradient (or momentum) y of a stack of blocks, and the factors that learn from it."""

    xp: Any
    factors: list[Any]
    norms: list[Any]
    y: Any
    noise: Noise[Any] | None
    #: P = Q^T Q of each factor; empty: it is not known.
    whiteners: list[Any]


#: A factor, its norm, and the two sides that its step makes more equal.
FactorStep = tuple[A, A, A, Scalar]


def refresh_all(xp: Space[A], rule: Kron, gradients: Sequence[FactorGradient], *, together: bool) -> list[Factors[A]]:
    """One step of every factor towards whitening y. Nothing learned is lost to a bad y.

    A slice of y that is all zero teaches nothing, and a step that ends in NaN or infinity
    is not taken. together: what is done to factors of one shape is done to all of them at once.
    """
    if not together and len(gradients) > 1:
        return [refresh_all(xp, rule, [gradient], together=False)[0] for gradient in gradients]
    learned = [learn(rule, gradient) for gradient in gradients]
    alike = Alike(xp, [gradient.factors for gradient in gradients], together=together)
    q, norm, left, right = zip(*(step for steps, _ in learned for step in steps), strict=True)
    if together:
        right = tuple(xp.full(xp.shape(n), r, n) if is_number(r) else r for n, r in zip(norm, right, strict=True))
    steps = zip(*map(alike.gather, (q, norm, left, right)), strict=True)
    stepped = [one_step(xp, rule, *step) for step in steps]

    # all factors of a tensor get the same largest entry; their product stays as it was
    sizes = [numbers(xp, xp.largest_magnitude(q, inner_axes(xp, q))) for q, _ in stepped]
    means = alike.combine([xp.log(size) for size in sizes], lambda logs: xp.exp(sum(logs) / len(logs)))
    scales = [mean / size for mean, size in zip(alike.spread(means), sizes, strict=True)]
    rows = zip(stepped, scales, strict=True)
    stepped = [(scaled(xp, scale, q), norm) for (q, norm), scale in rows]

    totals = [scale + numbers(xp, norm) for scale, (_, norm) in zip(scales, stepped, strict=True)]
    taught = alike.join([numbers(xp, largest > 0) for _, largest in learned])
    good = alike.spread(xp.isfinite(alike.combine(totals, sum)) & taught)

    def keep_good(new: list[A], old: list[list[A]]) -> list[list[A]]:
        rows = zip(good, new, alike.gather([x for factors in old for x in factors]), strict=True)
        return alike.part([xp.where(per_slice(xp, is_good, a), a, b) for is_good, a, b in rows])

    factors = keep_good([q for q, _ in stepped], [gradient.factors for gradient in gradients])
    norms = keep_good([norm for _, norm in stepped], [gradient.norms for gradient in gradients])
    return list(zip(factors, norms, strict=True))


def inner_axes(xp: Space[A], x: A) -> tuple[int, ...]:
    return tuple(range(1, len(xp.shape(x))))


def numbers(xp: Space[A], x: A) -> A:
    """The number of each slice, as a vector."""
    return xp.reshape(x, xp.shape(x)[:1])


class Alike:
    """The factors of several tensors, in stacks of one shape."""

    def __init__(self, xp: Any, by_tensor: Sequence[Sequence[Any]], *, together: bool) -> None:
        """together: False makes a stack of every factor by itself."""
        self.xp = xp
        self.batches = [xp.shape(factors[0])[0] for factors in by_tensor]
        #: Of each factor its tensor.
        self.owners = [index for index, factors in enumerate(by_tensor) for _ in factors]
        groups: dict[Any, list[int]] = {}
        for index, q in enumerate(q for factors in by_tensor for q in factors):
            groups.setdefault(xp.shape(q)[1:] if together else index, []).append(index)
        self.groups = list(groups.values())

    def join(self, parts: Sequence[Any]) -> Any:
        return join_stacks(self.xp, parts)

    def cut(self, x: Any, tensors: Sequence[int]) -> Sequence[Any]:
        return cut_stack(self.xp, x, tuple(self.batches[i] for i in tensors))

    def gather(self, by_factor: Sequence[Any]) -> list[Any]:
        """Stacks of something that every factor has."""
        return [self.join([by_factor[i] for i in members]) for members in self.groups]

    def part(self, stacks: Sequence[Any]) -> list[list[Any]]:
        """The slices of stacks, by tensor and factor."""
        by_factor: dict[int, Any] = {}
        for members, stack in zip(self.groups, stacks, strict=True):
            by_factor.update(zip(members, self.cut(stack, [self.owners[i] for i in members]), strict=True))
        by_tensor: list[list[Any]] = [[] for _ in self.batches]
        for index, owner in enumerate(self.owners):
            by_tensor[owner].append(by_factor[index])
        return by_tensor

    def combine(self, stacks: Sequence[Any], function: Callable[[list[Any]], Any]) -> Any:
        """What a function makes of the numbers of a tensor's factors, for all tensors."""
        return self.join([function(values) for values in self.part(stacks)])

    def spread(self, combined: Any) -> list[Any]:
        """The numbers of tensors, for each of their factors, in stacks."""
        pieces = self.cut(combined, range(len(self.batches)))
        return self.gather([pieces[owner] for owner in self.owners])


def learn(rule: Kron, gradient: FactorGradient) -> tuple[list[FactorStep[Any]], Scalar]:
    """The step of every factor, and the largest magnitude in y."""
    xp, factors, norms, y, noise, known = gradient
    axes = inner_axes(xp, y)
    largest, magnitude = xp.largest_magnitude(y, axes), xp.mean_power(y, 1, 1.0, axes)
    whiteners: list[Any] = []
    if rule.geometry != "eq":
        whiteners = known or [square(xp, q) for q in factors]
    if rule.init_scale is None:
        scale = first_scale_of(xp, rule, len(factors), norms[0], y, largest)
        factors = [scaled(xp, scale, q) for q in factors]
        whiteners = [scaled(xp, scale * scale, w) for w in whiteners]
    strength = strength_of(rule, magnitude)
    probe = None
    if rule.damping_mode == "noise":
        assert noise is not None
        probe = xp.reshape(noise(), xp.shape(y))
        y = xp.combined((1, y), (strength, probe))
        if rule.geometry != "eq":  # whose solves are of this noise
            probe = None
    grams = equilibrium(xp, rule, factors, whiteners, y, probe, strength)
    return [(q, norm, *pair) for q, norm, pair in zip(factors, norms, grams, strict=True)], largest


def strength_of(rule: Kron, magnitude: Scalar) -> Scalar:
    """The standard deviation of noise, from the mean magnitude of what it is added to."""
    relative = DTYPES["float32"].rounding if rule.relative_damping is None else rule.relative_damping
    return rule.damping + relative * magnitude


def first_scale_of(xp: Space[A], rule: Kron, count: int, norm: A, y: A, largest: Scalar) -> Value:
    """Before the first refresh: what gives Q, of ``count`` factors, the scale (mean of y**4)**(-1/8) that whitens y."""
    fourth = xp.mean_power(y, 4, unit_of(xp, largest), inner_axes(xp, y))
    fourth, largest, norm = (numbers(xp, number) for number in (fourth, largest, norm))
    return first_scale(xp, rule, count, fourth, largest, norm)


def scaled(xp: Space[A], scale: A, x: A) -> Value:
    """x times a number for each slice."""
    return xp.combined((per_slice(xp, scale, x), x))


def unit_of(xp: Space[A], largest: Scalar) -> Scalar:
    """What y is divided by so that its fourth powers neither overflow nor vanish."""
    return xp.where(largest > 0, largest, 1.0)


def first_scale(xp: Space[A], rule: Kron, count: int, fourth: A, largest: A, norm: A) -> Value:
    """What each of ``count`` factors is multiplied by: 1 once there is a norm. fourth: in units of the largest."""
    unit = unit_of(xp, largest)
    scale = ((fourth + (rule.damping / unit) ** 4) ** -0.125 * unit**-0.5) ** (1 / count)
    return xp.where(norm <= 0, scale, 1.0)


def equilibrium(
    xp: Space[A], rule: Kron, factors: list[A], whiteners: list[A], y: A, probe: A | None, strength: Scalar
) -> list[tuple[A, Scalar]]:
    """For each axis the two sides that are equal once y is white.

    whiteners: P of each factor, which all but "eq" need. "eq" compares Q y with Q^-T of white noise; the other
    geometries compare P y with the noise's own expectation, so that no inverse is needed.
    """
    diagonals = [is_diagonal(xp, q) for q in factors]
    if rule.geometry == "eq":
        assert probe is not None
        a, b = apply(xp, factors, y), apply_inverse_transpose(xp, factors, probe)
        return [(gram(xp, a, i, diagonal=d), gram(xp, b, i, diagonal=d)) for i, d in enumerate(diagonals)]
    white = apply(xp, whiteners, y)
    left = [gram(xp, white, i, diagonal=d) for i, d in enumerate(diagonals)]
    if rule.damping_mode == "expected":
        left = [a + b for a, b in zip(left, expected_damping(xp, whiteners, strength), strict=True)]
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
        return rotate_to_symmetric(xp, xp.combined((1 + rate * right, q), (-rate, xp.matmul(left, q)))), norm
    half = rate / 2  # (1 - e) q (1 - e) with e = half (left - right), made symmetric again
    q = xp.combined((1 + half * right, q), (-half, xp.matmul(left, q)))
    q = xp.combined((1 + half * right, q), (-half, xp.matmul(q, left)))
    return (q + transposed(xp, q)) / 2, norm


def paced(xp: Space[A], rule: Kron, norm: A, size: Scalar) -> tuple[A, Scalar]:
    """The smoothed norm, from that before and the size now, and how far a step goes."""
    norm = xp.maximum(average(norm, size, 1 - rule.lipschitz_beta), size)
    return norm, rule.precond_lr / xp.maximum(norm, rule.eps)


def moved(rule: Kron, q: A, left: A, right: Scalar, rate: Scalar) -> Value:
    """A diagonal factor after one step."""
    gain = rate * (left - right)
    return q * (1 - gain if rule.geometry != "quad" else (1 - gain / 2) * (1 - gain / 2))


def expected_damping(xp: Space[A], whiteners: list[A], strength: Scalar) -> list[A]:
    """What white noise of this strength adds to each gram matrix of P y, on average.

    For axis i: strength**2 * P_i**2 * product over the other axes j of trace(P_j**2).
    """
    batch = xp.shape(whiteners[0])[0]
    squares = [p * p if is_diagonal(xp, p) else xp.matmul_symmetric(p, p) for p in whiteners]
    traces = [numbers(xp, xp.sums(Squares(p, inner_axes(xp, p)))[0]) for p in whiteners]
    strength = xp.reshape(strength, (batch,))
    added = []
    for i, squared in enumerate(squares):
        weight = strength * strength
        for j, trace in enumerate(traces):
            weight = weight * trace if j != i else weight
        added.append(squared * per_slice(xp, weight, squared))
    return added
