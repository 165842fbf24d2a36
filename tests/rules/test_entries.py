"""What a rule declares of its state is what it makes and what it answers; nobody else knows its keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import EVERY, SHAPES, Case

from thalweg.rules import Adafactor
from thalweg.rules.entries import Count, Factor, Moment, PerSlice, Spread, Square
from thalweg.settings import STORAGE
from thalweg.spaces import numpy as xp


def every_entry() -> list[Any]:
    """(rule, shape, entries) for every rule, its options and some shapes, stacked and not."""
    found = []
    for case in EVERY:
        for options in case.options.values():
            for shape in SHAPES:
                rule = case.rule(**options)
                for stacked in (rule, replace(rule, stacked_axes=1)) if len(shape) > 1 else (rule,):
                    found.append((stacked, shape, stacked.entries(shape)))
    return found


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_a_rule_makes_and_answers_what_it_declares(case: Case) -> None:
    for rule, shape, entries in every_entry():
        if type(rule) is not case.rule:
            continue
        p = np.linspace(-1, 1, int(np.prod(shape))).reshape(shape)
        state = rule.init(xp, p)
        noise = np.zeros_like(p)
        with np.errstate(all="ignore"):
            update = rule.update(xp, p, state, p, t=1, lr=0.1, noise=lambda noise=noise: noise)
        assert list(entries) == list(state)
        assert set(entries) == set(update.state)
        for key, entry in entries.items():
            assert np.shape(update.state[key]) == state[key].shape
            if isinstance(entry, Spread):
                assert state[key].shape == tuple(1 if axis in entry.over else n for axis, n in enumerate(shape))
            if isinstance(entry, PerSlice):
                assert state[key].shape == entry.shape(shape, rule.stacked_axes)
            if isinstance(entry, Count):
                assert state[key].shape == ()
            if isinstance(entry, Square):
                assert (np.asarray(update.state[key]) >= 0).all()
            if not isinstance(entry, Factor):
                assert not state[key].any()


def test_roles_are_asked_for_by_shape() -> None:
    rule = Adafactor(min_dim_size_to_factor=2, momentum=0.9)
    assert rule.keys((3,), Square) == ["variance"]
    assert rule.keys((3, 4), Square) == ["row_var", "col_var"]
    assert rule.keys((3, 4), Moment) == ["exp_avg"]
    assert rule.keys((3, 4), Factor) == []


def test_what_stores_an_entry_is_an_option() -> None:
    for _, _, entries in every_entry():
        assert {option for entry in entries.values() for option in entry.stored_by} <= set(STORAGE)
