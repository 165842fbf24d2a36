"""What must hold whatever the numbers: laws of each rule, and laws of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import EVERY, OPTION_IDS, OPTIONS, SHAPES, Case
from drive import gradients, run
from tolerances import FLOAT32, FLOAT64

from thalweg.errors import OptionError
from thalweg.rules import LAMB, LARS, RULES, Adafactor
from thalweg.spaces import numpy as xp

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

#: Entries that are zero, or of ordinary size: squares neither vanish nor overflow.
ENTRIES = st.one_of(st.just(0.0), st.floats(1e-3, 1e3), st.floats(-1e3, -1e-3))


def tensors(shape: Any = None) -> st.SearchStrategy:
    shape = hnp.array_shapes(min_dims=0, max_dims=3, max_side=6) if shape is None else shape
    return hnp.arrays(np.float64, shape, elements=ENTRIES)


@st.composite
def pairs(draw: st.DrawFn, shape: Any = None) -> tuple[Any, Any]:
    """A parameter and a gradient of one shape."""
    p = draw(tensors(shape))
    return p, draw(tensors(p.shape))


def delta(rule: Any, p: Any, g: Any, lr: float | None) -> Any:
    return rule.update(xp, g, rule.init(xp, p), p, t=1, lr=lr, noise=lambda: np.zeros(p.shape)).delta


def close(a: Any, b: Any, scale: Any = None) -> bool:
    size = np.abs(b).max(initial=0.0) if scale is None else scale
    return bool(np.abs(a - b).max(initial=0.0) <= FLOAT64 * max(size, 1e-300))


# ---- laws of one rule


@given(pairs(), st.floats(1e-4, 1.0), st.floats(0.0, 0.5))
def test_lamb_moves_by_lr_times_the_norm(pair: Any, lr: float, decay: float) -> None:
    p, g = pair
    rule = LAMB(weight_decay=decay)
    moved, norm = np.linalg.norm(delta(rule, p, g, lr)), np.linalg.norm(p)
    if norm > 0 and (g != 0).any():
        assert np.isclose(moved, lr * norm, rtol=FLOAT64)


@given(pairs(), st.floats(1e-2, 1e2))
def test_scale_of_the_gradient_does_not_matter_to_lamb_and_lars(pair: Any, factor: float) -> None:
    p, g = pair
    for rule in (LAMB(eps=0.0), LARS()) if (g != 0).all() else (LARS(),):
        if (p != 0).any():
            assert close(delta(rule, p, factor * g, 0.1), delta(rule, p, g, 0.1))


@given(pairs(), st.floats(1e-3, 1.0), st.floats(0.1, 5.0))
def test_adafactor_bounds_the_rms_of_its_steps(pair: Any, lr: float, clip: float) -> None:
    p, g = pair
    if p.size == 0:
        return
    rms = np.sqrt(np.mean(p * p))
    moved = delta(Adafactor(clip_threshold=clip, min_dim_size_to_factor=2), p, g, lr)
    assert np.sqrt(np.mean(moved * moved)) <= lr * max(1e-3, rms) * clip * (1 + FLOAT64)


@given(pairs((5, 4)), st.permutations(range(5)), st.permutations(range(4)))
def test_adafactor_does_not_care_how_rows_and_columns_are_ordered(pair: Any, rows: Any, columns: Any) -> None:
    p, g = pair
    rule = Adafactor(min_dim_size_to_factor=2)
    shuffled = delta(rule, p[rows][:, columns], g[rows][:, columns], 0.1)
    assert close(shuffled, delta(rule, p, g, 0.1)[rows][:, columns])


@given(hnp.arrays(np.float64, 5, elements=st.floats(0.1, 10)), hnp.arrays(np.float64, 4, elements=st.floats(0.1, 10)))
def test_factoring_is_exact_for_squares_of_rank_one(rows: Any, columns: Any) -> None:
    g, p = np.outer(rows, columns), np.ones((5, 4))
    factored = delta(Adafactor(min_dim_size_to_factor=0), p, g, 0.1)
    assert close(factored, delta(Adafactor(factored=False), p, g, 0.1))


@given(pairs())
def test_without_ratios_lars_is_sgd_and_lamb_is_adam(pair: Any) -> None:
    p, g = pair
    assert close(delta(LARS(trust=False, momentum=0.0), p, g, 0.1), -0.1 * g)
    adam = g / (np.abs(g) + 1e-6)
    assert close(delta(LAMB(trust=False), p, g, 0.1), -0.1 * adam)


@given(pairs())
def test_zero_ratio_decides_about_zero_tensors(pair: Any) -> None:
    p, g = pair
    if (g != 0).any():
        assert close(delta(LARS(), np.zeros_like(p), g, 0.1), -0.1 * g)
        assert close(delta(LARS(zero_ratio="eta"), np.zeros_like(p), g, 0.1), -0.1 * 1e-3 * g)


# ---- laws of all rules


every_case = pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)


@every_case
@given(data=st.data())
def test_inputs_are_left_alone_and_steps_are_finite(case: Case, data: Any) -> None:
    rule, (p, g) = case.rule(**data.draw(st.sampled_from(list(case.options.values())))), data.draw(pairs())
    s = rule.init(xp, p)
    for array in (p, g, *s.values()):
        array.flags.writeable = False
    with np.errstate(all="ignore"):
        update = rule.update(xp, g, s, p, t=1, lr=case.lr, noise=lambda: np.ones(p.shape))
    assert np.isfinite(update.delta).all()


@pytest.mark.slow
@every_case
def test_float32_follows_float64(case: Case) -> None:
    options = case.options["defaults"]
    for shape in SHAPES:
        p, grads = gradients(shape, 20)
        exact, _ = run(case.rule(**options), p, grads, lr=case.lr)
        rough, state = run(
            case.rule(**options), p.astype(np.float32), [g.astype(np.float32) for g in grads], lr=case.lr
        )
        assert rough.dtype == np.float32
        assert {entry.dtype for entry in state.values()} <= {np.dtype(np.float32)}
        assert np.abs(rough - exact).max() < FLOAT32 * np.abs(exact - p).max() + 4 * np.spacing(
            np.float32(np.abs(p).max())
        )


@pytest.mark.parametrize(("case", "description", "options"), OPTIONS, ids=OPTION_IDS)
def test_descends(case: Case, description: str, options: dict) -> None:
    """Every setting of every rule goes down a bowl around zero, or around a point of its norm if norms are kept."""
    rule, start = case.rule(**options), np.array([[3.0, -2.0, 1.0], [0.5, 4.0, -1.0], [1.5, -3.0, 2.0]])
    lowest = start[::-1] if options.get("keep_norms") else np.zeros_like(start)
    p, s = start, rule.init(xp, start)
    lr = 0.1 if options.get("trust") is False else case.lr  # without ratios, steps are as large as lr says
    for t in range(1, 61):
        update = rule.update(
            xp, p - lowest, s, p, t=t, lr=lr, noise=lambda t=t: np.random.default_rng(t).standard_normal(start.shape)
        )
        p, s = p + update.delta, update.state
    assert np.square(p - lowest).sum() < np.square(start - lowest).sum()


@every_case
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_empty_tensors_are_stepped_without_a_fuss(case: Case, shape: tuple) -> None:
    for options in case.options.values():
        p, state = run(case.rule(**options), np.zeros(shape), [np.zeros(shape)] * 3, lr=case.lr)
        assert p.shape == shape
        assert all(np.isfinite(entry).all() for entry in state.values())


@every_case
def test_a_zero_lr_moves_nothing(case: Case) -> None:
    for shape in SHAPES:
        p, grads = gradients(shape, 3)
        for description, options in case.options.items():
            if description in ("independent decay", "relative with cap"):
                continue  # these do not scale by lr alone: the names say so
            assert (run(case.rule(**options), p, grads, lr=0.0)[0] == p).all(), description


@pytest.mark.slow
@every_case
def test_stacked_slices_are_stepped_as_if_alone(case: Case) -> None:
    for description, options in case.options.items():
        if case.name == "Kron":
            if "geometry" in options and options["geometry"] == "eq":
                continue  # probes with noise, which depends on the position in the stack
            options = {**options, "damping_mode": "expected"}
        for shape in [(4,), (6, 4), (3, 4, 5)]:
            p, grads = gradients((3, *shape), 3)
            stacked, state = run(case.rule(stacked_axes=1, **options), p, grads, lr=case.lr)
            for i in range(3):
                alone, own = run(case.rule(**options), p[i], [g[i] for g in grads], lr=case.lr)
                assert close(stacked[i], alone), (description, shape)
                for key, entry in own.items():
                    whole = state[key]
                    part = whole if whole.ndim == entry.ndim else whole[i]
                    assert close(part, entry), (description, shape, key)


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [(case, options, message) for case in EVERY for options, message in case.refused],
    ids=lambda value: value.name if isinstance(value, Case) else str(value)[:40],
)
def test_bad_options_are_refused(case: Case, options: dict, message: str) -> None:
    with pytest.raises(OptionError) as error:
        case.rule(**options).validate()
    assert message in str(error.value)


def test_every_rule_has_a_row() -> None:
    assert {case.rule for case in EVERY} == set(RULES.values())
