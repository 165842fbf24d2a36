"""Networks learn with thalweg.optax: far below the first loss, and below plain SGD at equal steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

import thalweg.optax as ours  # noqa: E402

pytestmark = pytest.mark.nightly

STEPS = 300
#: How much of the first loss may be left.
LEFT = 0.1
NAMES = ["adafactor", "lamb", "lars", "kron"]
#: In the ordinary lane, one of them.
ONE_TRAINED = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "lamb" else pytest.mark.nightly) for name in NAMES]
)


def optimizer(name: str) -> Any:
    """Each with a learning rate that suits it, warmed up for a tenth of the steps and falling to zero."""
    highest = {"adafactor": 0.1, "lamb": 0.01, "lars": 5.0, "kron": 0.003}[name]
    rate = optax.warmup_cosine_decay_schedule(0.0, highest, STEPS // 10, STEPS)
    return getattr(ours, name)(rate)


def trained(transformation: Any, params: Any, loss: Callable[[Any, Any], Any], batches: Any) -> Any:
    """The loss of every batch before its step."""

    def step(carry: Any, batch: Any) -> Any:
        p, state = carry
        value, grads = jax.value_and_grad(loss)(p, batch)
        updates, state = transformation.update(grads, state, p)
        return (optax.apply_updates(p, updates), state), value

    return jax.lax.scan(step, (params, transformation.init(params)), batches)[1]


def ends(losses: Any) -> tuple[float, float]:
    """The mean of the first five and of the last twenty losses."""
    return float(np.mean(losses[:5])), float(np.mean(losses[-20:]))


def of_sgd(params: Any, loss: Callable[[Any, Any], Any], batches: Any) -> float:
    """The last loss under SGD, with the best of several learning rates."""
    rates = jnp.asarray([0.03, 0.1, 0.3, 1.0], "float32")
    every = jax.jit(jax.vmap(lambda rate: trained(optax.sgd(rate), params, loss, batches)))(rates)
    return min(last for _, last in map(ends, every) if np.isfinite(last))


def check(name: str, params: Any, loss: Callable[[Any, Any], Any], batches: Any, sgd: float) -> None:
    first, last = ends(jax.jit(lambda p, b: trained(optimizer(name), p, loss, b))(params, batches))
    assert last < LEFT * first, (first, last)
    assert last < sgd, (last, sgd)


# ---- a network that imitates another


def dense(rng: Any, rows: int, columns: int) -> dict[str, Any]:
    w = rng.standard_normal((rows, columns)) / np.sqrt(rows)
    return {"w": jnp.asarray(w, "float32"), "bias": jnp.zeros(columns, "float32")}


def mlp(layers: Any, x: Any) -> Any:
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["bias"])
    return x @ layers[-1]["w"] + layers[-1]["bias"]


def imitation() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    teacher, params = ([dense(rng, *sizes) for sizes in ((8, 32), (32, 32), (32, 4))] for _ in range(2))
    x = jnp.asarray(rng.standard_normal((STEPS, 64, 8)), "float32")

    def loss(p: Any, batch: Any) -> Any:
        return jnp.mean((mlp(p, batch) - 2 * mlp(teacher, batch)) ** 2)

    return params, loss, x


@pytest.fixture(scope="module")
def imitated_by_sgd() -> float:
    return of_sgd(*imitation())


@ONE_TRAINED
def test_a_network_learns_to_imitate_another(name: str, imitated_by_sgd: float) -> None:
    check(name, *imitation(), imitated_by_sgd)


# ---- a transformer that finds what was said three tokens before

VOCABULARY, LENGTH, WIDTH, HEADS = 12, 16, 32, 2


def transformer_params(rng: Any) -> dict[str, Any]:
    def normal(*shape: int, scale: float = WIDTH**-0.5) -> Any:
        return jnp.asarray(rng.standard_normal(shape) * scale, "float32")

    return {
        "tokens": normal(VOCABULARY, WIDTH, scale=1.0),
        "places": normal(LENGTH, WIDTH, scale=1.0),
        "attention": {"qkv": normal(3, WIDTH, WIDTH), "out": normal(WIDTH, WIDTH)},
        "mlp": [dense(rng, WIDTH, 2 * WIDTH), dense(rng, 2 * WIDTH, WIDTH)],
        "gains": [jnp.ones(WIDTH, "float32") for _ in range(3)],
        "head": normal(WIDTH, VOCABULARY),
    }


def normalised(x: Any, gain: Any) -> Any:
    return x * gain * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def transformer(p: Any, tokens: Any) -> Any:
    x = p["tokens"][tokens] + p["places"]
    q, k, v = (
        (normalised(x, p["gains"][0]) @ w).reshape(*tokens.shape, HEADS, WIDTH // HEADS) for w in p["attention"]["qkv"]
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH // HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(*tokens.shape, WIDTH)
    x = x + mixed @ p["attention"]["out"]
    x = x + mlp(p["mlp"], normalised(x, p["gains"][1]))
    return normalised(x, p["gains"][2]) @ p["head"]


def repetition() -> tuple[Any, Any, Any]:
    """Three random tokens, over and over: from the fourth on, each is what was said three before."""
    rng = np.random.default_rng(1)
    words = jnp.asarray(np.tile(rng.integers(0, VOCABULARY, (STEPS, 32, 3)), 6)[..., : LENGTH + 1], "int32")

    def loss(p: Any, batch: Any) -> Any:
        each = optax.softmax_cross_entropy_with_integer_labels(transformer(p, batch[:, :-1]), batch[:, 1:])
        return jnp.mean(each[:, 2:])

    return transformer_params(rng), loss, words


@pytest.fixture(scope="module")
def repeated_by_sgd() -> float:
    return of_sgd(*repetition())


@pytest.mark.parametrize("name", NAMES)
def test_a_causal_transformer_learns_to_repeat(name: str, repeated_by_sgd: float) -> None:
    check(name, *repetition(), repeated_by_sgd)


# ---- a model of flax


@ONE_TRAINED
def test_a_model_of_flax_learns_to_imitate_a_network(name: str, imitated_by_sgd: float) -> None:
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            for size in (32, 32):
                x = jnp.tanh(linen.Dense(size)(x))
            return linen.Dense(4)(x)

    rng = np.random.default_rng(0)
    teacher = [dense(rng, *sizes) for sizes in ((8, 32), (32, 32), (32, 4))]
    _, _, x = imitation()
    model = Model()

    def loss(p: Any, batch: Any) -> Any:
        return jnp.mean((model.apply(p, batch) - 2 * mlp(teacher, batch)) ** 2)

    check(name, model.init(jax.random.key(0), x[0]), loss, x, imitated_by_sgd)
