"""What the tests of the numpy front end share: rows to cross tests with, a small model, and bits to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest

from thalweg.errors import OptimError
from thalweg.numpy import LAMB, LARS, Adafactor, Kron, Optimizer, optimizer
from thalweg.rules import RULES
from thalweg.settings import Numerics

Make = Callable[..., Optimizer]
Arrays = dict[str, Any]

#: All but Muon, which takes matrices alone: tests/rules/test_muon.py has its own.
FRONT_END: dict[str, Any] = {name: optimizer(rule) for name, rule in RULES.items() if name != "Muon"}

#: One row for each kind of state and arithmetic. Kron draws noise that matters, and refreshes now and then.
CASES: dict[str, Make] = {
    "LARS": partial(LARS, lr=0.5, weight_decay=0.1, trust_coefficient=0.1),
    "LAMB": partial(LAMB, lr=0.05, weight_decay=0.1),
    "Adafactor": partial(Adafactor),
    "Adafactor factored": partial(Adafactor, lr=0.05, momentum=0.9, min_dim_size_to_factor=2, weight_decay=0.1),
    "Kron": partial(Kron, lr=0.05, precond_update_probability=0.4, damping=0.1, weight_decay=0.1),
    "Kron eq": partial(Kron, lr=0.05, variant="kron_torch", precond_update_probability=0.4, relative_damping=0.1),
}
every_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES)
#: Where the rule hardly matters: the simplest, and the one with most state.
two_cases = pytest.mark.parametrize("make", [CASES["LARS"], CASES["Kron"]], ids=["LARS", "Kron"])
#: Those whose step is proportional to a given lr, without momentum of earlier rates.
cases_with_lr = pytest.mark.parametrize(
    "make", [make for make in CASES.values() if "lr" in make.keywords], ids=[n for n in CASES if n != "Adafactor"]
)

SHAPES = {"encoder.0.weight": (6, 5), "encoder.0.bias": (5,), "conv": (2, 3, 2, 2), "scale": (), "empty": (0, 4)}


def model(dtype: Any = "float32", shapes: Mapping[str, tuple[int, ...]] = SHAPES, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}


def gradients(
    steps: int, dtype: Any = "float32", shapes: Mapping[str, tuple[int, ...]] = SHAPES, seed: int = 1
) -> list[Arrays]:
    """Gradients for each step, of a size that varies from step to step."""
    return [
        {
            name: np.asarray(g * (3 - t % 3)).astype(dtype)
            for name, g in model("float64", shapes, seed=seed + 1000 * t).items()
        }
        for t in range(steps)
    ]


def train(optimizer: Optimizer, params: Any, grads: Sequence[Any]) -> Any:
    """Step the model once for each set of gradients. Something must move."""
    before = bits(params)
    for step in grads:
        optimizer.step(params, step)
    assert bits(params) != before, "nothing moved: comparing would prove nothing"
    return params


def copies(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: copies(x) for name, x in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [copies(x) for x in tree]
    return tree.copy(order="K")


def bits(tree: Any) -> Any:
    """Something that is equal just when shapes, dtypes and all bits are."""
    if isinstance(tree, Mapping):
        return {name: bits(x) for name, x in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [bits(x) for x in tree]
    if isinstance(tree, (np.ndarray, np.generic)):
        return tree.shape, tree.dtype.str, tree.dtype.name, tree.tobytes()
    return repr(tree)


def fingerprint(optimizer: Optimizer) -> Any:
    """All of an optimizer that a step, or a failed attempt at one, could change."""
    names = [(type(name).__name__, name) for name in optimizer.state]
    return bits(
        {
            "names": names,
            "state": optimizer.state,
            "skipped": optimizer.skipped,
            "iteration": optimizer.iteration,
            "count": optimizer.num_parameters,
            "lr": optimizer.lr,
            "options": optimizer.options,
            "repr": repr(optimizer),
        }
    )


@contextmanager
def refused(error: type[OptimError], match: str, optimizer: Optimizer, *arrays: Any) -> Iterator[None]:
    """The block must raise, and must leave the optimizer and all arrays as they were."""
    before = fingerprint(optimizer), bits(arrays)
    with pytest.raises(error, match=match) as caught:
        yield
    assert type(caught.value) is error
    assert (fingerprint(optimizer), bits(arrays)) == before


def bfloat16() -> Any:
    return pytest.importorskip("ml_dtypes").bfloat16


def torch() -> Any:
    # one of its parts is asked for: without torch, "torch" itself would be the folder of that name beside this file
    return pytest.importorskip("torch.nn") and pytest.importorskip("torch")


def option_fields(name: str) -> dict[str, Any]:
    """The dataclass fields that are the options of an optimizer, by name."""
    return {f.name: f for kind in (RULES[name], Numerics) for f in fields(kind)}
