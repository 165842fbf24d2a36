"""The way back: state as optimizers of ``torch.optim`` load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thalweg.errors import StateError
from thalweg.given import differ
from thalweg.rules import Rule
from thalweg.rules.around import parts_of, switch_of
from thalweg.rules.orthogonal import COEFFICIENTS
from thalweg.settings import Handling
from thalweg.spaces import torch as xp
from thalweg.storage import RECORD, coded_keys
from thalweg.torch.base import Optimizer
from thalweg.torch.params.groups import Group
from thalweg.torch.params.states import as_found, convert_entries
from thalweg.torch.peers.formats import Peer, Wanted, check_axes
from thalweg.torch.peers.imports import SCHEDULED, check_is_ours
from thalweg.torch.peers.sources import PEERS

#: Options around a rule that no optimizer of torch has.
OURS_ALONE = ("max_grad_norm", "on_nonfinite", "spikes", "rounding", "state_rounding")


def export_peer(optimizer: Optimizer, target: str) -> dict[str, Any]:
    """The state of an optimizer for ``load_state_dict`` of one of ``torch.optim`` with the same parameters and groups.

    target: "torch". AdamW (or LAMB without trust ratios) goes to torch's AdamW, or to Adam if its decay is not
    decoupled; SGD (or LARS without trust ratios) to SGD; Adafactor and Muon to those of their names. Options that have
    no counterpart there are refused. Tensors are those of the optimizer, as in ``state_dict()``, but for codes of eight
    bits, which are decoded, and records of what rounding has cost, which are left out.
    """
    if target != "torch":
        raise StateError(f"target={target!r} is not known: it must be 'torch'")
    check_is_ours(optimizer)
    rule = getattr(optimizer, "rule", None)
    if rule is None:
        raise StateError(
            "a Mixture steps by several rules, and states of other optimizers are of one: export an optimizer that has "
            "one rule"
        )
    if rule.__name__ not in TARGETS:
        raise StateError(f"no optimizer of torch.optim has the mathematics of {rule.__name__}")
    saved = optimizer.state_dict()
    peers = [target_of(rule, group) for group in saved["param_groups"]]
    groups = [export_group(peer, group) for peer, group in zip(peers, saved["param_groups"], strict=True)]
    for name, p, home in optimizer._homes():
        check_served(optimizer, rule, peers[home], groups[home], name, p, home)
    state = dict(saved["state"])
    for place, (name, p, home) in enumerate(optimizer._homes()):
        if place in state and (coded_keys(xp, state[place]) or RECORD in state[place]):
            setting, _ = optimizer._groups.make_settings(optimizer.param_groups[home]).of(name, p)
            state[place] = convert_entries(as_found(setting, p, {}), p, name, state[place])
    if any(peer.counts == "nowhere" for peer in peers):
        state = {place: {key: x for key, x in entries.items() if key != "step"} for place, entries in state.items()}
    return {"state": state, "param_groups": groups}


#: The optimizers of torch that equal rules; Adam takes the place of AdamW where decay is not decoupled.
TARGETS: Mapping[str, str] = {
    "AdamW": "torch.AdamW",
    "LAMB": "torch.AdamW",
    "SGD": "torch.SGD",
    "LARS": "torch.SGD",
    "Adafactor": "torch.Adafactor",
    "Muon": "torch.Muon",
}


def target_of(rule: type[Rule], group: Group) -> Peer:
    """The optimizer of torch for one of our groups."""
    decoupled = group.get("decoupled", group.get("weight_decay_mode") != "l2")
    name = TARGETS[rule.__name__]
    return PEERS["torch.Adam" if name == "torch.AdamW" and not decoupled else name]


def export_group(peer: Peer, group: Group) -> dict[str, Any]:
    """A group as torch has it, with what schedulers keep in it."""
    if group.get("lr_is_scale"):
        raise StateError("lr=None has no counterpart in torch.Adafactor: lr=0.01 is the same")
    kept = {key: group[key] for key in ("params", "param_names", "lr", *SCHEDULED) if key in group}
    own = {theirs: group.get(ours, peer.off.get(ours)) for ours, theirs in peer.names.items()}
    if "Adam" in peer.name:
        own["capturable"] = group["capturable"]
    if "eps" in peer.reads:
        own["eps"] = group["eps"]
    if "adjust_lr_fn" in peer.reads:
        given, scaling = group["ns_coefficients"], group["scaling"]
        triple = COEFFICIENTS[given] if isinstance(given, str) else given
        own["ns_coefficients"] = triple[0] if isinstance(triple[0], tuple) else triple
        own["adjust_lr_fn"] = scaling if scaling in ("match_rms_adamw", "spectral_unclamped") else "original"
    return {**kept, **own, **peer.where}


def check_served(
    optimizer: Optimizer, rule: type[Rule], peer: Peer, group: Group, name: str, p: Any, home: int
) -> None:
    """Refuse options of a parameter that an optimizer of torch with this group would not have."""
    own = optimizer.param_groups[home]
    setting, _ = optimizer._groups.make_settings(own).of(name, p)
    asked = Wanted(peer, rule, group, p)
    unserved = [(option, ours, "") for option, _, ours in asked.differences(setting, optimizer._rate(own)[0])]
    for option in OURS_ALONE:
        ours, without = getattr(setting.handling, option), getattr(Handling, option)
        if differ(ours, without):
            hint = f"; to go on without it, set {option}={without!r} in param_groups or overrides before"
            unserved.append((option, ours, hint))
    for wrapper in parts_of(type(setting.rule))[1]:
        option = switch_of(wrapper)
        hint = f"; to go on without it, set {option}=None in param_groups or overrides before, and take a step"
        unserved.append((option, getattr(setting.rule, option), hint))
    for option, ours, hint in unserved:
        raise StateError(f"{option}={ours!r}, which {name!r} has here, has no counterpart in {peer.name}{hint}")
    check_axes(peer, group, name, tuple(p.shape), setting.rule)
