"""By which page a parameter of an optimizer of torch is to be stepped, and what is kept for it: ours or another's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from thalweg.audit.report import AuditError
from thalweg.boundary import seen
from thalweg.given import plain
from thalweg.rules import AdamW, Rule, ScheduleFree, around
from thalweg.rules.around import EVALUATED
from thalweg.rules.schedule_free import weight_of
from thalweg.settings import Numerics, ParameterOptions, combined
from thalweg.spaces import torch as xp
from thalweg.storage import SPIKES, decoded
from thalweg.torch.base import Optimizer
from thalweg.torch.params.groups import homes_in
from thalweg.torch.params.parameter import Param
from thalweg.torch.peers import TABLE, Peer, names
from thalweg.torch.sharding.shards import whole

#: Keys of state, each with that of the page.
Keys: TypeAlias = Mapping[str, str]
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


def list_treatments(optimizer: torch.optim.Optimizer, rule: Any) -> Iterator[tuple[Param, Keys | None]]:
    """What holds for each parameter, and the keys of its state with those of its page; None: it is ours.

    rule: the page of all, or a function of name and parameter; None: that of the optimizer.
    """
    if isinstance(optimizer, Optimizer) and rule is None:
        yield from ((treatment, None) for treatment in optimizer._treatments())
        return
    for name, p, index in homes_in(optimizer.param_groups):
        group, keys = optimizer.param_groups[index], dict[str, str]()
        if rule is None:
            peer = find_peer(optimizer, group)
            options = peer.convert(group, group["params"][:1])  # whose eps is torch's for all
            setting = combined(ParameterOptions(peer.rule(), Numerics()), {key: plain(x) for key, x in options.items()})
            keys.update(peer.keys)
        else:
            setting = ParameterOptions(rule if isinstance(rule, Rule) else rule(name, p), Numerics())
            check_state(optimizer, name, p, setting.rule)
        if p.requires_grad:
            lr = None if group.get("relative_step") else float(group["lr"])
            yield Param(name, p, index, setting.for_shape(tuple(p.shape)), lr, 1.0, ()), keys


def check_state(optimizer: torch.optim.Optimizer, name: str, p: Tensor, rule: Rule) -> None:
    """Refuse a state that has not all that a page keeps."""
    state = optimizer.state.get(p, {})
    missing = sorted(rule.entries(tuple(p.shape)).keys() - state.keys())
    if state and missing:
        raise AuditError(
            f"the page of {name!r}, {type(rule).__name__}, keeps {', '.join(missing)}, which the state of "
            f"{type(optimizer).__name__} has not: audit its first step, before which there is no state, or say another "
            "page, rule="
        )


def find_peer(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Peer:
    """The row of the table for the class, or for one that it derives from, and for the options of a group."""
    called = [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(optimizer).__mro__]
    rows = [peer for name in called for peer in KNOWN if peer.name == name]
    # Adam with decoupled_weight_decay=True is AdamW
    alike = [peer for row in rows for peer in (row, *KNOWN) if peer.keys == row.keys and peer.is_like(group)]
    if not rows:
        raise AuditError(
            f"{called[0]} is in no table: say its page, such as rule=thalweg.rules.AdamW(weight_decay=0.1)"
        )
    if not alike:
        raise AuditError(f"the page of {rows[0]} is known, and a group has other options")
    return alike[0]


def hold(
    optimizer: torch.optim.Optimizer, p: Tensor, rule: Rule, keys: Keys | None, t: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """A parameter, at "", and its state as the page before step t sees them; and the dtypes in which they are kept."""
    state, shape, kept, x = optimizer.state.get(p, {}), tuple(p.shape), dict[str, Tensor](), whole(p.detach())
    sizes = {key: entry.shape(shape, rule.stacked_axes) for key, entry in rule.entries(shape).items()}
    for name, entry in state.items():
        key = name if keys is None else keys.get(name, name)
        if isinstance(entry, Tensor) and (keys is None or key in sizes) and key not in ("step", SPIKES):
            # ours keep an axis that was averaged, with size 1
            kept[key] = whole(entry.detach()) if keys is None else whole(entry.detach()).reshape(sizes[key])
    numbers = decoded(xp, rule, x, kept)
    if keys and kept and isinstance(rule, ScheduleFree):  # x of before, of y = (1 - beta) z + beta x
        beta, z = float(rule.schedule_free), whole(state["z"].detach()).double()
        weight = float(weight_of(xp, torch.tensor(t - 1.0, dtype=torch.float64), rule.schedule_free_warmup))
        averaged = (x.double() - (1 - beta) * z) / beta
        before = (averaged - weight * z) / (1 - weight) if weight < 1 else x
        numbers |= {EVALUATED: before, "exp_avg": torch.zeros_like(z)}
    arrays = {key: to_host(entry) for key, entry in numbers.items()}
    return {**arrays, "": to_host(seen(xp, x, kept))}, {key: xp.dtype(entry) for key, entry in {**kept, "": x}.items()}


def to_host(x: Tensor) -> Any:
    """A copy on the host, with all digits."""
    return (x.detach() if x.dtype is torch.float64 else x.detach().float()).to("cpu", copy=True).numpy()
