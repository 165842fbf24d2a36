"""Options: every one of every rule is checked, shown, and changed in a copy by one mechanism."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from drive import gradients as steps_of
from drive import run
from raw_arrays import (
    FRONT_END,
    HANDLING,
    OPTIONS,
    SHOWCASE,
    VARIANTS,
    bits,
    fingerprint,
    gradients,
    model,
    option_fields,
    refused,
    shown,
    torch,
    train,
)

from thalweg.errors import OptionError
from thalweg.numpy import LAMB, LARS, Adafactor, Annealed, Kron, Muon, Optimizer
from thalweg.rules import RULES
from thalweg.settings import Handling

EVERY = [(name, option) for name in OPTIONS for option in OPTIONS[name]]
NUMBERS = [(name, option) for name, option in EVERY if "Scalar" in str(option_fields(name)[option].type)]
OTHERS = [pair for pair in EVERY if pair not in NUMBERS]


def rate(t: int) -> float:
    return 0.1 / t


def made(name: str, **options: Any) -> Optimizer:
    return FRONT_END[name](**{"lr": rate, **options})


def beside(name: str, option: str) -> dict[str, Any]:
    """What an option needs around it; momentum is LAMB's own affair."""
    known = {*option_fields(name), "lr", "variant"}
    return {k: v for k, v in OPTIONS[name][option].beside.items() if k in known}


def test_the_table_has_every_option_of_every_rule() -> None:
    for name in OPTIONS:
        factorless = {"precond_dtype"} if name != "Kron" else set()
        assert set(OPTIONS[name]) == set(option_fields(name)) - factorless
    for name, option in EVERY:
        value, default = OPTIONS[name][option].value, option_fields(name)[option].default
        assert value != default, f"{name}'s {option}"


class TestEveryOption:
    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "option"), EVERY)
    def test_a_copy_has_it_and_the_original_has_not(self, name: str, option: str) -> None:
        value, original = OPTIONS[name][option].value, made(name, **beside(name, option))
        before = fingerprint(original)
        changed = getattr(original, f"with_{option}")(value)
        assert type(changed) is type(original)
        assert changed.options == {**original.options, option: value}
        assert changed.options != original.options
        assert fingerprint(original) == before
        assert shown(changed) == shown(made(name, **beside(name, option), **{option: value}))

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "option"), EVERY)
    def test_it_has_an_effect(self, name: str, option: str) -> None:
        """On the parameters or on the state: an option without one must be refused."""
        value, around = OPTIONS[name][option].value, beside(name, option)
        poisoned = option == "on_nonfinite"
        with_it = shown(made(name, **around, **{option: value}), poisoned=poisoned)
        assert with_it != shown(made(name, **around), poisoned=poisoned)

    @pytest.mark.parametrize(("name", "option"), EVERY)
    def test_a_bad_value_is_refused_by_name(self, name: str, option: str) -> None:
        """Text, NaN, infinity, objects, and what would be a number, a flag or nothing in another place."""
        optimizer, kind = made(name), str(option_fields(name)[option].type)
        bad: list[Any] = ["nonsense", math.nan, -math.inf, {}, b"", object(), 1j, np.array([0.5, 0.5])]
        bad += [] if "bool" in kind else [True]
        bad += [] if "None" in kind else [None]
        bad += [] if option in ("beta2_decay", "seed") else [-1]
        bad += [(-1, 0.5), (0.5, math.nan), (0.5,)] if "tuple" in kind else [(0.5, 0.5)]
        for value in bad:
            with pytest.raises(OptionError, match=rf"\b{option}\b"):
                made(name, **{option: value})
        for value in ("nonsense", math.nan):
            with refused(OptionError, rf"\b{option}\b.*{re.escape(repr(value))}", optimizer):
                getattr(optimizer, f"with_{option}")(value)
            with pytest.raises(OptionError, match=rf"entry 'w': .*\b{option}\b"):
                made(name, overrides=[("w", {option: value})])


