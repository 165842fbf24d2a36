"""The hand-written backward pass, against finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from thalweg.race.tasks import digits as network


@pytest.fixture
def batch() -> tuple[network.Array, network.Array]:
    rng = np.random.default_rng(1)
    return rng.uniform(0, 1, (7, 64)), rng.integers(0, 10, 7)


@pytest.mark.parametrize("name", sorted(network.init(0)))
def test_gradient_is_the_slope_of_the_loss(name: str, batch: tuple[network.Array, network.Array]) -> None:
    params = {key: value.astype(np.float64) for key, value in network.init(0).items()}
    _, gradients = network.loss_and_gradients(params, *batch)
    assert gradients[name].shape == params[name].shape
    assert np.any(gradients[name] != 0)

    rng = np.random.default_rng(2)
    step = 1e-6
    for _ in range(5):
        # central differences along random directions of length 1, and along single coordinates
        for direction in (rng.standard_normal(params[name].shape), one_hot(params[name].shape, rng)):
            direction /= np.linalg.norm(direction)  # short of the next kink of a ReLU
            loss_ahead, loss_behind = (
                network.evaluate({**params, name: params[name] + sign * step * direction}, *batch)[0]
                for sign in (1, -1)
            )
            slope = (loss_ahead - loss_behind) / (2 * step)
            assert slope == pytest.approx((gradients[name] * direction).sum(), rel=1e-5, abs=1e-8)


def one_hot(shape: tuple[int, ...], rng: np.random.Generator) -> network.Array:
    direction = np.zeros(shape)
    direction.flat[rng.integers(direction.size)] = 1
    return direction


def test_the_loss_is_the_same_by_both_ways(batch: tuple[network.Array, network.Array]) -> None:
    params = network.init(0)
    assert network.loss_and_gradients(params, *batch)[0] == network.evaluate(params, *batch)[0]


def test_gradients_keep_names_and_dtype(batch: tuple[network.Array, network.Array]) -> None:
    params = network.init(0)
    images, labels = batch
    _, gradients = network.loss_and_gradients(params, images.astype(np.float32), labels)
    assert list(gradients) == list(params)
    assert {gradient.dtype for gradient in gradients.values()} == {np.dtype(np.float32)}


def test_huge_logits_do_not_overflow(batch: tuple[network.Array, network.Array]) -> None:
    params = {name: value * 1e4 for name, value in network.init(0).items()}
    loss, gradients = network.loss_and_gradients(params, *batch)
    assert np.isfinite(loss)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


def test_the_seed_decides() -> None:
    assert all(np.array_equal(a, b) for a, b in zip(network.init(3).values(), network.init(3).values(), strict=True))
    assert not np.array_equal(network.init(3)["output.weight"], network.init(4)["output.weight"])
