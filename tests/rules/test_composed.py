"""What is put around a rule: equal to plain loops in float64, in numpy; what is refused; one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from composed import (
    RULES,
    STEPS,
    Damped,
    averaged,
    case_of,
    damped,
    draw,
    pairs,
    take_steps,
)
from tolerances import FLOAT64

import thalweg.numpy
from thalweg import Moment, OptionError, ResumeWarning, RuleError, StateError
from thalweg.rules import Adafactor, AdamW, Around, Cautious, Kron, Muon, around


def error(found: Any, wanted: Any) -> float:
    return float(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted - draw(0))))


def train(rule: type[Any], lr: float, options: Any, engine: Any = "auto") -> tuple[Any, Any, Any]:
    optimizer = thalweg.numpy.optimizer(rule)(lr=lr, engine=engine, **options)
    params = {"w": draw(0)}
    for t in range(1, STEPS + 1):
        optimizer.step(params, {"w": draw(t)})
    return optimizer, params, optimizer.state["w"]


@pytest.mark.parametrize(("name", "what"), pairs())
def test_it_is_a_plain_loop(name: str, what: str) -> None:
    rule, lr, options, wanted = case_of(name, what)
    optimizer, params, _ = train(type(rule), lr, options, "reference")
    assert error(params["w"], wanted["p"]) < FLOAT64
    if evaluated := wanted.keys() & {"average", "x"}:
        before = params["w"].copy()
        with optimizer.averaged(params):
            assert error(params["w"], wanted[evaluated.pop()]) < FLOAT64
        assert np.array_equal(params["w"], before)


# ---- what is refused


REFUSED = [
    (dict(cautious="decay", decoupled=False), "cautious='decay' needs decay that is apart from the step"),
    (dict(cautious="decay", weight_decay=0.0), "cautious='decay' has no effect here: it needs a weight_decay above 0"),
    (dict(averaged="mean", averaged_warmup=True), "averaged_warmup=True is for a decay"),
    (dict(averaged_from=10), "averaged_from=10 has no effect here: it needs averaged=0.9999"),
    (dict(schedule_free_warmup=10), "schedule_free_warmup=10 has no effect here: it needs schedule_free=True"),
    (dict(schedule_free=True), r"schedule_free takes the place of momentum: beside it, write betas=\(0, 0.999\)"),
    (dict(schedule_free=True, betas=(0.0, 0.9), averaged=0.9), "schedule_free keeps an average already"),
    (dict(schedule_free=lambda t: 0.9, betas=(0.0, 0.9)), "schedule_free cannot be a function of the step"),
    (dict(graft="sgd"), "graft must be a rule that goes element by element, such as .*, got 'sgd'"),
]


@pytest.mark.parametrize(("options", "told"), REFUSED, ids=[told[:50] for _, told in REFUSED])
def test_what_cannot_be_is_refused(options: Any, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        thalweg.numpy.AdamW(lr=0.1, **options)


def test_a_grafted_rule_without_a_rate_of_its_own_needs_one() -> None:
    with pytest.raises(OptionError, match=r"graft=AdamW\(\) needs a learning rate: give lr a number"):
        thalweg.numpy.Adafactor(graft=AdamW())
    assert thalweg.numpy.Adafactor(graft=Adafactor()).lr is None


def test_norms_that_are_kept_are_not_changed_afterwards() -> None:
    for options in (dict(cautious=True), dict(graft=AdamW())):
        with pytest.raises(OptionError, match="changes the step after keep_norms=True"):
            thalweg.numpy.LAMB(lr=0.1, keep_norms=True, **options)
    with pytest.raises(OptionError, match="are the same: leave out cautious_decay"):
        thalweg.numpy.Muon(lr=0.1, weight_decay=0.1, cautious="both", cautious_decay=True)


def test_averages_are_asked_for() -> None:
    plain = thalweg.numpy.AdamW(lr=0.1)
    with pytest.raises(OptionError, match="no parameter has an average"), plain.averaged({"w": draw(0)}):
        pass
    optimizer, params, _ = train(AdamW, 0.1, dict(averaged=0.5), "reference")
    before = params["w"].copy()
    with pytest.raises(OptionError, match="a step within averaged"), optimizer.averaged(params):
        optimizer.step(params, {"w": draw(1)})
    assert np.array_equal(params["w"], before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_average_of_narrow_parameters_is_wide_and_of_the_weights_that_were(dtype: str) -> None:
    pytest.importorskip("ml_dtypes")
    p = draw(0).astype(dtype)
    optimizer = thalweg.numpy.AdamW(lr=0.01, averaged=0.5, state_dtype="bfloat16", engine="reference")
    wanted = p.astype(np.float32)
    for t in range(1, 4):
        assert t == 1 or np.array_equal(optimizer.state["w"]["average"], wanted)
        wanted = wanted + np.float32(0.5) * (p.astype(np.float32) - wanted)
        optimizer.step({"w": p}, {"w": draw(t).astype(dtype)})
    assert optimizer.state["w"]["average"].dtype == np.float32
    assert np.array_equal(optimizer.state["w"]["average"], wanted)


def test_an_average_is_of_the_weights_as_the_caller_has_left_them() -> None:
    optimizer, params, wanted = thalweg.numpy.SGD(lr=0.1, averaged=0.5), {"w": draw(0)}, draw(0)
    for t in range(1, 5):
        optimizer.step(params, {"w": draw(t)})
        np.maximum(params["w"], 0.0, out=params["w"])
        wanted = 0.5 * wanted + 0.5 * params["w"]
    with optimizer.averaged(params):
        assert error(params["w"], wanted) < FLOAT64


def test_a_parameter_without_a_gradient_has_the_average_of_its_own_steps() -> None:
    optimizer, params, averages = thalweg.numpy.SGD(lr=0.1, averaged=0.5), {"w": draw(0), "rests": draw(0)}, []
    for t in range(1, 5):
        optimizer.step(params, {"w": draw(t), "rests": None if t > 2 else draw(t)})
        with optimizer.averaged(params):
            averages.append(params["rests"].copy())
    assert not np.array_equal(averages[0], averages[1])
    assert not np.array_equal(averages[1], params["rests"])
    assert np.array_equal(averages[2], averages[1])
    assert np.array_equal(averages[3], averages[1])


# ---- one's own


@pytest.mark.parametrize("name", ["SGD", "LAMB", "Muon", "Kron", "SOAP"])
def test_one_of_ones_own(name: str) -> None:
    rule, lr = RULES[name]
    options = {key: value for key, value in vars(rule).items() if value != vars(type(rule)())[key]}
    made = around(type(rule), Damped)
    engine = "fused" if name == "SGD" else "reference"
    _, params, _ = train(made, lr, dict(options, memory=0.8), engine)
    assert error(params["w"], take_steps(rule, lr, damped(0.8))["p"]) < FLOAT64


def test_one_of_ones_own_goes_with_ours() -> None:
    made = around(AdamW, Damped)
    optimizer, params, _ = train(made, 0.05, dict(averaged=0.7, weight_decay=0.1), "reference")
    by_hand, kept = damped(0.9), averaged(0.7)

    def after(t: int, p: Any, g: Any, step: Any, decay: Any, own: Any) -> Any:
        return kept(t, p, g, by_hand(t, p, g, step, decay, own) - p, 0.0, own)

    wanted = take_steps(AdamW(weight_decay=0.1), 0.05, after)
    assert error(params["w"], wanted["p"]) < FLOAT64
    with optimizer.averaged(params):
        assert error(params["w"], wanted["average"]) < FLOAT64


@pytest.mark.parametrize("rule", [AdamW, Muon])
def test_the_rule_sees_a_changed_gradient(rule: Any) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Bounded(Around):
        def change_gradient(self, xp: Any, g: Any, s: Any, p: Any, *, t: Any) -> Any:
            return xp.maximum(xp.minimum(g, 0.5), -0.5)

    _, params, _ = train(around(rule, Bounded), 0.05, {}, "reference")
    optimizer, wanted = thalweg.numpy.optimizer(rule)(lr=0.05, engine="reference"), {"w": draw(0)}
    for t in range(1, STEPS + 1):
        optimizer.step(wanted, {"w": np.clip(draw(t), -0.5, 0.5)})
    assert error(params["w"], wanted["w"]) < FLOAT64


def test_what_does_not_go_together_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twice(Around):
        betas: float = 0.5

    @dataclass(frozen=True, kw_only=True)
    class Taken(Around):
        def extra_entries(self, shape: Any) -> Any:
            return {"exp_avg": Moment()}

    with pytest.raises(RuleError, match="'betas' is a name in two of AdamW and what is around it"):
        around(AdamW, Twice)
    with pytest.raises(RuleError, match="keeps 'exp_avg' twice, for the rule and around it"):
        around(AdamW, Taken)().entries((3,))
    with pytest.raises(RuleError, match="give each once"):
        around(AdamW, Cautious, Cautious)
    with pytest.raises(RuleError, match=r"derived from thalweg\.rules\.Around, got"):
        around(AdamW, Kron)  # type: ignore[arg-type]


def test_a_run_that_gains_an_average_begins_it_and_one_that_loses_it_is_refused() -> None:
    plain, params, _ = train(AdamW, 0.1, {}, "reference")
    again = thalweg.numpy.AdamW(lr=0.1, averaged=0.7, engine="reference")
    again.load_state_dict(plain.state_dict())
    before = params["w"].copy()
    with pytest.warns(ResumeWarning, match="'average' of 'w' is new and begins with this step"):
        again.step(params, {"w": draw(1)})
    wanted = 0.7 * before + 0.3 * params["w"]
    with again.averaged(params):
        assert np.allclose(params["w"], wanted, rtol=1e-12)
    with pytest.raises(StateError, match=r"'w' does not fit its options: .*'average'"):
        plain.load_state_dict(again.state_dict())
