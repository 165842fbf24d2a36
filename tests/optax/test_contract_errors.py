"""What is refused, and how it is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from thalweg import OptionError, ParameterError, StateError
from thalweg.optax import adafactor, adamw, kron, lamb, lars, lion

Tree = Any
MADE: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "adafactor": adafactor,
    "lamb": lamb,
    "lars": lars,
    "kron": kron,
}
each = pytest.mark.parametrize("name", MADE)
PARAMS = {"w": jnp.ones((4, 3), jnp.float32), "b": jnp.ones(3, jnp.float32)}
NAN = float("nan")


def by_name(own: dict[str, Any]) -> list[Any]:
    return [("*", own)]


RATES = [-0.1, NAN, float("inf"), "0.1", True, None, np.float32(-1), jnp.array(-0.1), jnp.array(NAN), jnp.ones(3)]
RATES += [lambda count: -1.0 + count, optax.constant_schedule(jnp.array(-1.0))]
#: Options of every function; those of rules are refused by tests/rules/test_options.py.
OF_ALL: list[tuple[str, Any]] = [
    ("max_grad_norm", 0.0),
    ("max_grad_norm", jnp.array(-1.0)),
    ("on_nonfinite", "raise"),
    ("rounding", "up"),
    ("state_dtype", "float8"),
    ("seed", 0.5),
    ("stacked_axes", -1),
    ("overrides", by_name(dict(lr_scale=-1.0))),
    ("overrides", by_name(dict(lr_scale=jnp.array(-1.0)))),
    ("overrides", by_name(dict(weight_decay=jnp.array(-1.0)))),
    ("overrides", by_name(dict(seed=3))),
    ("overrides", {"*": dict(lr_scale=1.0)}),
]
#: Arrays, schedules, names that rules do not have, and what optax's functions alone look at.
REFUSED: list[tuple[Any, str, Any]] = [
    *[(f, "learning_rate", -0.1) for f in MADE.values()],
    *[(lamb, "learning_rate", lr) for lr in RATES],
    *[(lars, option, value) for option, value in OF_ALL],
    (lamb, "b1", 1.0),
    (lamb, "b1", lambda count: 2.0),
    (lamb, "b2", jnp.array(1.5)),
    (lamb, "eps_root", jnp.array(-1.0)),
    (lamb, "weight_decay", jnp.array(NAN)),
    (lamb, "trust_clip", (jnp.array(2.0), jnp.array(1.0))),
    (lamb, "momentum_dtype", jnp.int32),
    (lars, "momentum", jnp.array(2.0)),
    (lars, "nesterov", jnp.array(True)),
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
    REFUSED,
    ids=[f"{f.__name__}-{option}-{i}" for i, (f, option, _) in enumerate(REFUSED)],
)
def test_an_option_is_refused_by_the_name_under_which_it_was_given(factory: Any, option: str, value: Any) -> None:
    said = "entry|overrides" if option == "overrides" else rf"\b{option}\b"
    with pytest.raises(OptionError, match=said):
        factory(**{"learning_rate": 0.1, option: value})


@pytest.mark.parametrize(
    ("factory", "options", "said"),
    [
        (lamb, dict(weight_decy=0.5), "lamb has no option 'weight_decy': did you mean 'weight_decay'?"),
        (lars, dict(trust_coeficient=0.5), "lars has no option 'trust_coeficient': did you mean 'trust_coefficient'?"),
        (adafactor, dict(clipping_treshold=1), "no option 'clipping_treshold': did you mean 'clipping_threshold'?"),
        (
            kron,
            dict(precond_probability=1),
            "no option 'precond_probability': did you mean 'precond_update_probability'?",
        ),
        (kron, dict(weight_decay_maks=1), "no option 'weight_decay_maks': did you mean 'weight_decay_mask'?"),
        (lamb, dict(zzz=1), "lamb has no option 'zzz': it has "),
        (adafactor, dict(momentum=0.9, momentum_dtype="bfloat16"), "'momentum_dtype': it is 'dtype_momentum' here"),
        *(
            (function, dict(betas=(0.9, 0.95)), "no option 'betas': it is b1 and b2 here: write b1=0.9, b2=0.95")
            for function in (adamw, lamb, lion)
        ),
        (adafactor, dict(eps=(1e-30, 1e-3)), "eps is one number here, and the second is min_scale"),
        (adafactor, dict(overrides=by_name(dict(decay_rate=0.9))), "entry '*': write 'beta2_decay' for 'decay_rate'"),
        (lamb, dict(overrides=by_name(dict(b1=0.9))), "entry '*': write 'betas' for 'b1'"),
        (kron, dict(b1=0.9, momentum_mode="polyak"), "needs momentum_mode='ema': polyak momentum comes after"),
    ],
)
def test_an_unknown_option_is_refused_with_the_one_that_was_meant(factory: Any, options: Any, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        factory(0.1, **options)
    assert said in str(caught.value)


@each
def test_traced_options_pass(name: str) -> None:
    def step(x: Any) -> Tree:
        tx = MADE[name](x, max_grad_norm=x, **{"weight_decay_rate" if name == "adafactor" else "weight_decay": x})
        return tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0]

    assert jax.tree.structure(jax.eval_shape(step, jnp.float32(-0.1))) == jax.tree.structure(PARAMS)


# ---- parameters and gradients, which every function reads in the same way


@pytest.mark.parametrize(
    "leaf",
    [
        jnp.arange(3),
        jnp.array([True]),
        jnp.ones(3, jnp.complex64),
        jnp.ones(3, jnp.float8_e4m3fn),
        jax.random.key(0),
        "a word",
        jax.nn.relu,
        object(),
        np.array(["a"]),
        np.array([None]),
    ],
    ids=range(10),
)
def test_parameters_that_are_no_floating_point_numbers_are_refused_by_name(leaf: Any) -> None:
    with pytest.raises(ParameterError, match=r"'layer\.x'"):
        lars(0.1).init({"layer": {"x": leaf, "w": jnp.ones(3)}})


def test_a_bare_array_is_named_in_words_that_can_be_read() -> None:
    with pytest.raises(ParameterError) as caught:
        lamb(0.1).init(jnp.arange(3))
    assert "parameter ''" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
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
    ],
    ids=range(10),
)
def test_gradients_that_do_not_fit_are_refused_by_name(wrong: Any, said: str) -> None:
    tx = lars(0.1)
    state = tx.init(PARAMS)
    with pytest.raises(ParameterError, match=said):
        tx.update({**PARAMS, "w": wrong}, state, PARAMS)
    with pytest.raises(ParameterError, match=said):
        jax.eval_shape(lambda p, s: tx.update({**p, "w": wrong}, s, p), PARAMS, state)


@pytest.mark.parametrize("tree", [{"w": 1.0}, [1.0, 1.0], {"w": 1.0, "b": 1.0, "c": 1.0}, None], ids=str)
def test_trees_of_gradients_of_another_structure_are_refused(tree: Tree) -> None:
    with pytest.raises(ParameterError, match="same structure"):
        lars(0.1).update(tree, lars(0.1).init(PARAMS), PARAMS)


def test_updates_without_parameters_are_refused() -> None:
    with pytest.raises(ParameterError, match="needs the parameters"):
        lars(0.1).update(PARAMS, lars(0.1).init(PARAMS))


# ---- states


@each
def test_states_of_other_optimizers_trees_and_shapes_are_refused(name: str) -> None:
    tx = MADE[name](0.1)
    other = next(own for own in MADE if own != name)
    for state in (MADE[other](0.1).init(PARAMS), optax.adam(0.1).init(PARAMS), None, ()):
        with pytest.raises(StateError, match=f"expected {name.capitalize()}State, got {type(state).__name__}"):
            tx.update(PARAMS, state, PARAMS)
    for tree in ({"w": PARAMS["w"]}, list(PARAMS.values())):
        with pytest.raises(StateError, match="another structure"):
            tx.update(PARAMS, tx.init(tree), PARAMS)
    for shape in ((1, 3), (3, 4), ()):
        with pytest.raises(StateError, match="'w'"):
            tx.update(PARAMS, tx.init({**PARAMS, "w": jnp.ones(shape, jnp.float32)}), PARAMS)


@pytest.mark.parametrize(
    ("made", "used"),
    [
        (adafactor(0.1), adafactor(0.1, momentum=0.9)),
        (adafactor(0.1, momentum=0.9), adafactor(0.1)),
        (lars(0.1, momentum=0.0), lars(0.1)),
        (lars(0.1), lars(0.1, momentum=0.0)),
        (adafactor(0.1), adafactor(0.1, min_dim_size_to_factor=2)),
        (kron(0.1), kron(0.1, max_size_dense=0)),
        (lamb(0.1), lamb(0.1, on_nonfinite="skip")),
    ],
    ids=range(7),
)
def test_states_of_other_options_are_refused(made: Any, used: Any) -> None:
    with pytest.raises(StateError):
        used.update(PARAMS, made.init(PARAMS), PARAMS)
