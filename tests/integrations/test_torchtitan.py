"""torchtitan's container of optimizers with rules by name, from its configuration to its checkpoints."""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import Configurable, OverrideConfig, apply_overrides

from thalweg import OptionError
from thalweg.rules import LAMB


@dataclass(kw_only=True, slots=True)
class Job(Configurable.Config):
    """As much of a job's configuration as overrides look at."""

    optimizer: OptimizersContainer.Config


class Own(LAMB):
    """A rule that torchtitan is told of by where it is."""


def built(model: nn.Module, **names: str) -> Any:
    """An optimizer made as torchtitan makes it. names: of optimizers, by what they step."""
    groups = [
        ParamGroupConfig(pattern=r"bias$", optimizer_name=names["vectors"], optimizer_kwargs=dict(lr=0.01)),
        ParamGroupConfig(pattern=r".*", optimizer_name=names["matrices"], optimizer_kwargs=dict(lr=0.1)),
    ]
    beside = {names["matrices"]: dict(overrides=[("1.*", dict(lr_scale=0.5))])}
    given = OptimizersContainer.Config(param_groups=groups, optimizer_factory_kwargs_by_name=beside)
    job = Job(optimizer=given)
    apply_overrides(OverrideConfig(imports=["thalweg.integrations.torchtitan.optimizers"]), job)
    return job.optimizer.build(model_parts=[model])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()


def test_rules_are_found_by_name_and_resume_by_the_names_of_parameters() -> None:
    names = dict(vectors="AdamW", matrices="thalweg.Kron")
    model, again = network(), network()
    optimizer, resumed = built(model, **names), built(again, **names)
    adamw, kron = optimizer.optimizers
    assert isinstance(adamw, torch.optim.AdamW)
    assert kron.param_groups[0]["param_names"] == ["0.weight", "1.weight"]
    assert not kron.explain().unused_overrides
    train(model, optimizer, 2)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    train(model, optimizer, 2)
    train(again, resumed, 2)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_rule_of_ones_own_is_named_by_module_and_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_rules", sys.modules[__name__])
    optimizer = built(network(), vectors="thalweg.AdamW", matrices="own_rules:Own")
    assert [own.rule.__name__ for own in optimizer.optimizers] == ["AdamW", "Own"]


def test_a_name_that_is_not_known_is_answered_with_those_that_are() -> None:
    with pytest.raises(OptionError, match=r"no optimizer 'thalweg.Lamb'; there are .*thalweg\.LAMB"):
        built(network(), vectors="AdamW", matrices="thalweg.Lamb")
    with pytest.raises(NotImplementedError, match="Optimizer LAMB not added"):
        built(network(), vectors="AdamW", matrices="LAMB")
