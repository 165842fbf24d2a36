"""Stacked arrays are stepped as the separate arrays they hold."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from published_runs import error
from raw_arrays import Make, bits
from tolerances import FLOAT64

from thalweg.numpy import LAMB, LARS, Adafactor, Kron

#: Kron's noise depends on the position in the array, its expectation does not.
STACKABLE: dict[str, Make] = {
    "LARS": partial(LARS, lr=0.5, trust_coefficient=0.1, weight_decay=0.1, nesterov=True),
    "LARS combined, clipped": partial(LARS, lr=0.5, norm_mode="combined", weight_decay=0.1, clip=True),
    "LAMB": partial(LAMB, lr=0.1, weight_decay=0.1, trust_clip=(0.0, 3.0)),
    "LAMB decoupled": partial(LAMB, lr=0.1, weight_decay=0.1, weight_decay_mode="decoupled"),
    "Adafactor": partial(Adafactor, momentum=0.9),
    "Adafactor factored": partial(Adafactor, lr=0.1, min_dim_size_to_factor=2, weight_decay=0.1),
    "Adafactor clamped": partial(Adafactor, lr=0.1, variant="torch"),
    "Kron": partial(Kron, lr=0.1, damping_mode="expected", damping=0.01, precond_update_probability=0.4),
    "Kron quad": partial(Kron, lr=0.1, damping_mode="expected", geometry="quad", variant="psgd", init_scale=None),
}
every_stackable = pytest.mark.parametrize("make", STACKABLE.values(), ids=STACKABLE)


def arrays(shape: tuple[int, ...], steps: int = 6) -> tuple[Any, list[Any]]:
    """Slices of very different size, so that statistics of the whole would be far off."""
    rng = np.random.default_rng(0)
    scale = 10.0 ** np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return rng.standard_normal(shape) * scale, [rng.standard_normal(shape) / scale for _ in range(steps)]


@every_stackable
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 6), (3, 2, 3, 2), (1, 4, 4)], ids=str)
def test_one_stacked_axis_is_so_many_arrays(make: Make, shape: tuple[int, ...]) -> None:
    start, grads = arrays(shape)
    stacked, apart = start.copy(), [p.copy() for p in start]
    together, singly = make(stacked_axes=1), make()
    for gradient in grads:
        together.update("w", stacked, gradient)
        for i, p in enumerate(apart):
            singly.update(i, p, gradient[i].copy(), shape=p.shape)
    for i, p in enumerate(apart):  # slice by slice: the large must not hide the small
        assert error([stacked[i]], [p], [start[i]]) < FLOAT64


@every_stackable
def test_two_stacked_axes(make: Make) -> None:
    start, grads = arrays((2, 3, 4, 5))
    two, one = start.copy(), start.reshape(6, 4, 5).copy()
    first, second = make(stacked_axes=2), make(stacked_axes=1)
    for gradient in grads:
        first.update("w", two, gradient)
        second.update("w", one, gradient.reshape(6, 4, 5))
    assert error([two.reshape(6, 4, 5)], [one], [start.reshape(6, 4, 5)]) < FLOAT64


@every_stackable
def test_without_it_the_slices_are_one_array(make: Make) -> None:
    """Or else the tests above would show nothing."""
    start, grads = arrays((3, 4, 5))
    plain, stacked = start.copy(), start.copy()
    one, two = make(), make(stacked_axes=1)
    for gradient in grads:
        one.update("w", plain, gradient)
        two.update("w", stacked, gradient)
    first, second = plain[0] - start[0], stacked[0] - start[0]
    assert np.abs(first - second).max() > 0.01 * np.abs(second).max()


@every_stackable
def test_by_name_through_overrides(make: Make) -> None:
    start, grads = arrays((3, 4, 5))
    everywhere, chosen = {"layers": start.copy()}, {"layers": start.copy(), "head": np.ones(4)}
    first, second = make(stacked_axes=1), make(overrides=[("layers", dict(stacked_axes=1))])
    for gradient in grads:
        first.step(everywhere, {"layers": gradient})
        second.step(chosen, {"layers": gradient, "head": np.ones(4)})
    assert bits(everywhere["layers"]) == bits(chosen["layers"]) != bits(start)


@every_stackable
def test_all_axes_stacked_are_so_many_numbers(make: Make) -> None:
    start, grads = arrays((3, 2), 3)
    stacked, apart = start.copy(), {(i, j): np.array(start[i, j]) for i in range(3) for j in range(2)}
    together, singly = make(stacked_axes=2), make()
    for gradient in grads:
        together.update("w", stacked, gradient)
        for (i, j), p in apart.items():
            singly.update(f"{i},{j}", p, np.array(gradient[i, j]))
    for (i, j), p in apart.items():
        assert error([stacked[i, j]], [p], [start[i, j]]) < FLOAT64
