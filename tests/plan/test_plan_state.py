"""State that is planned is state that is allocated, to the byte, in every front end."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from lanes import by_turns

from thalweg.plan import plan
from thalweg.plan.models import Model, Tensor
from thalweg.plan.optimizers import USUAL
from thalweg.rules import RULES
from thalweg.show.arguments import Given

SHAPES = [(), (1,), (7,), (1000,), (0,), (3, 0), (5, 4), (130, 140), (3, 4, 5, 2), (16, 8, 3, 3), (2, 130, 140)]
STACKED = [(3, 7), (2, 130, 140), (4, 5, 6)]
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"vectors": "row"} if name == "Muon" else {}) for name in RULES),
    ("LARS", {"momentum": 0.0}),
    ("SGD", {"momentum_dtype": "bfloat16"}),
    ("LAMB", {"momentum_dtype": "float16"}),
    ("AdamW", {"state_dtype": "bfloat16", "momentum_dtype": "float32"}),
    ("LAMB", {"on_nonfinite": "skip"}),
    ("Adafactor", {"min_dim_size_to_factor": 2}),
    ("Adafactor", {"factored": False, "state_dtype": "bfloat16"}),
    ("Adafactor", {"momentum": 0.9, "momentum_dtype": "bfloat16", "min_dim_size_to_factor": 4}),
    ("Adafactor", {"factor_dims": "last2", "only_2d": True, "min_dim_size_to_factor": 0}),
    ("Kron", {"precond_dtype": "bfloat16"}),
    ("Kron", {"max_size_dense": 8, "momentum": 0.0}),
    ("Kron", {"merge": None, "max_skew": None}),
    ("Kron", {"merge": "squeeze", "state_dtype": "float16"}),
]
EVERY = [(name, options, SHAPES) for name, options in OPTIONS] + [
    (name, {"stacked_axes": 1}, STACKED) for name in ("LARS", "LAMB", "Adafactor", "Kron")
]


def model_of(shapes: list[tuple[int, ...]], dtype: str) -> Model:
    return Model("odd", "", tuple(Tensor(f"p{i}", shape, dtype) for i, shape in enumerate(shapes)))


def planned(name: str, options: dict[str, Any], model: Model, front_end: str) -> int:
    given = [Given(name, key, value) for key, value in options.items()]
    found = plan(model, optimizers=[name], options=given, front_end=front_end, device="cpu")
    return found.costs[0].share.state_bytes


def rate(name: str) -> dict[str, float]:
    return {} if name == "Adafactor" else {"lr": 1e-3}


SPIKES: list[Any] = [("AdamW", {"spikes": True}, SHAPES)]


@by_turns()
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(("name", "options", "shapes"), [*EVERY, *SPIKES])
def test_torch(name: str, options: dict[str, Any], shapes: list[tuple[int, ...]], dtype: str) -> None:
    torch = pytest.importorskip("torch")
    import thalweg.torch

    own = USUAL.get(name, {})
    params = [torch.ones(shape, dtype=getattr(torch, dtype), requires_grad=True) for shape in shapes]
    for p in params:
        p.grad = torch.full_like(p, 0.5)
    optimizer = getattr(thalweg.torch, name)(params, **rate(name), **own, **options)
    optimizer.step()
    entries = {id(entry): entry for state in optimizer.state.values() for entry in state.values()}  # some are shared
    allocated = sum(entry.numel() * entry.element_size() for entry in entries.values())
    assert planned(name, options, model_of(shapes, dtype), "torch") == allocated


@by_turns()
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(("name", "options", "shapes"), EVERY)
def test_numpy(name: str, options: dict[str, Any], shapes: list[tuple[int, ...]], dtype: str) -> None:
    import thalweg.numpy

    if "bfloat16" in (dtype, *options.values()):
        dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
        pytest.importorskip("ml_dtypes")
    own = USUAL.get(name, {})
    params = {f"p{i}": np.ones(shape, dtype) for i, shape in enumerate(shapes)}
    optimizer = getattr(thalweg.numpy, name)(engine="reference", **rate(name), **own, **options)
    optimizer.step(params, {key: np.full(p.shape, 0.5, p.dtype) for key, p in params.items()})
    allocated = sum(entry.nbytes for state in optimizer.state.values() for entry in state.values())
    assert planned(name, options, model_of(shapes, np.dtype(dtype).name), "numpy") == allocated


@by_turns()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "options", "shapes"), EVERY)
def test_optax(name: str, options: dict[str, Any], shapes: list[tuple[int, ...]], dtype: str) -> None:
    jax = pytest.importorskip("jax")
    pytest.importorskip("optax")
    import thalweg.optax
    from thalweg.optax.functions import arguments_of

    own = USUAL.get(name, {})
    theirs = {each.option: argument for argument, each in arguments_of(RULES[name]).items()}
    name_there = theirs.get("momentum_dtype", "momentum_dtype")
    called = {name_there: options["momentum_dtype"]} if "momentum_dtype" in options else {}
    given = {key: value for key, value in options.items() if not (called and key == "momentum_dtype")}
    learning_rate = {} if name == "Adafactor" else {"learning_rate": 1e-3}
    given |= {"layout": "torch"} if name == "Muon" else {}
    solver = getattr(thalweg.optax, name.lower())(**learning_rate, **own, **given, **called)
    params = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    leaves = jax.tree.leaves(jax.eval_shape(solver.init, params))  # what init would allocate, compiled or not
    allocated = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    assert planned(name, options, model_of(shapes, dtype), "optax") == allocated