def test_two_values_make_a_pair() -> None:
    for given in ((0.5, 0.75), ((0.5, 0.75),), ([0.5, 0.75],)):
        assert LAMB(0.1).with_betas(*given).options["betas"] == (0.5, 0.75)
    for given in ((0.5, 0.6), ()):
        with pytest.raises(OptionError, match="momentum must be"):
            LARS(0.1).with_momentum(*given)
    with pytest.raises(OptionError, match="betas"):
        LAMB(0.1, betas=(lambda t: 0.9, 0.999))


def test_unknown_options_get_a_hint() -> None:
    with pytest.raises(OptionError, match="LARS has no option 'momentumm': did you mean 'momentum'"):
        LARS(0.1, momentumm=0.5)


class TestLearningRate:
    def test_only_adafactor_works_without_one(self) -> None:
        assert Adafactor().lr is None
        for name in ("LARS", "LAMB", "Kron"):
            with pytest.raises(OptionError, match=f"{name} needs a learning rate"):
                FRONT_END[name](None)

    @pytest.mark.parametrize("name", ["LARS", "Adafactor"])
    def test_a_bad_one_is_refused_wherever_it_is_given(self, name: str) -> None:
        said, optimizer = "lr must be a finite number", made(name, lr=0.25)
        numbers = (-0.1, math.nan, math.inf, -math.inf, np.array(-1.0), np.ma.masked_array(-0.1))
        others = ("0.1", True, [0.1], (0.1,), {}, object(), 1j, Decimal("0.1"), np.array([0.1, 0.2]), Annealed())
        for value in (*numbers, *others):
            for given in (value, lambda t, value=value: value):
                with pytest.raises(OptionError, match=said):
                    FRONT_END[name](given)
            with refused(OptionError, said, optimizer):
                optimizer.lr = value
            with refused(OptionError, said, optimizer):
                optimizer.with_lr(value)

    def test_a_tensor_is_refused(self) -> None:
        half, optimizer = torch().tensor(0.5), LARS(0.25)
        with refused(OptionError, "lr must be a Python number here, got Tensor", optimizer):
            optimizer.lr = half
        for options in (dict(momentum=half), dict(overrides=[("w", dict(momentum=half))])):
            with pytest.raises(OptionError, match="momentum must be a Python number here, got Tensor"):
                LARS(0.25, **options)

    @pytest.mark.parametrize("option", ["lr", "momentum"])
    def test_a_tensor_from_a_function_is_a_number_or_refused(self, option: str) -> None:
        try:
            optimizer = LARS(**{"lr": 0.25, option: lambda t: torch().tensor(0.5)})
        except OptionError:
            return
        assert shown(optimizer) == shown(LARS(**{"lr": 0.25, option: 0.5}))

    @pytest.mark.parametrize(
        "value", [np.float32(0.1), np.float64(0.1), np.float16(0.1), np.int64(1), np.array(0.1)], ids=repr
    )
    def test_numbers_of_numpy_become_pythons_own(self, value: Any) -> None:
        """So that a float64 number never widens a float32 step."""
        optimizer = LARS(value)
        assert type(optimizer.lr) in (int, float)
        assert optimizer.lr == value
        assert shown(optimizer) == shown(LARS(float(value))) == shown(LARS(lambda t: value))

    def test_it_can_be_set_and_a_function_of_the_step_counts_from_one(self) -> None:
        seen: list[int] = []

        def lr(t: int) -> float:
            seen.append(t)
            return 0.0 if t == 3 else 0.5 / t

        optimizer, weights = LARS(lr, momentum=0.0), np.ones(3)
        assert optimizer.lr is lr
        seen.clear()
        twin, manual = np.ones(3), LARS(0.0, momentum=0.0)
        for t in (1, 2, 3):
            optimizer.update("w", weights, np.ones(3))
            manual.lr = 0.0 if t == 3 else 0.5 / t
            manual.update("w", twin, np.ones(3))
        assert seen == [1, 2, 3]
        assert bits(weights) == bits(twin)

    @pytest.mark.parametrize("value", [-1.0, math.nan, "a", None, True], ids=repr)
    def test_a_function_that_goes_wrong_later_is_caught_then(self, value: Any) -> None:
        optimizer, weights = LARS(lambda t: 0.1 if t < 3 else value), np.ones(3)
        for _ in range(2):
            optimizer.update("w", weights, np.ones(3))
        with refused(OptionError, "parameter 'w', step 3: .*(lr|learning rate)", optimizer, weights):
            optimizer.update("w", weights, np.ones(3))


