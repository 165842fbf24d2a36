"""Kron through the torch front end equals kron-torch, with the noise made equal."""

from __future__ import annotations

import pytest

pytest.importorskip("torch.nn")
from published_runs import error, kron_torch_run, torch_peer
from tolerances import FLOAT64

pytestmark = pytest.mark.nightly  # through the numpy front end, make test has it


@pytest.mark.parametrize("engine", ["reference", "foreach"])
@pytest.mark.parametrize(
    ("options", "published"),
    [({}, {}), (dict(max_skew=1.0), dict(memory_save_mode="smart_one_diag"))],
    ids=["defaults", "one-sided"],
)
def test_equals_kron_torch(options: dict, published: dict, engine: str) -> None:
    from thalweg.torch import Kron

    with pytest.MonkeyPatch.context() as patch:
        params, grads, theirs = kron_torch_run(patch, **published)
    options = {"precond_update_probability": 1.0, **options}

    def make(p: list) -> Kron:
        named = [(f"p{i}", q) for i, q in enumerate(p)]
        return Kron(named, lr=0.01, variant="kron_torch", engine=engine, **options)

    assert error(torch_peer(make, params, grads), theirs, params) < FLOAT64
