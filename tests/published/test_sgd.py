"""SGD equals torch's and optax's, under the settings that the docs name."""

from __future__ import annotations

import numpy as np
import pytest
from published_runs import error, optax_peer, ours, peer, problem, torch_peer
from tolerances import FLOAT64

from thalweg.numpy import SGD

TORCH = [
    pytest.param({}, id="defaults"),
    pytest.param(dict(momentum=0.9, weight_decay=0.1), id="momentum"),
    pytest.param(dict(momentum=0.9, dampening=0.5), id="dampening"),
    pytest.param(dict(momentum=0.9, nesterov=True, weight_decay=0.1), id="nesterov"),
    pytest.param(dict(momentum=0.9, maximize=True), id="maximize"),
]


@pytest.mark.parametrize("options", TORCH)
def test_equals_torch(options: dict) -> None:
    torch = peer("torch")
    params, grads = problem()

    def set_lr(optimizer: object, t: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 / t

    theirs = torch_peer(lambda p: torch.optim.SGD(p, lr=0.01, **options), params, grads, before=set_lr)
    assert error(ours(SGD(lr=lambda t: 0.01 / t, **options), params, grads), theirs, params) < FLOAT64


def test_its_state_is_that_of_torch() -> None:
    torch = peer("torch")
    import thalweg.torch

    options, states = dict(lr=0.1, momentum=0.9, dampening=0.5), []
    for kind in (torch.optim.SGD, thalweg.torch.SGD):
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = kind([p], **options)
        for t in range(3):
            p.grad = torch.full_like(p, 1.0 + t)
            optimizer.step()
        states.append({key: value for key, value in optimizer.state[p].items() if key != "step"})
    assert states[0].keys() == states[1].keys() == {"momentum_buffer"}
    assert torch.allclose(*(state["momentum_buffer"] for state in states), rtol=FLOAT64, atol=0.0)


OPTAX = [
    pytest.param({}, {}, id="defaults"),
    pytest.param(dict(momentum=0.9), dict(momentum=0.9), id="momentum"),
    pytest.param(dict(momentum=0.9, nesterov=True), dict(momentum=0.9, nesterov=True), id="nesterov"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("options", "published"), OPTAX)
def test_equals_optax(options: dict, published: dict) -> None:
    optax = peer("optax")
    import thalweg.optax

    params, grads = problem()
    theirs = optax_peer(optax.sgd(0.01, **published), params, grads)
    assert error(ours(SGD(lr=0.01, **options), params, grads), theirs, params) < FLOAT64
    assert error(optax_peer(thalweg.optax.sgd(0.01, **published), params, grads), theirs, params) < FLOAT64


def test_the_first_gradient_is_not_dampened_and_later_ones_are() -> None:
    p = np.zeros(1)
    optimizer = SGD(lr=1.0, momentum=0.5, dampening=0.25)
    for expected in (-1.0, -2.25, -3.625):  # the sum is 1, then 0.5 + 0.75, then 0.625 + 0.75
        optimizer.update("p", p, np.ones(1))
        assert p[0] == expected
