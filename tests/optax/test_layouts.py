"""Which matrices Muon makes of the weights of flax and equinox, and which parameters muon_adamw gives to AdamW."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from optax_runs import error, run, take_step
from tolerances import FLOAT32, FLOAT64

from thalweg.errors import OptionError, ParameterError, UnusedOverrideWarning
from thalweg.numpy import Muon
from thalweg.optax import MatrixAxes, explain, export_state, muon, muon_adamw

pytestmark = pytest.mark.slow


class Block(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = x + linen.MultiHeadDotProductAttention(num_heads=2)(linen.LayerNorm()(x))
        return x + linen.Dense(8)(jnp.tanh(linen.Dense(12)(x)))


class Net(linen.Module):
    @linen.compact
    def __call__(self, tokens: Any, image: Any) -> Any:
        x = Block()(linen.Embed(10, 8)(tokens))
        y = linen.Conv(6, (3, 3))(image)
        y = linen.Conv(6, (3, 3), feature_group_count=6)(y)
        y = linen.Conv(4, (3,))(y.reshape(1, -1, 6))
        return linen.Dense(10)(x), y


#: The matrices of Net by hand: (inputs, outputs).
MATRICES = {
    "Block_0.Dense_0.kernel": (0, 1),
    "Block_0.Dense_1.kernel": (0, 1),
    "Block_0.MultiHeadDotProductAttention_0.query.kernel": (0, (1, 2)),
    "Block_0.MultiHeadDotProductAttention_0.key.kernel": (0, (1, 2)),
    "Block_0.MultiHeadDotProductAttention_0.value.kernel": (0, (1, 2)),
    "Block_0.MultiHeadDotProductAttention_0.out.kernel": ((0, 1), 2),
    "Conv_0.kernel": ((0, 1, 2), 3),
    "Conv_2.kernel": ((0, 1), 2),
}


def shapes_of_net() -> Any:
    shapes = jax.eval_shape(Net().init, jax.random.key(0), jnp.zeros((1, 4), int), jnp.zeros((1, 4, 4, 3)))
    return shapes["params"]


def draw(shapes: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape)), shapes)


def draw_one(*shape: int, seed: int = 0) -> Any:
    return {"w": draw(jax.ShapeDtypeStruct(shape, jnp.float32), seed)}


def named(tree: Any) -> dict[str, Any]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}


def train(solver: Any, params: Any, steps: int = 2) -> Any:
    return run(solver, params, lambda step: draw(params, step), steps)


def step(solver: Any, g: Any) -> Any:
    """The updates of a first step, of parameters that are their gradients."""
    return take_step(solver, g, g)[0]


def rows_of(solver: Any, params: Any, rule: str = "Muon") -> dict[str, str]:
    """What is told of the parameters that a rule steps."""
    return {row.name: row.treatment for row in explain(solver, params).rows if row.rule == rule}


# ---- numbers


def test_steps_equal_those_of_optax_with_dimension_numbers() -> None:
    def numbers(params: Any) -> Any:
        names = iter(named(params))
        axes = jax.tree.map(lambda _: MATRICES.get(next(names)), params)
        is_axes = lambda x: x is None or isinstance(x, tuple)  # noqa: E731
        return jax.tree.map(lambda a: a and optax.contrib.MuonDimensionNumbers(*a), axes, is_leaf=is_axes)

    options: Any = dict(consistent_rms=0.2, weight_decay=0.1)
    theirs = optax.contrib.muon(0.02, adam_learning_rate=1e-3, muon_weight_dimension_numbers=numbers, **options)
    params = draw(shapes_of_net(), 0)
    ours = muon_adamw(0.02, 1e-3, layout="flax", muon=options, adamw=dict(weight_decay=0.0, nesterov=True))
    found, state = train(ours, params)
    assert error(found, train(theirs, params)[0], params) < FLOAT64
    # state is shaped like the parameters, so that it shards and is saved as they are
    kept = export_state(state, params)["state"]
    assert all(kept[name]["momentum_buffer"].shape == named(params)[name].shape for name in MATRICES)


def test_rows_of_declared_matrices_are_their_outputs() -> None:
    """Also where a leaf has matrices along further axes, each with means of its own."""

    def as_matrices(x: Any) -> dict[str, Any]:
        """(matrices, outputs, inputs)."""
        return {"w": np.array(x["w"]).transpose(2, 0, 1).copy()}

    params = draw_one(4, 5, 3)
    found, _ = train(muon(0.02, normalize="rows", layout=MatrixAxes(inputs=1, outputs=0)), params)
    optimizer = Muon(lr=0.02, variant="optax", scaling="original", normalize="rows", stacked_axes=1)
    arrays = as_matrices(params)
    for seed in (1, 2):
        optimizer.step(arrays, as_matrices(draw(params, seed)))
    assert error(as_matrices(found), arrays, as_matrices(params)) < FLOAT64


def test_dimension_numbers_of_optax_and_axes_of_ours_say_the_same() -> None:
    params = draw_one(3, 4, 5)
    theirs = step(muon(0.1, layout=lambda name, p: optax.contrib.MuonDimensionNumbers(2, 0)), params)
    assert np.array_equal(step(muon(0.1, layout=MatrixAxes(inputs=-1, outputs=0)), params)["w"], theirs["w"])
    assert rows_of(muon(0.1, layout=MatrixAxes(2, 0)), params) == {"w": "4 matrices 3 x 5"}  # the other axis is stacked
    stacked = {"w": jnp.stack([params["w"]] * 2)}
    assert rows_of(muon(0.1, layout=MatrixAxes(2, 0), stacked_axes=1), stacked) == {"w": "8 matrices 3 x 5"}


@pytest.mark.parametrize("scaling", ["original", "optax"])
def test_widths_are_those_of_outputs_over_inputs_in_every_layout(scaling: str) -> None:
    g = draw_one(8, 2)
    by_torch, by_flax = (step(muon(0.1, layout=own, scaling=scaling), g)["w"] for own in ("torch", MatrixAxes(0, 1)))
    assert np.allclose(np.linalg.norm(by_torch), 2 * np.linalg.norm(by_flax), rtol=FLOAT32)
    turned = step(muon(0.1, layout=MatrixAxes(0, 1), scaling=scaling), {"w": g["w"].T})["w"]
    assert np.allclose(turned.T, by_torch, rtol=FLOAT32, atol=FLOAT32)


def test_a_fused_kernel_steps_as_its_three_matrices() -> None:
    drawing, solver = draw_one(4, 12)["w"], muon(0.1, layout="flax", ns_dtype="float32")
    parts = step(solver, {name: {"kernel": part} for name, part in zip("abc", jnp.split(drawing, 3, 1), strict=True)})
    together = step(solver, {"qkv": {"kernel": drawing}})["qkv"]["kernel"]
    expected = jnp.concatenate([parts[name]["kernel"] for name in "abc"], 1)
    assert np.allclose(together, expected, rtol=FLOAT32, atol=FLOAT32)


# ---- what is told apart


def test_flax_parameters_are_told_apart_and_what_is_not_understood_is_said() -> None:
    shapes = shapes_of_net()
    told = explain(optax.chain(optax.clip(1.0), muon_adamw(0.02, layout="flax")), shapes)
    assert str(told).splitlines()[0].split()[3] == "rule"
    assert {row.name for row in told.rows if row.rule == "Muon"} == set(MATRICES)
    assert {row.name for row in told.rows if row.weight_decay != "0"} == {
        "Conv_1.kernel",
        "Dense_0.kernel",
        "Embed_0.embedding",
    }
    treatments = {row.name: row.treatment for row in told.rows}
    assert treatments["Conv_0.kernel"] == "matrix 27 x 6"
    assert treatments["Block_0.MultiHeadDotProductAttention_0.out.kernel"] == "matrix 8 x 8"
    (hint,) = told.hints
    assert hint.startswith("Conv_1.kernel: AdamW steps it: a convolution of one channel")
    assert told.warnings == []
    assert [(group.rule, float(group.lr)) for group in told.groups] == [
        ("Muon", 0.02),
        ("AdamW", pytest.approx(3e-4)),
        ("AdamW", pytest.approx(3e-4)),
    ]


#: Layers, and which of them is the output.
HEADS = {
    "Dense_2 Dense_10": "Dense_10",
    "fc1 fc2 conv3": "fc2",
    "hidden out": "out",
    "a lm_head z": "lm_head",
    "a b": "",
}


@pytest.mark.parametrize("names", HEADS)
def test_an_output_layer_of_flax_is_told_by_name_or_number(names: str) -> None:
    told = explain(muon_adamw(0.02, layout="flax"), {name: {"kernel": jnp.ones((4, 4))} for name in names.split()})
    assert [row.name for row in told.rows if row.rule == "AdamW"] == [f"{HEADS[names]}.kernel"] * bool(HEADS[names])
    assert ("no output layer was recognized" in str(told)) == (not HEADS[names])


def kernels(**shapes: Any) -> Any:
    return {"attn": {name: {"kernel": jnp.ones(shape)} for name, shape in shapes.items()}, "head": jnp.ones((4, 6))}


def test_queries_keys_and_values_in_one_kernel_are_three_matrices() -> None:
    fused = kernels(qkv=(4, 12), c_attn=(4, 12), qkv_all=(4, 3, 2, 2), to_kv=(4, 8))
    solver = muon_adamw(0.02, layout="flax", other=["head"])
    assert rows_of(solver, fused) == {
        **{f"attn.{name}.kernel": "3 matrices 4 x 4" for name in ("qkv", "c_attn", "qkv_all")},
        "attn.to_kv.kernel": "2 matrices 4 x 4",
    }
    assert explain(solver, fused).hints == []
    turned = {"attn": {"qkv": {"weight": jnp.ones((12, 4))}}}
    assert explain(muon(0.1, layout="torch"), turned).rows[0].treatment == "3 matrices 4 x 4"


def test_kernels_that_may_be_fused_are_hinted_at() -> None:
    params = kernels(proj_in=(4, 12), query_key_value=(4, 12), qkv=(4, 8))
    told = explain(muon_adamw(0.02, layout="flax", other=["head"]), params)
    one, several = sorted(told.hints, key=len)
    assert one.startswith("attn.proj_in.kernel: Muon steps it: it looks like queries, keys and values in one layer")
    assert several.startswith("attn.qkv.kernel, attn.query_key_value.kernel: AdamW steps it: it looks like several")
    split = dict(overrides=[("*.proj_in.kernel", dict(split=3, split_axis=1))])
    settled = muon_adamw(0.02, layout="flax", other=["head", "*.q*"], muon=split)
    assert explain(settled, params).hints == []
    assert set(rows_of(settled, params).values()) == {"3 matrices 4 x 4"}


def test_a_rate_that_is_meant_for_adamw_is_told() -> None:
    """tests/torch/test_torch_recipes.py has those that are not."""
    params = {"a": {"kernel": jnp.ones((4, 4))}, "out": {"kernel": jnp.ones((4, 5))}}
    (hint,) = explain(muon_adamw(3e-4, layout="flax"), params).hints
    assert hint.startswith("a.kernel: the rate 0.0003 is that of Muon, usually 0.02, and AdamW has 4.5e-06")
    assert explain(muon_adamw(lambda count: 3e-4, layout="flax"), params).hints == []


class Model(eqx.Module):
    embedding: Any
    attention: Any
    conv: Any
    depthwise: Any
    grouped: Any
    gru: Any
    norm: Any
    positions: Any
    mlp: Any
    last: Any


def shapes_in(make: Any) -> Any:
    """The shapes of a model's parameters."""
    return eqx.filter(eqx.filter_eval_shape(make), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))


