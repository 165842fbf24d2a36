"""Mixtures: one optimizer for raw arrays that steps by several rules is each of them for its own parameters."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thalweg.errors import NonFiniteError, OptionError, ParameterError, StateError, UnusedOverrideWarning
from thalweg.numpy import LAMB, AdamW, Kron, Mixture

ENGINES = pytest.mark.parametrize("engine", ["auto", "reference"])
OVERRIDES = [("*.1.*", dict(weight_decay=0.0))]


def is_matrix(name: str, p: Any) -> bool:
    return bool(p.ndim == 2)


def drawn(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    shapes = {"layers.0.weight": (5, 4), "layers.1.weight": (3, 5), "layers.0.bias": (5,), "layers.1.bias": (3,)}
    return {name: random.normal(size=shape) for name, shape in shapes.items()}


def entries() -> list[Any]:
    return [(is_matrix, Kron.options(lr=0.01)), ("*", AdamW.options(lr=0.1, weight_decay=0.2, overrides=OVERRIDES))]


def apart(params: dict[str, Any], **arguments: Any) -> Any:
    """A function that steps the same by separate optimizers."""
    optimizers = [Kron(0.01, **arguments), AdamW(0.1, weight_decay=0.2, overrides=OVERRIDES, **arguments)]

    def step(grads: dict[str, Any]) -> None:
        for optimizer, part in zip(optimizers, ("weight", "bias"), strict=True):
            own = [name for name in params if name.endswith(part)]
            optimizer.step({name: params[name] for name in own}, {name: grads[name] for name in own})

    return step


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, p in one.items():
        assert (p == other[name]).all(), name


@ENGINES
def test_steps_are_those_of_separate_optimizers(engine: Any) -> None:
    ours, theirs = drawn(0), drawn(0)
    optimizer, step = Mixture(entries(), engine=engine), apart(theirs, engine=engine)
    for seed in range(1, 6):
        optimizer.step(ours, drawn(seed))
        step(drawn(seed))
        assert_same(ours, theirs)


def test_name_by_name() -> None:
    ours, theirs = drawn(0), drawn(0)
    optimizer, step = Mixture(entries()), apart(theirs)
    for name, p in ours.items():
        optimizer.update(name, p, drawn(1)[name])
    step(drawn(1))
    assert_same(ours, theirs)


@ENGINES
def test_one_norm_for_all_rules(engine: Any) -> None:
    ours, theirs, grads = drawn(0), drawn(0), drawn(1)
    Mixture(entries(), engine=engine, max_grad_norm=0.5).step(ours, grads)
    norm = np.sqrt(sum(float((g * g).sum()) for g in grads.values()))
    apart(theirs, engine=engine)({name: g * (0.5 / norm) for name, g in grads.items()})
    for name, p in ours.items():
        np.testing.assert_allclose(p, theirs[name], rtol=1e-12)


@ENGINES
def test_an_error_leaves_all_rules_as_they_were(engine: Any) -> None:
    params, grads = drawn(0), drawn(1)
    optimizer = Mixture(entries(), engine=engine, on_nonfinite="raise")
    grads["layers.1.bias"][0] = np.nan
    with pytest.raises(NonFiniteError, match=r"layers\.1\.bias"):
        optimizer.step(params, grads)
    assert_same(params, drawn(0))


def test_parameters_without_an_entry_are_listed_and_none_is_stepped() -> None:
    params = drawn(0)
    optimizer = Mixture([("*.weight", Kron.options(lr=0.1))])
    with pytest.raises(ParameterError, match=r"matches 'layers\.0\.bias', 'layers\.1\.bias': add a last entry"):
        optimizer.step(params, drawn(1))
    assert_same(params, drawn(0))
    with pytest.raises(ParameterError, match=r"matches 'layers\.0\.bias'"):
        optimizer.update("layers.0.bias", params["layers.0.bias"], np.ones(5))


def test_entries_and_overrides_without_parameters_are_reported_once() -> None:
    given = [("*", AdamW.options()), (re.compile("nothing"), Kron.options())]
    optimizer = Mixture(given, overrides=[("*.bais", dict(lr_scale=0.5)), ("*.bias", dict(lr_scale=0.5))])
    with pytest.warns(UnusedOverrideWarning) as told:
        optimizer.step(drawn(0), drawn(1))
    assert [str(each.message) for each in told] == [
        "overrides that match no parameter: '*.bais'",
        "entries of the mixture that match no parameter: re.compile('nothing')",
    ]
    assert optimizer.explain(drawn(0)).unused_entries == [re.compile("nothing")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(drawn(0), drawn(1))


def test_learning_rates_are_those_of_entries() -> None:
    optimizer = Mixture([("*.weight", Kron.options(lr=0.01)), ("*", AdamW.options(lr=lambda t: 0.1 / t))])
    ours, theirs, alone = drawn(0), drawn(0), AdamW(lambda t: 0.1 / t)
    for seed in (1, 2):
        optimizer.step(ours, drawn(seed))
        alone.update("layers.0.bias", theirs["layers.0.bias"], drawn(seed)["layers.0.bias"])
    assert (ours["layers.0.bias"] == theirs["layers.0.bias"]).all()
    with pytest.raises(OptionError, match="entries have different learning rates"):
        _ = optimizer.lr
    optimizer.rates = [0.5, 0.25]
    assert [own.lr for _, own in optimizer.entries] == [0.5, 0.25]
    optimizer.lr = 0.125
    assert (optimizer.lr, optimizer.rates) == (0.125, [0.125, 0.125])
    for wrong in ([0.1], [0.1, -1.0]):
        with pytest.raises(OptionError, match=r"learning rates for 2 entries|lr must be"):
            optimizer.rates = wrong
    assert optimizer.rates == [0.125, 0.125]


def test_options() -> None:
    assert AdamW(0.1, weight_decay=0.5).options["weight_decay"] == 0.5  # of an optimizer, as ever
    made = AdamW.options(weight_decay=0.5)
    assert (made.rule.__name__, made.lr, made.options) == ("AdamW", 1e-3, {"weight_decay": 0.5})
    with pytest.raises(OptionError, match="AdamW has no option 'betta'"):
        AdamW.options(betta=0.5)
    with pytest.raises(OptionError, match="lr must be"):
        AdamW.options(lr=-1)
    with pytest.raises(OptionError, match="seed concerns the whole step: give it to the mixture"):
        AdamW.options(seed=1)
    assert Mixture(entries(), seed=3).options["'*'"].items() >= {"weight_decay": 0.2, "seed": 3}.items()
    with pytest.raises(OptionError, match="a mixture is a list of"):
        Mixture(AdamW.options())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="max_grad_norm must be"):
        Mixture(entries(), max_grad_norm=-1.0)


def test_it_shows_itself() -> None:
    optimizer = Mixture([("*.weight", Kron.options(lr=0.01)), ("*", AdamW.options(weight_decay=0.5))], seed=3)
    text = "Mixture([('*.weight', Kron.options(lr=0.01)), ('*', AdamW.options(lr=0.001, weight_decay=0.5))], seed=3)"
    assert repr(optimizer) == text
    assert repr(eval(text)) == text
    assert repr(optimizer.with_seed(0)) == text.replace(", seed=3", "")


# ---- copies and checkpoints


def reload(optimizer: Any, folder: Path, kind: str) -> Any:
    if kind in ("copy", "pickle"):
        return copy.deepcopy(optimizer) if kind == "copy" else pickle.loads(pickle.dumps(optimizer))
    other = Mixture(entries())
    if kind == "dict":
        other.load_state_dict(optimizer.state_dict())
    else:
        optimizer.save(folder / "state.npz")
        other.load(folder / "state.npz")
    return other


@pytest.mark.parametrize("kind", ["copy", "pickle", "dict", "npz"])
def test_copies_and_saved_states_go_on(kind: str, tmp_path: Path) -> None:
    params, optimizer = drawn(0), Mixture(entries())
    optimizer.step(params, drawn(1))
    optimizer.rates = [0.02, 0.2]
    again, other = copy.deepcopy(params), reload(optimizer, tmp_path, kind)
    assert other.rates == [0.02, 0.2]
    assert other.state_dict()["rules"] == optimizer.state_dict()["rules"]
    for seed in (2, 3):
        optimizer.step(params, drawn(seed))
        other.step(again, drawn(seed))
    assert_same(params, again)


def test_a_state_of_other_rules_is_refused_whole() -> None:
    params, optimizer = drawn(0), Mixture(entries())
    optimizer.step(params, drawn(1))
    plain = AdamW(0.1)
    plain.step(params, drawn(1))
    both = "a mixture of Kron and AdamW"
    for target, state, message in (
        (optimizer, plain.state_dict(), f"this is a state of AdamW and cannot be loaded into {both}"),
        (plain, optimizer.state_dict(), f"this is a state of {both} and cannot be loaded into AdamW"),
        (
            Mixture([("*.weight", Kron.options()), ("*", LAMB.options())]),
            optimizer.state_dict(),
            "the state of 'layers.0.bias' is one of AdamW and cannot be loaded into LAMB",
        ),
        (
            Mixture([("*.bias", Kron.options()), ("*", AdamW.options())]),
            optimizer.state_dict(),
            "the state of 'layers.0.weight' is one of Kron and cannot be loaded into AdamW",
        ),
    ):
        before = repr(target.state_dict())
        with pytest.raises(StateError, match=message):
            target.load_state_dict(state)
        assert repr(target.state_dict()) == before


def test_a_function_that_decides_otherwise_is_told_with_the_parameter() -> None:
    params, optimizer = drawn(0), Mixture(entries())
    optimizer.step(params, drawn(1))
    other = Mixture([(lambda name, p: p.ndim == 1, Kron.options()), ("*", AdamW.options())])
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(StateError, match=r"'layers\.0\.weight' is one of Kron, and AdamW steps it here"):
        other.step(params, drawn(2))
