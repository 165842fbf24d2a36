"""Kron equals kron-torch under ``variant="kron_torch"``, with the noise made equal.

kron-torch draws from torch's generator, solves in float32, and lets its damping noise leak into
the update. The first two are replaced by ours for the comparison, the third is pinned below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from published_runs import error, ours, peer, problem, torch_peer
from tolerances import FLOAT64

from thalweg import rules
from thalweg.numpy import Kron
from thalweg.rules.noise import normal, tensor_id
from thalweg.spaces import numpy as xp

pytestmark = pytest.mark.slow

SHAPES = [(12, 10), (7, 16), (9,), (5, 4, 6)]


def run_peer(monkeypatch: pytest.MonkeyPatch, *, leak: bool = False, **options: Any) -> tuple[list, list, list]:
    """The problem, and kron-torch's answer: with our noise, in the order of its parameters, solved in float64."""
    kron_torch, torch = peer("kron_torch.kron"), peer("torch")
    step, calls = 0, 0
    calculate = kron_torch._calc_A_and_conjB

    def randn_like(x: Any) -> Any:
        nonlocal calls
        name = f"p{calls % len(SHAPES)}"
        calls += 1
        return torch.tensor(normal(xp, x.numpy(), seed=0, tensor=tensor_id(name), t=step))

    def solve(x: Any, a: Any) -> Any:
        return torch.linalg.solve_triangular(a, x.reshape(-1, x.size(-1)), upper=True, left=False).reshape_as(x)

    def make(p: list) -> Any:
        given = dict(lr=0.01, precond_dtype=torch.float64, preconditioner_update_probability=1.0)
        optimizer = kron_torch.Kron(p, **given, **options)
        optimizer.rng.random = lambda: 1.0  # never balance: that leaves the preconditioner as it is
        return optimizer

    def count(optimizer: Any, t: int) -> None:
        nonlocal step
        step = t

    monkeypatch.setattr(torch, "randn_like", randn_like)
    monkeypatch.setattr(kron_torch, "_solve_triangular_right", solve)
    if not leak:
        monkeypatch.setattr(kron_torch, "_calc_A_and_conjB", lambda expr, g, q: calculate(expr, g.clone(), q))
    params, grads = problem(SHAPES)
    with torch.compiler.set_stance("force_eager"):
        return params, grads, torch_peer(make, params, grads, before=count)


ROWS = {
    "defaults": ({}, {}),
    "numbers": (dict(momentum=0.5, precond_lr=0.3), dict(b1=0.5, precond_lr=0.3)),
    "weight decay": (dict(weight_decay=0.1, overrides=[("p2", dict(weight_decay=0.0))]), dict(weight_decay=0.1)),
    "whiten the gradient": (dict(whiten="gradient"), dict(momentum_into_precond_update=False)),
    "initial scale": (dict(init_scale=2.0), dict(precond_init_scale=2.0)),
    "large axes diagonal": (dict(max_size_dense=10), dict(max_size_triangular=10)),
    "one-sided": (dict(max_skew=1.0), dict(memory_save_mode="smart_one_diag")),
    "all diagonal": (dict(max_size_dense=0), dict(memory_save_mode="all_diag")),
    "one factor for each axis": (dict(merge=None), dict(merge_dims=False)),
}


@pytest.mark.parametrize(("options", "published"), ROWS.values(), ids=ROWS)
def test_equals_kron_torch(options: dict, published: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    params, grads, theirs = run_peer(monkeypatch, **published)
    optimizer = Kron(lr=0.01, variant="kron_torch", precond_update_probability=1.0, **options)
    assert error(ours(optimizer, params, grads), theirs, params) < FLOAT64


# ---- intended differences


def test_kron_torch_leaks_its_damping_noise_into_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    params, grads, leaking = run_peer(monkeypatch, leak=True)
    mine = ours(Kron(lr=0.01, variant="kron_torch", precond_update_probability=1.0), params, grads)
    assert 1e-5 < error(mine, leaking, params) < 1e-2


def test_kron_torch_fails_on_a_scalar() -> None:
    kron_torch, torch = peer("kron_torch.kron"), peer("torch")
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError):
        torch_peer(lambda p: kron_torch.Kron(p), [np.array(1.0)], [[np.array(2.0)]])
    assert ours(Kron(lr=0.1, variant="kron_torch"), [np.array(1.0)], [[np.array(2.0)]])[0] < 1.0


def test_kron_torch_counts_whole_steps_between_refreshes() -> None:
    """At a probability of 0.4 it refreshes every third step; ours two steps in five."""
    kron_torch, torch = peer("kron_torch.kron"), peer("torch")
    q = torch.nn.Parameter(torch.ones(3, 3))
    theirs = kron_torch.Kron([q], preconditioner_update_probability=0.4)
    refreshed = 0
    with torch.compiler.set_stance("force_eager"):
        for t in range(20):
            before = theirs.state[q]["Q"][0].clone() if theirs.state[q] else torch.eye(3)
            q.grad = torch.eye(3) + t
            theirs.step()
            refreshed += not torch.equal(before, theirs.state[q]["Q"][0])
    assert refreshed == 6  # and ours 8: tests/rules/test_kron.py


def test_kron_torch_merges_convolutions_by_a_signed_difference() -> None:
    """(16, 8, 3, 3) becomes 384 x 3 there, and the most square matrix here."""
    kron_torch, torch = peer("kron_torch.kron"), peer("torch")
    p = torch.nn.Parameter(torch.ones(16, 8, 3, 3))
    p.grad = torch.randn(16, 8, 3, 3)
    theirs = kron_torch.Kron([p])
    with torch.compiler.set_stance("force_eager"):
        theirs.step()
    assert [int(n) for n in theirs.state[p]["merged_shape"]] == [384, 3]
    assert rules.Kron().sizes((16, 8, 3, 3)) == (16, 72)