def make_model() -> Model:
    nn, key = eqx.nn, jax.random.key(0)
    return Model(
        embedding=nn.Embedding(9, 4, key=key),
        attention=nn.MultiheadAttention(2, 8, key=key),
        conv=nn.Conv2d(4, 8, 3, key=key),
        depthwise=nn.Conv2d(8, 8, 3, groups=8, key=key),
        grouped=nn.Conv2d(8, 8, 3, groups=2, key=key),
        gru=nn.GRUCell(4, 8, key=key),
        norm=nn.LayerNorm((4, 8)),
        positions=jnp.ones((4, 4)),
        mlp=nn.MLP(4, 4, 8, 1, key=key),
        last=nn.Linear(8, 5, key=key),
    )


def test_equinox_parameters_are_told_apart_by_their_modules() -> None:
    params = shapes_in(make_model)
    solver = muon_adamw(1e-3, layout="equinox", muon=dict(consistent_rms=0.2))
    told = explain(solver, params)
    assert rows_of(solver, params) == {
        **{f"attention.{part}_proj.weight": "matrix 8 x 8" for part in ("query", "key", "value", "output")},
        "conv.weight": "matrix 8 x 36",
        "grouped.weight": "2 matrices 4 x 36",
        "gru.weight_ih": "3 matrices 8 x 4",
        "gru.weight_hh": "3 matrices 8 x 8",
        "mlp.layers.0.weight": "matrix 8 x 4",
        "mlp.layers.1.weight": "matrix 4 x 8",
    }
    assert {float(group.lr) for group in told.groups} == {1e-3}  # steps have one size
    assert told.hints[0].startswith("positions: AdamW steps it: no layer of equinox.nn holds it")
    updates, _ = jax.eval_shape(lambda p: solver.update(p, solver.init(p), p), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    # the last layer of an MLP is its output
    params = shapes_in(lambda: eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0)))
    assert list(rows_of(solver, params)) == ["layers.0.weight", "layers.1.weight"]


