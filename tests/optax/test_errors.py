"""What is refused, and how it is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_runs import MADE, PARAMS, Tree, every_function

from thalweg import OptionError, ParameterError, StateError
from thalweg.optax import adafactor, adamw, kron, lamb, lars, lion

NAN, NEGATIVE = float("nan"), jnp.array(-1.0)
RATES = [-0.1, NAN, float("inf"), "0.1", True, None, np.float32(-1), NEGATIVE, jnp.array(NAN), jnp.ones(3)]
RATES += [lambda count: -1.0 + count, optax.constant_schedule(NEGATIVE)]
#: Arrays, schedules, and what optax's functions alone look at; other values are refused by tests/rules/test_options.py.
VALUES: list[tuple[Any, str, Any]] = [
    *[(lamb, "learning_rate", lr) for lr in RATES],
    *[(factory, "learning_rate", -0.1) for factory in (adafactor, lars, kron)],
    (lars, "max_grad_norm", NEGATIVE),
    (lars, "on_nonfinite", "raise"),
    (lars, "stacked_axes", -1),
    *[
        (lars, "overrides", [("*", own)])
        for own in (dict(lr_scale=NEGATIVE), dict(weight_decay=NEGATIVE), dict(seed=3))
    ],
    (lars, "overrides", {"*": dict(lr_scale=1.0)}),
    (lars, "momentum", jnp.array(2.0)),
    (lars, "nesterov", jnp.array(True)),
    *[(adafactor, option, -1.0) for option in ("weight_decay_rate", "eps", "min_scale")],
    *[(kron, option, 2.0) for option in ("b1", "preconditioner_lr", "max_size_triangular")],
    (lamb, "b1", 1.0),
    (lamb, "b1", lambda count: 2.0),
    (lamb, "b2", jnp.array(1.5)),
    (lamb, "eps_root", NEGATIVE),
    (lamb, "weight_decay", jnp.array(NAN)),
    (lamb, "trust_clip", (jnp.array(2.0), jnp.array(1.0))),
    (lamb, "momentum_dtype", jnp.int32),
    (adafactor, "clipping_threshold", NEGATIVE),
    (adafactor, "decay_rate", 0.0),
    (adafactor, "min_dim_size_to_factor", jnp.array(3)),
    (adafactor, "multiply_by_parameter_scale", "no"),
    (adafactor, "dtype_momentum", jnp.bfloat16),  # without momentum
    (kron, "precond_update_probability", lambda count: 1.5),
    (kron, "max_size_dense", jnp.array(8)),
    (kron, "precond_dtype", "int8"),
]


@pytest.mark.parametrize(
    ("factory", "option", "value"),
    VALUES,
    ids=[f"{f.__name__}-{option}-{i}" for i, (f, option, _) in enumerate(VALUES)],
)
def test_an_option_is_refused_by_the_name_under_which_it_was_given(factory: Any, option: str, value: Any) -> None:
    with pytest.raises(OptionError, match="entry|overrides" if option == "overrides" else rf"\b{option}\b"):
        factory(**{"learning_rate": 0.1, option: value})


PAIR = "no option 'betas': it is b1 and b2 here: write b1=0.9, b2=0.95"
NAMES: list[tuple[Any, dict[str, Any], str]] = [
    (lamb, dict(weight_decy=0.5), "lamb has no option 'weight_decy': did you mean 'weight_decay'?"),
    (adafactor, dict(clipping_treshold=1), "no option 'clipping_treshold': did you mean 'clipping_threshold'?"),
    (kron, dict(precond_probability=1), "'precond_probability': did you mean 'precond_update_probability'?"),
    (lamb, dict(zzz=1), "lamb has no option 'zzz': it has "),
    (adafactor, dict(momentum=0.9, momentum_dtype="bfloat16"), "'momentum_dtype': it is 'dtype_momentum' here"),
    *((factory, dict(betas=(0.9, 0.95)), PAIR) for factory in (adamw, lamb, lion)),
    (adafactor, dict(eps=(1e-30, 1e-3)), "eps is one number here, and the second is min_scale"),
    (adafactor, dict(overrides=[("*", dict(decay_rate=0.9))]), "entry '*': write 'beta2_decay' for 'decay_rate'"),
    (lamb, dict(overrides=[("*", dict(b1=0.9))]), "entry '*': write 'betas' for 'b1'"),
    (kron, dict(b1=0.9, momentum_mode="polyak"), "needs momentum_mode='ema': polyak momentum comes after"),
]


@pytest.mark.parametrize(("factory", "options", "said"), NAMES, ids=range(len(NAMES)))
def test_an_unknown_option_is_refused_with_the_one_that_was_meant(factory: Any, options: Any, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        factory(0.1, **options)
    assert said in str(caught.value)


@every_function
def test_traced_options_pass(name: str) -> None:
    def step(x: Any) -> Tree:
        tx = MADE[name](x, max_grad_norm=x, **{"weight_decay_rate" if name == "adafactor" else "weight_decay": x})
        return tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0]

    assert jax.tree.structure(jax.eval_shape(step, jnp.float32(-0.1))) == jax.tree.structure(PARAMS)


# ---- parameters, gradients and states, which every function reads in the same way


def begin(leaf: Any) -> Callable[[], Any]:
    return lambda: lars(0.1).init({"layer": {"x": leaf, "w": jnp.ones(3)}})


def update(grads: Any) -> Callable[[], Any]:
    return lambda: lars(0.1).update(grads, lars(0.1).init(PARAMS), PARAMS)


def go_on(made: Any, used: Any, params: Any = PARAMS) -> Callable[[], Any]:
    return lambda: used.update(PARAMS, made.init(params), PARAMS)


NUMBERS = [jnp.arange(3), jnp.array([True]), jnp.ones(3, jnp.complex64), jnp.ones(3, jnp.float8_e4m3fn)]
OTHERS = [jax.random.key(0), "a word", np.array(["a"]), np.array([None])]
INPUTS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *[(begin(leaf), ParameterError, r"'layer\.x'") for leaf in (*NUMBERS, *OTHERS)],
    *[
        (update({**PARAMS, "w": wrong}), ParameterError, said)
        for wrong, said in (
            (jnp.ones((3, 4), jnp.float32), r"'w' has shape \(4, 3\), and its gradient \(3, 4\)"),
            (None, r"'w' has no gradient.*optax\.masked"),
            (jnp.ones((4, 3), jnp.int32), r"gradient of parameter 'w' has dtype int32"),
            (jnp.ones((4, 3), jnp.complex64), r"gradient of parameter 'w' has dtype complex64"),
            (np.zeros((4, 3), jax.dtypes.float0), r"gradient of parameter 'w'"),
            ("words", r"gradient of parameter 'w' must be an array, got str"),
            (optax.MaskedNode(), r"'w'"),
            ([jnp.ones(3)], r"'w'"),
        )
    ],
    *[
        (update(tree), ParameterError, "same structure")
        for tree in ({"w": 1.0}, [1.0, 1.0], {"w": 1.0, "b": 1.0, "c": 1.0}, None)
    ],
    *[
        (lambda state=state: lamb(0.1).update(PARAMS, state, PARAMS), StateError, said)
        for state, said in (
            (lars(0.1).init(PARAMS), "expected LambState, got LarsState"),
            (optax.adam(0.1).init(PARAMS), "expected LambState, got tuple"),
            (None, "expected LambState, got NoneType"),
        )
    ],
    *[
        (go_on(tx, tx, tree), StateError, "another structure")
        for tx in (lamb(0.1), kron(0.1))
        for tree in ({"w": PARAMS["w"]}, list(PARAMS.values()))
    ],
    *[
        (go_on(tx, tx, {**PARAMS, "w": jnp.ones(shape, jnp.float32)}), StateError, "'w'")
        for tx in (lamb(0.1), adafactor(0.1), kron(0.1))
        for shape in ((1, 3), (3, 4), ())
    ],
    (go_on(adafactor(0.1), adafactor(0.1, momentum=0.9)), StateError, "state"),
    (go_on(adafactor(0.1, momentum=0.9), adafactor(0.1)), StateError, "state"),
    (go_on(lars(0.1, momentum=0.0), lars(0.1)), StateError, "state"),
    (go_on(lars(0.1), lars(0.1, momentum=0.0)), StateError, "state"),
    (go_on(adafactor(0.1), adafactor(0.1, min_dim_size_to_factor=2)), StateError, "state"),
    (go_on(kron(0.1), kron(0.1, max_size_dense=0)), StateError, "state"),
    (go_on(lamb(0.1), lamb(0.1, on_nonfinite="skip")), StateError, "on_nonfinite='skip' .* keep a counter"),
]


@pytest.mark.parametrize(("call", "kind", "said"), INPUTS, ids=range(len(INPUTS)))
def test_what_does_not_fit_is_refused_by_name(call: Callable[[], Any], kind: type[Exception], said: str) -> None:
    """Also under jit."""
    with pytest.raises(kind, match=said):
        call()
    with pytest.raises(kind, match=said):
        jax.eval_shape(call)
