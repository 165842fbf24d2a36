"""Learning rates, schedules, and options that clash. test_every_option.py has what holds for all options."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from raw_arrays import FRONT_END, bits, gradients, model, refused, torch, train

from thalweg.errors import OptionError
from thalweg.numpy import LAMB, LARS, Adafactor, AdamW, Annealed, Kron, Optimizer
from thalweg.rules import RULES


def shown(optimizer: Optimizer) -> Any:
    """The bits of parameters and state after two steps."""
    return bits(train(optimizer, model(), gradients(2))), bits(optimizer.state)


def test_two_values_make_a_pair() -> None:
    for given in ((0.5, 0.75), ((0.5, 0.75),), ([0.5, 0.75],)):
        assert LAMB(0.1).with_betas(*given).options["betas"] == (0.5, 0.75)
    narrow = [np.float32(0.5), np.float64(0.75)]
    assert [(b, type(b)) for b in LAMB(0.1, betas=narrow).options["betas"]] == [(0.5, float), (0.75, float)]
    for given in ((0.5, 0.6), ()):
        with pytest.raises(OptionError, match="momentum must be"):
            LARS(0.1).with_momentum(*given)
    with pytest.raises(OptionError, match="betas"):
        LAMB(0.1, betas=(lambda t: 0.9, 0.999))


class TestLearningRate:
    def test_only_adafactor_works_without_one(self) -> None:
        assert Adafactor().lr is None
        for name in ("LARS", "LAMB", "Kron"):
            with pytest.raises(OptionError, match=f"{name} needs a learning rate"):
                FRONT_END[name](None)

    @pytest.mark.parametrize("make", [LARS, Adafactor])
    def test_a_bad_one_is_refused_wherever_it_is_given(self, make: Any) -> None:
        said, optimizer = "lr must be a finite number", make(lr=0.25)
        numbers = (-0.1, math.nan, math.inf, -math.inf, np.array(-1.0), np.ma.masked_array(-0.1))
        others = ("0.1", True, [0.1], (0.1,), {}, object(), 1j, Decimal("0.1"), np.array([0.1, 0.2]), Annealed())
        for value in (*numbers, *others):
            for given in (value, lambda t, value=value: value):
                with pytest.raises(OptionError, match=said):
                    make(given)
            with refused(OptionError, said, optimizer):
                optimizer.lr = value
            with refused(OptionError, said, optimizer):
                optimizer.with_lr(value)

    def test_a_tensor_is_refused_and_from_a_function_a_number_or_refused(self) -> None:
        half, optimizer = torch().tensor(0.5), LARS(0.25)
        with refused(OptionError, "lr must be a Python number here, got Tensor", optimizer):
            optimizer.lr = half
        for options in (dict(momentum=half), dict(overrides=[("w", dict(momentum=half))])):
            with pytest.raises(OptionError, match="momentum must be a Python number here, got Tensor"):
                LARS(0.25, **options)
        for option in ("lr", "momentum"):
            try:
                optimizer = LARS(**{"lr": 0.25, option: lambda t: half})
            except OptionError:
                continue
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

    @pytest.mark.parametrize("option", ["lr", "momentum"])
    @pytest.mark.parametrize("value", [-1.0, math.nan, "a", None, True], ids=repr)
    def test_a_function_that_goes_wrong_is_caught_then(self, option: str, value: Any) -> None:
        with pytest.raises(OptionError, match=f"{option} must be|LARS needs a learning rate"):
            LARS(**{"lr": 0.1, option: lambda t: value})
        optimizer, weights = LARS(**{"lr": 0.1, option: lambda t: 0.1 if t < 3 else value}), np.ones(3)
        for _ in range(2):
            optimizer.update("w", weights, np.ones(3))
        with refused(OptionError, f"parameter 'w', step 3: .*({option}|learning rate)", optimizer, weights):
            optimizer.update("w", weights, np.ones(3))


class TestSchedules:
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
        ("make", "options"),
        [(LARS, dict(nesterov=True)), (LARS, dict(momentum_mode="lr_outside")), (Kron, dict(momentum_mode="ema"))],
    )
    def test_a_momentum_may_warm_up_from_zero(self, make: Any, options: dict[str, Any]) -> None:
        warming = make(0.1, momentum=lambda t: min(0.9, (t - 1) / 10), **options)
        assert shown(warming) != shown(make(0.1, momentum=lambda t: 0.0))


class TestOptionsWithoutEffect:
    """test_every_option.py has that each is refused, and tests/rules/test_options.py with which words."""

    def test_setting_the_learning_rate_may_make_one_idle(self) -> None:
        optimizer = Adafactor(warmup_init=True)
        with refused(OptionError, "warmup_init=True has no effect", optimizer):
            optimizer.lr = 0.1

    def test_overrides_may_use_what_the_base_does_not(self) -> None:
        mixed = shown(LARS(0.1, trust=False, clip=True, overrides=[("conv", dict(trust=True))]))[0]
        clipped, free = (shown(LARS(0.1, **options))[0] for options in (dict(clip=True), dict(trust=False)))
        assert mixed["conv"] == clipped["conv"] != free["conv"]
        assert mixed["encoder.0.weight"] == free["encoder.0.weight"]

    def test_entries_of_overrides_are_held_to_it_and_excuse_nothing(self) -> None:
        for options in (dict(trust=False, clip=True), dict(momentum=0.0, nesterov=True)):
            with pytest.raises(OptionError, match=r"entry '\*\.bias': .* has no effect"):
                LARS(0.1, overrides=[("*.bias", options)])
        with pytest.raises(OptionError, match="clip=True"):
            LARS(0.1, trust=False, clip=True, overrides=[("*.bias", dict(weight_decay=0.1))])


def test_even_a_default_wins_over_a_variant_where_it_is_given() -> None:
    optimizer = LARS(0.1, variant="larc", clip=False, eps=0.0)
    assert optimizer.options == LARS(0.1, variant="larc").with_options(clip=False, eps=0.0).options
    assert optimizer.options["clip"] is False


#: Whose writer meant something that can be told.
MISTAKEN: list[tuple[dict[str, Any], str]] = [
    (dict(wight_decay=0), "AdamW has no option 'wight_decay': did you mean 'weight_decay'"),
    (dict(xyz=0), "AdamW has no option 'xyz': it has .*betas, .*weight_decay"),
    (dict(graft=RULES["AdamW"]), r"graft must be a value, got the class AdamW; write graft=thalweg"),
    *(({name: 0.9}, f"AdamW has no option '{name}': here it is averaged") for name in ("ema_decay", "use_ema")),
    *((dict(variant=variant), "variant must be one of") for variant in ("nonsense", 1, "")),
    (dict(max_grad_norm=0.0), "max_grad_norm"),
    (dict(state_dtype=np.float32), "state_dtype"),
]


@pytest.mark.parametrize(("options", "said"), MISTAKEN, ids=str)
def test_mistakes_are_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        AdamW(0.1, **options)
