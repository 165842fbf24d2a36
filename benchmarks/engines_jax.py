"""Steps in JAX by each engine: optax, ours by XLA, ours by native code.

    python benchmarks/engines_jax.py --models gpt2,resnet50 --rules adamw,lamb

All take turns. Milliseconds a step, medians of the rounds: "loop" of a program of several steps, "call" of a program of
one step whose state and parameters are donated, "kept" of one that donates nothing; ``--programs`` chooses among them.
A call of a program with hundreds of arrays costs milliseconds, of which few steps of a loop would each show a share.
"floor" is the share of the memory bandwidth that the bytes of the rule's passes need in the first. "compile" is the
first one's, in seconds, and has tracing in it.
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

OPTIONS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}}


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
    for _ in range(20):
        begin = time.perf_counter()
        x = jax.block_until_ready(add(x))
        best = max(best, 2 * 4 * size * 10 / (time.perf_counter() - begin))
    return best


class Contestant:
    def __init__(
        self, name: str, solver: Any, step: Any, params: Any, gradients: Any, inner: int, programs: Sequence[str]
    ) -> None:
        self.name, self.inner = name, inner
        self.state, self.params, self.gradients = solver.init(params), jax.tree.map(jnp.copy, params), gradients
        self.times: dict[str, list[float]] = {program: [] for program in programs}

        def loop(params: Any, state: Any, gradients: Any) -> Any:
            return jax.lax.fori_loop(0, inner, lambda _, own: step(*own, gradients), (params, state))

        made = {"loop": (loop, (0, 1)), "call": (step, (0, 1)), "kept": (step, ())}
        self.programs = {own: jax.jit(made[own][0], donate_argnums=made[own][1]) for own in programs}
        self.compile_s, *_ = [time_once(partial(self.take, own)) for own in programs]

    def take(self, name: str) -> Any:
        found = self.programs[name](self.params, self.state, self.gradients)
        if name != "kept":
            self.params, self.state = found
        return found

    def measure(self) -> None:
        for name, times in self.times.items():
            times.append(time_once(partial(self.take, name)) / (self.inner if name == "loop" else 1))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="gpt2,resnet50")
    parser.add_argument("--rules", default="adamw,sgd,lion,lars,lamb,adafactor")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--programs", default="loop,call,kept")
    parser.add_argument("--engines", default="optax,xla,native")
    parser.add_argument("--inner", type=int, default=100, help="steps of a loop (default: %(default)s)")
    given = parser.parse_args(arguments)
    programs = given.programs.split(",")
    names = {rule.lower(): rule for rule in RULES}
    speed = bandwidth()
    say(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {speed / 1e9:.0f} GB/s")
    say(f"native code: {reason_against_all('native') or 'available'}\n")
    columns = [f"{programs[0]}, ms", "floor", *(f"{own}, ms" for own in programs[1:]), "compile, s"]
    say(f"| model | rule | engine | {' | '.join(columns)} |\n|---|---|---|" + "---:|" * len(columns))
    for model in given.models.split(","):
        key, tensors = jax.random.key(0), builtin(model).tensors
        keys = [jax.random.fold_in(key, i) for i in range(2 * len(tensors))]
        params = [0.02 * jax.random.normal(k, t.shape) for k, t in zip(keys, tensors, strict=False)]
        gradients = [1e-3 * jax.random.normal(k, t.shape) for k, t in zip(keys[len(tensors) :], tensors, strict=True)]
        for rule in given.rules.split(","):
            options = OPTIONS.get(rule, {})
            floor = count_floor(names[rule], options, builtin(model))
            theirs, mine = getattr(optax, rule)(1e-3, **options), partial(getattr(ours, rule), 1e-3, **options)
            field = [("optax", theirs, by_update(theirs)), ("xla", mine(), by_update(mine()))]
            solver = mine(engine="native")
            if all(row.engine == "native" for row in ours.explain(solver, params).rows):
                field.append(("native", solver, ours.make_step(solver)))
            field = [each for each in field if each[0] in given.engines.split(",")]
            contestants = [Contestant(*each, params, gradients, given.inner, programs) for each in field]
            for _ in range(given.rounds):
                for each in contestants:
                    each.measure()
            for each in contestants:
                first, *others = (statistics.median(times) for times in each.times.values())
                share = f"{floor / speed / first:.0%}" if floor else ""
                cells = [f"{first * 1e3:.2f}", share, *(f"{own * 1e3:.2f}" for own in others), f"{each.compile_s:.1f}"]
                say(f"| {model} | {rule} | {each.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
