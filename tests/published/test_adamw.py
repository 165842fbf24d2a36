"""AdamW equals torch's AdamW and Adam, and optax's, under the settings that the docs name."""

from __future__ import annotations

import pytest
from published_runs import error, optax_peer, ours, peer, problem, torch_peer
from tolerances import FLOAT64

from thalweg.numpy import AdamW

TORCH = [
    pytest.param("AdamW", {}, {}, id="defaults"),
    pytest.param("AdamW", dict(amsgrad=True, betas=(0.5, 0.7)), dict(amsgrad=True, betas=(0.5, 0.7)), id="amsgrad"),
    pytest.param("AdamW", dict(eps=0.1, weight_decay=0.3), dict(eps=0.1, weight_decay=0.3), id="numbers"),
    pytest.param("Adam", dict(decoupled=False, weight_decay=0.1), dict(weight_decay=0.1), id="Adam with L2"),
    pytest.param("AdamW", dict(maximize=True), dict(maximize=True), id="maximize"),
]


@pytest.mark.parametrize(("name", "options", "published"), TORCH)
def test_equals_torch(name: str, options: dict, published: dict) -> None:
    torch = peer("torch")
    params, grads = problem()

    def set_lr(optimizer: object, t: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 / t

    theirs = torch_peer(lambda p: getattr(torch.optim, name)(p, lr=0.01, **published), params, grads, before=set_lr)
    assert error(ours(AdamW(lr=lambda t: 0.01 / t, **options), params, grads), theirs, params) < FLOAT64


def test_its_state_is_that_of_torch() -> None:
    torch = peer("torch")
    import thalweg.torch

    states = []
    for kind in (torch.optim.AdamW, thalweg.torch.AdamW):
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = kind([p], lr=0.1, amsgrad=True)
        for t in range(3):
            p.grad = torch.full_like(p, 3.0 - t)
            optimizer.step()
        states.append(optimizer.state[p])
    assert states[0].keys() == states[1].keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    for key, value in states[0].items():
        assert torch.allclose(value, states[1][key].to(value.dtype), rtol=FLOAT64, atol=0.0), key


MASK = [True, True, True, False, True]
OPTAX = [
    pytest.param(dict(variant="optax"), {}, id="defaults"),
    pytest.param(
        dict(betas=(0.8, 0.9), eps=1e-3, eps_root=1e-3, weight_decay=0.1),
        dict(b1=0.8, b2=0.9, eps=1e-3, eps_root=1e-3, weight_decay=0.1),
        id="numbers",
    ),
    pytest.param(dict(nesterov=True, weight_decay=0.0), dict(nesterov=True, weight_decay=0.0), id="nesterov"),
    pytest.param(
        dict(weight_decay=0.1, overrides=[("p3", dict(weight_decay=0.0))]), dict(weight_decay=0.1, mask=MASK), id="mask"
    ),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("options", "published"), OPTAX)
def test_equals_optax(options: dict, published: dict) -> None:
    optax = peer("optax")
    import thalweg.optax

    params, grads = problem()
    theirs = optax_peer(optax.adamw(0.01, **published), params, grads)
    assert error(ours(AdamW(lr=0.01, **options), params, grads), theirs, params) < FLOAT64
    assert error(optax_peer(thalweg.optax.adamw(0.01, **published), params, grads), theirs, params) < FLOAT64


def test_lamb_without_its_ratio_is_the_same() -> None:
    from thalweg.numpy import LAMB

    params, grads = problem()
    mine = ours(AdamW(lr=0.01, weight_decay=0.1), params, grads)
    other = ours(LAMB(lr=0.01, eps=1e-8, weight_decay=0.1, trust=False, exempt=None), params, grads)
    assert error(mine, other, params) < FLOAT64
