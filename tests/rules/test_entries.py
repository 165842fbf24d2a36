"""What a rule declares of its state is what it makes and what it answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import OPTION_IDS, OPTIONS, SHAPES, Case

from thalweg.rules.entries import Count, Factor, PerSlice, Spread, Square
from thalweg.settings import STORAGE
from thalweg.spaces import numpy as xp


@pytest.mark.parametrize(("case", "description", "options"), OPTIONS, ids=OPTION_IDS)
def test_a_rule_makes_and_answers_what_it_declares(case: Case, description: str, options: dict[str, Any]) -> None:
    for shape in SHAPES:
        for stacked_axes in range(min(len(shape), 2)):
            rule = replace(case.rule(**options), stacked_axes=stacked_axes)
            p, entries = np.linspace(-1, 1, int(np.prod(shape))).reshape(shape), rule.entries(shape)
            state = rule.init(xp, p)
            with np.errstate(all="ignore"):
                update = rule.update(xp, p, state, p, t=1, lr=0.1, noise=lambda p=p: np.zeros_like(p))
            assert list(entries) == list(state)
            assert set(entries) == set(update.state)
            for key, entry in entries.items():
                found = state[key].shape
                assert np.shape(update.state[key]) == found
                assert set(entry.stored_by) <= set(STORAGE)
                if isinstance(entry, Spread):
                    assert found == tuple(1 if axis in entry.over else n for axis, n in enumerate(shape))
                if isinstance(entry, PerSlice | Count):
                    assert found == (() if isinstance(entry, Count) else entry.shape(shape, stacked_axes))
                assert not isinstance(entry, Square) or (np.asarray(update.state[key]) >= 0).all()
                assert isinstance(entry, Factor) or not state[key].any()
