"""FullyShardedDataParallel flattens parameters into one: layer-wise norms are gone, and we say what to use."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from world import world  # noqa: E402
from world_faults import refusal_of_fsdp1  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.errors import ParameterError  # noqa: E402

OPTIMIZERS = pytest.mark.parametrize("optimizer", ["LARS", "LAMB", "Adafactor", "Kron"])


@OPTIMIZERS
@pytest.mark.parametrize("mark", ["_is_flat_param", "_fsdp_flattened"])
def test_parameters_that_were_flattened_are_refused(optimizer: str, mark: str) -> None:
    p = torch.nn.Parameter(torch.ones(12))
    setattr(p, mark, True)
    with pytest.raises(ParameterError, match=r"'weight' belongs to FullyShardedDataParallel.*use .*fully_shard"):
        getattr(thalweg.torch, optimizer)([("weight", p)], lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("whole_names", [False, True])
def test_fsdp1_itself_is_refused(whole_names: bool) -> None:
    for said in world(2).run(refusal_of_fsdp1, whole_names):
        assert "use torch.distributed.fsdp.fully_shard (FSDP2) instead" in said
