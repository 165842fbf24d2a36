"""What holds for every option of every rule, as their fields say: there is no table of options here."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import strategies
from agree import draw, draw_gradients, dtype_of
from drive import run
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from raw_arrays import SHAPES, Make, bits, copies, every_case, fingerprint, refused

import thalweg
import thalweg.numpy
from thalweg.errors import OptimError, OptionError
from thalweg.numpy import Optimizer, optimizer
from thalweg.rules import AROUND, RULES, Rule
from thalweg.rules.options import alternatives, choices_of, hints_of, is_structure, number_options, options_of
from thalweg.settings import Numerics

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
#: Options of each rule; and those of all optimizers and around rules, with a rule for which all of them matter.
EVERY = [
    *((rule, name) for rule in RULES.values() for name in options_of(rule)),
    *((RULES["Kron"], name) for name in options_of(Numerics)),
    *((RULES["AdamW"], name) for kind in AROUND for name in options_of(kind) if name != "stacked_axes"),
]
every_option = pytest.mark.parametrize(
    ("rule", "option"), EVERY, ids=[f"{rule.__name__} {option}" for rule, option in EVERY]
)
#: What repr() shows as it is written.
WORDS = {**vars(thalweg.numpy), "Spikes": thalweg.Spikes, "Annealed": thalweg.numpy.Annealed, "inf": math.inf}


def made(rule: type[Rule], options: Mapping[str, Any]) -> Optimizer:
    return optimizer(rule)(**{"lr": rule.typical_lr or rule.default_lr, "engine": "reference", **options})


def default_of(rule: type[Rule], option: str) -> Any:
    return made(rule, {}).options[option]


def own_options(rule: type[Rule], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the rule itself."""
    return {name: value for name, value in options.items() if name in rule.__dataclass_fields__}


def kind_of(rule: type[Rule], option: str) -> Any:
    """The class that has an option as a field."""
    return next(kind for kind in (rule, Numerics, *AROUND) if option in options_of(kind))


#: What is beside values that change nothing by themselves.
BESIDE: dict[str, dict[str, Any]] = {
    "schedule_free_warmup": dict(schedule_free=True, betas=(0.0, 0.9)),
    "averaged_warmup": dict(averaged=0.9),
    "state_rounding": dict(state_dtype="float16"),
    "momentum_mode": dict(whiten="gradient"),
}


def candidates(rule: type[Rule], option: str) -> list[Any]:
    """Some values that an option may have beside its default."""
    return strategies.candidates(kind_of(rule, option), option, default_of(rule, option))


#: Options that change nothing on a CPU.
FOR_GPUS = {"precond_precision"}
#: Small arrays on which every option has something to do.
SHOWCASE = {"matrix": (4, 6), "half": (40,), "zeros": (3, 2), "tensor": (3, 2, 4)}


