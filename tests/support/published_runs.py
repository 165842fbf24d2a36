"""Published implementations, run beside ours over the same gradients.

timm and transformers are installed without what they would drag in; of timm only the optimizers' own files are loaded,
since its package imports torchvision.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from thalweg.numpy import Optimizer
from thalweg.rules.noise import normal, tensor_id
from thalweg.spaces import numpy as xp

SHAPES = [(24, 40), (40, 24), (20, 18, 3, 3), (17,), (1, 30)]
STEPS = 30


def peer(module: str) -> Any:
    """A module of a published implementation; the test is skipped where it is not installed."""
    package = module.split(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package == "timm":
        _load_only_submodules("timm", "timm.optim", "timm.scheduler")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def _load_only_submodules(*packages: str) -> None:
    for name in packages:
        if name in sys.modules:
            continue
        parent, _, own = name.rpartition(".")
        if parent:
            folders = [f"{path}/{own}" for path in sys.modules[parent].__path__]
        else:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            folders = list(spec.submodule_search_locations or ())
        package = types.ModuleType(name)
        package.__path__ = folders
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package


def problem(
    shapes: Sequence[tuple[int, ...]] = SHAPES, steps: int = STEPS, seed: int = 0
) -> tuple[list[Any], list[list[Any]]]:
    """First parameters, and gradients for each step: of varied scale, with rows and columns that differ."""
    rng = np.random.default_rng(seed)
    params = [rng.standard_normal(shape) for shape in shapes]
    scales = [np.exp(rng.standard_normal(shape[:1] + (1,) * (len(shape) - 1))) for shape in shapes]
    grads = [
        [rng.standard_normal(p.shape) * scale * (1 + step % 3) for p, scale in zip(params, scales, strict=True)]
        for step in range(steps)
    ]
    return params, grads


def ours(optimizer: Optimizer, params: Sequence[Any], grads: Sequence[Sequence[Any]]) -> list[Any]:
    """Final parameters under one of our optimizers."""
    current = {f"p{i}": p.copy() for i, p in enumerate(params)}
    for step in grads:
        optimizer.step(current, {f"p{i}": g for i, g in enumerate(step)})
    return list(current.values())


def torch_peer(
    make: Callable[[list[Any]], Any],
    params: Sequence[Any],
    grads: Sequence[Sequence[Any]],
    *,
    before: Callable[[Any, int], None] | None = None,
) -> list[Any]:
    """Final parameters under a torch.optim.Optimizer. Gradients are cloned: some peers overwrite them."""
    import torch

    current = [torch.nn.Parameter(torch.tensor(p)) for p in params]
    optimizer = make(current)
    for t, step in enumerate(grads, 1):
        for p, g in zip(current, step, strict=True):
            p.grad = torch.tensor(g)
        if before is not None:
            before(optimizer, t)
        optimizer.step()
    return [p.detach().numpy() for p in current]


def optax_peer(transformation: Any, params: Sequence[Any], grads: Sequence[Sequence[Any]]) -> list[Any]:
    """Final parameters under an optax transformation."""
    import jax
    import jax.numpy as jnp
    import optax

    current = [jnp.asarray(p) for p in params]
    state = transformation.init(current)
    update = jax.jit(transformation.update)
    for step in grads:
        updates, state = update([jnp.asarray(g) for g in step], state, current)
        current = optax.apply_updates(current, updates)
    return [np.asarray(p) for p in current]


def error(first: Sequence[Any], second: Sequence[Any], start: Sequence[Any]) -> float:
    """The largest difference over the largest displacement."""
    difference = max(np.abs(a - b).max() for a, b in zip(first, second, strict=True))
    displacement = max(np.abs(b - p).max() for b, p in zip(second, start, strict=True))
    assert displacement > 0, "nothing moved: this comparison would prove nothing"
    return float(difference / displacement)


# ---- kron-torch with our noise

KRON_SHAPES = [(12, 10), (7, 16), (9,), (5, 4, 6)]


@contextlib.contextmanager
def our_noise(kron_torch: Any, monkeypatch: pytest.MonkeyPatch, *, leak: bool) -> Iterator[list[int]]:
    """Within: kron-torch draws our noise, in the order of its parameters, and solves in float64."""
    import torch

    step, calls = [0], [0]
    calculate = kron_torch._calc_A_and_conjB

    def randn_like(x: torch.Tensor) -> torch.Tensor:
        name = f"p{calls[0] % len(KRON_SHAPES)}"
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
    params, grads = problem(KRON_SHAPES)

    def make(p: list) -> Any:
        import torch

        optimizer = kron_torch.Kron(
            p, lr=0.01, precond_dtype=torch.float64, preconditioner_update_probability=1.0, **options
        )
        optimizer.rng.random = lambda: 1.0  # never balance: that leaves the preconditioner as it is
        return optimizer

    with our_noise(kron_torch, monkeypatch, leak=leak) as step:
        return params, grads, torch_peer(make, params, grads, before=lambda _, t: step.__setitem__(0, t))
