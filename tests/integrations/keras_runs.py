"""Checks of the optimizers for Keras, for one backend a process: ``python keras_runs.py torch``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

# before Keras is imported, which looks for tensorflow else
os.environ["KERAS_BACKEND"] = sys.argv[1] if __name__ == "__main__" else "jax"

import keras
import numpy as np

from thalweg import OptionError, ParameterError, Rule, StateError, UnusedOverrideWarning, Update
from thalweg.integrations import keras as ours
from thalweg.integrations.keras import LAMB, LARS, Adafactor, Kron, Muon, muon_adamw, optimizer
from thalweg.rules import RULES

X = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
Y = np.sin(X.sum(1, keepdims=True))
#: What a run may differ by from the reference in float64, relative to the size of parameters.
CLOSE = 1e-5


class Signs(Rule):
    """A rule of one's own: every element moves by lr."""

    def update(
        self, xp: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, lr_scale: Any = 1.0, noise: Any = None
    ) -> Update:
        return Update(xp.where(g > 0, -1.0, xp.where(g < 0, 1.0, 0.0)) * (lr * lr_scale), {}, True)


def model_of(**options: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(5, activation="tanh", name="hidden"), keras.layers.Dense(1, name="out")]
    return keras.Sequential([keras.Input((4,)), *layers], name="net", **options)


def trained(model: Any, epochs: int) -> Any:
    model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return model


