"""State that comes from another front end, or goes to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import read_as
from thalweg.exchange import pack_state, read_state
from thalweg.rules import Rule
from thalweg.torch.base import Optimizer
from thalweg.torch.params.states import convert_count
from thalweg.torch.sharding.shards import whole


def export_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state of an optimizer for another front end, or for a file.

    ``thalweg.numpy``'s ``load_state_dict`` and ``thalweg.optax.import_state`` take it. What is sharded is
    brought together: every rank has to call it.
    """
    state = {
        name: {"step": to_numpy(convert_count(name, entries.get("step"))).astype("int64")}
        | {key: to_numpy(entry) for key, entry in entries.items() if key != "step"}
        for name, p, _ in optimizer._homes()
        if (entries := optimizer.state.get(p))
    }
    return pack_state(rules_by_name(optimizer), state)


@read_as("this state")
def import_state(optimizer: Optimizer, exported: Mapping[str, Any]) -> None:
    """Continue from what another front end exported. On any error nothing is changed."""
    rules = rules_by_name(optimizer)
    states = read_state(exported, rules, None if optimizer._groups.rules.are_mixed else optimizer.defaults)
    state = {
        place: {key: int(entry) if key == "step" else to_tensor(entry) for key, entry in states[name].items()}
        for place, name in enumerate(rules)
        if name in states
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def rules_by_name(optimizer: Optimizer) -> dict[str, type[Rule]]:
    return {name: optimizer._rule_of(optimizer.param_groups[index]) for name, _, index in optimizer._homes()}


def to_numpy(x: Tensor) -> Any:
    x = whole(x.detach()).cpu().contiguous().clone()
    if x.dtype != torch.bfloat16:
        return x.numpy()
    import ml_dtypes

    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def to_tensor(x: Any) -> Tensor:
    if str(x.dtype) == "bfloat16":
        return torch.tensor(x.view("int16")).view(torch.bfloat16)
    return torch.tensor(x)
