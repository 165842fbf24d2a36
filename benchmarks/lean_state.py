"""How far LAMB's update and its trust ratio are off when state is kept in few bits.

    python benchmarks/lean_state.py --steps 300

Gradients are drawn from Student's t distribution with five degrees of freedom, times scales that are lognormal by row
and by column: neighbours differ in size as they do in networks. Moments are averaged over the steps in float64, and
beside that with state that is rounded after every step. What is told is the norm of the difference of the last updates,
and the difference of their norms, which is that of the trust ratios, both in percent of the exact one.

Beside the codecs of the library, "int8" and "uint8", there are codes that others use or have published: the mu-law of
telephony, roots with and without a code for 0, 2x / (1 + |x|), and maps with a decimal exponent and a linear fraction
("dynamic"). Each has one float32 scale for a group.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from thalweg.boundary import rounded_stochastically
from thalweg.codecs import CODECS, GROUP, Grouping
from thalweg.spaces import numpy as xp

Arr: TypeAlias = Any
#: A group of numbers in each row, as it comes back from memory. The second argument is the step.
Rounding: TypeAlias = Callable[[Arr, int], Arr]


class Row(NamedTuple):
    name: str
    momentum: Rounding
    squares: Rounding
    #: Elements that share a scale; 0: there are no scales.
    group: int
    bytes: float


class Off(NamedTuple):
    """Percent."""

    update: float
    ratio: float


def exact(x: Arr, t: int) -> Arr:
    return x


def bfloat16(stream: int | None = None) -> Rounding:
    """To the nearest, or by chance if a stream is given."""

    def rounded(x: Arr, t: int) -> Arr:
        wide = x.astype("float32")
        if stream is None:
            return xp.rounded(wide, "bfloat16").astype("float64")
        chance = np.random.default_rng([stream, t]).random(x.shape, "float32")
        return rounded_stochastically(xp, wide, "bfloat16", chance).astype("float64")

    return rounded


def coded(name: str, stream: int | None = None) -> Rounding:
    """A codec of the library."""

    def rounded(x: Arr, t: int) -> Arr:
        groups = Grouping(1, x.shape[1])
        chance = None if stream is None else np.random.default_rng([stream, t]).random(x.shape, "float32")
        codes, scales = CODECS[name].encode(xp, x, groups, chance)
        return CODECS[name].decode(xp, codes, scales, groups).astype("float64")

    return rounded


def scaled(code: Callable[[Arr], Arr]) -> Rounding:
    """A code of numbers up to 1, by the largest of each group; groups of zeros stay so."""

    def rounded(x: Arr, t: int) -> Arr:
        scale = np.abs(x).max(1, keepdims=True)
        return np.where(scale > 0, code(x / np.where(scale > 0, scale, 1)) * scale, 0)

    return rounded


def mu_law(mu: float) -> Callable[[Arr], Arr]:
    def code(x: Arr) -> Arr:
        steps = np.rint(127 * np.log1p(mu * np.abs(x)) / np.log1p(mu))
        return np.sign(x) * np.expm1(steps / 127 * np.log1p(mu)) / mu

    return code


def softsign(x: Arr) -> Arr:
    code = np.rint(127 * 2 * x / (1 + np.abs(x))) / 127
    return code / (2 - np.abs(code))


def root(degree: int, *, zero: bool = False) -> Callable[[Arr], Arr]:
    def code(x: Arr) -> Arr:
        steps = np.rint(255 * x ** (1 / degree))
        return (steps / 255 if zero else np.maximum(steps, 1) / 255) ** degree

    return code


def dynamic(*, signed: bool) -> Callable[[Arr], Arr]:
    """Seven decimal exponents; the larger it is, the more bits are left for the fraction."""
    values = [0.0, 1.0]
    for exponent in range(7):
        ends = np.linspace(0.1, 1, 2 ** (exponent + (0 if signed else 1)) + 1)
        middles = 10.0 ** (exponent - 6) * (ends[:-1] + ends[1:]) / 2
        values += [*middles, *(-middles if signed else [])]
    table = np.sort(values)
    return lambda x: table[np.searchsorted((table[1:] + table[:-1]) / 2, x)]


ROWS = (
    Row("bfloat16", bfloat16(), bfloat16(), 0, 4),
    Row("bfloat16, stochastic", bfloat16(1), bfloat16(2), 0, 4),
    Row("**int8** momentum alone", coded("int8"), exact, GROUP, 5.06),
    Row("mu-law momentum alone", scaled(mu_law(255)), exact, GROUP, 5.06),
    Row("2x / (1 + abs(x)) momentum alone", scaled(softsign), exact, GROUP, 5.06),
    Row("**int8, uint8**", coded("int8"), coded("uint8"), GROUP, 2.13),
    Row("**int8, uint8**, stochastic", coded("int8", 1), coded("uint8", 2), GROUP, 2.13),
    Row("mu-law, fourth root without 0", scaled(mu_law(255)), scaled(root(4)), GROUP, 2.13),
    Row("dynamic maps", scaled(dynamic(signed=True)), scaled(dynamic(signed=False)), 256, 2.03),
    Row("2x / (1 + abs(x)), square root without 0", scaled(softsign), scaled(root(2)), 32, 2.25),
    Row("2x / (1 + abs(x)), square root with 0", scaled(softsign), scaled(root(2, zero=True)), 32, 2.25),
)


def off(row: Row, *, steps: int, shape: tuple[int, int], sigma: float = 1.0, seed: int = 0) -> Off:
    """How far the update of the last step is from the exact one."""
    rng, (b1, b2) = np.random.default_rng(seed), (0.9, 0.999)
    scale = 1e-4 * np.exp(sigma * (rng.standard_normal((shape[0], 1)) + rng.standard_normal((1, shape[1]))))
    m, v, kept_m, kept_v = (np.zeros(shape) for _ in range(4))
    group = row.group or shape[1]
    for t in range(1, steps + 1):
        g = rng.standard_t(5, shape) * scale
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        # the update is made of moments that are not rounded yet, as rules have it
        new_m, new_v = b1 * kept_m + (1 - b1) * g, b2 * kept_v + (1 - b2) * g * g
        kept_m = row.momentum(new_m.reshape(-1, group), t).reshape(shape)
        kept_v = row.squares(new_v.reshape(-1, group), t).reshape(shape)
    found, wanted = (x / (1 - b1**t) / (np.sqrt(y / (1 - b2**t)) + 1e-12) for x, y in ((new_m, new_v), (m, v)))
    norm = np.linalg.norm(wanted)
    return Off(100 * np.linalg.norm(found - wanted) / norm, 100 * abs(np.linalg.norm(found) / norm - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithms of scales")
    given = parser.parse_args()
    sys.stdout.write("| state | bytes a parameter | update off by | trust ratio off by |\n|---|---|---|---|\n")
    for row in ROWS:
        found = off(row, steps=given.steps, shape=(given.rows, given.columns), sigma=given.sigma)
        sys.stdout.write(f"| {row.name} | {row.bytes:g} | {found.update:.1f} % | {found.ratio:.2f} % |\n")


if __name__ == "__main__":
    main()
