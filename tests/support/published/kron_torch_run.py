"""Running kron-torch with our noise, so that it can be compared with ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from published.compare import problem, torch_peer
from published.peers import peer

from thalweg.rules.noise import normal, tensor_id
from thalweg.spaces import numpy as xp

SHAPES = [(12, 10), (7, 16), (9,), (5, 4, 6)]


@contextlib.contextmanager
def our_noise(kron_torch: Any, monkeypatch: pytest.MonkeyPatch, *, leak: bool) -> Iterator[list[int]]:
    """Within: kron-torch draws our noise, in the order of its parameters, and solves in float64."""
    import torch

    step, calls = [0], [0]
    calculate = kron_torch._calc_A_and_conjB

    def randn_like(x: torch.Tensor) -> torch.Tensor:
        name = f"p{calls[0] % len(SHAPES)}"
        calls[0] += 1
        return torch.tensor(normal(xp, x.numpy(), seed=0, tensor=tensor_id(name), t=step[0]))

    def solve(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve_triangular(a, x.reshape(-1, x.size(-1)), upper=True, left=False).reshape_as(x)

    monkeypatch.setattr(torch, "randn_like", randn_like)
    monkeypatch.setattr(kron_torch, "_solve_triangular_right", solve)
    if not leak:
        monkeypatch.setattr(kron_torch, "_calc_A_and_conjB", lambda expr, g, q: calculate(expr, g.clone(), q))
    with torch.compiler.set_stance("force_eager"):
        yield step


def kron_torch_run(monkeypatch: pytest.MonkeyPatch, *, leak: bool = False, **options: Any) -> tuple[list, list, list]:
    kron_torch = peer("kron_torch.kron")
    params, grads = problem(SHAPES)

    def make(p: list) -> Any:
        import torch

        optimizer = kron_torch.Kron(
            p, lr=0.01, precond_dtype=torch.float64, preconditioner_update_probability=1.0, **options
        )
        optimizer.rng.random = lambda: 1.0  # never balance: that leaves the preconditioner as it is
        return optimizer

    with our_noise(kron_torch, monkeypatch, leak=leak) as step:
        return params, grads, torch_peer(make, params, grads, before=lambda _, t: step.__setitem__(0, t))
