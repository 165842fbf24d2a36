"""Train a small transformer on text in JAX, with weights sharded over several devices.

The text is the Python standard library's own source. Without accelerators the CPU simulates several devices.
Usage: python examples/jax_sharded.py --optimizer kron --devices 4 --steps 200
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RATES = {"lars": 5.0, "lamb": 0.02, "adafactor": 0.03, "kron": 0.01}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--optimizer", choices=RATES, default="kron")
    parser.add_argument("--lr", type=float, help="the highest learning rate (default: one that suits the optimizer)")
    parser.add_argument("--devices", type=int, default=4, help="devices that the CPU simulates (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200)
    return parser.parse_args()


given = parsed()
# set before jax is imported; XLA uses the last of two equal flags
devices = f"--xla_force_host_platform_device_count={given.devices}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import thalweg.optax  # noqa: E402

BATCH, LENGTH, WIDTH, HEADS, LAYERS = 16, 64, 64, 4, 2
#: Letters as bytes; other characters than ASCII are dropped.
LETTERS = 128


def text() -> np.ndarray:
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:40])
    letters = np.frombuffer(source, np.uint8)
    return letters[letters < LETTERS].astype(np.int32)


def model(key: jax.Array) -> Any:
    """Layers are stacked along a leading axis, for a scan."""
    keys = iter(jax.random.split(key, 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    layers = {"qkv": normal(LAYERS, WIDTH, 3 * WIDTH), "out": normal(LAYERS, WIDTH, WIDTH)}
    layers |= {"up": normal(LAYERS, WIDTH, 4 * WIDTH), "down": normal(LAYERS, 4 * WIDTH, WIDTH)}
    return {"embed": normal(LETTERS, WIDTH), "place": normal(LENGTH, WIDTH), "layers": layers}


#: Wide matrices are sharded by columns, those that follow them by rows; the rest is replicated.
SPECS = {
    "embed": P(),
    "place": P(),
    "layers": {"qkv": P(None, None, "x"), "out": P(None, "x"), "up": P(None, None, "x"), "down": P(None, "x")},
}


def normed(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def loss_of(params: Any, letters: jax.Array) -> jax.Array:
    seen, next_ones = letters[:, :-1], letters[:, 1:]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

    def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        q, k, v = jnp.split((normed(x) @ own["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ own["out"]
        return x + jax.nn.gelu(normed(x) @ own["up"]) @ own["down"], None

    x, _ = jax.lax.scan(layer, params["embed"][seen] + params["place"], params["layers"])
    return optax.softmax_cross_entropy_with_integer_labels(normed(x) @ params["embed"].T, next_ones).mean()


def batches(letters: np.ndarray) -> Iterator[np.ndarray]:
    random = np.random.default_rng(1)
    while True:
        starts = random.integers(0, len(letters) - LENGTH - 1, (BATCH, 1))
        yield letters[starts + np.arange(LENGTH + 1)]


def main() -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS, is_leaf=lambda x: isinstance(x, P))
    params = jax.jit(model, out_shardings=placed)(jax.random.key(0))
    schedule = optax.linear_schedule(given.lr or RATES[given.optimizer], 0.0, given.steps)
    make = getattr(thalweg.optax, given.optimizer)
    solver = make(schedule, overrides=[("layers.*", dict(stacked_axes=1))])
    state = solver.init(params)  # sharded like the parameters

    @jax.jit
    def step(params: Any, state: Any, letters: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, letters)
        updates, state = solver.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    for count, letters in zip(range(1, given.steps + 1), batches(text()), strict=False):
        params, state, loss = step(params, state, letters)
        if count in (1, given.steps) or count % 50 == 0:
            sys.stdout.write(f"step {count}: loss {loss:.3f}\n")


if __name__ == "__main__":
    main()
