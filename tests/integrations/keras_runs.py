"""Checks of the optimizers for Keras, for one backend a process: ``python keras_runs.py torch``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

# before Keras is imported, which looks for tensorflow else
os.environ["KERAS_BACKEND"] = sys.argv[1] if __name__ == "__main__" else "jax"

import keras
import numpy as np

from thalweg import OptionError, ParameterError, Rule, StateError, Update
from thalweg.integrations import keras as ours
from thalweg.integrations.keras import LAMB, LARS, Adafactor, Kron, Muon, optimizer
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


def check_muon_alone_refuses_convolutions_and_tells_of_kernels() -> None:
    kernel = keras.Variable(np.ones((3, 3, 4, 8), "float32"), name="kernel")
    told = "nothing"
    try:
        Muon(0.1).build([kernel])
    except ParameterError as error:
        told = str(error)
    assert "(height, width, in, out)" in told, told
    assert "3 x 96" in told, told
    assert "keras.optimizers.Muon" in told, told
    assert "dict(stacked_axes=2)" in told, told
    Muon(0.1, overrides=[("kernel", dict(stacked_axes=2))]).build([kernel])
    matrix = keras.Variable(np.ones((4, 8), "float32"), name="kernel")
    for options, count in ((dict(), 1), (dict(transposed=True), 0), (dict(scaling=None), 0)):
        mine = Muon(0.1, **options)
        mine.build([matrix])
        (row,) = mine.explain().rows
        assert len(row.hints) == count


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
