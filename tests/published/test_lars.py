"""LARS equals optax, timm, LARC, and with the trust ratio off SGD, under the settings that the docs name."""

from __future__ import annotations

import numpy as np
import pytest
from lanes import one_in
from published_runs import error, optax_peer, ours, peer, problem, torch_peer
from tolerances import FLOAT64

from thalweg.numpy import LARS

pytestmark = pytest.mark.slow

MASK = [True, True, True, False, True]

OPTAX = [
    pytest.param({}, {}, id="defaults"),
    pytest.param(dict(weight_decay=0.1), dict(weight_decay=0.1), id="weight decay"),
    pytest.param(
        dict(weight_decay=0.1, overrides=[("p3", dict(weight_decay=0.0))]),
        dict(weight_decay=0.1, weight_decay_mask=MASK),
        id="weight decay mask",
    ),
    pytest.param(dict(overrides=[("p3", dict(trust=False))]), dict(trust_ratio_mask=MASK), id="trust ratio mask"),
    pytest.param(dict(trust_coefficient=0.02, eps=0.5), dict(trust_coefficient=0.02, eps=0.5), id="numbers"),
    pytest.param(dict(momentum=0.5), dict(momentum=0.5), id="momentum"),
    pytest.param(dict(nesterov=True), dict(nesterov=True), id="nesterov"),
    pytest.param(dict(lr=lambda t: 10.0 / t), dict(learning_rate=lambda count: 10.0 / (count + 1)), id="schedule"),
]


@pytest.mark.parametrize(("options", "published"), one_in(4, OPTAX))
def test_equals_optax(options: dict, published: dict) -> None:
    optax = peer("optax")
    params, grads = problem()
    theirs = optax_peer(optax.lars(**{"learning_rate": 5.0, **published}), params, grads)
    assert error(ours(LARS(**{"lr": 5.0, "variant": "optax", **options}), params, grads), theirs, params) < FLOAT64


TIMM = [
    pytest.param(dict(weight_decay=0.1), dict(weight_decay=0.1), id="weight decay"),
    pytest.param({}, {}, id="no decay, no adaptation"),
    pytest.param(dict(always_adapt=True), dict(always_adapt=True), id="always_adapt"),
    pytest.param(dict(weight_decay=0.1, momentum=0.9), dict(weight_decay=0.1, momentum=0.9), id="momentum"),
    pytest.param(
        dict(weight_decay=0.1, momentum=0.9, nesterov=True),
        dict(weight_decay=0.1, momentum=0.9, nesterov=True),
        id="nesterov",
    ),
    pytest.param(dict(weight_decay=0.1, clip=True), dict(weight_decay=0.1, trust_clip=True), id="LARC clipping"),
    pytest.param(
        dict(weight_decay=0.1, trust_coefficient=0.02, eps=0.1),
        dict(weight_decay=0.1, trust_coeff=0.02, eps=0.1),
        id="numbers",
    ),
]


@pytest.mark.parametrize("schedule", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize(("options", "published"), TIMM)
def test_equals_timm(options: dict, published: dict, schedule: bool) -> None:
    timm = peer("timm.optim.lars")
    params, grads = problem()

    def lr(t: int) -> float:
        return 0.01 / t if schedule else 0.01

    def set_lr(optimizer: object, t: int) -> None:
        optimizer.param_groups[0]["lr"] = lr(t)

    theirs = torch_peer(lambda p: timm.Lars(p, lr=0.01, **published), params, grads, before=set_lr)
    assert error(ours(LARS(lr=lr, variant="timm", **options), params, grads), theirs, params) < FLOAT64


def larc(params: list, grads: list, *, lr: float, decay: float, momentum: float) -> list:
    """LARC around SGD, from its equations: rate min(0.02 |p| / (|g| + decay |p| + 1e-8) / lr, 1)."""
    buffers = [np.zeros_like(p) for p in params]
    for step in grads:
        for i, g in enumerate(step):
            p = params[i]
            w, n = np.linalg.norm(p), np.linalg.norm(g)
            rate = min(0.02 * w / (n + decay * w + 1e-8) / lr, 1.0)
            buffers[i] = momentum * buffers[i] + rate * (g + decay * p)
            params[i] = p - lr * buffers[i]
    return params


@pytest.mark.parametrize("lr", [1e-3, 0.5], ids=["rate clipped", "rate free"])
def test_equals_the_equations_of_larc(lr: float) -> None:
    params, grads = problem()
    theirs = larc([p.copy() for p in params], grads, lr=lr, decay=0.1, momentum=0.9)
    assert error(ours(LARS(lr=lr, variant="larc", weight_decay=0.1), params, grads), theirs, params) < FLOAT64


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_trust_it_is_sgd_with_momentum(nesterov: bool) -> None:
    torch = peer("torch")
    params, grads = problem()
    theirs = torch_peer(
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=nesterov), params, grads
    )
    assert (
        error(ours(LARS(lr=0.01, weight_decay=0.1, trust=False, nesterov=nesterov), params, grads), theirs, params)
        < FLOAT64
    )


class TestIntendedDifferences:
    def test_larc_drops_the_decay_of_a_tensor_without_gradient(self) -> None:
        """Ours decays it at the zero ratio, like any tensor whose ratio is undefined."""
        p = np.ones(4)
        LARS(lr=0.1, variant="larc", weight_decay=0.1).update("p", p, np.zeros(4))
        assert np.allclose(p, 1 - 0.1 * 0.1)

    def test_timm_without_decay_measures_nothing_and_ours_says_so_by_variant(self) -> None:
        params, grads = problem()
        timm_like = ours(LARS(lr=0.01, variant="timm"), params, grads)
        sgd = ours(LARS(lr=0.01, momentum=0.0, trust=False), params, grads)
        assert error(timm_like, sgd, params) < FLOAT64

    def test_the_two_momenta_differ_under_a_schedule(self) -> None:
        """lr enters the momentum (paper) or leaves it (torch's SGD): equal only while lr is constant."""
        params, grads = problem()
        inside, outside = (dict(lr=lambda t: 5.0 / t, momentum_mode=mode) for mode in ("lr_inside", "lr_outside"))
        assert error(ours(LARS(**inside), params, grads), ours(LARS(**outside), params, grads), params) > 0.1
        inside["lr"] = outside["lr"] = 5.0
        assert error(ours(LARS(**inside), params, grads), ours(LARS(**outside), params, grads), params) < FLOAT64
