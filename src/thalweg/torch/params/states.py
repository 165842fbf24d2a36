"""The state of a parameter, laid out over ranks like the parameter: before its first step, and when options change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thalweg.codecs import CODECS
from thalweg.errors import StateError
from thalweg.given import plain
from thalweg.rules.entries import Moment, Square
from thalweg.settings import EIGHT_BITS, Setting
from thalweg.spaces import torch as xp
from thalweg.spaces.foreach import TensorList
from thalweg.spaces.sharded import Sharded
from thalweg.storage import RECORD, arithmetic, coded_keys, converted, first_state, kept, keys_like_parameter
from thalweg.torch.sharding.codes import check_groups, placed
from thalweg.torch.sharding.factors import first_owned
from thalweg.torch.sharding.shards import ghost_of, is_distributed, local, part_of
from thalweg.trial import check_update


def first_entries(p: Tensor, setting: Setting, name: str) -> dict[str, Tensor]:
    """The state of a parameter before its first step, laid out over ranks like the parameter."""
    rule, handling = setting.rule_at(1), setting.handling
    check_update(rule, tuple(p.shape))
    if not is_distributed(p):
        return first_state(xp, rule, handling, p.detach())
    check_groups(name, p, rule, handling)
    part, held = part_of(name, p), local(p.detach())
    if rule.needs_whole:
        return first_owned(p, held, part, rule, handling)
    made = first_state(Sharded([part]), rule, handling, TensorList([held]))
    return placed(made, p, rule)


def expected_entries(setting: Setting, p: Tensor, name: str) -> dict[str, Tensor]:
    """A parameter's state as it would be, without its memory."""
    return first_entries(ghost_of(p), setting, name)


def as_found(setting: Setting, p: Tensor, s: Mapping[str, Tensor]) -> Setting:
    """The setting under which state is kept as this one is: in codes or not, with a record or not."""
    rule, handling, shape = setting.rule_at(1), setting.handling, tuple(p.shape)
    wanted = kept(rule, handling, shape, xp.dtype(p))
    coded = set(coded_keys(xp, dict(s)))
    if coded == {key for key in wanted if wanted[key][1] in CODECS} - {RECORD} and (RECORD in s) == (RECORD in wanted):
        return setting
    moments, squares = (bool(coded & set(rule.keys(shape, role))) for role in (Moment, Square))
    as_computed = handling.state_dtype if handling.state_dtype != EIGHT_BITS else None
    kept_as: dict[str, Any] = {
        "state_dtype": EIGHT_BITS if squares else as_computed,
        "momentum_dtype": EIGHT_BITS if moments else as_computed or arithmetic(xp.dtype(p)),
        "rounding": "compensated" if RECORD in s else "nearest",
    }
    return replace(setting, handling=replace(handling, **kept_as))


def is_count_tensor(step: Any) -> bool:
    """Whether this is a count of steps as engines read it."""
    return isinstance(step, Tensor) and step.dtype is torch.float32 and step.ndim == 0


def convert_count(name: str, step: Any) -> Tensor:
    """A count of steps, which may be a plain number or another tensor of one number, as engines read it."""
    if not isinstance(step, Tensor):
        step = plain(step)
        is_number = isinstance(step, (int, float)) and not isinstance(step, bool)
        is_valid = is_number and step >= 0 and float(step).is_integer()
    else:
        is_valid = step.numel() == 1
    if not is_valid:
        raise StateError(
            f"state['step'] of {name!r} must be a whole number >= 0, or a tensor of one, got {step!r}; to begin anew, "
            "call clear_state()"
        )
    return torch.as_tensor(step, dtype=torch.float32).reshape(()).clone()


def converted_entries(setting: Setting, p: Tensor, name: str, s: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State that is kept in other codes, or with another record, as these options keep it. It fits its parameter."""
    rule, space = setting.rule_at(1), Sharded([part_of(name, p)])
    concerned = keys_like_parameter(rule, tuple(p.shape), s)
    before = {key: TensorList([local(s[key])]) for key in concerned}
    after = converted(space, rule, setting.handling, TensorList([local(p.detach())]), before)
    new = {key: entry for key, entry in after.items() if entry is not before.get(key)}
    made = placed(new, p, rule) if is_distributed(p) else {key: entry.tensors[0] for key, entry in new.items()}
    return {**{key: entry for key, entry in s.items() if key not in concerned or key in after}, **made}
