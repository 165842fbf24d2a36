"""What is refused, and how it is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_runs import MADE, PARAMS, Tree, every_function, same_bits

from thalweg import OptionError, ParameterError, StateError
from thalweg.optax import adafactor, adamw, export_state, import_state, kron, lamb, lars, lion

NAN = float("nan")


def for_all(**options: Any) -> list[Any]:
    return [("*", options)]


RATES = [-0.1, NAN, float("inf"), "0.1", True, None, np.float32(-1), jnp.array(-0.1), jnp.array(NAN), jnp.ones(3)]
RATES += [lambda count: -1.0 + count, optax.constant_schedule(jnp.array(-1.0))]
#: Arrays, schedules, and what optax's functions alone look at; other values are refused by tests/rules/test_options.py.
VALUES: list[tuple[Any, str, Any]] = [
    *[(lamb, "learning_rate", lr) for lr in RATES],
    *[(factory, "learning_rate", -0.1) for factory in (adafactor, lars, kron)],
    (lars, "max_grad_norm", 0.0),
    (lars, "max_grad_norm", jnp.array(-1.0)),
    (lars, "on_nonfinite", "raise"),
    (lars, "rounding", "up"),
    (lars, "state_dtype", "float8"),
    (lars, "seed", 0.5),
    (lars, "stacked_axes", -1),
    (lars, "overrides", for_all(lr_scale=-1.0)),
    (lars, "overrides", for_all(lr_scale=jnp.array(-1.0))),
    (lars, "overrides", for_all(weight_decay=jnp.array(-1.0))),
    (lars, "overrides", for_all(seed=3)),
    (lars, "overrides", {"*": dict(lr_scale=1.0)}),
    (lars, "momentum", jnp.array(2.0)),
    (lars, "nesterov", jnp.array(True)),
    (lamb, "b1", 1.0),
    (lamb, "b1", lambda count: 2.0),
    (lamb, "b2", jnp.array(1.5)),
    (lamb, "eps_root", jnp.array(-1.0)),
    (lamb, "weight_decay", jnp.array(NAN)),
    (lamb, "trust_clip", (jnp.array(2.0), jnp.array(1.0))),
    (lamb, "momentum_dtype", jnp.int32),
    (adafactor, "decay_rate", 0.0),
    (adafactor, "clipping_threshold", 0.0),
    (adafactor, "clipping_threshold", jnp.array(-1.0)),
    (adafactor, "weight_decay_rate", -1.0),
    (adafactor, "eps", -1.0),
    (adafactor, "min_scale", -1.0),
    (adafactor, "min_dim_size_to_factor", jnp.array(3)),
    (adafactor, "multiply_by_parameter_scale", "no"),
    (adafactor, "dtype_momentum", jnp.bfloat16),  # without momentum
    (kron, "b1", 1.0),
    (kron, "preconditioner_lr", 2.0),
    (kron, "precond_update_probability", lambda count: 1.5),
    (kron, "max_size_dense", jnp.array(8)),
    (kron, "max_size_triangular", -8),
    (kron, "precond_dtype", "int8"),
    (kron, "variant", "other"),
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
    (lars, dict(trust_coeficient=0.5), "lars has no option 'trust_coeficient': did you mean 'trust_coefficient'?"),
    (adafactor, dict(clipping_treshold=1), "no option 'clipping_treshold': did you mean 'clipping_threshold'?"),
    (kron, dict(precond_probability=1), "'precond_probability': did you mean 'precond_update_probability'?"),
    (kron, dict(weight_decay_maks=1), "no option 'weight_decay_maks': did you mean 'weight_decay_mask'?"),
    (lamb, dict(zzz=1), "lamb has no option 'zzz': it has "),
    (adafactor, dict(momentum=0.9, momentum_dtype="bfloat16"), "'momentum_dtype': it is 'dtype_momentum' here"),
    *((factory, dict(betas=(0.9, 0.95)), PAIR) for factory in (adamw, lamb, lion)),
    (adafactor, dict(eps=(1e-30, 1e-3)), "eps is one number here, and the second is min_scale"),
    (adafactor, dict(overrides=for_all(decay_rate=0.9)), "entry '*': write 'beta2_decay' for 'decay_rate'"),
    (lamb, dict(overrides=for_all(b1=0.9)), "entry '*': write 'betas' for 'b1'"),
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
OTHERS = [jax.random.key(0), "a word", jax.nn.relu, object(), np.array(["a"]), np.array([None])]
INPUTS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *[(begin(leaf), ParameterError, r"'layer\.x'") for leaf in (*NUMBERS, *OTHERS)],
    *[
        (update({**PARAMS, "w": wrong}), ParameterError, said)
        for wrong, said in (
            (jnp.ones((3, 4), jnp.float32), r"'w' has shape \(4, 3\), and its gradient \(3, 4\)"),
            (jnp.ones((1, 4, 3), jnp.float32), r"'w' has shape"),
            (1.0, r"'w' has shape \(4, 3\), and its gradient \(\)"),
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


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("exp_avg_scale", np.full((64, 2), np.nan, "float32"), "'exp_avg_scale' must be finite"),
        ("exp_avg_scale", np.ones((64, 4), "float32"), "'first' does not fit"),
        ("exp_avg", np.ones((64, 128), "float32"), "'exp_avg' is float32, and must be int8"),
        ("exp_avg_sq", np.ones((64, 128), "int8"), "'exp_avg_sq' is int8, and must be uint8"),
    ],
)
def test_damaged_codes_are_refused(key: str, value: Any, said: str) -> None:
    """tests/numpy/test_lean_state.py has more, told by the same code."""
    params = {"first": jnp.ones((64, 128))}
    state = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), lamb(0.01, state_dtype="int8").init(params))
    exported = export_state(state, params)
    assert same_bits(import_state(state, params, exported), state)
    exported["state"]["first"][key] = value
    with pytest.raises(StateError, match=said):
        import_state(state, params, exported)
