"""LARS, LAMB and Adafactor of thalweg.optax equal those of thalweg.numpy, in parameters and in state."""

from __future__ import annotations

import re
from typing import Any

import cases
import pytest
from cases import ADAFACTOR, LAMB, LARS
from lanes import one_in
from optax_runs import assert_equal, translated

pytest.importorskip("jax")
pytest.importorskip("optax")

import thalweg.numpy as reference
import thalweg.optax as ours

pytestmark = pytest.mark.slow

SHAPES = {
    "layers": [{"w": (6, 4), "bias": (7,)}, {"w": (6, 4)}],
    "wide": (1, 5),
    "deep": (3, 4, 5),
    "conv": (2, 3, 3, 2),
    "gain": (),
}
CASES = {"LARS": LARS, "LAMB": LAMB, "Adafactor": ADAFACTOR}
#: What differs in defaults: optax has trust ratios for vectors.
AS_OPTAX: dict[str, dict[str, Any]] = {"LAMB": dict(exempt=None)}
RATES = {name: case.lr for name, case in CASES.items()}
#: Options that every optimizer has, and those of single ones that no other row tries.
FURTHER: list[tuple[str, str, dict[str, Any]]] = [
    *((name, "maximize", dict(maximize=True)) for name in CASES),
    *((name, "max_grad_norm", dict(max_grad_norm=0.5)) for name in CASES),
    *((name, "state in float32", dict(state_dtype="float32")) for name in ("LARS", "LAMB")),
    ("LARS", "zero_ratio", dict(zero_ratio=0.01)),
    ("Adafactor", "pair of eps", dict(eps=(1e-4, 2.0))),
    ("Adafactor", "decay_rate", dict(beta2_decay=0.5, clip_threshold=0.5)),
    ("Adafactor", "warmup", dict(relative_step=True, warmup_init=True)),
    ("Adafactor", "scale only when relative", dict(scale_parameter="relative")),
]
ROWS = [(name, text, options) for name, case in CASES.items() for text, options in case.options.items()] + FURTHER


def rate(name: str, options: dict) -> Any:
    return None if options.get("warmup_init") else RATES[name]


@pytest.mark.parametrize(("name", "text", "options"), one_in(9, ROWS), ids=[f"{name}-{text}" for name, text, _ in ROWS])
def test_equals_the_numpy_front_end(name: str, text: str, options: dict) -> None:
    theirs = getattr(reference, name)(lr=rate(name, options), engine="reference", **AS_OPTAX.get(name, {}), **options)
    mine = getattr(ours, name.lower())(rate(name, options), **translated(name, options))
    assert_equal(mine, theirs, SHAPES)


MADE = [(case, text, options) for case in cases.CASES if case.rule.OPTAX for text, options in case.options.items()]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "text", "options"), one_in(8, MADE), ids=[f"{case.name}-{text}" for case, text, _ in MADE]
)
def test_what_is_made_of_a_rule_equals_the_numpy_front_end(case: cases.Case, text: str, options: dict) -> None:
    theirs = getattr(reference, case.name)(lr=case.lr, engine="reference", **options)
    assert_equal(ours.transformation(case.rule, case.lr, **options), theirs, SHAPES)


SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LARS": (
        dict(momentum=lambda t: 0.9 - 0.5 / t, trust_coefficient=lambda t: 0.01 / t, eps=lambda t: 0.1 * t),
        dict(
            momentum=lambda c: 0.9 - 0.5 / (c + 1),
            trust_coefficient=lambda c: 0.01 / (c + 1),
            eps=lambda c: 0.1 * (c + 1),
        ),
    ),
    "LAMB": (
        dict(betas=lambda t: (0.9 - 0.5 / t, 0.99), eps=lambda t: 0.1 / t, eps_root=lambda t: 0.1 / t),
        dict(b1=lambda c: 0.9 - 0.5 / (c + 1), b2=0.99, eps=lambda c: 0.1 / (c + 1), eps_root=lambda c: 0.1 / (c + 1)),
    ),
    "Adafactor": (
        dict(beta2_decay=lambda t: 0.8 - 0.3 / t, clip_threshold=lambda t: 1 + 1 / t, eps=lambda t: (0.01 / t, 0.5)),
        dict(
            decay_rate=lambda c: 0.8 - 0.3 / (c + 1),
            clipping_threshold=lambda c: 1 + 1.0 / (c + 1),
            eps=lambda c: 0.01 / (c + 1),
            min_scale=0.5,
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_schedules_of_options_count_from_0_where_those_of_numpy_count_from_1(name: str) -> None:
    theirs, mine = SCHEDULES[name]
    optimizer = getattr(reference, name)(
        lr=lambda t: RATES[name] / t, engine="reference", **AS_OPTAX.get(name, {}), **theirs
    )
    transformation = getattr(ours, name.lower())(lambda c: RATES[name] / (c + 1), **{**translated(name, {}), **mine})
    assert_equal(transformation, optimizer, SHAPES)


#: A glob, a regular expression and a predicate; where several match, later ones win.
OVERRIDES: list[tuple[Any, dict[str, Any]]] = [
    ("layers.*", dict(lr_scale=0.5)),
    (re.compile(r"bias$|^gain$"), dict(weight_decay=0.0)),
    (lambda name, p: p.ndim == 3, dict(weight_decay=0.3, lr_scale=2.0)),
    ("layers.1.w", dict(lr_scale=0.0)),
]


@pytest.mark.parametrize("name", CASES)
def test_overrides_by_name_choose_the_same_parameters(name: str) -> None:
    own = dict(AS_OPTAX.get(name, {}), weight_decay=0.1, overrides=OVERRIDES)
    theirs = getattr(reference, name)(lr=RATES[name], engine="reference", **own)
    options = {**translated(name, dict(weight_decay=0.1)), "overrides": OVERRIDES}
    assert_equal(getattr(ours, name.lower())(RATES[name], **options), theirs, SHAPES)


@pytest.mark.parametrize("name", CASES)
def test_stacked_axes_are_the_same(name: str) -> None:
    shapes = {"experts": (3, 6, 4), "others": (3, 6, 4), "biases": (3, 4)}
    options = dict(stacked_axes=1, **(dict(min_dim_size_to_factor=2) if name == "Adafactor" else {}))
    theirs = getattr(reference, name)(lr=RATES[name], engine="reference", **AS_OPTAX.get(name, {}), **options)
    assert_equal(getattr(ours, name.lower())(RATES[name], **translated(name, options)), theirs, shapes)


def test_a_wrong_option_would_be_noticed() -> None:
    """The comparison tells apart options that differ a little."""
    theirs = reference.LAMB(lr=0.02, engine="reference", betas=(0.9, 0.999))
    with pytest.raises(AssertionError):
        assert_equal(ours.lamb(0.02, b2=0.9990001), theirs, SHAPES)
