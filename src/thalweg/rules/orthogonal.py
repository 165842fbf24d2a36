"""Newton-Schulz iterations, which move the singular values of matrices near 1 by products of matrices alone.

Matrices are stacks (k, m, n). A step takes each singular value s to a s + b s^3 + c s^5, for coefficients a, b and c.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from thalweg.arrays import A, Space
from thalweg.dtypes import NARROW

#: a, b and c of a step X <- a X + (b R + c R^2) X with R = X X^T.
Triple: TypeAlias = tuple[float, float, float]

#: The optimal polynomials of Amsel et al. 2025 (arXiv:2505.16932, algorithm 1), before their margin for rounding.
POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)

#: Coefficients by name, step by step; the last serves all steps that are left.
COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    "polar_express": (*((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in POLAR_EXPRESS), (1.875, -1.25, 0.375)),
    # Cesista, You and Jordan 2025, leloykun.github.io/ponder/muon-opt-coeffs, for five steps
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Newton's and Schulz's own, which converges, slowly where singular values are small
    "cubic": ((1.5, -0.5, 0.0),),
}


def iterate_plain(xp: Space[A], x: A, steps: Sequence[Triple], dtype: str | None) -> A:
    """Step by step, as it is written. dtype: what each product is rounded to."""
    for a, b, c in steps:
        r = rounded(xp, multiply_by_own(xp, x), dtype)
        z = rounded(xp, xp.matmul_add_symmetric(r, r, r, c, b), dtype)
        x = rounded(xp, xp.matmul_add(*pair(xp, z, x), x, 1.0, a), dtype)
    return x


def iterate_gram(xp: Space[A], x: A, steps: Sequence[Triple], dtype: str | None, last: str | None) -> A:
    """The same polynomial as Q X, with Q found from R = X X^T alone, which is smaller where X is not square.

    A step with Z = b R + c R^2 is Q <- Q (a + Z) and R <- R (a + Z)^2: all of them are symmetric and commute. Errors
    of R's small eigenvalues grow from step to step, so that R is computed anew from Q X before they matter. last: the
    dtype of the result.
    """
    r = rounded(xp, multiply_by_own(xp, x), dtype)
    q = r
    for i, (a, b, c) in enumerate(steps):
        z = rounded(xp, xp.matmul_add_symmetric(r, r, r, c, b), dtype)
        q = xp.add_identity(z, a) if is_restart(i) else xp.matmul_add_symmetric(q, z, q, 1.0, a)
        q = rounded(xp, q, dtype)
        if i + 1 == len(steps):
            break
        if is_restart(i + 1):
            x = rounded(xp, xp.matmul(*pair(xp, q, x)), dtype)
            r = rounded(xp, multiply_by_own(xp, x), dtype)
        else:
            half = rounded(xp, xp.matmul_add_symmetric(r, z, r, 1.0, a), dtype)
            r = rounded(xp, xp.matmul_add_symmetric(half, z, half, 1.0, a), dtype)
    operands = pair(xp, q, x)
    return xp.matmul(*operands) if last is None else xp.matmul_rounded(*operands, last)


def divide_lines(xp: Space[A], x: A, dtype: str | None) -> A:
    """Rows (columns, if there are fewer) divided so that no singular value is above 1, and most are closer to it.

    Prach and Lampert 2022 (arXiv:2208.03160): each by the root of the sum of magnitudes of its products with all.
    """
    r = multiply_by_own(xp, x)
    (sums,) = xp.sums((xp.abs(xp.astype(r, "float32") if xp.dtype(r) in NARROW else r), (2,)))
    scale = 1 / xp.sqrt(xp.maximum(sums, 1e-30))
    _, m, n = xp.shape(x)
    wide = xp.astype(x, xp.dtype(scale))
    return rounded(xp, wide * (xp.swapaxes(scale, 1, 2) if m > n else scale), dtype)


def rounded(xp: Space[A], x: A, dtype: str | None) -> A:
    """x in a dtype; None: as it is."""
    return x if dtype is None else xp.rounded(x, dtype)


def is_restart(step: int) -> bool:
    """Whether a step begins with an R that was computed from X: the first, the third, and every third after it."""
    return step == 0 or step % 3 == 2


def count_gram(steps: int, less: int, more: int) -> int:
    """Multiplications of ``iterate_gram``, for the sides of a matrix. A plain step takes less^2 (2 more + less)."""
    begun = sum(map(is_restart, range(steps)))
    return less * less * (2 * begun * more + (steps + 3 * (steps - begun)) * less)


def multiply_by_own(xp: Space[A], x: A) -> A:
    """X X^T, or X^T X where there are more rows than columns: the smaller of both."""
    _, m, n = xp.shape(x)
    turned = xp.swapaxes(x, 1, 2)
    return xp.matmul_symmetric(turned, x) if m > n else xp.matmul_symmetric(x, turned)


def pair(xp: Space[A], square: A, x: A) -> tuple[A, A]:
    """X and a square matrix of its smaller side, as they are multiplied."""
    _, m, n = xp.shape(x)
    return (x, square) if m > n else (square, x)
