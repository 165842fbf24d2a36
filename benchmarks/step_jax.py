"""The time of one optimizer step in JAX, on the parameter shapes of real models: ours and optax's.

    python benchmarks/step_jax.py --models gpt2,resnet50 --json report/step_jax.json

A step is ``update`` and ``optax.apply_updates`` in one compiled program, float32, parameters and state donated. The two
take turns in one process, on whatever device JAX finds. Two times are taken, since a model of hundreds of tensors can
cost more to hand over than to compute:

call   a program of one step, called again and again, as a training loop would call an optimizer of its own
loop   a program of twenty steps, so that the device alone counts, as in a training step compiled as a whole

ratio              median over the rounds of optax's time divided by ours: above 1 we are faster
share of the floor time of moving the bytes that the rule must move at least, at the bandwidth measured, by "loop"
temporary          memory that the program of one step needs beside its arguments and results
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import thalweg.optax

SHAPES = json.loads((Path(__file__).parent / "shapes.json").read_text())
#: Bytes a parameter that the rule must move at least, ours, and optax's.
RULES: dict[str, tuple[int, Any, Any]] = {
    "lamb": (40, partial(thalweg.optax.lamb, 1e-3, weight_decay=0.01), partial(optax.lamb, 1e-3, weight_decay=0.01)),
    "lars": (28, partial(thalweg.optax.lars, 0.1, weight_decay=1e-4), partial(optax.lars, 0.1, weight_decay=1e-4)),
    "adafactor": (24, partial(thalweg.optax.adafactor, 1e-3), partial(optax.adafactor, 1e-3)),
    "kron": (24, partial(thalweg.optax.kron, 1e-3, max_size_dense=2048), None),
}
STEPS = 20
CALLS = 10


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def arrays(model: str, seed: int) -> list[jax.Array]:
    """Normal numbers in the shapes of a model."""
    key = jax.random.key(seed)
    return [
        0.02 * jax.random.normal(jax.random.fold_in(key, i), tuple(shape))
        for i, shape in enumerate(SHAPES[model]["shapes"])
    ]


class Runner:
    """One optimizer on one model, compiled as a step and as a loop of steps."""

    def __init__(self, solver: optax.GradientTransformation, model: str) -> None:
        self.params, self.grads = arrays(model, 0), arrays(model, 1)
        self.state = jax.jit(solver.init)(self.params)

        def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
            updates, state = solver.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def loop(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
            return jax.lax.fori_loop(0, STEPS, lambda _, carry: step(*carry, grads), (params, state))

        self.step, self.loop = jax.jit(step, donate_argnums=(0, 1)), jax.jit(loop, donate_argnums=(0, 1))
        start = time.perf_counter()
        lowered = self.step.lower(self.params, self.state, self.grads)
        traced = time.perf_counter()
        compiled = lowered.compile()
        self.trace_s, self.compile_s = traced - start, time.perf_counter() - traced
        self.temporary = compiled.memory_analysis().temp_size_in_bytes
        for program in (self.step, self.step, self.loop):
            self.run(program, 1)

    def run(self, program: Callable[..., Any], times: int) -> float:
        """Seconds for so many calls of a program."""
        start = time.perf_counter()
        for _ in range(times):
            self.params, self.state = program(self.params, self.state, self.grads)
        jax.block_until_ready((self.params, self.state))
        return time.perf_counter() - start


def bandwidth() -> float:
    """Bytes a second, read and written, when a large array is scaled in place."""
    x = jnp.ones(2**27)
    scale = jax.jit(lambda x: x * 0.999, donate_argnums=0)
    x, seconds = scale(x), []
    for _ in range(10):
        x.block_until_ready()
        start = time.perf_counter()
        for _ in range(5):
            x = scale(x)
        x.block_until_ready()
        seconds.append((time.perf_counter() - start) / 5)
    return 2 * x.nbytes / statistics.median(seconds)


def compared(model: str, rule: str, repeats: int, calls: int) -> dict[str, Any]:
    """Everyone's times on one model, in turns."""
    floor, *makers = RULES[rule]
    runners = {
        name: Runner(make(), model) for name, make in zip(("thalweg", "optax"), makers, strict=True) if make is not None
    }
    times: dict[str, dict[str, list[float]]] = {name: {"call": [], "loop": []} for name in runners}
    for _ in range(repeats):
        for name, runner in runners.items():
            times[name]["call"].append(runner.run(runner.step, calls) / calls)
        for name, runner in runners.items():
            times[name]["loop"].append(runner.run(runner.loop, 1) / STEPS)
    elements = sum(p.size for p in runners["thalweg"].params)
    return {
        "model": model,
        "rule": rule,
        "parameters": elements,
        "tensors": len(SHAPES[model]["shapes"]),
        "floor_bytes": floor * elements,
        "times": times,
        "trace_s": {name: runner.trace_s for name, runner in runners.items()},
        "compile_s": {name: runner.compile_s for name, runner in runners.items()},
        "temporary": {name: runner.temporary for name, runner in runners.items()},
    }


