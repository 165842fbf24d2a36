"""From what a user wrote to what holds for one parameter."""

from __future__ import annotations

from dataclasses import fields, replace
from enum import IntEnum
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest

from thalweg.dtypes import Name
from thalweg.errors import OptionError
from thalweg.given import check_known, plain
from thalweg.rules import AROUND, RULES, Annealed
from thalweg.settings import WHOLE_STEP, Handling, Setting, Settings, option_names

MATRIX = np.zeros((2, 2))

every_rule = pytest.mark.parametrize("name", RULES)


class TestPlain:
    @pytest.mark.parametrize(
        ("value", "wanted"),
        [
            *(
                (x, 0.5)
                for x in (0.5, np.float16(0.5), np.float32(0.5), np.float64(0.5), np.array(0.5), Fraction(1, 2))
            ),
            *((x, 3) for x in (3, np.int64(3), np.uint8(3), IntEnum("Size", {"LARGE": 3}).LARGE)),
            (np.bool_(True), True),
            ([np.float32(0.5), 1], (0.5, 1)),
            ((0.5, (np.int32(1),)), (0.5, (1,))),
            *((x, x) for x in (True, None, "eta", len)),
        ],
        ids=repr,
    )
    def test_numbers_become_pythons_own(self, value: Any, wanted: Any) -> None:
        def kinds(x: Any) -> Any:
            return tuple(map(kinds, x)) if isinstance(x, tuple) else type(x)

        assert plain(value) == wanted
        assert kinds(plain(value)) == kinds(wanted)


class TestHandling:
    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("maximize", 1),
            *(("max_grad_norm", value) for value in (0.0, "1", float("inf"))),
            *(("on_nonfinite", value) for value in ("ignore", None)),
            *(("rounding", "up"), ("state_rounding", "compensated")),
            *(("state_dtype", value) for value in ("uint8", np.float32)),
            *(("precond_dtype", "int8"), ("precond_dtype", ""), ("momentum_dtype", "float8")),
            *(("seed", value) for value in (1.0, True, None)),
        ],
    )
    def test_others_are_not(self, option: str, value: Any) -> None:
        with pytest.raises(OptionError, match=option):
            replace(Handling(), **{option: value}).validate()

    def test_what_concerns_the_whole_step_exists(self) -> None:
        assert set(WHOLE_STEP) < {f.name for f in fields(Handling)}


class TestKnown:
    @every_rule
    def test_names_are_those_of_the_fields(self, name: str) -> None:
        names = option_names(RULES[name])
        assert set(names) == {f.name for kind in (RULES[name], *AROUND, Handling) for f in fields(kind)}
        assert len(names) == len(set(names)), "an option of a rule and one around it share a name"

    def test_dtypes_for_editors_are_those_that_are_served(self) -> None:
        for dtype in get_args(Name):
            replace(Handling(), state_dtype=dtype, momentum_dtype=dtype, precond_dtype=dtype).validate()

    def test_a_hint_or_the_whole_list(self) -> None:
        with pytest.raises(OptionError, match="LARS has no option 'wight_decay': did you mean 'weight_decay'"):
            check_known("LARS", {"wight_decay": 0}, ("weight_decay", "momentum"))
        with pytest.raises(OptionError, match="LARS has no option 'xyz': it has momentum, weight_decay"):
            check_known("LARS", {"xyz": 0}, ("weight_decay", "momentum"))


def getattr_of(settings: Settings, option: str) -> Any:
    base = settings.base
    return getattr(base.rule if hasattr(base.rule, option) else base.handling, option)


class TestSettings:
    @every_rule
    def test_nothing_given_nothing_changed(self, name: str) -> None:
        settings = Settings(RULES[name], {})
        assert settings.base == Setting(RULES[name](), Handling())
        assert settings.changed() == {}
        assert settings.of("any", MATRIX) == (settings.base.for_shape(MATRIX.shape), [])

    @every_rule
    def test_every_variant_is_valid_and_shown(self, name: str) -> None:
        for variant, chosen in RULES[name].VARIANTS.items():
            settings = Settings(RULES[name], {}, variant)
            assert all(getattr_of(settings, option) == value for option, value in chosen.items())
            assert settings.changed() == {o: v for o, v in chosen.items() if v != settings.default(o)}

    def test_each_source_wins_over_the_one_before(self) -> None:
        """Default, variant, given, overrides in their order."""
        entries = [("a*", dict(eps=0.25, lr_scale=0.5)), ("ab", dict(eps=0.5)), ("ab", dict(momentum=0.5))]
        settings = Settings(RULES["LARS"], {"eps": 0.125}, "larc", entries)
        eps = {name: settings.of(name, MATRIX)[0].rule.eps for name in ("b", "a", "ab")}
        assert eps == {"b": 0.125, "a": 0.25, "ab": 0.5}
        assert [settings.of(name, MATRIX)[0].lr_scale for name in ("b", "a", "ab")] == [1.0, 0.5, 0.5]
        assert Settings(RULES["LARS"], {}, "larc").base.rule.eps == 1e-8
        assert Settings(RULES["LARS"], {}).base.rule.eps == 0.0
        assert settings.of("ab", MATRIX)[0].rule.trust_coefficient == 0.02
        assert settings.of("ab", MATRIX)[1] == [0, 1, 2]
        assert settings.of("a", MATRIX)[1] == [0]

    def test_what_was_given_is_kept_as_plain_numbers_and_not_the_mapping_itself(self) -> None:
        given: dict[str, Any] = {"betas": [np.float32(0.5), np.float64(0.75)]}
        settings = Settings(RULES["LAMB"], given)
        given["betas"] = (0.25, 0.25)
        assert settings.given == {"betas": (0.5, 0.75)}
        assert [type(b) for b in settings.base.rule.betas] == [float, float]

    def test_an_unknown_variant(self) -> None:
        for variant in ("nonsense", 1, ""):
            with pytest.raises(OptionError, match="variant must be one of"):
                Settings(RULES["LARS"], {}, variant)  # type: ignore[arg-type]


class TestSchedules:
    def test_the_rule_at_a_step(self) -> None:
        plainly = Settings(RULES["LARS"], {}).base
        assert plainly.rule_at(5) is plainly.rule
        setting = Settings(RULES["LARS"], {"momentum": lambda t: t / 10, "eps": lambda t: np.float32(t)}).base
        assert (setting.rule_at(3).momentum, setting.rule_at(3).eps) == (0.3, 3.0)
        assert type(setting.rule_at(3).eps) is float
        with pytest.raises(OptionError, match="momentum"):
            setting.rule_at(10)
        pairs = Settings(RULES["LAMB"], {"betas": lambda t: (0.5, 1 - 1 / (t + 1))}).base
        assert pairs.rule_at(3).betas == (0.5, 0.75)

    def test_an_annealed_probability_is_the_rules_own_affair(self) -> None:
        setting = Settings(RULES["Kron"], {"precond_update_probability": Annealed(0.5, 0.1)}).base
        assert setting.scheduled == {}
        assert setting.rule_at(9).precond_update_probability == Annealed(0.5, 0.1)


def test_mistakes_whose_writer_meant_something_that_can_be_told() -> None:
    with pytest.raises(OptionError, match=r"graft must be a value, got the class AdamW; write graft=thalweg"):
        Settings(RULES["Lion"], {"graft": RULES["AdamW"]})
    for name in ("ema_decay", "use_ema"):
        with pytest.raises(OptionError, match=f"AdamW has no option '{name}': here it is averaged"):
            Settings(RULES["AdamW"], {name: 0.9})
