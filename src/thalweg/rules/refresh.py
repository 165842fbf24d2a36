"""One refresh of Kron's factors: a step of each towards whitening what it is shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
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
    prepared = [prepare_steps(rule, gradient) for gradient in gradients]
    shapes = ShapeStacks(xp, [gradient.factors for gradient in gradients], together=together)
    all_steps = [step for steps, _ in prepared for step in steps]
    old, old_norms, left, right = zip(*all_steps, strict=True)
    if together:
        right = tuple(xp.full(xp.shape(n), r, n) if is_number(r) else r for n, r in zip(old_norms, right, strict=True))
    stacked_steps = zip(*map(shapes.gather, (old, old_norms, left, right)), strict=True)
    stepped = [step_factor(xp, rule, *step) for step in stacked_steps]

    # all factors of a tensor get the same largest entry; their product stays as it was
    sizes = [as_vector(xp, xp.largest_magnitude(q, inner_axes(xp, q))) for q, _ in stepped]
    means = shapes.combine([xp.log(size) for size in sizes], lambda logs: xp.exp(sum(logs) / len(logs)))
    scales = [mean / size for mean, size in zip(shapes.spread(means), sizes, strict=True)]
    stepped = [(scale_slices(xp, scale, q), norm) for (q, norm), scale in zip(stepped, scales, strict=True)]

    totals = [scale + as_vector(xp, norm) for scale, (_, norm) in zip(scales, stepped, strict=True)]
    is_nonzero = shapes.join([as_vector(xp, largest > 0) for _, largest in prepared])
    is_good = shapes.spread(xp.isfinite(shapes.combine(totals, sum)) & is_nonzero)

    def keep_good(new: list[A], before: list[list[A]]) -> list[list[A]]:
        rows = zip(is_good, new, shapes.gather([x for factors in before for x in factors]), strict=True)
        return shapes.divide([xp.where(per_slice(xp, takes, a), a, b) for takes, a, b in rows])

    factors = keep_good([q for q, _ in stepped], [gradient.factors for gradient in gradients])
    norms = keep_good([norm for _, norm in stepped], [gradient.norms for gradient in gradients])
    return list(zip(factors, norms, strict=True))


def inner_axes(xp: Space[A], x: A) -> tuple[int, ...]:
    return tuple(range(1, len(xp.shape(x))))


def as_vector(xp: Space[A], x: A) -> A:
    """A number for each slice, (b, 1, ...), as (b,)."""
    return xp.reshape(x, xp.shape(x)[:1])


class ShapeStacks:
    """Puts what the factors of several tensors have into stacks, one for each shape of a factor, and back."""

    def __init__(self, xp: Any, by_tensor: Sequence[Sequence[Any]], *, together: bool) -> None:
        """together: False makes a stack of every factor by itself."""
        self.xp = xp
        self.batches = [xp.shape(factors[0])[0] for factors in by_tensor]
        #: Of each factor the index of its tensor.
        self.tensors = [index for index, factors in enumerate(by_tensor) for _ in factors]
        groups: dict[Hashable, list[int]] = {}
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

    def divide(self, stacks: Sequence[Any]) -> list[list[Any]]:
        """What was gathered, again of each tensor and each of its factors."""
        by_factor: dict[int, Any] = {}
        for members, stack in zip(self.groups, stacks, strict=True):
            by_factor.update(zip(members, self.cut(stack, [self.tensors[i] for i in members]), strict=True))
        by_tensor: list[list[Any]] = [[] for _ in self.batches]
        for index, tensor in enumerate(self.tensors):
            by_tensor[tensor].append(by_factor[index])
        return by_tensor

    def combine(self, stacks: Sequence[Any], function: Callable[[list[Any]], Any]) -> Any:
        """What a function makes of the numbers of a tensor's factors, for all tensors in a row."""
        return self.join([function(values) for values in self.divide(stacks)])

    def spread(self, combined: Any) -> list[Any]:
        """Stacks in which each factor has the number of its tensor: the way back from ``combine``."""
        pieces = self.cut(combined, range(len(self.batches)))
        return self.gather([pieces[tensor] for tensor in self.tensors])


