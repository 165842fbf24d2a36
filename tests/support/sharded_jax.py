"""Cases for several devices: they run in a child process that has as many, and say what was wrong.

A case is a function without arguments that raises where something does not hold. Modules of cases have them in `CASES`,
and in `DAY` the names of those in the ordinary lane. jax learns the number of devices when it is imported.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tolerances import SHARDED

import thalweg.optax

Tree: TypeAlias = Any
Cases: TypeAlias = dict[str, Callable[[], None]]
Shapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], PartitionSpec]]
P = PartitionSpec

#: A mesh of 4 x 2, so that its axes cannot be taken for one another.
DEVICES = 8
DTYPE = "float64"
STEPS = 3
#: How the child begins the line that answers for a case.
ANSWER = "answer: "
#: Parameters by name: shape and how it is divided over a mesh with the axes x and y.
SMALL: Shapes = {
    "rows": ((16, 12), P("x")),
    "columns": ((16, 12), P(None, "y")),
    "whole": ((16, 12), P()),
    "both": ((8, 16), P("x", "y")),
    "pair": ((16, 4), P(("x", "y"))),
    "vector": ((24,), P("x")),
    "vector_whole": ((24,), P()),
    "cube": ((2, 8, 16), P(None, "x", "y")),
}
#: Step sizes are such that parameters move by some of their size.
OPTIMIZERS: Mapping[str, Callable[..., Any]] = {
    "lars": partial(thalweg.optax.lars, 100.0, weight_decay=0.01),
    "lamb": partial(thalweg.optax.lamb, 0.05, weight_decay=0.01),
    "adafactor": partial(thalweg.optax.adafactor, 0.05, min_dim_size_to_factor=4, momentum=0.9, weight_decay_rate=0.01),
    "unfactored": partial(thalweg.optax.adafactor, 0.05, factored=False, clipping_threshold=0.5),
    "kron": partial(thalweg.optax.kron, 0.05, damping=0.1, weight_decay=0.01, seed=3),
}


# ---- in the parent


class Child:
    """A process with several devices that answers for cases."""

    def __init__(self) -> None:
        flags = f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"
        environment = {
            **os.environ,
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags} --xla_llvm_disable_expensive_passes=true",
            "JAX_ENABLE_X64": "1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
        }
        self.words = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words,
            text=True,
            env=environment,
        )
        atexit.register(self.end)

    def fault_of(self, module: str, case: str) -> str:
        """What was wrong with a case; nothing where it held."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{json.dumps([module, case])}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return str(json.loads(line.removeprefix(ANSWER)))
        self.words.seek(0)
        return f"the child ended early:\n{self.words.read()[-3000:]}"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.words.close()


child = cache(Child)


def check_all(module: ModuleType) -> Any:
    """A test of all cases of a module."""
    marks = {case: () if case in module.DAY else pytest.mark.nightly for case in module.CASES}

    @pytest.mark.slow
    @pytest.mark.parametrize("case", [pytest.param(case, marks=own) for case, own in marks.items()])
    def test(case: str) -> None:
        fault = child().fault_of(module.__name__, case)
        assert not fault, fault

    return test


# ---- in the child


@cache
def mesh(kind: Any = jax.sharding.AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES // 2, 2), ("x", "y"), axis_types=(kind,) * 2)


def numbers(shapes: Shapes, seed: int, dtype: str = DTYPE) -> Tree:
    """A tree on one device; equal names have equal numbers in every tree of a seed."""
    return {
        name: jnp.asarray(np.random.default_rng([seed, *name.encode()]).standard_normal(shape), dtype)
        for name, (shape, _) in shapes.items()
    }


def placed(shapes: Shapes, tree: Tree, over: jax.sharding.Mesh) -> Tree:
    return {name: jax.device_put(x, NamedSharding(over, shapes[name][1])) for name, x in tree.items()}


def specs_of(shapes: Shapes) -> dict[str, PartitionSpec]:
    return {name: spec for name, (_, spec) in shapes.items()}


def step_of(solver: Any) -> Any:
    def step(params: Any, state: Any, g: Any) -> Any:
        updates, state = solver.update(g, state, params)
        return optax.apply_updates(params, updates), state

    return step


def stepped_alone(solver: Any, before: Any, draws: Sequence[Any]) -> Any:
    """Parameters and state after some steps on one device."""
    result, compiled = (before, solver.init(before)), jax.jit(step_of(solver))
    for g in draws:
        result = compiled(*result, g)
    return result


def check_equal(tree: Tree, wanted: Tree, before: Tree = None, tolerance: float = SHARDED[DTYPE]) -> None:
    """Within some units of rounding; ``before`` is what differences are measured from, zero unless told."""
    assert jax.tree.structure(tree) == jax.tree.structure(wanted)
    before = jax.tree.map(np.zeros_like, wanted) if before is None else before
    wrong = []
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(wanted)[0]]
    for path, *leaves in zip(paths, *map(jax.tree.leaves, (tree, wanted, before)), strict=True):
        x, y, start = (np.asarray(leaf, np.float64) for leaf in leaves)
        assert x.shape == y.shape, f"{path} has shape {x.shape} instead of {y.shape}"
        error, size = np.max(np.abs(x - y), initial=0), np.max(np.abs(y - start), initial=0)
        if not error <= tolerance * size:
            wrong.append(f"{path} by {error:.1e} of {size:.1e}")
    assert not wrong, f"differ by more than {tolerance}: " + "; ".join(wrong)


MESSAGE = re.compile(r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(")


def messages(text: str) -> list[tuple[str, int]]:
    """What a compiled program sends: of each message its kind and the elements of its largest array."""
    found = []
    for result, kind in MESSAGE.findall(text):
        shapes = re.findall(r"\w+\[([\d,]*)\]", result)
        found.append((kind, max(int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes)))
    return found


def primitives(jaxpr: Any) -> Counter[str]:
    """How often each primitive stands in a program, inner programs included."""
    found: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        found[equation.primitive.name] += 1
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    found += primitives(inner)
    return found


def answer(case: Callable[[], None]) -> str:
    try:
        case()
    except Exception as error:
        own = [line for line in traceback.format_exc().splitlines() if "/thalweg/" in line]
        return f"{type(error).__name__}: {str(error)[:3000]} {own[-1].strip() if own else ''}"
    return ""


def main() -> None:
    warnings.simplefilter("error")
    for line in sys.stdin:
        module, case = json.loads(line)
        fault = answer(importlib.import_module(module).CASES[case])
        sys.stdout.write(f"\n{ANSWER}{json.dumps(fault)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