def line(result: dict[str, Any], bytes_a_second: float) -> str:
    """A row of the table."""
    times, cells = result["times"], []
    for kind in ("call", "loop"):
        medians = {name: 1e3 * statistics.median(own[kind]) for name, own in times.items()}
        cells += [f"{medians['thalweg']:.2f}", f"{medians['optax']:.2f}" if "optax" in medians else ""]
        pairs = zip(times["optax"][kind], times["thalweg"][kind], strict=True) if "optax" in times else []
        ratios = [theirs / ours for theirs, ours in pairs]
        cells.append(f"{statistics.median(ratios):.2f}" if ratios else "")
    share = result["floor_bytes"] / bytes_a_second / statistics.median(times["thalweg"]["loop"])
    cells.append(f"{share:.0%}" if result["rule"] != "kron" else "")
    for field, unit in (("trace_s", 1.0), ("compile_s", 1.0), ("temporary", 1e6)):
        own = result[field]
        cells.append(" / ".join(f"{own[name] / unit:.1f}" for name in ("thalweg", "optax") if name in own))
    return f"| {result['rule']} | {result['model']} | " + " | ".join(cells) + " |"


def heading(bytes_a_second: float) -> str:
    device = jax.devices()[0]
    return (
        f"# One optimizer step in JAX\n\n{datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds')}. "
        f"{device.device_kind} ({device.platform}), {os.cpu_count()} cores; python {platform.python_version()}, "
        f"jax {jax.__version__}, optax {optax.__version__}. Bandwidth: {bytes_a_second / 1e9:.0f} GB/s.\n\n"
        f"    {shlex.join(['python', 'benchmarks/step_jax.py', *sys.argv[1:]])}\n\n"
        "| rule | model | call: ours, ms | optax, ms | ratio | loop: ours, ms | optax, ms | ratio | share of the floor "
        "| trace, s | compile, s | temporary, MB |\n" + "|---|---|" + "---:|" * 10
    )


def main(arguments: Sequence[str] | None = None) -> None:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=names, default=["gpt2", "resnet50"], help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--rules", type=names, default=["lamb", "lars", "adafactor"], help=f"some of {','.join(RULES)}")
    parser.add_argument("--repeats", type=int, default=9, help="rounds (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=CALLS, help="calls in a row (default: %(default)s)")
    parser.add_argument("--small", type=int, help="largest parameters that are stacked with others of their shape")
    parser.add_argument("--json", type=Path, help="write everything, all samples included, to this file")
    given = parser.parse_args(arguments)
    if given.small is not None:
        from thalweg.optax import batches

        batches.SMALL = given.small
    speed = bandwidth()
    say(heading(speed))
    results = []
    for model in given.models:
        for rule in given.rules:
            results.append(compared(model, rule, given.repeats, given.calls))
            say(line(results[-1], speed))
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"heading": heading(speed), "bandwidth": speed, "results": results}) + "\n")


if __name__ == "__main__":
    main()