def test_rates_may_be_schedules_and_patterns_route_parameters() -> None:
    params = {"a": {"kernel": jnp.ones((4, 4))}, "out": {"kernel": jnp.ones((4, 4))}}
    solver = muon_adamw(lambda count: 0.1 / (count + 1), layout="flax", first=["out.*"], other=["a.*"])
    assert list(rows_of(solver, params)) == ["out.kernel"]
    assert [float(group.lr) for group in explain(solver, params).groups] == pytest.approx([0.1, 0.0015])
    with pytest.warns(UnusedOverrideWarning, match=r"patterns of first and other that match no parameter: 'ot.\*'"):
        muon_adamw(0.1, layout="flax", other=["ot.*"]).init(params)


def test_stacked_layers_are_declared() -> None:
    params = {"layers": {"kernel": jnp.ones((3, 4, 5))}, "head": {"kernel": jnp.ones((4, 5))}}
    assert not rows_of(muon_adamw(0.02, layout="flax"), params)
    solver = muon_adamw(0.02, layout="flax", muon=dict(stacked_axes={"layers": 1, "head": 0}))
    assert rows_of(solver, params)["layers.kernel"] == "3 matrices 4 x 5"
    other = muon_adamw(0.02, layout="flax", muon=dict(overrides=[("layers.*", dict(stacked_axes=1))]))
    assert rows_of(other, params) == rows_of(solver, params)


