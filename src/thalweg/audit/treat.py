"""By which page each parameter of an optimizer of torch is to be stepped: ours, those of the table, and others."""

from __future__ import annotations

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
from thalweg.storage import SPIKES, decoded
from thalweg.torch.base import Optimizer
from thalweg.torch.params.groups import homes_in
from thalweg.torch.peers import AVERAGED_OVER, TABLE, Peer, names
from thalweg.torch.sharding.shards import whole

#: Other optimizers that can be audited at any step, though no run of theirs can be continued.
MORE = (
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


class Treatment(NamedTuple):
    """A parameter, and what the page needs to step it."""

    name: str
    p: Tensor
    group: int
    setting: ParameterOptions
    lr: Any
    #: What multiplies the step size.
    factor: float
    #: The number of the coming step, and its state by the names of the page.
    t: int
    state: Mapping[str, Tensor]
    #: What this is known from: "" of ours, else its row in the table or its name.
    known_as: str = ""


def treatments(optimizer: torch.optim.Optimizer, rule: Any = None) -> Iterator[Treatment]:
    """What holds for each parameter before a step. rule: the page of all, or a function of name and parameter."""
    if isinstance(optimizer, Optimizer) and rule is None:
        for name, p, index, setting, lr, factor, _ in optimizer._treatments():
            state = optimizer.state.get(p, {})
            t = int(state.get("step", 0)) + 1
            yield Treatment(name, p, index, setting, lr, factor * setting.lr_scale, t, without_step(state))
        return
    for name, p, index in homes_in(optimizer.param_groups):
        if p.requires_grad:
            group, state = optimizer.param_groups[index], optimizer.state.get(p, {})
            peer = peer_of(optimizer, group) if rule is None else None
            setting = setting_of(peer, group) if peer else other_setting(optimizer, group, state, name, p, rule)
            count = state.get("step", group.get("step", group.get("k", 1 if state else 0)))
            lr = None if group.get("relative_step") else plain_rate(group["lr"])
            entries = named_state(peer, state, setting, p, int(count)) if state else {}
            known = peer.name if peer else "a page that was said" if rule is not None else "its name"
            yield Treatment(name, p, index, setting.for_shape(tuple(p.shape)), lr, 1.0, int(count) + 1, entries, known)


def without_step(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: entry for key, entry in state.items() if key not in ("step", SPIKES) and isinstance(entry, Tensor)}


def plain_rate(lr: Any) -> Any:
    return float(lr) if isinstance(lr, Tensor) else plain(lr)


# ---- those of the table


def peer_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Peer | None:
    """The row of the table for a class or what it derives from."""
    known = [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(optimizer).__mro__]
    rows = [peer for name in known for peer in (*TABLE, *MORE) if peer.name == name]
    if rows and not rows[0].is_like(group):  # Adam with decoupled_weight_decay=True is AdamW
        rows = [peer for peer in (*TABLE, *MORE) if peer.keys == rows[0].keys and peer.is_like(group)]
        if not rows:
            raise AuditError(f"{type(optimizer).__name__} is audited with the options that the table knows: {rows}")
    return rows[0] if rows else None


def setting_of(peer: Peer, group: Mapping[str, Any]) -> ParameterOptions:
    """The page of a row with the options of a group. torch takes the eps of the first parameter's dtype."""
    options: dict[str, Any] = dict(peer.always)
    for key, name in peer.options.items():
        options |= {name: group[key]} if isinstance(name, str) else name(group[key], [group["params"][0].dtype])
    return combined(ParameterOptions(peer.rule(), Handling()), {n: plain_rate(v) for n, v in options.items()})


def named_state(
    peer: Peer | None, state: Mapping[str, Any], setting: ParameterOptions, p: Tensor, steps: int
) -> dict[str, Tensor]:
    """State as the page names and lays it out."""
    entries = {(peer.keys.get(key, key) if peer else key): whole(x.detach()) for key, x in without_step(state).items()}
    wanted = setting.rule_at(1).entries(tuple(p.shape))
    for key in AVERAGED_OVER.keys() & entries.keys():
        if entries[key].ndim < p.ndim:
            entries[key] = entries[key].unsqueeze(AVERAGED_OVER[key])
    if EVALUATED in wanted and "z" in entries:  # the x before the step before, of y = (1 - beta) z + beta x
        y, z, beta = whole(p.detach()).double(), entries["z"].double(), setting.rule_at(1).schedule_free  # type: ignore[attr-defined]
        weight = float(weight_of(xp, torch.tensor(float(steps)), setting.rule_at(1).schedule_free_warmup))  # type: ignore[attr-defined]
        x = (y - (1 - beta) * z) / beta
        entries[EVALUATED] = (x - weight * z) / (1 - weight) if weight < 1 else y
        entries["exp_avg"] = torch.zeros_like(y)
    return {key: entry for key, entry in entries.items() if key in wanted}


# ---- others


def other_setting(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    name: str,
    p: Tensor,
    rule: Any,
) -> ParameterOptions:
    """The page that was said, or that of the name of a class that no table has: of that the first step alone."""
    if rule is not None:
        page = rule if isinstance(rule, Rule) else rule(name, p)
        wanted = page.entries(tuple(p.shape)).keys()
        if state and not wanted <= state.keys():
            raise AuditError(
                f"the page of {name!r} keeps {', '.join(wanted)}, and its state has {', '.join(state)}: audit the "
                "first step, before which there is none"
            )
        return ParameterOptions(page, Handling())
    kind = type(optimizer).__name__
    if state:
        raise AuditError(
            f"{kind} is in no table: audit its first step, before which all of its state is zero, or say rule=, a page "
            "such as thalweg.rules.AdamW(weight_decay=0.1), whose keys its state must have"
        )
    pages: dict[str, type[Rule]] = {**RULES, "Adam": AdamW}
    by_length = sorted(pages.items(), key=lambda item: -len(item[0]))
    called = next(((n, page) for n, page in by_length if n.lower() in kind.lower()), None)
    if called is None:
        raise AuditError(f"{kind} is in no table, and its name is that of none of our pages: say rule=, its page")
    made = ParameterOptions(called[1](), Handling())
    options = {n: plain_rate(v) for n, v in group.items() if n in option_names(called[1])}
    return combined(made, {**({"decoupled": False} if called[0] == "Adam" else {}), **options})


def floats_of(setting: ParameterOptions, p: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State in floating point, whole."""
    gathered = {key: whole(entry.detach()) for key, entry in state.items()}
    return decoded(xp, setting.rule_at(1), whole(p.detach()), gathered) if gathered else {}
