"""Cases for several devices: they run in a child process that has as many, and say what became of each of them.

A case is a function without arguments that raises where something does not hold. The child is asked for cases of
modules by name, some a line, and answers in lines of JSON; what cases have in common it makes once. jax learns the
number of devices when it is imported, so that no process can have two.
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
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tolerances import SHARDED

import thalweg.optax

Tree: TypeAlias = Any
Cases: TypeAlias = dict[str, Callable[[], None]]
P = PartitionSpec

#: The numbers of devices on which all cases run, with the dtype of the parameters there.
DEVICES = {4: "float64", 8: "float32"}
STEPS = 3
#: How the child begins the line that answers for a case.
ANSWER = "answer: "
#: Parameters by name: shape and how it is divided over a mesh with the axes x and y.
SMALL: Mapping[str, tuple[tuple[int, ...], PartitionSpec]] = {
    "rows": ((16, 12), P("x")),
    "columns": ((16, 12), P(None, "y")),
    "whole": ((16, 12), P()),
    "both": ((8, 16), P("x", "y")),
    "pair": ((16, 4), P(("x", "y"))),
    "vector": ((24,), P("x")),
    "vector_whole": ((24,), P()),
    "cube": ((2, 8, 16), P(None, "x", "y")),
}
#: Of 2**16 elements: the largest that are stacked with others of their shape.
LIMIT: Mapping[str, tuple[tuple[int, ...], PartitionSpec]] = {
    "limit_rows": ((256, 256), P("x")),
    "limit_columns": ((256, 256), P(None, "y")),
}
LARGE: Mapping[str, tuple[tuple[int, ...], PartitionSpec]] = {
    "large_rows": ((264, 256), P("x")),
    "large_columns": ((264, 256), P(None, "x")),
    "large_both": ((264, 256), P("x", "y")),
    "large_whole": ((264, 256), P()),
    "large_cube": ((2, 264, 128), P(None, "y", "x")),
    "large_vector": ((67584,), P(("x", "y"))),
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
    """A process with so many devices that answers for cases."""

    def __init__(self, devices: int) -> None:
        flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
        environment = {
            **os.environ,
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags} --xla_llvm_disable_expensive_passes=true",
            "JAX_ENABLE_X64": "1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
        }
        self.devices = devices
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

    def faults_of(self, module: str, cases: Sequence[str]) -> dict[str, str]:
        """What was wrong with cases, by name; nothing where all held."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{json.dumps([module, *cases])}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return dict(json.loads(line.removeprefix(ANSWER)))
        self.words.seek(0)
        return {"": f"the child for {self.devices} devices ended early:\n{self.words.read()[-3000:]}"}

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.words.close()


child = cache(Child)
#: Of each module, what the ordinary lane does without.
LEFT = {
    "sharded_jax_jit": ("lamb", "adafactor", "unfactored"),
    "sharded_jax_map": ("adafactor", "lamb", "unfactored"),
    "sharded_jax_lean": ("sgd",),
    "sharded_jax_explicit": ("lars", "lamb", "unfactored", "kron"),
}


def check_all(cases: Callable[[int], Cases]) -> Any:
    """Test all cases of a number of devices and of an optimizer together, which share what takes long to compile.

    The ordinary lane has the most devices alone, few cases of Kron, which takes longest, and nothing that is in LEFT.
    """
    left = LEFT[cases.__module__]

    def is_ordinary(devices: int, case: str) -> bool:
        about = case.partition(": ")[0]
        return (
            devices == max(DEVICES)
            and about not in left
            and (not about.startswith("kron") or case == "kron: same numbers")
        )

    found: dict[tuple[int, str, bool], list[str]] = {}
    for devices in DEVICES:
        for case in cases(devices):
            about = case.partition(": ")[0] if ": " in case else "others"
            found.setdefault((devices, about, is_ordinary(devices, case)), []).append(case)
    rows = [
        pytest.param(devices, some, id=f"{devices}-{about}", marks=() if ordinary else pytest.mark.nightly)
        for (devices, about, ordinary), some in found.items()
    ]

    @pytest.mark.slow
    @pytest.mark.parametrize(("devices", "some"), rows)
    def test(devices: int, some: list[str]) -> None:
        assert child(devices).faults_of(cases.__module__, some) == {}

    return test


# ---- in the child


def dtype() -> str:
    return DEVICES[jax.device_count()]


@cache
def mesh(kind: Any = jax.sharding.AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((jax.device_count() // 2, 2), ("x", "y"), axis_types=(kind,) * 2)


def numbers(shapes: Mapping[str, Any], seed: int, dtype: str) -> Tree:
    """A tree on one device; equal names have equal numbers in every tree of a seed."""
    return {
        name: jnp.asarray(np.random.default_rng([seed, *name.encode()]).standard_normal(shape), dtype)
        for name, (shape, _) in shapes.items()
    }


def placed(shapes: Mapping[str, Any], tree: Tree, over: jax.sharding.Mesh) -> Tree:
    return {name: jax.device_put(x, NamedSharding(over, shapes[name][1])) for name, x in tree.items()}


def specs_of(shapes: Mapping[str, Any]) -> dict[str, PartitionSpec]:
    return {name: spec for name, (_, spec) in shapes.items()}


def state_specs(state: Any, shapes: Mapping[str, Any], stacked_axes: int = 0) -> Any:
    """As the parameter along axes that it shares with it; scalars and the factors of Kron whole, one for each layer."""

    def own(path: Any, x: Any) -> PartitionSpec:
        name = next((part.key for part in path if isinstance(part, jax.tree_util.DictKey)), None)
        kept = {part.name for part in path if isinstance(part, jax.tree_util.GetAttrKey)}
        if name is None or "refresh" in kept:
            return P()
        shape, spec = shapes[name]
        parts = [*spec, *[None] * (len(shape) - len(spec))]
        if kept & {"Q", "L"}:
            return P(*parts[:stacked_axes])
        return P(*[part if n == m else None for n, m, part in zip(x.shape, shape, parts, strict=True)])

    return jax.tree_util.tree_map_with_path(own, state)


def check_shardings(tree: Tree, specs: Tree, over: jax.sharding.Mesh) -> None:
    wrong = []
    wanted = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    for (path, x), spec in zip(jax.tree_util.tree_flatten_with_path(tree)[0], wanted, strict=True):
        fits = x.sharding.is_equivalent_to(NamedSharding(over, spec), x.ndim)
        if not (fits or (x.ndim == 0 and x.sharding.is_fully_replicated)):
            got = getattr(x.sharding, "spec", x.sharding)
            wrong.append(f"{jax.tree_util.keystr(path)}: {got} instead of {spec}")
    assert not wrong, f"{len(wrong)} of {len(wanted)} are divided otherwise: " + "; ".join(wrong)


def check_equal(tree: Tree, wanted: Tree, before: Tree = None, tolerance: float | None = None) -> None:
    """Within some units of rounding; ``before`` is what differences are measured from, zero unless told."""
    tolerance = SHARDED[dtype()] if tolerance is None else tolerance
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
        module, *some = json.loads(line)
        cases: Cases = importlib.import_module(module).cases(jax.device_count())
        faults = {case: fault for case in some if (fault := answer(cases[case]))}
        sys.stdout.write(f"\n{ANSWER}{json.dumps(faults)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
