"""Rules equal the published optimizers that their rows of test cases name."""

from __future__ import annotations

from typing import Any

import pytest
from cases import CASES, Case
from published_runs import error, optax_peer, ours, peer, problem, torch_peer
from tolerances import FLOAT64

import thalweg.numpy

ROWS = [
    pytest.param(case, *row, id=f"{case.name}-{description}")
    for case in CASES
    for description, row in case.published.items()
]


@pytest.mark.parametrize(("case", "name", "options", "published"), ROWS)
def test_equals_what_is_published(case: Case, name: str, options: dict[str, Any], published: dict[str, Any]) -> None:
    module, _, attribute = name.rpartition(".")
    make: Any = getattr(peer(module), attribute)
    params, grads = problem()
    mine = ours(thalweg.numpy.optimizer(case.rule)(lr=0.01, **options), params, grads)
    if module.startswith("optax"):
        theirs = optax_peer(make(0.01, **published), params, grads)
        same = getattr(pytest.importorskip("thalweg.optax"), attribute)(0.01, **published)
        assert error(optax_peer(same, params, grads), theirs, params) < FLOAT64
    else:
        theirs = torch_peer(lambda p: make(p, lr=0.01, **published), params, grads)
    assert error(mine, theirs, params) < FLOAT64
