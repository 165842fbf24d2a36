"""Options for some parameters only, chosen by glob, by regular expression or by a function."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
from raw_arrays import Make, bits, gradients, model, option_fields, refused, train, two_cases

from thalweg.errors import OptionError, UnusedOverrideWarning
from thalweg.numpy import LAMB, LARS, Kron
from thalweg.settings import WHOLE_STEP

PATTERNS = [
    pytest.param("encoder.[0-9].?ias", {"encoder.0.bias"}, id="glob"),
    pytest.param(re.compile(r"\.bias$|^scale"), {"encoder.0.bias", "scale"}, id="regular expression"),
    pytest.param(lambda name, x: x.ndim < 2 or name == "conv", {"encoder.0.bias", "scale", "conv"}, id="function"),
]


@two_cases
@pytest.mark.parametrize(("pattern", "chosen"), PATTERNS)
def test_they_hold_for_those_chosen_and_for_no_others(make: Make, pattern: Any, chosen: set[str]) -> None:
    options = dict(weight_decay=0.5, lr_scale=0.5)
    mixed = train(make(overrides=[(pattern, options)]), model(), gradients(3))
    plain = train(make(), model(), gradients(3))
    other = train(make(overrides=[("*", options)]), model(), gradients(3))
    for name in mixed:
        assert bits(mixed[name]) == bits((other if name in chosen else plain)[name])
        assert name == "empty" or bits(other[name]) != bits(plain[name])


def test_a_function_sees_the_name_as_text_and_the_array_in_its_shape() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def choose(name: str, x: Any) -> bool:
        seen.append((name, x.shape))
        return False

    optimizer = LARS(0.1, overrides=[(choose, dict(momentum=0.5))])
    optimizer.update(7, np.ones(6), np.ones(6), shape=(2, 3))
    optimizer.update("seven", np.ones(()), np.ones(()))
    assert seen == [("7", (2, 3)), ("seven", ())]


def test_a_schedule_by_name() -> None:
    entries = [("conv", dict(weight_decay=lambda t: 0.5 if t > 1 else 0.0))]
    params = train(LAMB(0.1, overrides=entries), model(), gradients(2))
    plain = train(LAMB(0.1), model(), gradients(2))
    assert bits(params["conv"]) != bits(plain["conv"])
    assert bits(params["scale"]) == bits(plain["scale"])
    first = train(LAMB(0.1, overrides=entries), model(), gradients(1))
    assert bits(first) == bits(train(LAMB(0.1), model(), gradients(1)))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([("*.bias", dict(decay=0.0))], r"entry '\*.bias': LARS has no option 'decay'"),
        ([("*.bias", dict(momentumm=0.0))], "did you mean 'momentum'"),
        ([("*.bias", dict(lr=0.0))], r"entry '\*.bias': lr is given for all: use lr_scale"),
        ([("*.bias", dict(variant="larc"))], "LARS has no option 'variant'"),
        ([("*.bias", dict(momentum=1.5))], r"entry '\*.bias': momentum must be.*1.5"),
        ([("*.bias", dict(lr_scale=-1))], r"entry '\*.bias': lr_scale must be"),
        ([("*.bias", dict(lr_scale=None))], r"entry '\*.bias': lr_scale must be"),
        ([("*", {}), (re.compile("b"), dict(eps=-1))], r"entry re.compile\('b'\): eps must be"),
        ([("*", dict(momentum=lambda t: 2.0))], "entry '.*': momentum must be"),
        ({"*.bias": dict(momentum=0.5)}, "overrides must be a list of"),
        ("*.bias", "overrides must be a list of"),
        (None, "overrides must be a list of"),
        ([("*.bias",)], "overrides must be a list of"),
        ([("*.bias", 0.5)], "overrides must be a list of"),
        (["*.bias"], "overrides must be a list of"),
        ([(1, dict(momentum=0.5))], "pattern must be a glob"),
        ([(None, dict(momentum=0.5))], "pattern must be a glob"),
        ([(b"*", dict(momentum=0.5))], "pattern must be a glob"),
    ],
)
def test_bad_ones_are_refused_at_once_and_named(overrides: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        LARS(0.1, overrides=overrides)
    optimizer = LARS(0.1)
    with refused(OptionError, said, optimizer):
        optimizer.with_overrides(overrides)


@pytest.mark.parametrize(
    ("name", "shape", "exempt"),
    [
        ("encoder.0.weight", (3, 2), False),
        ("gain", (3,), True),
        ("temperature", (), True),
        ("layers.norm1.weight", (3, 2), True),
        ("ln_f.scale", (3, 2), True),
        ("LayerNorm_0.scale", (3, 2), True),
        ("norm1.linear.weight", (3, 2), False),
        ("attention.relative_position_bias_table", (3, 2), True),
        ("bnet.weight", (3, 2), False),
    ],
)
def test_one_word_exempts_tensors_of_one_axis_norms_and_biases(name: str, shape: tuple[int, ...], exempt: bool) -> None:
    start, slope = {name: np.full(shape, 0.5)}, [{name: np.full(shape, 0.25)}]
    found = train(LAMB(0.1, weight_decay=0.5, overrides="standard"), start.copy(), slope)
    plain = LAMB(0.1, trust=False) if exempt else LAMB(0.1, weight_decay=0.5)
    assert bits(found) == bits(train(plain, {name: np.full(shape, 0.5)}, slope))


def test_the_word_may_be_one_entry_of_several_and_is_read_back() -> None:
    optimizer = LARS(0.1, weight_decay=0.1, overrides=["standard", ("gain", dict(weight_decay=0.2))])
    assert repr(optimizer) == "LARS(lr=0.1, weight_decay=0.1, overrides=['standard', ('gain', {'weight_decay': 0.2})])"
    matrices = {"w": np.ones((2, 2)), "m": np.ones((2, 2))}
    LARS(0.1, overrides=["standard", ("m", dict(weight_decay=0.2))]).step(matrices, matrices)  # which may match none


@pytest.mark.parametrize("option", WHOLE_STEP)
def test_what_concerns_the_whole_step_cannot_differ(option: str) -> None:
    value = option_fields("LARS")[option].default
    with pytest.raises(OptionError, match=f"entry 'conv': {option} concerns the whole step"):
        LARS(0.1, overrides=[("conv", {option: value})])


def test_entries_that_only_clash_together_are_told_with_the_parameter_before_anything_changes() -> None:
    entries = [("*", dict(momentum_mode="ema", whiten="momentum")), ("b", dict(momentum_mode="polyak"))]
    optimizer = Kron(0.1, variant="polyak", overrides=entries)
    params = {"a": np.ones(3), "b": np.ones(3)}
    with refused(OptionError, "'b'.*whiten='momentum' needs momentum_mode='ema'", optimizer, params):
        optimizer.step(params, {"a": np.ones(3), "b": np.ones(3)})


def test_each_source_wins_over_the_one_before() -> None:
    """Variant, what is given for all, entries in their order."""
    entries = [("enc*", dict(eps=0.25, lr_scale=0.5)), ("*.bias", dict(eps=0.5)), ("*.bias", dict(momentum=0.5))]
    mixed = train(LARS(0.5, variant="larc", eps=0.125, overrides=entries), model(), gradients(2))
    for name, lr, options in (
        ("conv", 0.5, dict(eps=0.125)),
        ("encoder.0.weight", 0.25, dict(eps=0.25)),
        ("encoder.0.bias", 0.25, dict(eps=0.5, momentum=0.5)),
    ):
        alone = train(LARS(lr, variant="larc", **options), model(), gradients(2))
        assert bits(mixed[name]) == bits(alone[name])


def test_an_entry_may_build_on_an_earlier_one() -> None:
    entries = [("*", dict(momentum_mode="ema")), ("*.weight", dict(whiten="momentum"))]
    params = train(Kron(0.1, variant="polyak", overrides=entries), model(), gradients(2))
    direct = train(Kron(0.1, variant="polyak", momentum_mode="ema", whiten="momentum"), model(), gradients(2))
    assert bits(params["encoder.0.weight"]) == bits(direct["encoder.0.weight"])


ENTRIES = [("encoder.*", dict(momentum=0.5)), ("*.gamma", dict(lr_scale=0.5)), (re.compile("^x"), dict(eps=1.0))]


class TestUnused:
    def test_a_whole_model_that_uses_none_brings_one_warning(self) -> None:
        optimizer, params = LARS(0.1, overrides=ENTRIES), model()
        one, two = gradients(2)
        with pytest.warns(UnusedOverrideWarning) as caught:
            optimizer.step(params, one)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert "'*.gamma', re.compile('^x')" in str(caught[0].message)
        assert "encoder" not in str(caught[0].message)
        assert bits(params) != bits(model())  # and the step was made
        optimizer.step(params, two)  # silent: warnings are errors here

    def test_otherwise_nothing_is_said(self) -> None:
        """Where all are used, some have no gradient yet, or arrays come name by name."""
        train(LARS(0.1, overrides=ENTRIES[:1]), model(), gradients(2))
        optimizer, params = LARS(0.1, overrides=[("conv", dict(momentum=0.5))]), model()
        optimizer.step(params, {**gradients(1)[0], "conv": None})
        optimizer.step(params, gradients(1)[0])
        optimizer = LARS(0.1, overrides=ENTRIES)
        optimizer.update("w", np.ones(3), np.ones(3))
        optimizer.end_iteration()
        optimizer = LARS(0.1, overrides=[("late", dict(momentum=0.5))])
        optimizer.update("late", np.ones(3), np.ones(3))
        train(optimizer, params, gradients(1))

    def test_where_warnings_are_errors_nothing_is_changed(self) -> None:
        optimizer, params = LARS(0.1, overrides=ENTRIES), model()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UnusedOverrideWarning):
                optimizer.step(params, gradients(1)[0])
        assert bits(params) == bits(model())
        assert optimizer.num_parameters == 0
