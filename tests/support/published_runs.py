"""Published implementations, run beside ours over the same gradients.

timm and transformers are installed without what they would drag in; of timm only the optimizers' own files are loaded,
since its package imports torchvision.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from thalweg.numpy import Optimizer

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
        if name not in sys.modules:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            package = types.ModuleType(name)
            package.__path__ = list(spec.submodule_search_locations or ())
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
    after: Callable[[Any], None] | None = None,
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
    if after is not None:
        after(optimizer)
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


def added_early(b2: float) -> dict[str, Any]:
    """pytorch_optimizer adds eps, and 1e-15 under the root, before it corrects the bias of the second moment."""
    return dict(eps=lambda t: 1e-8 / (1 - b2**t) ** 0.5, eps_root=lambda t: 1e-15 / (1 - b2**t))


#: Rows of rules that equal a published optimizer as it comes: its import name, our options, and its own.
PUBLISHED: dict[str, dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "Lion": {
        "optax": ("optax.lion", dict(variant="optax"), {}),
        "optax numbers": (
            "optax.lion",
            dict(betas=(0.8, 0.95), weight_decay=0.1),
            dict(b1=0.8, b2=0.95, weight_decay=0.1),
        ),
        "timm": ("timm.optim.lion.Lion", dict(variant="timm"), {}),
        "timm decay": ("timm.optim.lion.Lion", dict(weight_decay=0.1), dict(weight_decay=0.1)),
    },
    "AdEMAMix": {
        "optax": ("optax.contrib.ademamix", dict(variant="optax"), {}),
        "optax numbers": (
            "optax.contrib.ademamix",
            dict(betas=(0.8, 0.95, 0.99), alpha=3.0, eps=1e-3, eps_root=1e-4, weight_decay=0.1),
            dict(b1=0.8, b2=0.95, b3=0.99, alpha=3.0, eps=1e-3, eps_root=1e-4, weight_decay=0.1),
        ),
        "pytorch_optimizer": ("pytorch_optimizer.AdEMAMix", {}, {}),
        "pytorch_optimizer warm-ups": (
            "pytorch_optimizer.AdEMAMix",
            dict(alpha_warmup=20, beta3_warmup=20, weight_decay=0.1),
            dict(t_alpha_beta3=20, weight_decay=0.1, weight_decouple=True),
        ),
    },
    "MARS": {
        "pytorch_optimizer": ("pytorch_optimizer.MARS", added_early(0.99), dict(optimize_1d=True)),
        "pytorch_optimizer numbers": (
            "pytorch_optimizer.MARS",
            dict(added_early(0.95), betas=(0.9, 0.95), gamma=0.5, weight_decay=0.1),
            dict(betas=(0.9, 0.95), gamma=0.5, weight_decay=0.1, optimize_1d=True),
        ),
        "pytorch_optimizer amsgrad": (
            "pytorch_optimizer.MARS",
            dict(added_early(0.99), amsgrad=True),
            dict(ams_bound=True, optimize_1d=True),
        ),
    },
}
