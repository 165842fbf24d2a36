"""LAMB equals optax, timm, and with the trust ratio off AdamW, under the settings that the docs name."""

from __future__ import annotations

import numpy as np
import pytest
from lanes import one_in
from published_runs import error, optax_peer, ours, peer, problem, torch_peer
from tolerances import FLOAT64

from thalweg.numpy import LAMB

pytestmark = pytest.mark.slow

OPTAX = [
    pytest.param({}, {}, id="defaults"),
    pytest.param(dict(betas=(0.8, 0.95)), dict(b1=0.8, b2=0.95), id="betas"),
    pytest.param(dict(eps=1e-2), dict(eps=1e-2), id="eps"),
    pytest.param(dict(eps_root=1e-2), dict(eps_root=1e-2), id="eps_root"),
    pytest.param(dict(weight_decay=0.1), dict(weight_decay=0.1), id="weight decay"),
    pytest.param(
        dict(weight_decay=0.1, overrides=[("p3", dict(weight_decay=0.0))]),
        dict(weight_decay=0.1, mask=[True, True, True, False, True]),
        id="mask",
    ),
    pytest.param(dict(lr=lambda t: 0.1 / t), dict(learning_rate=lambda count: 0.1 / (count + 1)), id="schedule"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("options", "published"), one_in(4, OPTAX))
def test_equals_optax(options: dict, published: dict) -> None:
    optax = peer("optax")
    params, grads = problem()
    theirs = optax_peer(optax.lamb(**{"learning_rate": 0.01, **published}), params, grads)
    assert error(ours(LAMB(**{"lr": 0.01, "variant": "optax", **options}), params, grads), theirs, params) < FLOAT64


TIMM = [
    pytest.param({}, {}, id="defaults"),
    pytest.param(dict(weight_decay=0.0), dict(weight_decay=0.0), id="no decay, no adaptation"),
    pytest.param(
        dict(weight_decay=0.0, always_adapt=True), dict(weight_decay=0.0, always_adapt=True), id="always_adapt"
    ),
    pytest.param(dict(bias_correction=False), dict(bias_correction=False), id="no bias correction"),
    pytest.param(dict(grad_averaging=False), dict(grad_averaging=False), id="no averaging"),
    pytest.param(dict(max_grad_norm=None), dict(max_grad_norm=None), id="no global clip"),
    pytest.param(dict(max_grad_norm=30.0), dict(max_grad_norm=30.0), id="global clip 30"),
    pytest.param(dict(trust_clip=(0.0, 1.0)), dict(trust_clip=True), id="trust_clip"),
    pytest.param(
        dict(weight_decay_mode="decoupled", weight_decay=0.5),
        dict(decoupled_decay=True, weight_decay=0.5),
        id="decoupled",
    ),
    pytest.param(dict(betas=(0.8, 0.9), eps=1e-3), dict(betas=(0.8, 0.9), eps=1e-3), id="numbers"),
]


@pytest.mark.parametrize(("options", "published"), TIMM)
def test_equals_timm(options: dict, published: dict) -> None:
    timm = peer("timm.optim.lamb")
    params, grads = problem()
    theirs = torch_peer(lambda p: timm.Lamb(p, lr=0.01, **published), params, grads)
    assert error(ours(LAMB(lr=0.01, variant="apex", **options), params, grads), theirs, params) < FLOAT64


@pytest.mark.parametrize(
    ("variant", "options"),
    [("nvlamb", dict(always_adapt=True, weight_decay=0.0)), ("lambc", dict(always_adapt=True, trust_clip=True))],
)
def test_variants_equal_timm(variant: str, options: dict) -> None:
    timm = peer("timm.optim.lamb")
    params, grads = problem()
    theirs = torch_peer(lambda p: timm.Lamb(p, lr=0.01, **options), params, grads)
    mine = LAMB(lr=0.01, variant=variant, **{name: v for name, v in options.items() if name == "weight_decay"})
    assert error(ours(mine, params, grads), theirs, params) < FLOAT64


def apex_step(params: list, grads: list, state: dict, t: int, *, lr: float, l2: bool, adapt: bool) -> list:
    """The equations of apex's multi_tensor_lamb.cu, in our own words, with its defaults."""
    b1, b2, eps, decay, limit = 0.9, 0.999, 1e-6, 0.01, 1.0
    norm = np.sqrt(sum((g * g).sum() for g in grads))
    grads = [g / max(1.0, norm / limit) for g in grads]
    new = []
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        g = g + decay * p if l2 else g
        m, v = state.get(i, (np.zeros_like(p), np.zeros_like(p)))
        state[i] = m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + (0.0 if l2 else decay * p)
        ratio = np.linalg.norm(p) / np.linalg.norm(u) if adapt or decay != 0 else 1.0
        new.append(p - lr * ratio * u)
    return new


@pytest.mark.parametrize("l2", [False, True], ids=["decoupled", "l2"])
def test_equals_the_equations_of_apex(l2: bool) -> None:
    params, grads = problem()
    theirs, state = params, {}
    for t, step in enumerate(grads, 1):
        theirs = apex_step(theirs, step, state, t, lr=0.01, l2=l2, adapt=False)
    mode = dict(weight_decay_mode="l2") if l2 else {}
    assert error(ours(LAMB(lr=0.01, variant="apex", **mode), params, grads), theirs, params) < FLOAT64


def test_without_trust_it_is_adamw() -> None:
    torch = peer("torch")
    params, grads = problem()
    theirs = torch_peer(lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-8, weight_decay=0.1), params, grads)
    assert (
        error(ours(LAMB(lr=0.01, eps=1e-8, weight_decay=0.1, trust=False, exempt=None), params, grads), theirs, params)
        < FLOAT64
    )


class TestIntendedDifferences:
    def test_timm_fails_when_no_parameter_has_a_gradient(self) -> None:
        torch = peer("torch")
        timm = peer("timm.optim.lamb")
        p = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(RuntimeError):
            timm.Lamb([p]).step()
        LAMB(lr=0.1, variant="apex").step({"p": np.ones(3)}, {"p": None})

    def test_timm_writes_into_the_gradient(self) -> None:
        torch = peer("torch")
        timm = peer("timm.optim.lamb")
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.full((3,), 10.0)
        timm.Lamb([p]).step()
        assert p.grad[0] != 10.0
        gradient = np.full(3, 10.0)
        LAMB(lr=0.1, variant="apex").step({"p": np.ones(3)}, {"p": gradient})
        assert (gradient == 10.0).all()
