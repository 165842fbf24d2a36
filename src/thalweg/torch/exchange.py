"""State that comes from another front end, or goes to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thalweg.exchange import check_exchanged, entries_of, pack_state
from thalweg.rules import Rule
from thalweg.torch.base import Optimizer
from thalweg.torch.params.states import convert_count
from thalweg.torch.sharding.shards import whole


def export_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state of an optimizer for another front end, or for a file.

    ``thalweg.numpy``'s ``load_state_dict`` and ``thalweg.optax.import_state`` take it. What is sharded is
    brought together: every rank has to call it.
    """
    found = {
        name: {"step": to_numpy(convert_count(name, state.get("step"))).astype("int64")}
        | {key: to_numpy(entry) for key, entry in state.items() if key != "step"}
        for name, p, _ in optimizer._homes()
        if (state := optimizer.state.get(p))
    }
    last = max((int(entries["step"]) for entries in found.values()), default=0)
    rule = getattr(optimizer, "rule", None) or rules_by_name(optimizer)
    return pack_state(rule, found, iteration=last)


def import_state(optimizer: Optimizer, exported: Mapping[str, Any]) -> None:
    """Continue from what another front end exported. On any error nothing is changed."""
    rule, by_name = getattr(optimizer, "rule", None), rules_by_name(optimizer)
    check_exchanged(exported, rule or by_name.values(), by_name.get, None if rule is None else optimizer.defaults)
    places = {name: place for place, name in enumerate(by_name)}
    state = {
        places[name]: {key: to_tensor(entry) for key, entry in entries.items()}
        for name, entries in entries_of(exported, list(by_name)).items()
    }
    optimizer._load({"state": state, "param_groups": optimizer.state_dict()["param_groups"]}, imported=True)


def rules_by_name(optimizer: Optimizer) -> dict[str, type[Rule]]:
    return {name: optimizer._rule_of(optimizer.param_groups[index]) for name, _, index in optimizer._homes()}


def to_numpy(x: Tensor) -> Any:
    x = whole(x.detach()).cpu().contiguous().clone()
    if x.dtype != torch.bfloat16:
        return x.numpy()
    import ml_dtypes

    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def to_tensor(x: Any) -> Tensor:
    if str(getattr(x, "dtype", "")) == "bfloat16":
        return torch.tensor(x.view("int16")).view(torch.bfloat16)
    return torch.tensor(x)
