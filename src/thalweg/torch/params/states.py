"""The state of a parameter before its first step, laid out over ranks like the parameter."""

from __future__ import annotations

from torch import Tensor

from thalweg.settings import Setting
from thalweg.spaces import torch as xp
from thalweg.spaces.foreach import TensorList
from thalweg.spaces.sharded import Sharded
from thalweg.storage import first_state
from thalweg.torch.sharding.factors import first_owned
from thalweg.torch.sharding.shards import ghost_of, is_distributed, local, part_of, placed_like
from thalweg.trial import check_update


def first_entries(p: Tensor, setting: Setting, name: str) -> dict[str, Tensor]:
    """The state of a parameter before its first step, laid out over ranks like the parameter."""
    rule, handling = setting.rule_at(1), setting.handling
    check_update(rule, tuple(p.shape))
    if not is_distributed(p):
        return first_state(xp, rule, handling, p.detach())
    part, held = part_of(name, p), local(p.detach())
    if rule.needs_whole:
        return first_owned(p, held, part, rule, handling)
    made = first_state(Sharded([part]), rule, handling, TensorList([held]))
    return {key: placed_like(entry.tensors[0], p, getattr(entry, "axes", ())) for key, entry in made.items()}


def expected_entries(setting: Setting, p: Tensor, name: str) -> dict[str, Tensor]:
    """A parameter's state as it would be, without its memory."""
    return first_entries(ghost_of(p), setting, name)
