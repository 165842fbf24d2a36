"""Runs of other optimizers, continued."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ResumeWarning, StateError, read_as
from thalweg.exchange import list_names
from thalweg.peers import Rename, Report, check_same_names, refused_option, rename_parameter
from thalweg.rules.around import keys_around, parts_of
from thalweg.torch.base import Optimizer
from thalweg.torch.params.checkpoints import check_sizes, read_settings, strip_wrappers
from thalweg.torch.params.groups import Group, names_of
from thalweg.torch.params.states import as_found, expected_entries
from thalweg.torch.peers.files import find_state
from thalweg.torch.peers.formats import Member, Peer, Wanted, read_entries, recognize, unhide
from thalweg.torch.peers.sources import PEERS

#: What schedulers leave in groups and read there again.
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
#: Options that a scheduler of learning rates may change too, if it has left its bounds for them in a group.
CYCLED, CYCLES = ("momentum", "betas"), "base_momentum"


def import_peer(
    optimizer: Optimizer,
    state_dict: Any,
    source: str | None = None,
    *,
    rename: Rename | None = None,
    names: Sequence[str] | None = None,
) -> Report:
    """Continue a run that another optimizer has started. On any error nothing is changed.

    state_dict: what its ``state_dict()`` returned; or a checkpoint that holds it, such as one of Lightning; or the path
    of a file of either, such as ``optimizer.pt`` of a Trainer. source: the name of that optimizer, as in "torch.AdamW",
    if its state does not tell. rename: from their names of parameters to those here, where the state has names. names:
    their names in the order of the source, where the state has none, as most have.

    Learning rates are taken over. All other options must be those that make the rule equal to the source. In a mixture,
    parameters whose rule is equal to the source go on, and all others begin anew, which a ResumeWarning and the report
    tell.
    """
    check_is_ours(optimizer)
    rules = list(map(optimizer._rule_of, optimizer.param_groups))
    saved = find_state(state_dict)
    with read_as("this state"):
        peer = recognize(PEERS, saved["param_groups"], source, rules)
    members = match_parameters(optimizer, saved, rename, names)
    going = [member for member in members if peer.has_equal(rules[member.home])]
    begun = {member.name: rules[member.home].__name__ for member in members if not peer.has_equal(rules[member.home])}
    with read_as("this state"):
        groups = take_rates(optimizer, peer, going)
        settings = read_settings(optimizer._groups, groups, optimizer.param_groups)
        state: dict[int, dict[str, Any]] = {}
        taken: dict[str, str] = {}
        made: dict[str, str] = {}
        untold: dict[str, Any] = {}
        for place, (member, setting) in enumerate(zip(members, settings, strict=True)):
            if member.name in begun:
                continue
            lr, _ = optimizer._rate(groups[member.home])
            asked = Wanted(peer, parts_of(type(setting.rule))[0], member.group, member.p)
            for option, theirs, ours in asked.differences(setting, lr):
                construct = asked.construct(member.group.get("initial_lr", rate_of(member.group)))
                raise refused_option(peer.name, member.name, option, theirs, ours, construct)
            options = {**vars(setting.handling), **vars(setting.rule)}
            untold |= {name: options[name] for name in sorted(asked.untold)}
            if member.state:
                found = read_entries(peer, member, setting.rule)
                # without codes, into which the state is converted when it is here
                ghosts = expected_entries(as_found(setting, member.p, {}), member.p, member.name)
                new = keys_around(setting.rule_at(1), tuple(member.p.shape))  # which the next step begins
                ghosts = {key: ghost for key, ghost in ghosts.items() if key not in new}
                lacking = {key for key in ghosts if not peer.saves(key)}
                state[place] = {"step": steps_of(peer, member), **fill_in(found, lacking, ghosts)}
                taken |= {theirs: ours for theirs, ours in peer.keys.items() if theirs in member.state}
                made |= dict.fromkeys(sorted(lacking), f"not saved by {peer.name}: from 0 on")
        steps = max((entries["step"] for entries in state.values()), default=0)
        if state and peer.counts == "nowhere":
            made["step"], steps = f"not saved by {peer.name}: from 1 on", 0
    optimizer._load({"state": state, "param_groups": groups}, imported=True)
    name = next(rule.__name__ for rule in rules if peer.has_equal(rule))
    report = Report(peer.name, name, len(state), steps, taken, made, untold, begun)
    if begun:
        message = (
            f"{peer.name} goes on with {len(going)} of {len(members)} parameters; {list_names(list(begun))} begin anew"
        )
        warnings.warn(f"{message}, by {' and '.join(dict.fromkeys(begun.values()))}", ResumeWarning, stacklevel=2)
    return report


def check_is_ours(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise StateError(
            f"this needs an optimizer of thalweg.torch, got {type(optimizer).__module__}.{type(optimizer).__name__}"
        )


def match_parameters(
    optimizer: Optimizer, saved: Mapping[str, Any], rename: Rename | None, given: Sequence[str] | None
) -> list[Member]:
    """The parameters here, each with what was saved of it: by name where both have names, or else by position.

    given: the names there, where the state has none.
    """
    keys = [(key, group) for group in saved["param_groups"] for key in group["params"]]
    names = [name for group in saved["param_groups"] for name in names_in(group)]
    if given is not None:
        if names or len(given) != len(keys):
            told = "has names of its own" if names else f"has {len(keys)} parameters"
            raise StateError(
                f"names= has {len(given)} names, and this state {told}: give one for each, or leave it out"
            )
        names = list(given)
    homes, known = list(optimizer._homes()), dict(keys)
    unknown = [key for key in saved["state"] if key not in known]
    if unknown:
        raise StateError(f"this state is damaged: it has entries for {unknown[0]!r}, which is in none of its groups")
    if len(names) < len(keys) and rename is not None:
        raise StateError("rename= needs names: the groups of this state have no 'param_names', and go by position")
    if len(names) == len(keys) and all(names_of(group) for group in optimizer.param_groups if group["params"]):
        names = [strip_wrappers(rename_parameter(name, rename)) for name in names]
        ours = [strip_wrappers(name) for name, _, _ in homes]
        check_same_names(names, ours)
        by_name = dict(zip(names, keys, strict=True))
        keys = [by_name[name] for name in ours]
    elif len({optimizer._rule_of(group) for group in optimizer.param_groups}) > 1:
        raise StateError(
            "a mixture divides parameters among its rules, and this state goes by their position: pass names=, their "
            "names in the order in which the source had them, as [name for name, _ in model.named_parameters()]"
        )
    else:
        check_sizes(saved["param_groups"], optimizer.param_groups)
    return [
        Member(name, p, index, group, unhide(saved["state"].get(key) or {}))
        for (name, p, index), (key, group) in zip(homes, keys, strict=True)
    ]


def names_in(group: Group) -> list[str]:
    """The names of a saved group's parameters; none if it has none."""
    by_name = all(isinstance(key, str) for key in group["params"])  # as torch.distributed.checkpoint writes them
    return list(group["params"]) if by_name else names_of(group) or []


