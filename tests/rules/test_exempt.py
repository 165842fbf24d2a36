"""exempt="vectors" leaves out tensors of fewer than two axes: no trust ratio, no decay. It is LAMB's default."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import thalweg.numpy
import thalweg.rules

SHAPES = {"matrix": (3, 2), "vector": (3,), "scalar": (), "stack": (2, 3)}
both = pytest.mark.parametrize("name", ["LAMB", "LARS"])


def stepped(name: str, *overrides: Any, **options: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    params = {key: np.asarray(rng.standard_normal(shape)) for key, shape in SHAPES.items()}
    given = {"exempt": "vectors", **options} if "variant" not in options else options
    optimizer = getattr(thalweg.numpy, name)(lr=0.1, weight_decay=0.2, overrides=list(overrides), **given)
    for _ in range(3):
        optimizer.step(params, {key: np.asarray(rng.standard_normal(shape)) for key, shape in SHAPES.items()})
    return {key: p.tolist() for key, p in params.items()}


@both
def test_matrices_step_by_the_paper_and_all_else_without_ratio_and_decay(name: str) -> None:
    found, paper = stepped(name), stepped(name, variant="paper")
    plain = stepped(name, ("*", dict(weight_decay=0.0)), trust=False, exempt=None)
    for key in SHAPES:
        assert found[key] == (paper if len(SHAPES[key]) > 1 else plain)[key], key
        assert paper[key] != plain[key]


@both
def test_slices_of_a_stack_count_by_their_own_axes(name: str) -> None:
    stacked = ("stack", dict(stacked_axes=1))
    found = stepped(name, stacked)["stack"]
    assert found == stepped(name, ("stack", dict(trust=False, weight_decay=0.0)))["stack"]
    assert found != stepped(name, stacked, variant="paper")["stack"]


@both
def test_what_is_said_by_name_holds_for_vectors_too_and_the_last_wins(name: str) -> None:
    paper = stepped(name, variant="paper")["vector"]
    brought_back = stepped(name, ("vector", dict(exempt=None, weight_decay=0.2)))
    assert brought_back["vector"] == paper == stepped(name, ("*", dict(weight_decay=0.2, trust=True)))["vector"]
    assert brought_back["scalar"] == stepped(name)["scalar"]
    decayed = stepped(name, ("vector", dict(weight_decay=0.2)))["vector"]
    assert decayed == stepped(name, ("vector", dict(exempt=None, trust=False)))["vector"]
    assert decayed == stepped(name, ("*", dict(weight_decay=0.5)), ("vector", dict(weight_decay=0.2)))["vector"]


@both
def test_a_graft_leaves_out_vectors_too(name: str) -> None:
    graft = getattr(thalweg.rules, name)(exempt="vectors")
    for shape in SHAPES.values():
        p, g = np.full(shape, 2.0), np.full(shape, 0.5)
        alone, grafted = {"p": p.copy()}, {"p": p.copy()}
        getattr(thalweg.numpy, name)(lr=0.1, exempt="vectors").step(alone, {"p": g})
        thalweg.numpy.AdamW(lr=0.1, weight_decay=0.0, graft=graft).step(grafted, {"p": g})
        np.testing.assert_allclose(grafted["p"], alone["p"], rtol=1e-12)


def test_defaults() -> None:
    assert (thalweg.numpy.LAMB(0.1).options["exempt"], thalweg.numpy.LARS(0.1).options["exempt"]) == ("vectors", None)