KERNEL = {"conv": {"kernel": jnp.ones((3, 3, 4, 4))}}
NO_LAYOUT = "layout must be one of 'flax', 'equinox', 'torch'"
#: What is made, the parameters that it begins with, and what is wrong.
REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    (lambda: muon(0.1), KERNEL, ParameterError, r"'conv.kernel' has shape \(3, 3, 4, 4\).*say layout='flax'"),
    (lambda: muon(0.1), {"b": jnp.ones(3)}, ParameterError, r"parameter 'b' has shape \(3,\): it is no matrix"),
    (lambda: muon(0.1, layout="flx"), KERNEL, OptionError, f"{NO_LAYOUT}.*'flx'"),
    (lambda: muon_adamw(0.1, layout="flx"), KERNEL, OptionError, NO_LAYOUT),
    (lambda: muon_adamw(0.1), KERNEL, OptionError, "muon_adamw needs layout: one of 'flax'"),
    (lambda: muon(0.1, layout=3), KERNEL, OptionError, "layout must be .* got 3"),
    (lambda: muon(0.1, layout=MatrixAxes(0, 4)), KERNEL, OptionError, "'conv.kernel': .* outputs=4 must be different"),
    (lambda: muon(0.1, layout=lambda name, p: "x"), KERNEL, OptionError, "'conv.kernel' must be a MatrixAxes or None"),
    (lambda: muon(0.1, layout="flax"), {"b": jnp.ones(3)}, ParameterError, "'b' .* of which layout makes no matrix"),
    (lambda: muon_adamw(0.1, layout="flax", first="*"), KERNEL, OptionError, "first must be a list of patterns"),
]


@pytest.mark.parametrize(("make", "params", "kind", "said"), REFUSED, ids=range(len(REFUSED)))
def test_mistakes_are_told(make: Any, params: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        make().init(params)
