"""What must hold whatever the numbers: laws of all rules. Each by itself is held to what is published."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from drive import gradients, run
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from strategies import one_by_one
from tolerances import FLOAT64

from thalweg.errors import OptimError, OptionError
from thalweg.rules import LARS, RULES, Kron, Muon, Rule
from thalweg.spaces import numpy as xp

#: Entries that are zero, or of ordinary size: squares neither vanish nor overflow.
ENTRIES = st.one_of(st.just(0.0), st.floats(1e-3, 1e3), st.floats(-1e3, -1e-3))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    """A parameter and a gradient of one shape."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, max_side=6))
    p, g = (draw(hnp.arrays(np.float64, shape, elements=ENTRIES)) for _ in range(2))
    return p, g


def close(a: Any, b: Any) -> bool:
    return bool(np.abs(a - b).max(initial=0.0) <= FLOAT64 * max(np.abs(b).max(initial=0.0), 1e-300))


every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def settings_of(rule: type[Rule]) -> list[dict[str, Any]]:
    """Each option with each of some values. Products of Muon in full precision: every later one sees a rounding."""
    return one_by_one(rule, **(dict(ns_dtype=None, vectors="row") if rule is Muon else {}))


def rate_of(rule: type[Rule]) -> float:
    return rule.typical_lr or rule.default_lr or 0.01


def fits(rule: Rule, shape: tuple[int, ...]) -> bool:
    """Whether sizes of blocks are those of such a tensor."""
    try:
        rule.check_shape("p", shape)
    except OptimError:
        return False
    return True


@every_rule
@given(data=st.data())
def test_inputs_are_left_alone_and_steps_are_finite(rule: type[Rule], data: Any) -> None:
    tried = [own for own in settings_of(rule) if 0.0 not in (own.get("eps"), own.get("eps_root"))]  # or 0 / 0
    made, (p, g) = rule(**data.draw(st.sampled_from(tried))), data.draw(pairs())
    if not fits(made, p.shape):
        return
    s = made.init(xp, p)
    for array in (p, g, *s.values()):
        array.flags.writeable = False
    with np.errstate(all="ignore"):
        update = made.update(xp, g, s, p, t=1, lr=rate_of(rule), noise=lambda: np.ones(p.shape))
    assert np.isfinite(update.delta).all()


@every_rule
def test_descends(rule: type[Rule]) -> None:
    """Every choice of every rule goes down a bowl around zero, or around a point of its norm if norms are kept."""
    start = np.array([[3.0, -2.0, 1.0], [0.5, 4.0, -1.0], [1.5, -3.0, 2.0]])
    for options in settings_of(rule):
        if not all(value is None or isinstance(value, (bool, str)) for value in options.values()):
            continue  # numbers at the ends of their ranges are no good choice
        made = rule(**options)
        lowest = start[::-1] if options.get("keep_norms") else np.zeros_like(start)
        p, s = start, made.init(xp, start)
        for t in range(1, 61):
            noise = np.random.default_rng(t).standard_normal(start.shape)
            update = made.update(xp, p - lowest, s, p, t=t, lr=rate_of(rule), noise=lambda noise=noise: noise)
            p, s = p + update.delta, update.state
        assert np.square(p - lowest).sum() < np.square(start - lowest).sum(), options


@every_rule
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_empty_tensors_are_stepped_without_a_fuss(rule: type[Rule], shape: tuple) -> None:
    for options in settings_of(rule):
        if fits(rule(**options), shape):
            p, state = run(rule(**options), np.zeros(shape), [np.zeros(shape)] * 3, lr=rate_of(rule))
            assert p.shape == shape
            assert all(np.isfinite(entry).all() for entry in state.values()), options


@every_rule
def test_a_zero_lr_moves_nothing(rule: type[Rule]) -> None:
    for shape in [(), (7,), (4, 6), (3, 4, 5)]:
        p, grads = gradients(shape, 3)
        for options in settings_of(rule):
            # these do not scale by lr alone: the names say so
            is_apart = options.get("weight_decay_mode") == "independent" or options.get("relative_step") is True
            if not is_apart and fits(rule(**options), shape):
                assert (run(rule(**options), p, grads, lr=0.0)[0] == p).all(), options


