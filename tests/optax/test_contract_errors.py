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

RATES = [-0.1, NAN, float("inf"), "0.1", True, np.float32(-1), jnp.array(-0.1), jnp.array(NAN), jnp.ones(3)]
RATES += [lambda count: -1.0 + count, optax.constant_schedule(jnp.array(-1.0))]
REFUSED: list[tuple[Any, dict[str, Any]]] = [
    *[(f, dict(learning_rate=lr)) for f in MADE.values() for lr in RATES],
    *[(f, dict(learning_rate=None)) for f in (lamb, lars, kron)],
    (lamb, dict(b1=1.0)),
    (lamb, dict(b1=-0.1)),
    (lamb, dict(b2=1.5)),
    (lamb, dict(b2=jnp.array(1.5))),
    (lamb, dict(b1=lambda count: 2.0)),
    (lamb, dict(eps=-1e-8)),
    (lamb, dict(eps_root=jnp.array(-1.0))),
    (lamb, dict(weight_decay=-0.1)),
    (lamb, dict(weight_decay=jnp.array(NAN))),
    (lamb, dict(weight_decay=None)),
    (lamb, dict(trust_clip=(2.0, 1.0))),
    (lamb, dict(trust_clip=(jnp.array(2.0), jnp.array(1.0)))),
    (lamb, dict(trust=1)),
    (lamb, dict(weight_decay_mode="coupled")),
    (lamb, dict(momentum_dtype="uint8")),
    (lamb, dict(momentum_dtype=jnp.int32)),
    (lars, dict(momentum=2.0)),
    (lars, dict(momentum=jnp.array(2.0))),
    (lars, dict(trust_coefficient=0.0)),
    (lars, dict(nesterov="yes")),
    (lars, dict(nesterov=jnp.array(True))),
    (lars, dict(norm_mode="both")),
    (lars, dict(trust=False, eps=0.1)),
    (adafactor, dict(decay_rate=0.0)),
    (adafactor, dict(clipping_threshold=0.0)),
    (adafactor, dict(clipping_threshold=jnp.array(-1.0))),
    (adafactor, dict(momentum=2.0)),
    (adafactor, dict(weight_decay_rate=-1.0)),
    (adafactor, dict(eps=-1.0)),
    (adafactor, dict(min_scale=-1.0)),
    (adafactor, dict(min_dim_size_to_factor=0.5)),
    (adafactor, dict(min_dim_size_to_factor=jnp.array(3))),
    (adafactor, dict(multiply_by_parameter_scale="no")),
    (adafactor, dict(momentum=0.9, dtype_momentum="float7")),
    (adafactor, dict(dtype_momentum=jnp.bfloat16)),
    (adafactor, dict(decay_offset=-1)),
    (adafactor, dict(factored=1)),
    (kron, dict(precond_lr=2.0)),
    (kron, dict(preconditioner_lr=2.0)),
    (kron, dict(b1=1.0)),
    (kron, dict(b1=0.9, momentum=0.9)),
    (kron, dict(variant="other")),
    (kron, dict(geometry="flat")),
    (kron, dict(precond_update_probability=1.5)),
    (kron, dict(precond_update_probability=lambda count: 1.5)),
    (kron, dict(max_size_dense=jnp.array(8))),
    (kron, dict(max_size_triangular=-8)),
    (kron, dict(precond_dtype="int8")),
    *[(f, dict(max_grad_norm=0.0)) for f in MADE.values()],
    *[(f, dict(max_grad_norm=jnp.array(-1.0))) for f in MADE.values()],
    *[(f, dict(on_nonfinite="raise")) for f in MADE.values()],
    *[(f, dict(on_nonfinite="stop")) for f in MADE.values()],
    *[(f, dict(rounding="up")) for f in MADE.values()],
    *[(f, dict(state_dtype="float8")) for f in MADE.values()],
    *[(f, dict(seed=0.5)) for f in MADE.values()],
    *[(f, dict(stacked_axes=-1)) for f in MADE.values()],
    *[(f, dict(overrides=[("*", dict(lr_scale=-1.0))])) for f in MADE.values()],
    *[(f, dict(overrides=[("*", dict(lr_scale=jnp.array(-1.0)))])) for f in MADE.values()],
    *[(f, dict(overrides=[("*", dict(weight_decay=jnp.array(-1.0)))])) for f in MADE.values()],
    *[(f, dict(overrides=[("*", dict(seed=3))])) for f in MADE.values()],
    *[(f, dict(overrides={"*": dict(lr_scale=1.0)})) for f in MADE.values()],
]