def moving(value: Any) -> Any:
    """A schedule that differs from step to step and stays in range."""

    def schedule(t: int) -> Any:
        return tuple(moving(v)(t) for v in value) if isinstance(value, tuple) else value / 2 ** (t - 1)

    return schedule


class TestSchedules:
    # a zero ratio matters at the first step only, where zeros are zeros
    @pytest.mark.parametrize(("name", "option"), [pair for pair in NUMBERS if pair != ("LARS", "zero_ratio")])
    def test_a_function_is_asked_at_every_step(self, name: str, option: str) -> None:
        """It equals changing the option by hand between the steps."""
        around = beside(name, option)
        schedule = moving(OPTIONS[name][option].value)
        by_schedule = made(name, **around, **{option: schedule})
        params, twin = model(shapes=SHOWCASE), model(shapes=SHOWCASE)
        by_hand = made(name, **around, **{option: schedule(1)})
        for t, step in enumerate(gradients(2, shapes=SHOWCASE), 1):
            by_schedule.step(params, step)
            by_hand = by_hand.with_options(**{option: schedule(t)})
            by_hand.step(twin, step)
        assert bits(params) == bits(twin)
        assert bits(by_schedule.state) == bits(by_hand.state)
        assert shown(made(name, **around, **{option: schedule(1)})) != shown(made(name, **around, **{option: schedule}))

    def test_what_is_no_number_cannot_be_a_function(self) -> None:
        for name, option in OTHERS:
            value = OPTIONS[name][option].value
            with pytest.raises(OptionError, match=rf"\b{option}\b"):
                made(name, **beside(name, option), **{option: lambda t, value=value: value})

    def test_a_function_that_leaves_the_range_is_caught_then(self) -> None:
        with pytest.raises(OptionError, match=r"momentum must be.*got 1\.5"):
            LARS(0.1, momentum=lambda t: 1.5)
        optimizer, weights = LARS(0.1, momentum=lambda t: 0.4 * t), np.ones(3)
        for _ in range(2):
            optimizer.update("w", weights, np.ones(3))
        with refused(OptionError, "parameter 'w', step 3: momentum must be", optimizer, weights):
            optimizer.update("w", weights, np.ones(3))

    @pytest.mark.parametrize("engine", ["auto", "reference"])
    def test_a_momentum_that_is_zero_in_a_step_is_kept_for_the_next(self, engine: Any) -> None:
        options: dict[str, Any] = dict(trust=False, momentum_mode="lr_outside", momentum_dtype="float16", engine=engine)
        optimizer, weights = LARS(0.5, momentum=lambda t: 0.0 if t == 2 else 0.5, **options), np.zeros(3, "float32")
        for _ in range(3):
            optimizer.update("w", weights, np.ones(3, "float32"))
        kept = optimizer.state["w"]["momentum_buffer"]
        assert (kept.dtype.name, kept.tolist()) == ("float16", [1.5] * 3)
        assert weights.tolist() == [-0.5 * (1 + 1 + 1.5)] * 3

    @pytest.mark.parametrize(
        ("cls", "options"),
        [
            pytest.param(LARS, dict(nesterov=True), id="nesterov"),
            pytest.param(LARS, dict(momentum_mode="lr_outside"), id="momentum_mode"),
            pytest.param(Kron, dict(momentum_mode="ema"), id="ema"),
        ],
    )
    def test_a_momentum_may_warm_up_from_zero(self, cls: type[Optimizer], options: dict[str, Any]) -> None:
        warming = cls(0.1, momentum=lambda t: min(0.9, (t - 1) / 10), **options)
        assert shown(warming) != shown(cls(0.1, momentum=lambda t: 0.0))


