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
@pytest.mark.parametrize(
    ("shape", "axes"), [((3, 4, 5), 1), ((2, 6), 1), ((3, 2, 3, 2), 1), ((2, 3, 4, 5), 2), ((3, 2), 2)], ids=str
)
def test_a_stack_is_so_many_arrays(make: Make, shape: tuple[int, ...], axes: int) -> None:
    start, grads = arrays(shape)
    stacked = start.copy()
    apart = {place: np.array(start[place]) for place in np.ndindex(shape[:axes])}
    together, singly = make(stacked_axes=axes), make()
    for gradient in grads:
        together.update("w", stacked, gradient)
        for place, p in apart.items():
            singly.update(str(place), p, np.array(gradient[place]), shape=p.shape)
    for place, p in apart.items():  # slice by slice: the large must not hide the small
        assert error([stacked[place]], [p], [start[place]]) < FLOAT64


@every_stackable
def test_it_differs_from_one_array_and_may_be_said_by_name(make: Make) -> None:
    start, grads = arrays((3, 4, 5))
    plain, stacked = {"layers": start.copy()}, {"layers": start.copy()}
    chosen = {"layers": start.copy(), "head": np.ones(4)}
    one, two, three = make(), make(stacked_axes=1), make(overrides=[("layers", dict(stacked_axes=1))])
    for gradient in grads:
        one.step(plain, {"layers": gradient})
        two.step(stacked, {"layers": gradient})
        three.step(chosen, {"layers": gradient, "head": np.ones(4)})
    assert bits(chosen["layers"]) == bits(stacked["layers"])
    first, second = (end["layers"][0] - start[0] for end in (plain, stacked))
    assert np.abs(first - second).max() > 0.01 * np.abs(second).max()
