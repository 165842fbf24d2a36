"""By which page each parameter of an optimizer of torch is to be stepped: ours, those of the table, and others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.audit.report import AuditError
from thalweg.given import plain
from thalweg.rules import RULES, AdamW, Rule, ScheduleFree, around
from thalweg.rules.around import EVALUATED
from thalweg.rules.schedule_free import weight_of
from thalweg.settings import Handling, ParameterOptions, combined, option_names
from thalweg.spaces import torch as xp
from thalweg.storage import RECORD, SPIKES, decoded
from thalweg.torch.base import Optimizer
from thalweg.torch.params.groups import homes_in
from thalweg.torch.peers import TABLE, Peer, names
from thalweg.torch.sharding.shards import whole

#: The table of those whose runs can be continued, and one whose steps can be audited alone.
KNOWN = (
    *TABLE,
    Peer(
        "schedulefree.AdamWScheduleFree",
        around(AdamW, ScheduleFree),  # type: ignore[type-abstract]
        names("eps weight_decay")
        | {
            "betas": lambda value, dtypes: {"betas": (0.0, value[1]), "schedule_free": value[0]},
            "warmup_steps": lambda value, dtypes: {"schedule_free_warmup": value or None},
        },
        names("z exp_avg_sq"),
        only={"r": 0.0, "weight_lr_power": 2.0},
    ),
)


class Treated(NamedTuple):
    """A parameter before a step, and what its page needs to step it."""

    name: str
    p: Tensor
    #: The index of its group.
    group: int
    setting: ParameterOptions
    lr: Any
    #: What multiplies the step size.
    factor: float
    #: The number of the coming step.
    t: int
    #: Its row in the table; None: ours, or known by its name, or by the page that was said.
    peer: Peer | None
    is_ours: bool
    #: Whether its page is that of its name.
    is_named: bool = False


def list_treated(optimizer: torch.optim.Optimizer, rule: Any) -> Iterator[Treated]:
    """What holds for each parameter before a step. rule: the page of all, or a function of name and parameter."""
    if isinstance(optimizer, Optimizer) and rule is None:
        for name, p, index, setting, lr, factor, _ in optimizer._treatments():
            t = int(optimizer.state.get(p, {}).get("step", 0)) + 1
            yield Treated(name, p, index, setting, lr, factor * setting.lr_scale, t, None, True)
        return
    for name, p, index in homes_in(optimizer.param_groups):
        if p.requires_grad:
            group, state = optimizer.param_groups[index], optimizer.state.get(p, {})
            peer = find_peer(optimizer, group) if rule is None else None
            setting = set_by(peer, group) if peer else set_by_name(optimizer, group, state, name, p, rule)
            count = int(state.get("step", group.get("step", group.get("k", len(state) > 0))))
            lr = None if group.get("relative_step") else plain(group["lr"])
            yield Treated(
                name,
                p,
                index,
                setting.for_shape(tuple(p.shape)),
                lr,
                1.0,
                count + 1,
                peer,
                False,
                peer is None and rule is None,
            )


def find_peer(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Peer | None:
    """The row of the table for a class, or for what it derives from."""
    called = [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(optimizer).__mro__]
    named = [peer for name in called for peer in KNOWN if peer.name == name][:1]
    # Adam with decoupled_weight_decay=True is AdamW
    rows = [peer for row in named for peer in (row, *KNOWN) if peer.keys == row.keys and peer.is_like(group)]
    if named and not rows:
        only = ", ".join(f"{key}={value!r}" for key, value in named[0].only.items())
        raise AuditError(f"of {named[0].name} it is known what a step is with {only}, and it has other options")
    return rows[0] if rows else None


def set_by(peer: Peer, group: Mapping[str, Any]) -> ParameterOptions:
    """The page of a row with the options of a group. torch takes the eps of the first parameter's dtype."""
    options: dict[str, Any] = dict(peer.always)
    for key, name in peer.options.items():
        options |= {name: group[key]} if isinstance(name, str) else name(group[key], [group["params"][0].dtype])
    return combined(ParameterOptions(peer.rule(), Handling()), {key: plain(value) for key, value in options.items()})


def set_by_name(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    name: str,
    p: Tensor,
    rule: Any,
) -> ParameterOptions:
    """The page that was said, or that of the name of a class that no table has: of that the first step alone."""
    kind = type(optimizer).__name__
    if rule is not None:
        page: Rule = rule if isinstance(rule, Rule) else rule(name, p)
        if state and (lacking := page.entries(tuple(p.shape)).keys() - state.keys()):
            raise AuditError(
                f"the page of {name!r} keeps {', '.join(sorted(lacking))}, and its state has {', '.join(state)}: audit "
                "the first step, before which there is no state"
            )
        return ParameterOptions(page, Handling())
    if state:
        raise AuditError(
            f"{kind} is in no table: audit its first step, before which all of its state is zero, or say its page, "
            "such as rule=thalweg.rules.AdamW(weight_decay=0.1), whose keys its state must have"
        )
    pages: dict[str, type[Rule]] = {**RULES, "Adam": AdamW}
    called = [page for page in sorted(pages, key=len, reverse=True) if page.lower() in kind.lower()]
    if not called:
        raise AuditError(f"{kind} is in no table, and has the name of none of our pages: say its page, rule=")
    options = {key: plain(value) for key, value in group.items() if key in option_names(pages[called[0]])}
    beside = {"decoupled": False} if called[0] == "Adam" else {}
    return combined(ParameterOptions(pages[called[0]](), Handling()), beside | options)


def name_state(one: Treated, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """State as its page names it and lays it out, as it is kept."""
    rule, p = one.setting.rule_at(1), one.p
    wanted = {
        key: entry.shape(tuple(p.shape), rule.stacked_axes) for key, entry in rule.entries(tuple(p.shape)).items()
    }
    found = {}
    for theirs, entry in state.items():
        key = one.peer.keys.get(theirs, theirs) if one.peer else theirs
        if isinstance(entry, Tensor) and key not in ("step", SPIKES) and (one.is_ours or key in wanted):
            x = whole(entry.detach())
            # ours keep an axis that was averaged, with size 1
            found[key] = x.reshape(wanted[key]) if x.numel() == math.prod(wanted.get(key, (-1,))) else x
    return found


def read_state(one: Treated, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """State in floating point: what the page is given."""
    entries, rule, y = name_state(one, state), one.setting.rule_at(1), whole(one.p.detach())
    if "z" in state and isinstance(rule, ScheduleFree):  # the x before the last step, of y = (1 - beta) z + beta x
        beta, z = float(rule.schedule_free), whole(state["z"].detach()).double()
        count = torch.tensor(one.t - 1.0, dtype=torch.float64)
        weight = float(weight_of(xp, count, rule.schedule_free_warmup))
        x = (y.double() - (1 - beta) * z) / beta
        entries[EVALUATED] = (x - weight * z) / (1 - weight) if weight < 1 else y
        entries["exp_avg"] = torch.zeros_like(z)
    found = decoded(xp, rule, y, entries) if entries else {}
    return {key: entry for key, entry in found.items() if key != RECORD}
