"""Steps in JAX by each engine: optax, ours by XLA, ours by native code.

    python benchmarks/engines_jax.py --models gpt2,resnet50 --rules adamw,lamb

All take turns. Milliseconds a step, medians of the rounds: "loop" of a program of several steps, "call" of a program of
one step whose state and parameters are donated, "kept" of one that donates nothing. "floor" is the share of the memory
bandwidth that the bytes of the rule's passes need in the loop. "compile" has tracing in it, in seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import thalweg.optax as ours
from thalweg.bench.ours import count_floor
from thalweg.optax.engines import reason_against_all
from thalweg.plan.models import builtin
from thalweg.rules import RULES


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def by_update(solver: optax.GradientTransformation) -> Callable[..., Any]:
    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = solver.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def time_once(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def bandwidth(size: int = 2**28) -> float:
    """Bytes a second of a pass that reads and writes."""
    add = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda _, x: x + 1, x), donate_argnums=0)
    x = jax.block_until_ready(add(jnp.ones(size)))
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        x = jax.block_until_ready(add(x))
        best = max(best, 2 * 4 * size * 10 / (time.perf_counter() - begin))
    return best


class Contestant:
    def __init__(self, name: str, solver: Any, step: Any, params: Any, gradients: Any, inner: int) -> None:
        self.name, self.inner = name, inner
        self.state, self.params, self.gradients = solver.init(params), jax.tree.map(jnp.copy, params), gradients
        self.times: dict[str, list[float]] = {"loop": [], "call": [], "kept": []}

        def loop(params: Any, state: Any, gradients: Any) -> Any:
            return jax.lax.fori_loop(0, inner, lambda _, own: step(*own, gradients), (params, state))

        self.loop, self.call = (jax.jit(f, donate_argnums=(0, 1)) for f in (loop, step))
        self.kept = jax.jit(step)
        self.compile_s = time_once(partial(self.take, self.call))
        self.take(self.loop)
        jax.block_until_ready(self.kept(self.params, self.state, self.gradients))

    def take(self, program: Any) -> Any:
        self.params, self.state = program(self.params, self.state, self.gradients)
        return self.params

    def measure(self) -> None:
        self.times["loop"].append(time_once(partial(self.take, self.loop)) / self.inner)
        self.times["call"].append(time_once(partial(self.take, self.call)))
        self.times["kept"].append(time_once(partial(self.kept, self.params, self.state, self.gradients)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="gpt2,resnet50")
    parser.add_argument("--rules", default="adamw,sgd,lion,lars,lamb,adafactor")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--inner", type=int, default=10, help="steps of a loop (default: %(default)s)")
    given = parser.parse_args(arguments)
    names = {rule.lower(): rule for rule in RULES}
    speed = bandwidth()
    say(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {speed / 1e9:.0f} GB/s")
    say(f"native code: {reason_against_all('native') or 'available'}\n")
    say("| model | rule | engine | loop, ms | floor | call, ms | kept, ms | compile, s |\n|---|---|---|" + "---:|" * 5)
    for model in given.models.split(","):
        key, tensors = jax.random.key(0), builtin(model).tensors
        keys = [jax.random.fold_in(key, i) for i in range(2 * len(tensors))]
        params = [0.02 * jax.random.normal(k, t.shape) for k, t in zip(keys, tensors, strict=False)]
        gradients = [1e-3 * jax.random.normal(k, t.shape) for k, t in zip(keys[len(tensors) :], tensors, strict=True)]
        for rule in given.rules.split(","):
            floor = count_floor(names[rule], {}, builtin(model))
            theirs, mine = getattr(optax, rule)(1e-3), partial(getattr(ours, rule), 1e-3)
            field = [("optax", theirs, by_update(theirs)), ("xla", mine(), by_update(mine()))]
            solver = mine(engine="native")
            if all(row.engine == "native" for row in ours.explain(solver, params).rows):
                field.append(("native", solver, ours.make_step(solver)))
            contestants = [Contestant(*each, params, gradients, given.inner) for each in field]
            for _ in range(given.rounds):
                for each in contestants:
                    each.measure()
            for each in contestants:
                loop, call, kept = (statistics.median(times) for times in each.times.values())
                share = f"{floor / speed / loop:.0%}" if floor else ""
                cells = f"{loop * 1e3:.2f} | {share} | {call * 1e3:.2f} | {kept * 1e3:.2f} | {each.compile_s:.1f}"
                say(f"| {model} | {rule} | {each.name} | {cells} |")


if __name__ == "__main__":
    main()
