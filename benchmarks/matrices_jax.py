"""How long JAX takes to trace, compile and run a step of the rules that multiply matrices: Kron and Muon.

    python benchmarks/matrices_jax.py --layers 2,12 --width 64                    # a CPU
    python benchmarks/matrices_jax.py --layers 12 --width 768 --precision tensorfloat32

The parameters are those of GPT-2, or of ResNet-50 (``--model``), float32; Muon has the hidden matrices alone. A program
is ``--steps`` steps in one loop, each of them ``update`` and ``optax.apply_updates``, parameters and state donated.
Equations of a program that is called several times count once. ``--profile`` counts them by primitive.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxprs_in_params

import thalweg.optax

Shapes = dict[str, tuple[int, ...]]
SOLVERS = {
    "kron": lambda: thalweg.optax.kron(1e-3, precond_update_probability=1.0),
    "kron-applied": lambda: thalweg.optax.kron(1e-3, precond_update_probability=1e-6),
    "muon": lambda: thalweg.optax.muon(0.02, layout="torch", ns_dtype="bfloat16"),
    "muon-gram": lambda: thalweg.optax.muon(0.02, layout="torch", ns_dtype="bfloat16", ns_method="auto"),
    "optax.muon": lambda: optax.contrib.muon(0.02),
}


def list_gpt2(layers: int, width: int) -> Shapes:
    found: Shapes = {"embed.tokens": (50257 * width // 768, width), "embed.places": (4 * width // 3, width)}
    for layer in range(layers):
        for name, rows, columns in (("qkv", 3, 1), ("out", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            found[f"{layer}.{name}.weight"] = (rows * width, columns * width)
            found[f"{layer}.{name}.bias"] = (rows * width,)
        found |= {f"{layer}.norm{i}.{name}": (width,) for i in (1, 2) for name in ("scale", "bias")}
    return {**found, "norm.scale": (width,), "norm.bias": (width,)}


def list_resnet50(layers: int, width: int) -> Shapes:
    """width: channels of the first convolution, 64. layers: ignored."""
    found: Shapes = {"stem": (width, 3, 7, 7), "embed.head": (1000, 32 * width), "bias": (1000,)}
    before = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width * 2**stage
        for block in range(blocks):
            name = f"{stage}.{block}"
            found |= {
                f"{name}.1": (inner, before, 1, 1),
                f"{name}.2": (inner, inner, 3, 3),
                f"{name}.3": (4 * inner, inner, 1, 1),
            }
            if block == 0:
                found[f"{name}.down"] = (4 * inner, before, 1, 1)
            norms = [inner, inner, 4 * inner, *([4 * inner] if block == 0 else [])]
            found |= {f"{name}.norm{i}.{own}": (n,) for i, n in enumerate(norms) for own in ("scale", "bias")}
            before = 4 * inner
    return found


def list_equations(jaxpr: Any, known: set[int]) -> Iterator[Any]:
    """Those of inner programs too, once for each of these."""
    if id(jaxpr) not in known:
        known.add(id(jaxpr))
        for equation in jaxpr.eqns:
            yield equation
            for inner in jaxprs_in_params(equation.params):
                yield from list_equations(inner, known)


def measure(name: str, shapes: Shapes, steps: int, repeats: int, profile: int) -> str:
    solver = SOLVERS[name]()
    if "muon" in name:
        shapes = {key: shape for key, shape in shapes.items() if len(shape) > 1 and "embed" not in key}
    numbers = np.random.default_rng(0)

    def draw(scale: float) -> Any:
        return {key: jnp.asarray(numbers.normal(0, scale, shape).astype(np.float32)) for key, shape in shapes.items()}

    params, grads = draw(0.02), draw(0.01)

    def program(params: Any, state: Any, grads: Any) -> Any:
        def step(i: Any, kept: Any) -> Any:
            # gradients of each step are others, so that nothing made of them can leave the loop
            own = jax.tree.map(lambda g: g * (1 + 2.0**-20 * i), grads)
            updates, state = solver.update(own, kept[1], kept[0])
            return optax.apply_updates(kept[0], updates), state

        return jax.lax.fori_loop(0, steps, step, (params, state))

    state = jax.jit(solver.init)(params)
    begin = time.perf_counter()
    traced = jax.jit(program, donate_argnums=(0, 1)).trace(params, state, grads)
    lowered = traced.lower()
    between = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    equations = Counter(equation.primitive.name for equation in list_equations(traced.jaxpr.jaxpr, set()))
    lines = lowered.as_text().count("\n")
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        params, state = jax.block_until_ready(compiled(params, state, grads))
        times.append((time.perf_counter() - start) / steps)
    cells = [
        name,
        equations.total(),
        lines,
        f"{between - begin:.1f}",
        f"{end - between:.1f}",
        f"{1e3 * min(times):.2f}",
    ]
    memory = compiled.memory_analysis()
    cells.append("" if memory is None else f"{memory.temp_size_in_bytes / 1e6:.0f}")
    most = "".join(f"\n    {count:6d} {own}" for own, count in equations.most_common(profile))
    return f"| {' | '.join(map(str, cells))} |{most}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=["gpt2", "resnet50"], default="gpt2")
    parser.add_argument("--layers", default="2,12", help="how many (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of a layer (default: %(default)s)")
    parser.add_argument("--solvers", default=",".join(SOLVERS), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="of one program (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of it (default: %(default)s)")
    parser.add_argument("--precision", help="what jax.default_matmul_precision is told")
    parser.add_argument("--profile", type=int, default=0, help="how many primitives to list")
    given = parser.parse_args(arguments)
    list_shapes = {"gpt2": list_gpt2, "resnet50": list_resnet50}[given.model]
    sys.stdout.write("| solver | equations | HLO lines | trace, s | compile, s | step, ms | temporary, MB |\n")
    for layers in map(int, given.layers.split(",")):
        shapes = list_shapes(layers, given.width)
        sys.stdout.write(f"{given.model}, {layers} layers, width {given.width}, {jax.default_backend()}\n")
        for name in given.solvers.split(","):
            with jax.default_matmul_precision(given.precision):
                line = measure(name, shapes, given.steps, given.repeats, given.profile)
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