def far(first: Any, second: Any) -> float:
    pairs = zip(first.get_weights(), second.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def check_every_rule_steps_as_the_reference() -> None:
    import thalweg.numpy as reference

    rng = np.random.default_rng(1)
    for name in RULES:
        shapes = {"w": (4, 3), "v": (3, 3)} if name == "Muon" else {"w": (4, 3), "b": (3,)}
        start = {key: rng.standard_normal(shape) for key, shape in shapes.items()}
        grads = [{key: rng.standard_normal(shape) for key, shape in shapes.items()} for _ in range(4)]
        exact = {"ns_dtype": None} if name == "Muon" else {}
        variables = [keras.Variable(value.astype("float32"), name=key) for key, value in start.items()]
        stepper, mine = getattr(reference, name)(lr=0.1, **exact), getattr(ours, name)(0.1, **exact)
        expected = {key: value.copy() for key, value in start.items()}
        for g in grads:
            mine.apply([keras.ops.convert_to_tensor(g[v.path].astype("float32")) for v in variables], variables)
            stepper.step(expected, g)
        for v in variables:
            apart = np.abs(keras.ops.convert_to_numpy(v.value) - expected[v.path]).max()
            assert apart <= CLOSE * np.abs(expected[v.path]).max(), (name, v.path, apart)


def check_files_have_state_options_and_schedule() -> None:
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 24)
    overrides = ["standard", ("net.out.*", {"lr_scale": 0.5})]
    mine = LAMB(schedule, weight_decay=0.1, overrides=overrides, global_clipnorm=1.0, state_dtype="bfloat16")
    model = model_of()
    mine.exclude_from_weight_decay([model.layers[1].kernel])
    model.compile(optimizer=mine, loss="mse")
    trained(model, 2)
    rows = {row.name: row for row in mine.explain().rows}
    assert rows["net.hidden.bias"].weight_decay == 0.0
    assert rows["net.hidden.bias"].treatment == "no trust ratio"
    assert (rows["net.hidden.kernel"].weight_decay, rows["net.hidden.kernel"].lr_scale) == (0.1, 1.0)
    assert (rows["net.out.kernel"].weight_decay, rows["net.out.kernel"].lr_scale) == (0.0, 0.5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        again = keras.models.load_model(path)
    assert type(again.optimizer) is LAMB
    assert again.optimizer.iterations == 8
    assert far(trained(model, 1), trained(again, 1)) == 0.0


def check_a_rule_of_ones_own_is_saved_too() -> None:
    made, model = optimizer(Signs), model_of()
    assert optimizer(Signs) is made
    model.compile(optimizer=made(learning_rate=0.01), loss="mse")
    before = model_of().get_weights()
    for a, b in zip(trained(model, 1).get_weights(), before, strict=True):
        moved = np.abs(a - b) / 0.01
        assert np.abs(moved - moved.round()).max() < 1e-3
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.keras")
        assert type(keras.models.load_model(Path(folder) / "model.keras").optimizer) is made


def check_accumulation_and_mixed_precision() -> None:
    whole, parts = model_of(), model_of()
    whole.compile(optimizer=LAMB(0.1), loss="mse")
    parts.compile(optimizer=LAMB(0.1, gradient_accumulation_steps=2), loss="mse")
    whole.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert far(whole, trained(parts, 2)) < CLOSE
    keras.config.set_dtype_policy("mixed_float16")
    try:
        scaled = model_of()
        scaled.compile(optimizer=Kron(0.01), loss="mse", auto_scale_loss=True)
        assert isinstance(scaled.optimizer, keras.optimizers.LossScaleOptimizer)
        losses = scaled.fit(X, Y, epochs=12, verbose=0).history["loss"]
        assert losses[-1] < losses[0]
    finally:
        keras.config.set_dtype_policy("float32")


def check_adafactor_has_its_own_rate() -> None:
    model = model_of()
    model.compile(optimizer=Adafactor(), loss="mse")
    losses = model.fit(X, Y, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert model.optimizer.get_config()["learning_rate"] is None
    assert Adafactor.from_config(model.optimizer.get_config()).get_config() == model.optimizer.get_config()


def check_the_limit_of_a_variant_is_that_of_keras() -> None:
    assert LAMB(0.1, variant="apex").global_clipnorm == 1.0
    assert LAMB(0.1, variant="apex", clipvalue=0.5).global_clipnorm is None


def rows_of(mine: Any, model: Any) -> dict[str, Any]:
    mine.build(model.trainable_variables)
    return {row.name: row for row in mine.explain().rows}


def speech() -> Any:
    """A model with layers of many kinds."""
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(50, 8, name="words")(inputs)
    x = keras.layers.LSTM(12, return_sequences=True, name="lstm")(x)
    x = keras.layers.GRU(12, return_sequences=True, name="gru")(x)
    x = keras.layers.SimpleRNN(12, return_sequences=True, name="rnn")(x)
    x = keras.layers.Conv1D(12, 3, padding="same", name="conv")(x)
    x = keras.layers.MultiHeadAttention(2, 6, name="attention")(x, x)
    x = keras.layers.LayerNormalization(name="norm")(x)
    x = keras.layers.Dense(24, activation="relu", name="up")(x)
    x = keras.layers.Dense(12, name="down")(x)
    x = keras.layers.PReLU(name="slopes")(x)
    return keras.Model(inputs, keras.layers.Dense(50, name="words_again")(x))


def check_a_mixture_routes_as_keras_does_and_knows_heads_and_gates() -> None:
    rows = rows_of(muon_adamw(weight_decay=0.1), speech())
    cells = {
        "lstm.lstm_cell.kernel": "4 matrices 8 x 12",
        "lstm.lstm_cell.recurrent_kernel": "4 matrices 12 x 12",
        "gru.gru_cell.kernel": "3 matrices 12 x 12",
        "gru.gru_cell.recurrent_kernel": "3 matrices 12 x 12",
        "rnn.simple_rnn_cell.kernel": "matrix 12 x 12",
        "rnn.simple_rnn_cell.recurrent_kernel": "matrix 12 x 12",
    }
    hidden = {**cells, "up.kernel": "matrix 12 x 24", "down.kernel": "matrix 24 x 12"}
    assert {name: row.treatment for name, row in rows.items() if row.rule == "Muon"} == hidden
    decayed = {name for name, row in rows.items() if row.weight_decay}
    kernels = {name for name in rows if name.endswith("kernel")}
    assert decayed == {*kernels, "words.embeddings"}, decayed  # two-dimensional biases and slopes are not
    theirs = keras.optimizers.Muon(exclude_layers=["words_again"])
    for variable in speech().trainable_variables:
        name = variable.path.replace("/", ".")
        is_matrix = "bias" not in name and "slopes" not in name
        assert not is_matrix or theirs._should_use_adamw(variable) == (rows[name].rule == "AdamW"), name


def check_output_layers_are_found_by_name_or_size_and_told() -> None:
    dense = keras.layers.Dense
    early = keras.Sequential([keras.Input((8,)), dense(8, name="classifier"), dense(8, name="body")], name="net")
    rows = rows_of(muon_adamw(), early)
    assert [rows[f"net.{name}.kernel"].rule for name in ("classifier", "body")] == ["AdamW", "Muon"]
    assert not rows["net.classifier.kernel"].hints
    sized = keras.Sequential([keras.Input((8,)), dense(16, name="a"), dense(4, name="b")], name="net")
    rows = rows_of(muon_adamw(), sized)
    assert [rows[f"net.{name}.kernel"].rule for name in "ab"] == ["Muon", "AdamW"]
    assert "no other kernel can take its outputs" in rows["net.b.kernel"].hints[0]
    again = keras.Sequential([keras.Input((8,)), dense(16, name="a"), dense(8, name="b")], name="net")
    rows = rows_of(muon_adamw(), again)
    assert [rows[f"net.{name}.kernel"].rule for name in "ab"] == ["Muon", "AdamW"]
    assert "it is the last kernel of all" in rows["net.b.kernel"].hints[0]
    inner = [keras.Sequential([keras.Input((8,)), dense(8, name="out")], name=f"block_{i}") for i in range(2)]
    blocks = keras.Sequential([keras.Input((8,)), *inner, dense(4, name="out")], name="net")
    rows = rows_of(muon_adamw(), blocks)
    assert [row.rule for name, row in rows.items() if name.endswith("kernel")] == ["Muon", "Muon", "AdamW"], rows
    single = keras.Sequential([keras.Input((8,)), dense(16, name="a"), dense(1, name="b")], name="net")
    rows = rows_of(muon_adamw(), single)
    assert [rows[f"net.{name}.kernel"].rule for name in "ab"] == ["Muon", "AdamW"]
    rows = rows_of(muon_adamw(include_layers=["net/b"], exclude_layers=["/a/"]), again)
    assert [rows[f"net.{name}.kernel"].rule for name in "ab"] == ["AdamW", "Muon"]


def check_rates_follow_one_rule() -> None:
    matched = dict(scaling="match_rms_adamw")
    for given, expected in (
        (dict(), (0.02, 3e-4)),
        (dict(learning_rate=0.04), (0.04, 6e-4)),
        (dict(muon=matched), (3e-4, 3e-4)),
        (dict(learning_rate=1e-3, muon=matched), (1e-3, 1e-3)),
        (dict(learning_rate=1e-3, muon=dict(variant="moonlight")), (1e-3, 1e-3)),
        (dict(learning_rate=0.04, adam_lr_ratio=0.5), (0.04, 0.02)),
        (dict(learning_rate=keras.optimizers.schedules.CosineDecay(0.04, 10)), (0.04, 6e-4)),
    ):
        mine = muon_adamw(**given)
        mine.build(model_of().trainable_variables)
        told = mine.explain()
        assert [(group.rule, group.lr) for group in told.groups] == list(zip(("Muon", "AdamW"), expected, strict=True))
        assert f"lr {expected[0]}" in str(told)
        assert f"lr {expected[1]}" in str(told)


def check_a_mixture_steps_as_its_rules_do() -> None:
    import thalweg.numpy as reference

    rng, model = np.random.default_rng(2), speech()
    model_weights = model.trainable_variables
    mine = muon_adamw(0.05, weight_decay=0.1, muon=dict(ns_dtype=None), adamw=dict(betas=(0.8, 0.9)))
    rows = rows_of(mine, model)
    expected = {v.path.replace("/", "."): keras.ops.convert_to_numpy(v.value).astype(float) for v in model_weights}
    gates = [("*lstm_cell*", dict(split=4, split_axis=1)), ("*gru_cell*", dict(split=3, split_axis=1))]
    muon = reference.Muon(lr=0.05, weight_decay=0.1, ns_dtype=None, transposed=True, overrides=gates)
    plain = [(name, dict(weight_decay=0.0)) for name, row in rows.items() if not row.weight_decay]
    adamw = reference.AdamW(lr=0.05 * 0.015, weight_decay=0.1, betas=(0.8, 0.9), overrides=plain)
    steppers = {"Muon": muon, "AdamW": adamw}
    for _ in range(3):
        grads = {name: rng.standard_normal(value.shape) for name, value in expected.items()}
        mine.apply([keras.ops.convert_to_tensor(grads[name].astype("float32")) for name in expected], model_weights)
        for rule, stepper in steppers.items():
            own = {name: value for name, value in expected.items() if rows[name].rule == rule}
            stepper.step(own, {name: grads[name] for name in own})
    for variable, (name, value) in zip(model_weights, expected.items(), strict=True):
        apart = np.abs(keras.ops.convert_to_numpy(variable.value) - value).max()
        assert apart <= CLOSE * max(1.0, np.abs(value).max()), (name, apart)


def check_a_mixture_trains_and_files_hold_it() -> None:
    model = model_of()
    options = dict(ns_coefficients=(3.0, -4.0, 2.0), overrides=[("net.hidden.*", {"lr_scale": 0.5})])
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 24)
    mine = muon_adamw(schedule, adam_lr_ratio=0.1, include_layers=["hidden"], exclude_layers=["out"], muon=options)
    mine.exclude_from_weight_decay([model.layers[1].kernel])
    model.compile(optimizer=muon_adamw(), loss="mse")
    losses = model.fit(X, Y, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model.compile(optimizer=muon_adamw(schedule, adam_lr_ratio=0.1, exclude_layers=["out"], muon=options), loss="mse")
    model.optimizer.exclude_from_weight_decay([model.layers[1].kernel])
    trained(model, 2)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.keras")
        again = keras.models.load_model(Path(folder) / "model.keras")
    assert type(again.optimizer) is muon_adamw
    rows = {row.name: row for row in again.optimizer.explain().rows}
    assert (rows["net.hidden.kernel"].rule, rows["net.hidden.kernel"].lr_scale) == ("Muon", 0.5)
    assert (rows["net.out.kernel"].rule, rows["net.out.kernel"].weight_decay) == ("AdamW", 0.0)
    assert far(trained(model, 1), trained(again, 1)) == 0.0


def check_muon_alone_refuses_convolutions_and_tells_of_kernels() -> None:
    kernel = keras.Variable(np.ones((3, 3, 4, 8), "float32"), name="kernel")
    told = "nothing"
    try:
        Muon(0.1).build([kernel])
    except ParameterError as error:
        told = str(error)
    assert "(height, width, in, out)" in told, told
    assert "3 x 96" in told, told
    assert "muon_adamw()" in told, told
    assert "dict(stacked_axes=2)" in told, told
    Muon(0.1, overrides=[("kernel", dict(stacked_axes=2))]).build([kernel])
    matrix = keras.Variable(np.ones((4, 8), "float32"), name="kernel")
    for options, count in ((dict(), 1), (dict(transposed=True), 0), (dict(scaling=None), 0)):
        assert len(rows_of(Muon(0.1, **options), Holding([matrix]))["kernel"].hints) == count


class Holding:
    """What an optimizer asks of a model."""

    def __init__(self, variables: list[Any]) -> None:
        self.trainable_variables = variables


def check_mistakes_in_a_mixture_are_told() -> None:
    def included() -> None:
        kernel = keras.Variable(np.ones((3, 3, 4, 8), "float32"), name="kernel")
        muon_adamw(include_layers=["kernel"]).build([kernel])

    wrong = {
        "no option 'adam_beta_1': write adamw=dict(betas=": lambda: muon_adamw(adam_beta_1=0.9),
        "no option 'momentum': write muon=dict(momentum=...)": lambda: muon_adamw(momentum=0.9),
        "no option 'other': write exclude_layers": lambda: muon_adamw(other=["out"]),
        "did you mean 'exclude_layers'?": lambda: muon_adamw(exclude_layer=["out"]),
        "use global_clipnorm": lambda: muon_adamw(max_grad_norm=1.0),
        "muon: Muon has no option 'momentun'": lambda: muon_adamw(muon=dict(momentun=0.9)),
        "exclude_layers must be a list of regular expressions": lambda: muon_adamw(exclude_layers="out"),
        "is no regular expression": lambda: muon_adamw(exclude_layers=["("]),
        "adam_lr_ratio must be": lambda: muon_adamw(adam_lr_ratio=-1.0),
        "(height, width, in, out)": included,
        "call build": lambda: muon_adamw().explain(),
    }
    for message, attempt in wrong.items():
        told = "nothing"
        try:
            attempt()
        except (OptionError, ParameterError, StateError) as error:
            told = str(error)
        assert message in told, (message, told)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        muon_adamw(exclude_layers=["uot"]).build(model_of().trainable_variables)
    assert [str(w.message) for w in heard if issubclass(w.category, UnusedOverrideWarning)] == [
        "patterns of layers that are found in no path: 'uot'"
    ]


def check_mistakes_are_told() -> None:
    wrong = {
        "LAMB has no option 'wieght_decay': did you mean 'weight_decay'?": lambda: LAMB(0.1, wieght_decay=0.1),
        "use global_clipnorm": lambda: LAMB(0.1, max_grad_norm=1.0),
        "averaged is not available in Keras": lambda: LAMB(0.1, averaged=0.9),
        "schedule_free is not available in Keras": lambda: LAMB(0.1, overrides=[("*", dict(schedule_free=True))]),
        "weight_decay cannot be a function in Keras": lambda: LAMB(0.1, weight_decay=lambda t: 0.1),
        "eps cannot be a function in Keras": lambda: LAMB(0.1, overrides=[("*.bias", {"eps": lambda t: 0.1})]),
        "lr must be": lambda: LARS(-1.0),
        "write their patterns as strings": lambda: LAMB(
            0.1, overrides=[(lambda name, v: True, {"trust": False})]
        ).get_config(),
        "call build": lambda: LAMB(0.1).explain(),
    }
    for message, attempt in wrong.items():
        told = "nothing"
        try:
            attempt()
        except (OptionError, StateError) as error:
            told = str(error)
        assert message in told, (message, told)


CHECKS = {name: value for name, value in globals().items() if name.startswith("check_")}


def main() -> None:
    """Print what went wrong, by check."""
    found = {}
    for name, check in CHECKS.items():
        try:
            check()
        except BaseException:
            found[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