#: Options whose names rules do not have, each with a value out of range.
RENAMED: list[tuple[Any, str, Any]] = [
    *[(f, "learning_rate", -1.0) for f in MADE.values()],
    (lamb, "b1", 1.0),
    (lamb, "b2", 1.0),
    (adafactor, "decay_rate", 0.0),
    (adafactor, "clipping_threshold", 0.0),
    (adafactor, "multiply_by_parameter_scale", "no"),
    (adafactor, "weight_decay_rate", -1.0),
    (adafactor, "min_scale", -1.0),
    (kron, "b1", 1.0),
    (kron, "preconditioner_lr", 2.0),
    (kron, "max_size_triangular", -1),
]


@pytest.mark.parametrize(
    "index", range(len(REFUSED)), ids=lambda i: f"{REFUSED[i][0].__name__}-{next(iter(REFUSED[i][1]))}-{i}"
)
def test_an_option_that_is_out_of_range_is_refused(index: int) -> None:
    factory, options = REFUSED[index]
    with pytest.raises(OptionError):
        factory(**{"learning_rate": 0.1, **options})


@pytest.mark.parametrize(("factory", "name", "value"), RENAMED)
def test_an_option_is_refused_by_the_name_under_which_it_was_given(factory: Any, name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"\b{name}\b"):
        factory(**{"learning_rate": 0.1, name: value})


@pytest.mark.parametrize("order", [("b1", "momentum"), ("momentum", "b1")])
def test_an_option_under_two_names_is_refused(order: tuple[str, str]) -> None:
    with pytest.raises(OptionError, match="b1 is psgd-jax's name of momentum"):
        kron(0.1, **dict.fromkeys(order, 0.9))


@pytest.mark.parametrize(
    ("factory", "unknown", "meant"),
    [
        (lamb, "trus", "trust"),
        (lamb, "weight_decy", "weight_decay"),
        (lamb, "maxgradnorm", "max_grad_norm"),
        (lars, "trust_coeficient", "trust_coefficient"),
        (lars, "momentun", "momentum"),
        (adafactor, "clipping_treshold", "clipping_threshold"),
        (adafactor, "min_dim_size_factor", "min_dim_size_to_factor"),
        (kron, "precond_probability", "precond_update_probability"),
        (kron, "weight_decay_maks", "weight_decay_mask"),
    ],
)
def test_an_unknown_option_is_refused_with_the_one_that_was_meant(factory: Any, unknown: str, meant: str) -> None:
    with pytest.raises(OptionError, match=rf"{factory.__name__} has no option '{unknown}': did you mean '{meant}'\?"):
        factory(0.1, **{unknown: 0.5})


@each
def test_an_unknown_option_like_no_other_is_refused_with_a_list(name: str) -> None:
    with pytest.raises(OptionError, match=r"has no option 'zzz': it has .*on_nonfinite"):
        MADE[name](0.1, zzz=1)


@each
def test_traced_options_pass(name: str) -> None:
    def step(x: Any) -> Tree:
        tx = MADE[name](x, max_grad_norm=x, **{"weight_decay_rate" if name == "adafactor" else "weight_decay": x})
        return tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0]

    assert jax.tree.structure(jax.eval_shape(step, jnp.float32(-0.1))) == jax.tree.structure(PARAMS)


# ---- parameters and gradients


@each
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
def test_parameters_that_are_no_floating_point_numbers_are_refused_by_name(name: str, leaf: Any) -> None:
    with pytest.raises(ParameterError, match=r"'layer\.x'"):
        MADE[name](0.1).init({"layer": {"x": leaf, "w": jnp.ones(3)}})


@each
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
def test_gradients_that_do_not_fit_are_refused_by_name(name: str, wrong: Any, said: str) -> None:
    tx = MADE[name](0.1)
    state = tx.init(PARAMS)
    with pytest.raises(ParameterError, match=said):
        tx.update({**PARAMS, "w": wrong}, state, PARAMS)
    with pytest.raises(ParameterError, match=said):
        jax.eval_shape(lambda p, s: tx.update({**p, "w": wrong}, s, p), PARAMS, state)