@pytest.mark.slow
@every_rule
def test_stacked_slices_are_stepped_as_if_alone(rule: type[Rule]) -> None:
    for options in settings_of(rule):
        if rule is Kron:
            if options.get("geometry") == "eq":
                continue  # probes with noise, which depends on the position in the stack
            options = {**options, "damping_mode": "expected"}
        for shape in [(4,), (6, 4), (3, 4, 5)]:
            if not fits(rule(**options), shape):
                continue
            p, grads = gradients((3, *shape), 3)
            stacked, state = run(rule(**{**options, "stacked_axes": 1}), p, grads, lr=rate_of(rule))
            for i in range(3):
                alone, own = run(rule(**options), p[i], [g[i] for g in grads], lr=rate_of(rule))
                assert close(stacked[i], alone), (options, shape)
                for key, entry in own.items():
                    whole = state[key]
                    part = whole if whole.ndim == entry.ndim else whole[i]
                    assert close(part, entry), (options, shape, key)


def test_a_tensor_of_zeros_has_the_ratio_that_is_asked_for() -> None:
    g = np.linspace(-1.0, 2.0, 12).reshape(3, 4)
    for options, ratio in (({}, 1.0), (dict(zero_ratio="eta"), 1e-3)):
        p, _ = run(LARS(**options), np.zeros((3, 4)), [g], lr=0.1)
        assert close(p, -0.1 * ratio * g)


#: Options that do not go together, or of which one part is wrong; what one value alone says is in tests/numpy.
MISFITS: list[tuple[str, dict[str, Any], str]] = [
    ("SGD", dict(momentum=0.9, dampening=1.5), "dampening must be a finite number >= 0 and <= 1, got 1.5"),
    ("SGD", dict(momentum=0.9, dampening=0.5, nesterov=True), "nesterov=True needs dampening=0"),
    ("LAMB", dict(betas=(0.9, 0.99, 0.999)), "betas"),
    ("LAMB", dict(trust_clip=(2.0, 1.0)), "trust_clip"),
    ("LAMB", dict(phi=(-1.0, 1.0)), "phi"),
    ("Adafactor", dict(beta2_decay=0), "beta2_decay must not be 0"),
    (
        "Adafactor",
        dict(eps=(0.0, 0.001), eps_mode="clamp"),
        "eps[0] under eps_mode='clamp' must be a finite number > 0, got 0.0",
    ),
    ("Kron", dict(momentum_mode="polyak"), "whiten='momentum' needs momentum_mode='ema'"),
    ("Kron", dict(geometry="eq", damping_mode="expected"), "geometry='eq' needs damping_mode='noise'"),
    ("Muon", dict(split=()), "split"),
    ("Muon", dict(split=(2, 0)), "each size of split=(2, 0) must be a whole number >= 1, got 0"),
    ("Muon", dict(split=(2, 1.5)), "each size of split=(2, 1.5) must be a whole number >= 0, got 1.5"),
    ("Muon", dict(ns_steps=100), "ns_steps"),
    ("Muon", dict(ns_coefficients=()), "ns_coefficients"),
    ("Muon", dict(ns_coefficients=(3.0, "b", 2.0)), "each of ns_coefficients must be a finite number"),
    ("Muon", dict(ns_coefficients=((3.0, -4.0, 2.0), (1.0,))), "ns_coefficients"),
    ("Muon", dict(bias_correction=True, momentum_mode="sum"), "bias_correction=True needs momentum_mode='ema'"),
    ("AdEMAMix", dict(betas=(0.9, 0.999, 0.0), beta3_warmup=9), "beta3_warmup needs a betas[2] above 0"),
]


@pytest.mark.parametrize(("rule", "options", "message"), MISFITS)
def test_what_does_not_go_together_is_refused(rule: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        RULES[rule](**options).validate()
