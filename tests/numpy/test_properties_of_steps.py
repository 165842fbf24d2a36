"""Properties of whole steps, over arbitrary models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st
from raw_arrays import CASES, bits, fingerprint

pytestmark = pytest.mark.nightly  # test_whole_model.py and test_saved_files.py have one model

SHAPE = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NAME = st.one_of(st.integers(), st.text(max_size=3))
MODEL = st.dictionaries(NAME, st.tuples(SHAPE, st.sampled_from(["float16", "float32", "float64"])), max_size=4)


def arrays(shapes: dict[Any, Any], seed: int) -> dict[Any, Any]:
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 2)).astype(dtype)
        for name, (shape, dtype) in shapes.items()
    }


@given(case=st.sampled_from(list(CASES)), shapes=MODEL, seed=st.integers(0, 2**32 - 1), data=st.data())
def test_whole_name_by_name_and_in_any_order(case: str, shapes: dict[Any, Any], seed: int, data: Any) -> None:
    """Three ways to take the same steps, gradients missing here and there: bits are equal."""
    make, order = CASES[case], data.draw(st.permutations(list(shapes)))
    whole, single, turned = make(on_nonfinite="skip"), make(on_nonfinite="skip"), make(on_nonfinite="skip")
    first, second, third = (arrays(shapes, seed) for _ in range(3))
    for t in range(3):
        grads = arrays(shapes, seed + t + 1)
        missing = data.draw(st.sets(st.sampled_from(list(shapes)))) if shapes else set()
        present = {name: None if name in missing else g for name, g in grads.items()}
        whole.step(first, present)
        for name, weights in second.items():
            single.update(name, weights, present[name], shape=weights.shape)
        turned.step({name: third[name] for name in order}, {n: g for n, g in present.items() if g is not None})
    assert bits(first) == bits(second) == bits(third)
    assert fingerprint(whole) == fingerprint(single)
    assert bits(whole.state) == bits(turned.state)


@given(case=st.sampled_from(list(CASES)), shapes=MODEL, seed=st.integers(0, 2**32 - 1), at=st.integers(0, 4))
def test_resumed_from_a_state_dict(case: str, shapes: dict[Any, Any], seed: int, at: int) -> None:
    make = CASES[case]
    whole, broken = make(), make()
    first, second = arrays(shapes, seed), arrays(shapes, seed)
    for t in range(5):
        if t == at:
            resumed = make()
            resumed.load_state_dict(broken.state_dict())
            broken = resumed
        grads = arrays(shapes, seed + t + 1)
        whole.step(first, grads)
        broken.step(second, grads)
    assert bits(first) == bits(second)
    assert fingerprint(whole) == fingerprint(broken)
