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
from thalweg.torch.params.parameter import Param
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
#: Names of classes that a page is looked for in.
PAGES: dict[str, type[Rule]] = {**RULES, "Adam": AdamW}


class Treated(NamedTuple):
    """A parameter before a step, and what holds for it."""

    optimizer: torch.optim.Optimizer
    treatment: Param
    is_ours: bool = True
    #: Their keys of state, each with the page's.
    keys: Mapping[str, str] = {}
    #: Whether its page is that of its name.
    is_guessed: bool = False

    @property
    def state(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self.optimizer.state.get(self.treatment.p, {})
        return state

    @property
    def t(self) -> int:
        """The number of the coming step."""
        group, state = self.optimizer.param_groups[self.treatment.group], self.state
        return int(state.get("step", group.get("step", group.get("k", len(state) > 0)))) + 1


def list_treated(optimizer: torch.optim.Optimizer, rule: Any) -> Iterator[Treated]:
    """What holds for each parameter before a step. rule: the page of all, or a function of name and parameter."""
    if isinstance(optimizer, Optimizer) and rule is None:
        yield from (Treated(optimizer, treatment) for treatment in optimizer._treatments())
        return
    for name, p, index in homes_in(optimizer.param_groups):
        if p.requires_grad:
            group, peer = optimizer.param_groups[index], None if rule else find_peer(optimizer, index)
            page = rule if rule is None or isinstance(rule, Rule) else rule(name, p)
            setting = ParameterOptions(page, Handling()) if page else set_by(peer or guess_peer(optimizer), group)
            lr = None if group.get("relative_step") else float(group["lr"])
            treatment = Param(name, p, index, setting.for_shape(tuple(p.shape)), lr)
            treated = Treated(optimizer, treatment, False, peer.keys if peer else {}, not (peer or page))
            check_state(treated)
            yield treated


def find_peer(optimizer: torch.optim.Optimizer, index: int) -> Peer | None:
    """The row of the table for the class, or for what it derives from."""
    called = [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(optimizer).__mro__]
    named = [peer for name in called for peer in KNOWN if peer.name == name][:1]
    # Adam with decoupled_weight_decay=True is AdamW
    alike = [peer for row in named for peer in (row, *KNOWN) if peer.keys == row.keys]
    rows = [peer for peer in alike if peer.is_like(optimizer.param_groups[index])]
    if named and not rows:
        raise AuditError(f"the page of {named[0]} is known, and group {index} has other options")
    return rows[0] if rows else None


def guess_peer(optimizer: torch.optim.Optimizer) -> Peer:
    """A row for a class that is in no table, by the page in its name and the names of options."""
    kind = type(optimizer).__name__
    called = [page for page in sorted(PAGES, key=len, reverse=True) if page.lower() in kind.lower()]
    if not called:
        raise AuditError(f"{kind} is in no table, and has the name of none of our pages: say its page, rule=")
    known = option_names(PAGES[called[0]])
    options = {name: name for name in optimizer.param_groups[0] if name in known}
    return Peer(kind, PAGES[called[0]], options, {}, always={"decoupled": False} if called[0] == "Adam" else {})


def check_state(treated: Treated) -> None:
    """Refuse a state that is not that of its page."""
    name, p, _, setting, *_ = treated.treatment
    wanted = setting.rule.entries(tuple(p.shape)).keys() | ({"step"} if treated.is_guessed else set())
    if treated.state and wanted - treated.state.keys() and not treated.keys:
        raise AuditError(
            f"the page of {name!r} in {type(treated.optimizer).__name__}, {type(setting.rule).__name__}, keeps "
            f"{', '.join(sorted(wanted))}, and its state has {', '.join(map(str, treated.state))}: audit its first "
            "step, before which there is no state, or say another page, rule="
        )


def set_by(peer: Peer, group: Mapping[str, Any]) -> ParameterOptions:
    """The page of a row with the options of a group. torch takes the eps of the first parameter's dtype."""
    options: dict[str, Any] = dict(peer.always)
    for key, name in peer.options.items():
        options |= {name: group[key]} if isinstance(name, str) else name(group[key], [group["params"][0].dtype])
    return combined(ParameterOptions(peer.rule(), Handling()), {key: plain(value) for key, value in options.items()})


def name_state(treated: Treated) -> dict[str, Tensor]:
    """State as its page names it and lays it out, as it is kept."""
    _, p, _, setting, *_ = treated.treatment
    rule, shape, state = setting.rule_at(1), tuple(p.shape), {}
    wanted = {key: entry.shape(shape, rule.stacked_axes) for key, entry in rule.entries(shape).items()}
    for theirs, entry in treated.state.items():
        key = treated.keys.get(theirs, theirs)
        if isinstance(entry, Tensor) and key not in ("step", SPIKES) and (treated.is_ours or key in wanted):
            x = whole(entry.detach())
            # ours keep an axis that was averaged, with size 1
            state[key] = x.reshape(wanted[key]) if x.numel() == math.prod(wanted.get(key, (-1,))) else x
    return state


def read_state(treated: Treated) -> dict[str, Tensor]:
    """State in floating point: what the page is given."""
    entries, rule, y = name_state(treated), treated.treatment.setting.rule_at(1), whole(treated.treatment.p.detach())
    if "z" in treated.state and isinstance(rule, ScheduleFree):  # the x of before, of y = (1 - beta) z + beta x
        beta, z = float(rule.schedule_free), whole(treated.state["z"].detach()).double()
        weight = float(weight_of(xp, torch.tensor(treated.t - 1.0, dtype=torch.float64), rule.schedule_free_warmup))
        x = (y.double() - (1 - beta) * z) / beta
        entries |= {EVALUATED: (x - weight * z) / (1 - weight) if weight < 1 else y, "exp_avg": torch.zeros_like(z)}
    decoded_entries = decoded(xp, rule, y, entries) if entries else {}
    return {key: entry for key, entry in decoded_entries.items() if key != RECORD}
