"""Sharded sums on paper: shards of uneven size, reduced by sums over global counts, give the whole.

A space of shards is made from the numpy space: an array is a list of parts along one axis, and
``sums`` adds up what the parts contribute. Rules run on it unchanged. It also counts the rounds
of communication that a sharded run would need.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from drive import gradients
from tolerances import FLOAT64

from thalweg.arrays import Squares, count
from thalweg.rules import LAMB, LARS, Adafactor
from thalweg.spaces import numpy as whole


class Parts:
    """An array cut along an axis (size 1 there: every part holds a copy)."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)


def each(function: Callable[..., Any], *operands: Any) -> Any:
    lists = [x for x in operands if isinstance(x, Parts)]
    if not lists:
        return function(*operands)
    columns = zip(*(x.parts if isinstance(x, Parts) else [x] * len(lists[0].parts) for x in operands), strict=True)
    return Parts([function(*column) for column in columns])


def method(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    return lambda *xs: each(function, *(xs[::-1] if swapped else xs))


for name in ("add", "mul", "sub", "truediv", "gt", "le", "neg"):
    setattr(Parts, f"__{name}__", method(getattr(operator, name)))
    if name in ("add", "mul", "sub", "truediv"):
        setattr(Parts, f"__r{name}__", method(getattr(operator, name), swapped=True))


class Sharded:
    """The numpy space over parts, cut along ``axis`` of tensors of ``shape``."""

    def __init__(self, shape: tuple[int, ...], axis: int, cuts: Sequence[int]) -> None:
        self.whole_shape, self.axis, self.cuts, self.rounds = shape, axis, cuts, 0

    def split(self, x: Any) -> Parts:
        return Parts(
            np.split(x, np.cumsum(self.cuts)[:-1], self.axis) if x.shape[self.axis] > 1 else [x] * len(self.cuts)
        )

    def join(self, x: Parts, split: bool) -> Any:
        if split:
            return np.concatenate(x.parts, self.axis)
        assert all((part == x.parts[0]).all() for part in x.parts), "copies have drifted apart"
        return x.parts[0]

    def shape(self, x: Parts) -> tuple[int, ...]:
        return self.whole_shape

    def zeros_like(self, x: Parts) -> Parts:
        return each(whole.zeros_like, x)

    def zeros_reduced(self, x: Parts, axes: tuple[int, ...]) -> Parts:
        return each(lambda part: whole.zeros_reduced(part, axes), x)

    def sums(self, *terms: Any) -> tuple[Any, ...]:
        communicated = False

        def total(term: Any) -> Any:
            nonlocal communicated
            x, axes = term
            kind = Squares if isinstance(term, Squares) else lambda *pair: pair
            partial = each(lambda part: whole.sums(kind(part, axes))[0], x)
            if axes is not None and self.axis not in [axis % len(self.whole_shape) for axis in axes]:
                return partial  # this axis is whole in every part
            communicated = True
            return Parts([sum(partial.parts)] * len(self.cuts))

        results = tuple(map(total, terms))
        self.rounds += communicated
        return results

    def means(self, *terms: Any) -> tuple[Any, ...]:
        # over the global count: parts are of uneven size. row_var has size 1 along its own axis.
        return tuple(
            total / count(self.whole_shape, axes) for total, (_, axes) in zip(self.sums(*terms), terms, strict=True)
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *xs: each(getattr(whole, name), *xs)


RULES = [
    (LARS(), 5.0, 1),
    (LARS(weight_decay=0.1, norm_mode="combined"), 5.0, 1),
    (LAMB(weight_decay=0.1), 0.02, 1),
    (Adafactor(min_dim_size_to_factor=2, momentum=0.9), 0.05, 2),
    (Adafactor(min_dim_size_to_factor=2, eps_mode="clamp", eps=(1e-3, 1e-3)), 0.05, 2),
    (Adafactor(factored=False, weight_decay=0.1), None, 2),
]


@pytest.mark.parametrize(("rule", "lr", "rounds"), RULES, ids=lambda value: repr(value)[:60])
@pytest.mark.parametrize(("axis", "cuts"), [(0, (1, 5, 3)), (1, (4, 1, 2)), (0, (9, 0)), (0, (9,))], ids=str)
@pytest.mark.parametrize("shape", [(9, 7), (9, 7, 2)], ids=str)
def test_uneven_shards_give_the_whole(
    rule: Any, lr: float | None, rounds: int, axis: int, cuts: tuple, shape: tuple
) -> None:
    p, grads = gradients(shape, 5)
    xp = Sharded(shape, axis, cuts)
    q, r, s = xp.split(p), None, rule.init(whole, p)
    r = rule.init(xp, q)
    for t, g in enumerate(grads, 1):
        xp.rounds = 0
        update = rule.update(whole, g, s, p, t=t, lr=lr)
        sharded = rule.update(xp, xp.split(g), r, q, t=t, lr=lr)
        p, s, q, r = p + update.delta, update.state, q + sharded.delta, sharded.state
        assert xp.rounds == rounds
    displacement = np.abs(p - gradients(shape, 5)[0]).max()
    assert np.abs(xp.join(q, split=True) - p).max() < FLOAT64 * displacement
    for key, entry in s.items():
        joined = xp.join(r[key], split=entry.shape[axis] > 1)
        assert np.abs(joined - entry).max() <= FLOAT64 * np.abs(entry).max(), key


def test_kron_sharded_along_a_diagonal_factor() -> None:
    """Rows of a tall matrix: their factor is diagonal and stays local; what is dense is summed.

    For the procrustes geometry: T of the columns is the sum of the shards' gram matrices, and the
    norm of the row factor's gradient is the largest over all shards, plus the global N / m.
    """
    from thalweg.rules.factors import gram, norm_bound, precondition

    rng = np.random.default_rng(0)
    rows, column, y = rng.uniform(0.5, 2, (1, 9)), rng.standard_normal((1, 4, 4)), rng.standard_normal((1, 9, 4))
    white = precondition(whole, [rows, column], y)
    cuts = [slice(0, 1), slice(1, 6), slice(6, 9)]
    parts = [precondition(whole, [rows[:, cut], column], y[:, cut]) for cut in cuts]
    summed = sum(gram(whole, part, 1, diagonal=False) for part in parts)
    np.testing.assert_allclose(summed, gram(whole, white, 1, diagonal=False), rtol=FLOAT64)
    local = [gram(whole, part, 0, diagonal=True) for part in parts]
    np.testing.assert_allclose(np.concatenate(local, 1), gram(whole, white, 0, diagonal=True), rtol=FLOAT64)
    largest = max(norm_bound(whole, part).item() for part in local)
    np.testing.assert_allclose(largest, norm_bound(whole, gram(whole, white, 0, diagonal=True)).item(), rtol=FLOAT64)
