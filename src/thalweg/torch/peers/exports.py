"""The way back: state as optimizers of ``torch.optim`` load it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from thalweg.errors import StateError
from thalweg.given import differ
from thalweg.rules import Rule
from thalweg.settings import Handling
from thalweg.spaces import torch as xp
from thalweg.storage import RECORD, coded_keys
from thalweg.torch.params.stateful import StatefulOptimizer
from thalweg.torch.params.states import as_found, converted_entries
from thalweg.torch.peers.formats import Group, check_axes, wanted
from thalweg.torch.peers.imports import SCHEDULED, rule_of
from thalweg.torch.peers.options import picked
from thalweg.torch.peers.sources import PEERS

#: Options around a rule that no optimizer of torch has.
OURS_ALONE = ("max_grad_norm", "on_nonfinite", "rounding", "state_rounding")


def export_peer(optimizer: StatefulOptimizer, target: str) -> dict[str, Any]:
    """The state of an optimizer for ``load_state_dict`` of one of ``torch.optim`` with the same parameters and groups.

    target: "torch". AdamW (or LAMB without trust ratios) goes to torch's AdamW, or to Adam if its decay is not
    decoupled; SGD (or LARS without trust ratios) to SGD; Adafactor and Muon to those of their names. Options that have
    no counterpart there are refused. Tensors are those of the optimizer, as in ``state_dict()``, but for codes of eight
    bits, which are decoded, and records of what rounding has cost, which are left out.
    """
    if target != "torch":
        raise StateError(f"target={target!r} is not known: it must be 'torch'")
    rule = rule_of(optimizer)
    if rule.__name__ not in TARGETS:
        raise StateError(f"no optimizer of torch.optim has the mathematics of {rule.__name__}")
    saved = optimizer.state_dict()
    groups = [exported(rule, group) for group in saved["param_groups"]]
    for name, p, home in optimizer._homes():
        check_served(optimizer, rule, groups[home], name, p, home)
    state = dict(saved["state"])
    for place, (name, p, home) in enumerate(optimizer._homes()):
        if place in state and (coded_keys(xp, state[place]) or RECORD in state[place]):
            setting, _ = optimizer._group_settings.made(optimizer.param_groups[home]).of(name, p)
            state[place] = converted_entries(as_found(setting, p, {}), p, name, state[place])
    if PEERS[name_of(rule, {})].counts == "nowhere":
        state = {place: {key: x for key, x in entries.items() if key != "step"} for place, entries in state.items()}
    return {"state": state, "param_groups": groups}


def adam(g: Group) -> dict[str, Any]:
    decoupled = g["decoupled"] if "decoupled" in g else g["weight_decay_mode"] != "l2"
    own = picked(g, "betas", "eps", "weight_decay", "maximize", "capturable")
    return {**own, "amsgrad": g.get("amsgrad", False), "decoupled_weight_decay": decoupled}


def sgd(g: Group) -> dict[str, Any]:
    return {**picked(g, "momentum", "weight_decay", "nesterov", "maximize"), "dampening": g.get("dampening", 0.0)}


def adafactor(g: Group) -> dict[str, Any]:
    return picked(g, "beta2_decay", "eps", "weight_decay", "maximize", d="clip_threshold")


def muon(g: Group) -> dict[str, Any]:
    own = picked(g, "momentum", "nesterov", "weight_decay", "ns_steps", "eps")
    triple = g["ns_coefficients"]
    scaling = g["scaling"] if g["scaling"] == "match_rms_adamw" else "original"
    return {**own, "ns_coefficients": triple[0] if isinstance(triple[0], tuple) else triple, "adjust_lr_fn": scaling}


#: The groups of torch's optimizers, made from ours by the name of the rule.
TARGETS: Mapping[str, tuple[str, Callable[[Group], dict[str, Any]]]] = {
    "AdamW": ("AdamW", adam),
    "LAMB": ("AdamW", adam),
    "SGD": ("SGD", sgd),
    "LARS": ("SGD", sgd),
    "Adafactor": ("Adafactor", adafactor),
    "Muon": ("Muon", muon),
}


def name_of(rule: type[Rule], group: Group) -> str:
    """The optimizer of torch that has such groups."""
    return f"torch.{'Adam' if group.get('decoupled_weight_decay') is False else TARGETS[rule.__name__][0]}"


def exported(rule: type[Rule], group: Group) -> dict[str, Any]:
    """A group as torch has it, with what schedulers keep in it."""
    if group.get("lr_is_scale"):
        raise StateError("lr=None has no counterpart in torch.Adafactor: lr=0.01 is the same")
    beside = {key: group[key] for key in ("params", "param_names", "lr", *SCHEDULED) if key in group}
    return {**beside, **TARGETS[rule.__name__][1](group)}


def check_served(optimizer: StatefulOptimizer, rule: type[Rule], group: Group, name: str, p: Any, home: int) -> None:
    """Refuse options of a parameter that an optimizer of torch with this group would not have."""
    peer, own = PEERS[name_of(rule, group)], optimizer.param_groups[home]
    setting, _ = optimizer._group_settings.made(own).of(name, p)
    asked = wanted(peer, rule, group, p)
    unserved = [(option, ours, "") for option, _, ours in asked.differences(setting, optimizer._rate(own)[0])]
    for option in OURS_ALONE:
        ours, without = getattr(setting.handling, option), getattr(Handling, option)
        if differ(ours, without):
            hint = f"; to go on without it, set {option}={without!r} in param_groups or overrides before"
            unserved.append((option, ours, hint))
    for option, ours, hint in unserved:
        raise StateError(f"{option}={ours!r}, which {name!r} has here, has no counterpart in {peer.name}{hint}")
    check_axes(peer, group, name, tuple(p.shape), setting.rule)