@each
@pytest.mark.parametrize("tree", [{"w": 1.0}, [1.0, 1.0], {"w": 1.0, "b": 1.0, "c": 1.0}, None], ids=str)
def test_trees_of_gradients_of_another_structure_are_refused(name: str, tree: Tree) -> None:
    tx = MADE[name](0.1)
    with pytest.raises(ParameterError, match="same structure"):
        tx.update(tree, tx.init(PARAMS), PARAMS)


@each
def test_updates_without_parameters_are_refused(name: str) -> None:
    tx = MADE[name](0.1)
    with pytest.raises(ParameterError, match="needs the parameters"):
        tx.update(PARAMS, tx.init(PARAMS))


# ---- states


@each
def test_states_of_other_optimizers_are_refused(name: str) -> None:
    others = [other for other in MADE if other != name]
    for state in (MADE[others[0]](0.1).init(PARAMS), optax.adam(0.1).init(PARAMS), None, ()):
        with pytest.raises(StateError, match=f"expected {name.capitalize()}State, got {type(state).__name__}"):
            MADE[name](0.1).update(PARAMS, state, PARAMS)


@each
def test_states_of_other_trees_are_refused(name: str) -> None:
    tx = MADE[name](0.1)
    for other in ({"w": PARAMS["w"]}, list(PARAMS.values())):
        with pytest.raises(StateError, match="another structure"):
            tx.update(PARAMS, tx.init(other), PARAMS)


@each
@pytest.mark.parametrize("shape", [(1, 3), (3, 4), ()])
def test_states_of_other_shapes_are_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    tx = MADE[name](0.1)
    with pytest.raises(StateError, match="'w'"):
        tx.update(PARAMS, tx.init({**PARAMS, "w": jnp.ones(shape, jnp.float32)}), PARAMS)


@pytest.mark.parametrize(
    ("made", "used"),
    [
        (adafactor(0.1), adafactor(0.1, momentum=0.9)),
        (adafactor(0.1, momentum=0.9), adafactor(0.1)),
        (lars(0.1, momentum=0.0), lars(0.1)),
        (lars(0.1), lars(0.1, momentum=0.0)),
        (kron(0.1, momentum=0.0), kron(0.1)),
        (kron(0.1), kron(0.1, momentum=0.0)),
        (adafactor(0.1), adafactor(0.1, min_dim_size_to_factor=2)),
        (kron(0.1), kron(0.1, max_size_dense=0)),
        (lamb(0.1), lamb(0.1, on_nonfinite="skip")),
    ],
    ids=range(9),
)
def test_states_of_other_options_are_refused(made: Any, used: Any) -> None:
    with pytest.raises(StateError):
        used.update(PARAMS, made.init(PARAMS), PARAMS)


def test_a_bare_array_is_named_in_words_that_can_be_read() -> None:
    with pytest.raises(ParameterError) as caught:
        lamb(0.1).init(jnp.arange(3))
    assert "parameter ''" not in str(caught.value)


def test_names_that_another_front_end_has_are_translated() -> None:
    with pytest.raises(OptionError, match="adafactor has no option 'momentum_dtype': it is 'dtype_momentum' here"):
        adafactor(0.1, momentum=0.9, momentum_dtype="bfloat16")
    for function in (adamw, lamb, lion):
        with pytest.raises(OptionError, match=r"no option 'betas': it is b1 and b2 here: write b1=0\.9, b2=0\.95"):
            function(0.1, betas=(0.9, 0.95))
    with pytest.raises(OptionError, match="eps is one number here, and the second is min_scale"):
        adafactor(0.1, eps=(1e-30, 1e-3))
    with pytest.raises(OptionError, match="entry 'w': write 'beta2_decay' for 'decay_rate'"):
        adafactor(0.1, overrides=[("w", dict(decay_rate=0.9))])
    with pytest.raises(OptionError, match="entry 'w': write 'betas' for 'b1'"):
        lamb(0.1, overrides=[("w", dict(b1=0.9))])
    with pytest.raises(OptionError, match="needs momentum_mode='ema': polyak momentum comes after"):
        kron(0.1, b1=0.9, momentum_mode="polyak")
