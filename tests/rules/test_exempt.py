"""exempt="vectors" leaves out tensors of fewer than two axes: no trust ratio, no decay. It is LAMB's default."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import thalweg.numpy

SHAPES = {"matrix": (3, 2), "vector": (3,), "scalar": (), "stack": (2, 3)}
both = pytest.mark.parametrize("name", ["LAMB", "LARS"])


def stepped(name: str, **options: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    params = {key: np.asarray(rng.standard_normal(shape)) for key, shape in SHAPES.items()}
    given = {"exempt": "vectors", **options} if "variant" not in options else options
    optimizer = getattr(thalweg.numpy, name)(lr=0.1, weight_decay=0.2, **given)
    for _ in range(3):
        optimizer.step(params, {key: np.asarray(rng.standard_normal(shape)) for key, shape in SHAPES.items()})
    return params


@both
def test_matrices_step_by_the_paper_and_all_else_without_ratio_and_decay(name: str) -> None:
    found, paper = stepped(name), stepped(name, variant="paper")
    plain = stepped(name, trust=False, exempt=None, overrides=[("*", dict(weight_decay=0.0))])
    for key in SHAPES:
        expected = (paper if len(SHAPES[key]) > 1 else plain)[key]
        assert np.array_equal(found[key], expected), key
        assert not np.array_equal(paper[key], plain[key])


@both
def test_slices_of_a_stack_count_by_their_own_axes(name: str) -> None:
    stacked = [("stack", dict(stacked_axes=1))]
    found = stepped(name, overrides=stacked)["stack"]
    assert np.array_equal(found, stepped(name, overrides=[("stack", dict(trust=False, weight_decay=0.0))])["stack"])
    assert not np.array_equal(found, stepped(name, variant="paper", overrides=stacked)["stack"])


@both
def test_an_entry_brings_one_back(name: str) -> None:
    found = stepped(name, overrides=[("vector", dict(exempt=None, weight_decay=0.2))])
    assert np.array_equal(found["vector"], stepped(name, variant="paper")["vector"])
    assert np.array_equal(found["scalar"], stepped(name)["scalar"])


@both
def test_what_is_said_by_name_holds_for_vectors_too(name: str) -> None:
    said = [("vector", dict(weight_decay=0.2))]
    found = stepped(name, overrides=said)["vector"]
    assert np.array_equal(found, stepped(name, overrides=[("vector", dict(exempt=None, trust=False))])["vector"])
    paper = stepped(name, overrides=[("*", dict(weight_decay=0.2, trust=True))])
    assert np.array_equal(paper["vector"], stepped(name, variant="paper")["vector"])


@both
def test_of_several_entries_the_last_holds_for_vectors_too(name: str) -> None:
    found = stepped(name, overrides=[("*", dict(weight_decay=0.5)), ("vector", dict(weight_decay=0.2))])["vector"]
    assert np.array_equal(found, stepped(name, overrides=[("vector", dict(weight_decay=0.2))])["vector"])


def test_defaults() -> None:
    assert (thalweg.numpy.LAMB(0.1).options["exempt"], thalweg.numpy.LARS(0.1).options["exempt"]) == ("vectors", None)