#: What has no effect, the options beside it, and the start of what it needs.
IDLE: list[tuple[type[Optimizer], dict[str, Any], str]] = [
    (LARS, dict(trust=False, clip=True), "clip=True.*trust=True"),
    (LARS, dict(trust=False, trust_coefficient=0.5), "trust_coefficient=0.5.*trust=True"),
    (LARS, dict(trust=False, eps=0.5), "eps=0.5.*trust=True"),
    (LARS, dict(trust=False, norm_mode="combined"), "norm_mode.*trust=True"),
    (LARS, dict(trust=False, zero_ratio="eta"), "zero_ratio.*trust=True"),
    (LARS, dict(momentum=0, nesterov=True), "nesterov=True.*momentum above 0"),
    (LARS, dict(variant="timm", nesterov=True), "nesterov=True.*momentum above 0"),
    (LARS, dict(momentum=0.0, momentum_mode="lr_outside"), "momentum_mode"),
    (LARS, dict(momentum=0.0, momentum_dtype="float16"), "momentum_dtype"),
    (LAMB, dict(trust=False, trust_clip=(0, 1)), "trust_clip.*trust=True"),
    (LAMB, dict(trust=False, phi=(0, 1)), "phi.*trust=True"),
    (Adafactor, dict(warmup_init=True), "warmup_init.*relative_step=True"),
    (Adafactor, dict(relative_step=True, warmup_init=True), "lr=0.1.*warmup_init=False"),
    (Adafactor, dict(momentum_mode="before_lr"), "momentum_mode.*a momentum"),
    (Adafactor, dict(momentum_dtype="float16"), "momentum_dtype.*a momentum"),
    (Adafactor, dict(factored=False, only_2d=True), "only_2d.*factored=True"),
    (Adafactor, dict(factored=False, factor_dims="last2"), "factor_dims"),
    (Adafactor, dict(factored=False, min_dim_size_to_factor=2), "min_dim"),
    *((FRONT_END[name], dict(precond_dtype="float16"), "precond_dtype") for name in ("LARS", "LAMB", "Adafactor")),
    (Kron, dict(clip=None, clip_mode="value"), "clip_mode.*a clip"),
    (Kron, dict(momentum=0.0, whiten="gradient", momentum_mode="polyak"), "momentum_mode.*above 0"),
    (Kron, dict(momentum=0.0, momentum_dtype="float16"), "momentum_dtype"),
]
every_idle = pytest.mark.parametrize(
    ("cls", "options", "said"), IDLE, ids=[f"{cls.__name__} {options}" for cls, options, _ in IDLE]
)


#: What turns off something that is off beside the other options.
OFF_ANYWAY: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (LARS, dict(trust=False, always_adapt=False)),
    (LARS, dict(momentum=0.0, nesterov=False)),
    (LAMB, dict(trust=False, always_adapt=False)),
    (Muon, dict(vectors="row", momentum=0.0, nesterov=False)),
]