def rate_of(group: Group) -> Any:
    """The learning rate of a group there; None: it makes its own steps."""
    lr = None if group.get("relative_step") else group["lr"]
    return float(lr) if isinstance(lr, Tensor) else lr


def take_rates(optimizer: Optimizer, peer: Peer, members: Sequence[Member]) -> list[dict[str, Any]]:
    """The groups here, as they are saved, with what schedulers have set in the groups there."""
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    for index, group in enumerate(groups):
        sources = {id(member.group): member.group for member in members if member.home == index}
        found = list(map(read_schedule, sources.values()))
        if any(own != found[0] for own in found):
            raise StateError(
                f"parameter group {index} has parameters of several groups of {peer.name}, whose learning rates are "
                f"{', '.join(repr(own['lr']) for own in found)}: construct the optimizer with the groups of the source"
            )
        for own in found[:1]:
            lr = own["lr"]
            if (lr is None) != bool(group.get("lr_is_scale")):
                raise StateError(
                    f"{peer.name} was run {'without an lr' if lr is None else f'with lr={lr!r}'}, and parameter group "
                    f"{index} {'has one' if lr is None else 'has none'}: construct the optimizer with lr={lr!r}"
                )
            if lr is not None:
                group |= {**own, "lr": torch.full_like(group["lr"], lr) if isinstance(group["lr"], Tensor) else lr}
    return groups


def read_schedule(group: Group) -> dict[str, Any]:
    """What schedulers have set in a group there."""
    keys = (*SCHEDULED, *CYCLED) if CYCLES in group else SCHEDULED
    return {"lr": rate_of(group), **{key: group[key] for key in keys if key in group}}


def steps_of(peer: Peer, member: Member) -> int:
    """How many steps the source has taken with a parameter: 1 if it does not count them."""
    if peer.counts == "nowhere":
        return 1
    count = (member.state if peer.counts == "state" else member.group).get("step")
    if not isinstance(count, (int, float, Tensor)) or int(count) < 1:
        raise StateError(f"the state of {member.name!r} has no count of steps where {peer.name} keeps it: {count!r}")
    return int(count)


def fill_in(found: Mapping[str, Any], lacking: Iterable[str], ghost: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entries as they are stored here, and zeros for those that the source lacks. ghost: what is expected."""
    made = {key: torch.zeros(ghost[key].shape, dtype=ghost[key].dtype) for key in lacking}
    fitting = {key: x for key, x in found.items() if key in ghost and x.shape == ghost[key].shape}  # others are refused
    return {**made, **found, **{key: x.detach().to(ghost[key].dtype) for key, x in fitting.items()}}