def prepare_steps(rule: Kron, gradient: FactorGradient) -> tuple[list[FactorStep[Any]], Scalar]:
    """For each factor what its step is made of, and the largest magnitude in y."""
    xp, factors, norms, y, noise, whiteners = gradient
    axes = inner_axes(xp, y)
    largest, magnitude = xp.largest_magnitude(y, axes), xp.mean_power(y, 1, 1.0, axes)
    if rule.geometry == "eq":
        whiteners = []
    elif not whiteners:
        whiteners = [square(xp, q) for q in factors]
    if rule.init_scale is None:
        scale = find_first_scale(xp, rule, len(factors), norms[0], y, largest)
        factors = [scale_slices(xp, scale, q) for q in factors]
        whiteners = [scale_slices(xp, scale * scale, w) for w in whiteners]
    relative = DTYPES["float32"].rounding if rule.relative_damping is None else rule.relative_damping
    strength = rule.damping + relative * magnitude  # the standard deviation of noise
    probe = None
    if rule.damping_mode == "noise":
        assert noise is not None
        probe = xp.reshape(noise(), xp.shape(y))
        y = xp.combined((1, y), (strength, probe))
        if rule.geometry != "eq":  # whose solves are of this noise
            probe = None
    sides = compute_sides(xp, rule, factors, whiteners, y, probe, strength)
    return [(q, norm, *pair) for q, norm, pair in zip(factors, norms, sides, strict=True)], largest


def find_first_scale(xp: Space[A], rule: Kron, count: int, norm: A, y: A, largest: Scalar) -> Value:
    """What each of ``count`` factors is multiplied by before its first refresh, when its norm is 0; then 1.

    It gives Q the scale (mean of y**4)**(-1/8), which whitens y.
    """
    unit = xp.where(largest > 0, largest, 1.0)  # in units of it fourth powers neither overflow nor vanish
    fourth = xp.mean_power(y, 4, unit, inner_axes(xp, y))
    fourth, unit, norm = (as_vector(xp, number) for number in (fourth, unit, norm))
    scale = ((fourth + (rule.damping / unit) ** 4) ** -0.125 * unit**-0.5) ** (1 / count)
    return xp.where(norm <= 0, scale, 1.0)


def scale_slices(xp: Space[A], scale: A, x: A) -> Value:
    """x times a number for each slice, (b,)."""
    return xp.combined((per_slice(xp, scale, x), x))


def compute_sides(
    xp: Space[A], rule: Kron, factors: list[A], whiteners: list[A], y: A, probe: A | None, strength: Scalar
) -> list[tuple[A, Scalar]]:
    """For each axis the two sides, "left" and "right", that are equal once y is white.

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


def step_factor(xp: Space[A], rule: Kron, q: A, norm: A, left: A, right: Scalar) -> tuple[A, A]:
    """A factor after one step that brings left closer to right, and its smoothed norm."""
    size = norm_bound(xp, left + right) if rule.geometry == "eq" else norm_bound(xp, left) + right
    norm = xp.maximum(average(norm, size, 1 - rule.lipschitz_beta), size)
    rate = rule.precond_lr / xp.maximum(norm, rule.eps)
    if is_diagonal(xp, q):
        gain = rate * (left - right)
        return q * (1 - gain if rule.geometry != "quad" else (1 - gain / 2) * (1 - gain / 2)), norm
    if rule.geometry == "eq":
        return q - rate * xp.matmul(xp.upper(left - right), q), norm
    if rule.geometry == "procrustes":
        return rotate_to_symmetric(xp, xp.combined((1 + rate * right, q), (-rate, xp.matmul(left, q)))), norm
    half = rate / 2  # (1 - e) q (1 - e) with e = half (left - right), made symmetric again
    q = xp.combined((1 + half * right, q), (-half, xp.matmul(left, q)))
    q = xp.combined((1 + half * right, q), (-half, xp.matmul(q, left)))
    return (q + transposed(xp, q)) / 2, norm


def expected_damping(xp: Space[A], whiteners: list[A], strength: Scalar) -> list[A]:
    """What white noise of this strength adds to each gram matrix of P y, on average.

    For axis i: strength**2 * P_i**2 * product over the other axes j of trace(P_j**2).
    """
    batch = xp.shape(whiteners[0])[0]
    squares = [p * p if is_diagonal(xp, p) else xp.matmul_symmetric(p, p) for p in whiteners]
    traces = [as_vector(xp, xp.sums(Squares(p, inner_axes(xp, p)))[0]) for p in whiteners]
    strength = xp.reshape(strength, (batch,))
    added = []
    for i, squared in enumerate(squares):
        weight = strength * strength
        for j, trace in enumerate(traces):
            weight = weight * trace if j != i else weight
        added.append(squared * per_slice(xp, weight, squared))
    return added
