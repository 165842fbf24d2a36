"""Kron with normalized gradients is Kron on gradients of norm 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drive import gradients, run
from tolerances import FLOAT64

import thalweg.numpy
from thalweg.rules import Kron


@pytest.mark.parametrize("shape", [(6, 6), (4, 7), (5,), ()], ids=str)
@pytest.mark.parametrize("options", [{}, dict(weight_decay=0.1, weight_decay_mode="gradient")], ids=str)
def test_each_gradient_is_divided_by_its_norm(shape: tuple[int, ...], options: Any) -> None:
    p, grads = gradients(shape, 8)
    grads = [g * 10.0**k for k, g in enumerate(grads, -4)]
    by_hand = [g / (np.linalg.norm(g) + 1e-6) for g in grads]
    found, _ = run(Kron(normalize_grads=True, **options), p, grads, lr=0.01)
    wanted, _ = run(Kron(**options), p, by_hand, lr=0.01)
    assert np.abs(found - wanted).max() < FLOAT64 * np.abs(wanted - p).max()


def test_slices_of_a_stack_have_norms_of_their_own() -> None:
    p, grads = gradients((2, 4, 4), 4)
    options: Any = dict(normalize_grads=True, damping_mode="expected")
    whole, _ = run(Kron(stacked_axes=1, **options), p, [g * [[[1.0]], [[100.0]]] for g in grads], lr=0.01)
    for i in range(2):
        alone, _ = run(Kron(**options), p[i], [g[i] * (1.0, 100.0)[i] for g in grads], lr=0.01)
        assert np.abs(whole[i] - alone).max() < FLOAT64 * np.abs(alone - p[i]).max()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_a_gradient_whose_norm_is_not_finite_is_no_gradient_of_zeros(bad: float) -> None:
    optimizer = thalweg.numpy.Kron(lr=0.01, normalize_grads=True, on_nonfinite="skip")
    p = np.ones((3, 3))
    optimizer.update("p", p, np.full((3, 3), bad))
    assert (p == 1).all()
    assert optimizer.skipped == {"p": 1}
