"""Arithmetic of Kronecker factors.

Tensors here have one leading batch axis, then one axis for each factor: (b, n_1, ..., n_k).
The factor of an axis of size n is dense, (b, n, n), or diagonal, (b, n).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from thalweg.arrays import A, Scalar, Shape, Space, Squares, Value

#: What takes the place of 0 where a largest magnitude or a norm is divided by. Its square is no 0 in float32: XLA makes
#: one division of two, by the product of what they divide by.
TINY = 1e-18


def is_diagonal(xp: Space[A], q: A) -> bool:
    return len(xp.shape(q)) == 2


def merge_axes(sizes: Shape, merge: str | None) -> Shape:
    """The sizes of a tensor of this shape without axes of size 1 ("squeeze"), or as the most square "matrix"."""
    if merge == "squeeze" or (merge == "matrix" and len(sizes) > 2):
        sizes = tuple(n for n in sizes if n != 1)
    if merge == "matrix" and len(sizes) > 2:
        cuts = [(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes))]
        sizes = min(cuts, key=sum)
    return sizes or (1,)


def per_slice(xp: Space[A], x: A, like: A) -> A:
    """One number for each slice, (b,), shaped so that it multiplies ``like``."""
    return xp.reshape(x, (xp.shape(like)[0], *[1] * (len(xp.shape(like)) - 1)))


def transposed(xp: Space[A], x: A) -> A:
    return xp.swapaxes(x, -2, -1)


def around(xp: Space[A], x: A, axis: int) -> Shape:
    """(b, all before, n, all after): how x looks from one of its factors' axes."""
    batch, *sizes = xp.shape(x)
    return batch, math.prod(sizes[:axis]), sizes[axis], math.prod(sizes[axis + 1 :])


def along(xp: Space[A], q: A, x: A, axis: int) -> A:
    """Multiply x by a factor along the factor's axis."""
    batch, before, n, after = around(xp, x, axis)
    if is_diagonal(xp, q):
        y = xp.reshape(x, (batch, before, n, after)) * xp.reshape(q, (batch, 1, n, 1))
    elif after == 1:
        y = xp.matmul(xp.reshape(x, (batch, before, n)), transposed(xp, q))
    else:
        y = fold(xp, xp.matmul(q, unfold(xp, x, axis)), before, after)
    return xp.reshape(y, xp.shape(x))


def unfold(xp: Space[A], x: A, axis: int) -> A:
    """x as matrices (b, n, everything else)."""
    batch, before, n, after = around(xp, x, axis)
    if before == 1:
        return xp.reshape(x, (batch, n, after))
    return xp.reshape(xp.swapaxes(xp.reshape(x, (batch, before, n, after)), 1, 2), (batch, n, before * after))


def fold(xp: Space[A], x: A, before: int, after: int) -> A:
    """Matrices (b, n, everything else) as (b, before, n, after)."""
    return xp.swapaxes(xp.reshape(x, (*xp.shape(x)[:2], before, after)), 1, 2)


def join_stacks(xp: Space[A], stacks: Sequence[A]) -> A:
    """Stacks (b, ...) as one, (b + b' + ..., ...)."""
    return stacks[0] if len(stacks) == 1 else xp.join(stacks, 0)


def cut_stack(xp: Space[A], x: A, counts: Shape) -> Sequence[A]:
    """The stacks of so many tensors that were joined."""
    return [x] if len(counts) == 1 else xp.cut(x, 0, counts)


def apply(xp: Space[A], factors: Sequence[A], x: A) -> A:
    """Q x, with Q the Kronecker product of the factors."""
    for axis, q in enumerate(factors):
        x = along(xp, q, x, axis)
    return x


def square(xp: Space[A], q: A) -> Value:
    """Q^T Q, which one product with it applies."""
    return q * q if is_diagonal(xp, q) else xp.matmul_symmetric(transposed(xp, q), q)


def apply_inverse_transpose(xp: Space[A], factors: Sequence[A], x: A) -> A:
    """Q^-T x, for upper triangular dense factors."""
    for axis, q in enumerate(factors):
        if is_diagonal(xp, q):
            x = along(xp, 1 / q, x, axis)
            continue
        _, before, _, after = around(xp, x, axis)
        x = xp.reshape(fold(xp, xp.solve(transposed(xp, q), unfold(xp, x, axis)), before, after), xp.shape(x))
    return x


def gram(xp: Space[A], x: A, axis: int, *, diagonal: bool) -> A:
    """Inner products of the slices of x along an axis: (b, n, n), or its diagonal (b, n)."""
    batch, before, n, after = around(xp, x, axis)
    if diagonal:
        (squares,) = xp.sums(Squares(xp.reshape(x, (batch, before, n, after)), (1, 3)))
        return xp.reshape(squares, (batch, n))
    if after == 1:
        y = xp.reshape(x, (batch, before, n))
        return xp.matmul_symmetric(transposed(xp, y), y)
    y = unfold(xp, x, axis)
    return xp.matmul_symmetric(y, transposed(xp, y))


def average_gram(xp: Space[A], old: A, x: A, axis: int, weight: Scalar) -> Value:
    """An average of the inner products of slices, which gives those of x this weight."""
    y = unfold(xp, x, axis)
    return xp.matmul_add_symmetric(y, transposed(xp, y), old, weight, 1 - weight)


def norm_bound(xp: Space[A], x: A) -> Value:
    """A close lower bound of the spectral norm, (b, 1, 1): one power step from the largest column.

    x is symmetric, or the negative of its transpose. For a diagonal, (b, 1), it is the norm itself.
    """
    if is_diagonal(xp, x):
        return xp.largest_magnitude(x, (-1,))
    if xp.shape(x)[-1] == 1:
        return xp.abs(x)
    unit = xp.maximum(xp.largest_magnitude(x, (-2, -1)), TINY)
    y = xp.matmul(x, xp.largest_column(x) / unit) / unit  # squares neither overflow nor vanish
    z = xp.matmul(x, y / xp.maximum(xp.matrix_norm(y), TINY))
    return xp.matrix_norm(z / unit) * unit


def rotate_to_symmetric(xp: Space[A], q: A) -> Value:
    """One step of the rotation that makes q symmetric (the orthogonal Procrustes problem).

    Q^T Q stays, to second order; without it q would wander among its rotations. The step
    a along the skew direction -r maximises the trace of (1 - a r + a**2/2 r r) q, up to 1/8.
    """
    if xp.shape(q)[-1] == 1:
        return q
    r = q - transposed(xp, q)  # in which q comes first: so it lies in memory as q does
    size = norm_bound(xp, r)
    r = xp.divided(r, xp.maximum(size, TINY), None)
    rq = xp.matmul(r, q)
    rrq = xp.matmul(r, rq)
    squares, along_r = xp.sums(Squares(r, (-2, -1)), (r * rq, (-2, -1)))
    a = angle(xp, size / 2 * squares, -along_r)  # r is skew: of q only what is skew too counts in the first
    return xp.combined((1, q), (-a, rq), (a * a / 2, rrq))


def angle(xp: Space[A], slope: Value, curvature: Value) -> Value:
    """The step along a direction that maximises what has this slope and curvature along it, up to 1/8."""
    return xp.minimum(slope / xp.maximum(-curvature, TINY), 0.125)