@functools.cache
def showcase(is_of_matrices: bool, poisoned: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    shapes = {name: shape for name, shape in SHOWCASE.items() if not is_of_matrices or len(shape) > 1}
    params, grads = draw(shapes, "float32"), draw_gradients(shapes, "float32", 3)
    for name, dtype in {"half": "float16", "tensor": "float16", "matrix": "float64"}.items():
        if name in params:
            params[name] = params[name].astype(dtype)
    if "zeros" in params:
        params["zeros"][...] = 0
    if poisoned:
        grads[1]["tensor"][0, 0, 0] = np.inf
    return params, grads


def shown(found: Optimizer, *, poisoned: bool = False) -> Any:
    """The bits of parameters and state after three steps over the showcase, or how it refuses them."""
    params, grads = copies(showcase(found.rule.__name__ == "Muon", poisoned))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of spikes, that norms look as if they were clipped
            for step in grads:
                found.step(params, step)
    except OptimError as error:
        return str(error)
    return bits(params), bits(found.state)


@pytest.mark.slow
@every_option
def test_it_has_an_effect(rule: type[Rule], option: str) -> None:
    """Some value, by itself or beside one other option, changes parameters or state."""
    need = options_of(kind_of(rule, option))[option].need
    first = {need.option if need else "", "weight_decay", "momentum"}
    others = sorted(made(rule, {}).options.keys() - {option}, key=lambda name: (name not in first, name))
    beside = [{}, BESIDE.get(option, {}), dict(lr=None), dict(lr=2.0)]
    beside += [dict(variant=variant) for variant in rule.VARIANTS]
    beside += [{other: value} for other in others for value in candidates(rule, other) if option not in FOR_GPUS]
    poisoned = option == "on_nonfinite"
    for around in beside:
        try:
            plain = shown(made(rule, around), poisoned=poisoned)
        except OptimError:
            continue
        for value in candidates(rule, option):
            try:
                if shown(made(rule, {**around, option: value}), poisoned=poisoned) != plain:
                    assert option not in FOR_GPUS
                    return
            except OptimError:
                continue
    assert option in FOR_GPUS, "nothing changes, whatever is beside it"


@every_option
def test_a_bad_value_is_refused_by_name(rule: type[Rule], option: str) -> None:
    """Text, NaN, infinity, objects, and what would be a number, a flag, nothing or a function in another place."""
    found, default, hint = made(rule, {}), default_of(rule, option), hints_of(kind_of(rule, option))[option]
    choices = [choice for kind in alternatives(hint) for choice in choices_of(kind)]
    bad: list[Any] = ["nonsense", math.nan, -math.inf, {}, b"", object(), 1j, np.array([0.5, 0.5]), (-1, 0.5), (0.5,)]
    bad += [(0.5, math.nan), lambda t: "nonsense"]
    bad += [] if True in choices else [True]
    bad += [] if None in choices or kind_of(rule, option) in AROUND else [None]
    bad += [] if option in ("beta2_decay", "seed") else [-1]
    bad += [] if isinstance(default, tuple) and len(default) == 2 else [(0.5, 0.5)]
    bad += [] if option in number_options(rule) | {"averaged"} else [lambda t: default]
    for value in bad:
        with pytest.raises(OptionError, match=rf"\b{option}\b"):
            made(rule, {option: value})
    with refused(OptionError, rf"\b{option}\b", found):
        found.with_options(**{option: "nonsense"})
    with pytest.raises(OptionError, match=rf"entry 'w': .*\b{option}\b"):
        made(rule, dict(overrides=[("w", {option: math.nan})]))


@every_rule
@given(data=st.data())
def test_what_is_refused_for_want_of_an_effect_has_none(rule: type[Rule], data: Any) -> None:
    """The rule itself, which refuses nothing, steps the same with any value of it."""
    given = data.draw(strategies.options(rule, around=False))
    own = rule(**own_options(rule, given))
    p, g = draw({"p": (6, 4)}, "float64", 1)["p"], draw({"p": (6, 4)}, "float64", 2)["p"]
    idle = sorted(own.idle(given["lr"]).keys() & options_of(rule).keys())
    option = data.draw(st.sampled_from(idle or ["stacked_axes"]))
    value = data.draw(st.sampled_from(candidates(rule, option)))
    other = replace(own, **{option: value})
    try:
        other.validate()
    except OptimError:
        return
    if not idle or value == getattr(own, option):
        return
    assert bits(step_thrice(own, p, g)) == bits(step_thrice(other, p, g))
    if value is False:  # what is off may be said to be off
        assert made(rule, {**given, option: value}).options[option] is False
    elif value:
        with pytest.raises(OptionError, match=rf"\b{option}\b"):
            made(rule, {**given, option: value})


def step_thrice(rule: Rule, p: Any, g: Any) -> Any:
    return run(rule, p, [g, -g, 0.5 * g], lr=0.1)[0]


@every_rule
@given(data=st.data())
def test_options_are_given_at_once_one_by_one_or_as_they_are_shown(rule: type[Rule], data: Any) -> None:
    """A copy has an option that it is given, and the original has not."""
    drawn = data.draw(strategies.options(rule, without=("graft",)))
    at_once, chained = made(rule, drawn), made(rule, dict(lr=drawn["lr"]))
    for option, value in drawn.items():
        before = fingerprint(chained)
        changed = getattr(chained, f"with_{option}")(value)
        assert fingerprint(chained) == before
        assert changed.lr == value if option == "lr" else changed.options == {**chained.options, option: value}
        chained = changed
    for found in (chained, eval(repr(at_once), dict(WORDS)), pickle.loads(pickle.dumps(at_once)), at_once.copy()):
        assert (type(found), found.options, repr(found)) == (type(at_once), at_once.options, repr(at_once))


@every_rule
@given(data=st.data())
def test_a_function_is_asked_at_every_step(rule: type[Rule], data: Any) -> None:
    """A number that is one steps as if it were changed by hand between the steps."""
    drawn = data.draw(strategies.options(rule, without=("on_nonfinite", "spikes")))
    table = strategies.values_by_name(rule)
    numbers = {
        name: (value, data.draw(table[name]))
        for name, value in drawn.items()
        if name in number_options(rule) and not is_structure(value)
    }
    numbers = {name: pair for name, pair in numbers.items() if not is_structure(pair[1])}
    try:
        others = [{**drawn, **{name: pair[place] for name, pair in numbers.items()}} for place in (0, 1)]
        by_hand, _ = (made(rule, each) for each in others)
        found = made(rule, {**drawn, **{name: lambda t, pair=pair: pair[t % 2] for name, pair in numbers.items()}})
    except OptimError:
        reject()  # the second numbers do not go together
    shapes = data.draw(strategies.shapes(rule(**own_options(rule, drawn))))
    params, twin = draw(shapes, "float32"), draw(shapes, "float32")
    for t, step in enumerate(draw_gradients(shapes, "float32", 3), 1):
        by_hand = by_hand.with_options(**{name: others[t % 2][name] for name in numbers})
        found.step(params, step)
        by_hand.step(twin, step)
    assert bits(params) == bits(twin)
    assert bits(found.state) == bits(by_hand.state)


COPIERS: dict[str, Callable[[Optimizer, Path], Optimizer]] = {
    "copy()": lambda found, folder: found.copy(),
    "copy.copy": lambda found, folder: copy.copy(found),
    "copy.deepcopy": lambda found, folder: copy.deepcopy(found),
    "pickle": lambda found, folder: pickle.loads(pickle.dumps(found)),
    "with_options()": lambda found, folder: found.with_options(),
    "state_dict": lambda found, folder: resumed(found, lambda new: new.load_state_dict(found.state_dict())),
    "file": lambda found, folder: (
        found.save(folder / "state.npz"),
        resumed(found, lambda new: new.load(folder / "state.npz")),
    )[1],
}


def resumed(found: Optimizer, load: Callable[[Optimizer], None]) -> Optimizer:
    """A new one with the options of another, which has loaded its state."""
    new = found.with_options()
    new.clear_state()
    load(new)
    return new


@pytest.mark.slow
@every_rule
@settings(max_examples=settings.default.max_examples // 3 + 1)  # each has seven copies
@given(data=st.data())
def test_a_run_goes_on_from_copies_and_files_to_the_last_bit(rule: type[Rule], data: Any) -> None:
    """And the original as if there were none; whatever the options, shapes and dtypes."""
    options = data.draw(strategies.options(rule, without=("on_nonfinite", "spikes")))
    shapes = data.draw(strategies.shapes(rule(**own_options(rule, options))))
    check_going_on(made(rule, options), shapes, data.draw(strategies.dtypes))


@every_case
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_runs_go_on_too(make: Make, dtype: str) -> None:
    check_going_on(make(lr=falling, global_step=True, rounding="stochastic"), SHAPES, dtype)


def falling(t: int) -> float:
    return 0.1 / t


def check_going_on(found: Optimizer, shapes: Any, dtype: str) -> None:
    """All step the same arrays: native code must not take one for another because addresses are the same."""
    dtype_of(dtype)  # skips where it is not known
    params, grads = draw(shapes, dtype), draw_gradients(shapes, dtype, 4)
    for g in grads[:2]:
        found.step(params, g)
    before, middle = fingerprint(found), copies(params)
    with TemporaryDirectory() as folder:
        others = {way: copier(found, Path(folder)) for way, copier in COPIERS.items()}
    for g in grads[2:]:
        found.step(params, g)
    end = fingerprint(found), bits(params)
    for way, other in others.items():
        assert fingerprint(other) == before, way
        for name, p in params.items():
            p[...] = middle[name]
        for g in grads[2:]:
            other.step(params, g)
        assert (fingerprint(other), bits(params)) == end, way
        other.clear_state()
    assert fingerprint(found) == end[0]
