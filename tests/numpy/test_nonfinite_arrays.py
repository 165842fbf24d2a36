"""Steps that are not finite: let through, left out, or refused. tests/engines has every engine."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from raw_arrays import Make, bits, copies, every_case, fingerprint, gradients, model, refused

from thalweg.errors import NonFiniteError
from thalweg.numpy import LARS, Kron

NAME = "encoder.0.weight"
#: The last is finite, and its square is not.
POISONS = [np.nan, np.inf, -np.inf, 1e25]


def poisoned(gradient: Any, poison: float) -> Any:
    bad = gradient.copy()
    bad[(-1,) * bad.ndim] = poison
    return bad


class TestPropagate:
    @every_case
    def test_by_default_numbers_go_through_and_numpy_stays_silent(self, make: Make) -> None:
        """Warnings are errors here: none may escape."""
        for poison in POISONS:
            optimizer, params = make(), model()
            for step in gradients(2):
                optimizer.step(params, {name: poisoned(g, poison) if g.size else g for name, g in step.items()})
            assert optimizer.state[NAME]["step"] == 2
            assert set(optimizer.skipped.values()) == {0}
            assert np.isnan(params[NAME][-1, -1]) or not np.isnan(poison)


class TestSkip:
    @every_case
    @pytest.mark.parametrize("at", [0, 2], ids=["first step", "later step"])
    def test_the_run_goes_on_as_if_that_step_had_never_been_asked_for(self, make: Make, at: int) -> None:
        """However often it was; the others are stepped."""
        optimizer, twin = make(on_nonfinite="skip"), make()
        params, untouched = model(), model()
        poisons = POISONS[:3] if optimizer.rule.needs_whole else POISONS  # factors whiten what is huge
        for t, step in enumerate(gradients(4)):
            for count, poison in enumerate(poisons if t == at else (), 1):
                before = bits(params[NAME]), bits(optimizer.state.get(NAME, {}))
                optimizer.update(NAME, params[NAME], poisoned(step[NAME], poison))
                assert bits(params[NAME]) == before[0]
                assert t == 0 or bits(optimizer.state[NAME]) == before[1]
                assert optimizer.skipped[NAME] == count
                assert optimizer.state[NAME]["step"] == t
            optimizer.step(params, step)
            twin.step(untouched, step)
        assert bits(params) == bits(untouched) != bits(model())
        assert bits(optimizer.state) == bits(twin.state)

    def test_one_slice_of_a_stack_is_enough(self) -> None:
        optimizer, weights = LARS(1.0, on_nonfinite="skip", stacked_axes=1), np.ones((3, 4))
        optimizer.update(NAME, weights, poisoned(np.ones((3, 4)), np.inf))
        assert (weights == 1).all()


class TestRaise:
    @every_case
    def test_nothing_of_the_whole_step_is_changed(self, make: Make) -> None:
        optimizer, params, grads = make(on_nonfinite="raise"), model(), gradients(3)
        with refused(NonFiniteError, f"parameter '{NAME}', step 1", optimizer, params):
            optimizer.update(NAME, params[NAME], poisoned(grads[0][NAME], np.nan))
        optimizer.step(params, grads[0])
        twin, untouched = optimizer.copy(), copies(params)
        for name, poison in itertools.product((NAME, "conv"), POISONS):  # the first, and one behind others
            bad = {**grads[1], name: poisoned(grads[1][name], poison)}
            with refused(NonFiniteError, f"parameter '{name}', step 2", optimizer, params, bad):
                optimizer.step(params, bad)
        optimizer.step(params, grads[2])
        twin.step(untouched, grads[2])
        assert bits(params) == bits(untouched)
        assert fingerprint(optimizer) == fingerprint(twin)

    def test_the_one_to_blame_is_named_under_clipping_too(self) -> None:
        optimizer, params = LARS(1.0, max_grad_norm=1.0, on_nonfinite="raise"), {n: np.ones(3) for n in "abc"}
        bad = {"a": np.ones(3), "b": np.full(3, np.nan), "c": np.full(3, 1e200)}
        with refused(NonFiniteError, r"not finite.*\['b', 'c'\]", optimizer, params, bad):
            optimizer.step(params, bad)


def test_state_that_does_not_fit_its_dtype_brings_no_warning() -> None:
    optimizer, weights = LARS(1.0, state_dtype="float16", trust=False), np.ones(3, "float32")
    optimizer.update(NAME, weights, np.full(3, 1e6, "float32"))
    assert np.isinf(optimizer.state[NAME]["momentum_buffer"]).all()
    Kron(0.1, init_scale=1e10, precond_dtype="float16").update(NAME, np.ones((3, 2)), np.ones((3, 2)))


def test_nor_do_the_nans_of_a_loaded_state_of_another_dtype() -> None:
    """Of all NaNs, half are signalling: processors may report an invalid value where those are widened."""
    size = 2**16
    optimizer = LARS(1.0, state_dtype="float16")
    optimizer.update(NAME, np.ones(size, "float32"), np.ones(size, "float32"))
    saved = optimizer.state_dict()
    saved["state"][NAME]["momentum_buffer"] = np.arange(size, dtype=np.uint16).view("float16")
    wide = LARS(1.0)
    wide.load_state_dict(saved)
    wide.update(NAME, np.ones(size, "float32"), np.ones(size, "float32"))
    assert wide.state[NAME]["momentum_buffer"].dtype == "float32"
    assert np.isnan(wide.state[NAME]["momentum_buffer"]).sum() == 2 * (2**10 - 1)
