"""accelerate: on two ranks what one process learns, resumed in the middle, with overrides by name; averages."""

from __future__ import annotations

from pathlib import Path

import accelerate
import pytest
import torch
from tolerances import WORLD_TRAINED
from world import world
from world_accelerate import alone, batch, network, optimizer_of, together


@pytest.mark.slow
@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_ranks_learn_what_one_process_learns(way: str, tmp_path: Path) -> None:
    expected = alone()
    for sharded, found in world(2).run(together, way, str(tmp_path)):
        assert sharded == (way == "FSDP2")
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=WORLD_TRAINED)


def test_averages_are_evaluated_and_saved_through_what_prepare_returns(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    net = network()
    model, optimizer = accelerator.prepare(net, optimizer_of(net))
    accelerator.backward(model(batch(0)).square().mean())
    optimizer.step()
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.eval()
    averages = [p.detach().clone() for p in model.parameters()]
    assert not torch.equal(weights[0], averages[0])
    accelerator.save_state(str(tmp_path))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    accelerator.load_state(str(tmp_path))
    assert all(map(torch.equal, model.parameters(), averages))
    optimizer.train()
    assert all(map(torch.equal, model.parameters(), weights))
    with optimizer.optimizer.averaged(model):
        assert all(map(torch.equal, model.parameters(), averages))