class TestOptionsWithoutEffect:
    @pytest.mark.parametrize(("cls", "options"), OFF_ANYWAY)
    def test_what_is_off_anyway_may_be_said_to_be_off(self, cls: type[Optimizer], options: dict[str, Any]) -> None:
        *first, last = options.items()
        plain = cls(0.1, **dict(first))
        assert shown(cls(0.1, **options)) == shown(plain.with_options(**dict([last]))) == shown(plain)

    @every_idle
    def test_they_are_refused(self, cls: type[Optimizer], options: dict[str, Any], said: str) -> None:
        with pytest.raises(OptionError, match=said):
            cls(0.1, **options)
        *first, last = options.items()
        optimizer = cls(0.1, **dict(first))
        with refused(OptionError, said, optimizer):
            optimizer.with_options(**dict([last]))

    @every_idle
    def test_and_had_indeed_none(self, cls: type[Optimizer], options: dict[str, Any], said: str) -> None:
        """The rule itself, which refuses nothing, steps the same without the one that is refused."""
        rule, idle = RULES[cls.__name__], said.split("=")[0].split(".*")[0]
        given = {**rule.VARIANTS.get(options.get("variant", ""), {}), **options}
        around = {key: given[key] for key in given if key in HANDLING}
        own = {key: given[key] for key in given if key not in (*HANDLING, "variant")}
        start, grads = steps_of((3, 2, 4), 3)
        ends = []
        for left_out in (None, *[key for key in given if key.startswith(idle)], "lr"):
            chosen = rule(**{key: value for key, value in own.items() if key != left_out})
            handling = Handling(**{key: value for key, value in around.items() if key != left_out})
            lr = 0.2 if left_out == idle == "lr" else 0.1
            ends.append(bits(run(chosen, start, grads, lr=lr, handling=handling)[0]))
        assert len(ends) >= 2
        assert len(set(ends)) == 1
        assert ends[0] != bits(start)

    def test_setting_the_learning_rate_may_make_one_idle(self) -> None:
        optimizer = Adafactor(warmup_init=True)
        with refused(OptionError, "warmup_init=True has no effect", optimizer):
            optimizer.lr = 0.1

    def test_overrides_may_use_what_the_base_does_not(self) -> None:
        optimizer = LARS(0.1, trust=False, clip=True, overrides=[("matrix", dict(trust=True))])
        clipped, free = shown(optimizer)[0], shown(LARS(0.1, trust=False))[0]
        assert clipped["matrix"] == shown(LARS(0.1, clip=True))[0]["matrix"] != free["matrix"]
        assert clipped["tensor"] == free["tensor"]

    def test_entries_of_overrides_are_held_to_it_and_excuse_nothing(self) -> None:
        for options in (dict(trust=False, clip=True), dict(momentum=0.0, nesterov=True)):
            with pytest.raises(OptionError, match=r"entry '\*\.bias': .* has no effect"):
                LARS(0.1, overrides=[("*.bias", options)])
        with pytest.raises(OptionError, match="clip=True"):
            LARS(0.1, trust=False, clip=True, overrides=[("*.bias", dict(weight_decay=0.1))])


class TestVariants:
    @pytest.mark.parametrize(("name", "variant"), VARIANTS)
    def test_a_variant_is_its_options_and_those_given_beside_it_win(self, name: str, variant: str) -> None:
        optimizer = made(name, variant=variant)
        assert optimizer.options == {**made(name).options, **RULES[name].VARIANTS[variant]}
        given = {"maximize": True, "weight_decay": 0.5}
        assert made(name, variant=variant, **given).options == {**optimizer.options, **given}
        params = train(optimizer, model(), gradients(3))
        assert all(np.isfinite(p).all() for p in params.values())

    def test_even_a_default_wins_where_it_is_given(self) -> None:
        optimizer = LARS(0.1, variant="larc", clip=False, eps=0.0)
        assert optimizer.options == LARS(0.1, variant="larc").with_options(clip=False, eps=0.0).options
        assert optimizer.options["clip"] is False

    @pytest.mark.parametrize("name", FRONT_END)
    def test_an_unknown_one_is_refused_with_what_there_is(self, name: str) -> None:
        told = f"variant must be one of .*{[*RULES[name].VARIANTS][-1]}" if RULES[name].VARIANTS else "has no variants"
        for value in ("nonsense", 1, True, ("a",)):
            with pytest.raises(OptionError, match=told):
                made(name, variant=value)
