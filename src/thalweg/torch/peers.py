"""Runs that optimizers of torch, transformers and timm have started: one table of their options and their state."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ResumeWarning, StateError, read_as
from thalweg.given import differ
from thalweg.peers import Rename, Report, Source, check_rule, names, recognize, rename_parameter
from thalweg.rules import LAMB, LARS, SGD, Adafactor, AdamW, Muon
from thalweg.torch.base import Optimizer
from thalweg.torch.params.checkpoints import check_form, check_sizes, order_groups, read_settings
from thalweg.torch.params.groups import Group, homes_in, names_of, to_plain
from thalweg.torch.params.states import as_found, expected_entries


def torch_eps(eps: Any, dtypes: Sequence[torch.dtype]) -> dict[str, Any]:
    """Those of torch's Adafactor, of which the first follows the dtype if it is None."""
    if eps[0] is None and len(dtypes) != 1:
        raise StateError(f"eps=(None, ...) follows the dtype, and a group has {len(dtypes)}: divide it by dtype")
    return {"eps": (torch.finfo(dtypes[0]).eps if eps[0] is None else eps[0], eps[1])}


ADAM = names("betas eps weight_decay amsgrad maximize"), names("exp_avg exp_avg_sq max_exp_avg_sq")
MOMENTUM = names("momentum_buffer")
TABLE = (
    Source("torch.SGD", SGD, names("momentum dampening weight_decay nesterov maximize"), MOMENTUM, counts="nowhere"),
    Source("torch.Adam", AdamW, *ADAM, always={"decoupled": False}, only={"decoupled_weight_decay": False}),
    Source("torch.AdamW", AdamW, *ADAM, always={"decoupled": True}, only={"decoupled_weight_decay": True}),
    Source(
        "torch.Adafactor",
        Adafactor,
        names("beta2_decay weight_decay d=clip_threshold maximize"),
        names("row_var col_var variance"),
        converted={"eps": torch_eps},
        always={"variant": "torch"},
    ),
    Source(
        "torch.Muon",
        Muon,
        names("momentum nesterov weight_decay ns_coefficients ns_steps eps"),
        MOMENTUM,
        converted={"adjust_lr_fn": lambda value, dtypes: {"scaling": value or "original"}},
        always={"variant": "torch"},
        counts="nowhere",
    ),
    Source(
        "transformers.Adafactor",
        Adafactor,
        names("eps clip_threshold decay_rate=beta2_decay beta1=momentum weight_decay scale_parameter warmup_init"),
        names("exp_avg_sq_row=row_var exp_avg_sq_col=col_var exp_avg_sq=variance exp_avg"),
        converted={"relative_step": lambda value, dtypes: {}},  # an lr of None tells it
        always={"variant": "hf"},
        remade=("RMS",),
    ),
    Source(
        "timm.Lamb",
        LAMB,
        names("betas eps weight_decay bias_correction grad_averaging always_adapt"),
        names("exp_avg exp_avg_sq"),
        converted={
            "max_grad_norm": lambda value, dtypes: {"max_grad_norm": value or None},
            "trust_clip": lambda value, dtypes: {"trust_clip": (0.0, 1.0) if value else None},
            "decoupled_decay": lambda value, dtypes: {"weight_decay_mode": "decoupled" if value else "in_update"},
        },
        always={"exempt": None},
        only={"caution": False, "corrected_weight_decay": False},
        counts="group",
    ),
    Source(
        "timm.Lars",
        LARS,
        names("momentum nesterov weight_decay eps always_adapt trust_coeff=trust_coefficient trust_clip=clip"),
        MOMENTUM,
        always={"variant": "timm"},
        only={"dampening": 0},
        counts="nowhere",
    ),
)
#: What groups have beside options: keys that change no numbers, and those that schedulers leave there.
WITHOUT_EFFECT = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
#: The axes over which factors of squares are averages, at all sources of the table.
AVERAGED_OVER = {"row_var": -1, "col_var": -2}


def import_peer(
    optimizer: Optimizer, state_dict: Any, source: str | None = None, *, rename: Rename | None = None
) -> Report:
    """Continue a run that an optimizer of torch, transformers or timm has started. On any error nothing is changed.

    state_dict: what its ``state_dict()`` returned, or the path of a file of that. source: its name, as in
    "torch.AdamW", if its state does not tell. rename: from their names of parameters to those here.

    Learning rates and options become those of the run, as ``load_state_dict`` has it; a ResumeWarning tells which were
    others here. What has no equal here is refused.
    """
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "rule"):
        raise StateError(f"this needs an optimizer of thalweg.torch with one rule, got {type(optimizer).__name__}")
    if optimizer._groups.overrides:
        raise StateError("this optimizer has overrides, and the run had none: divide parameters into groups instead")
    with read_as("this state"):
        saved = read_state_dict(state_dict)
        peer = recognize(TABLE, saved["param_groups"], source)
        check_rule(peer, optimizer.rule)
        theirs = order_groups([rename_group(group, rename) for group in saved["param_groups"]], optimizer.param_groups)
        check_sizes(theirs, optimizer.param_groups)
        ours = optimizer.state_dict()["param_groups"]
        groups = [convert_group(peer, *trio) for trio in zip(theirs, ours, optimizer.param_groups, strict=True)]
        keys = [(key, group) for group in theirs for key in group["params"]]
        if unknown := saved["state"].keys() - dict(keys).keys():
            raise StateError(f"this state has entries for {unknown.pop()!r}, which is in none of its groups")
        settings = read_settings(optimizer._groups, groups, optimizer.param_groups)
        state: dict[int, dict[str, Any]] = {}
        for place, ((key, group), (name, p, _)) in enumerate(zip(keys, homes_in(optimizer.param_groups), strict=True)):
            if entries := saved["state"].get(key):
                like = expected_entries(as_found(settings[place], p, {}), p, name)  # codes are made when it is here
                step = peer.count_steps(f"the state of {name!r}", entries, group)
                state[place] = {"step": step, **convert_entries(peer, name, entries, like)}
    optimizer._load({"state": state, "param_groups": groups}, imported=True)
    if changed := describe_changes(ours, groups):
        warnings.warn(f"options are now those of the run of {peer.name}: {changed}", ResumeWarning, stacklevel=2)
    steps = max((entries["step"] for entries in state.values()), default=0) if peer.counts != "nowhere" else 0
    return Report(peer.name, peer.rule.__name__, len(state), steps)


def read_state_dict(given: Any) -> Mapping[str, Any]:
    """The state dict that was given, or the one in a file, which torch.load reads without running code from it."""
    if isinstance(given, (str, os.PathLike)):
        try:
            given = torch.load(given, map_location="cpu", weights_only=True)
        except Exception as error:
            raise StateError(f"{given} cannot be read by torch.load(weights_only=True): {error!s:.300}") from error
    if not isinstance(given, Mapping) or "state" not in given or "param_groups" not in given:
        raise StateError(
            "this is no state dict of an optimizer, which has 'state' and 'param_groups': of a checkpoint, pass the "
            "part that has them, such as checkpoint['optimizer'] or checkpoint['optimizer_states'][0]"
        )
    check_form(given)
    if any("rule" in group for group in given["param_groups"]):
        raise StateError("this is a state of thalweg.torch: load_state_dict takes it")
    return given


def rename_group(group: Group, rename: Rename | None) -> Group:
    """A group with the names that its parameters have here."""
    theirs = names_of(group)
    if not all(isinstance(key, int) for key in group["params"]):
        raise StateError("the groups of this state must number their parameters, as optimizer.state_dict() does")
    if rename is not None and theirs is None:
        raise StateError("rename= needs names: the groups of this state have no 'param_names', and go by position")
    return {**group, "param_names": [rename_parameter(name, rename) for name in theirs]} if theirs else group


def convert_group(peer: Source, theirs: Group, ours: Group, home: Group) -> dict[str, Any]:
    """A group of ours with the learning rate and the options of theirs. home: the group with its parameters."""
    peer.check_group(theirs, (*WITHOUT_EFFECT, *SCHEDULED))
    settings = peer.settings(theirs, list({p.dtype for p in home["params"]}))
    taken = {option.name for option in fields(peer.rule)} | settings.given.keys()
    options = {name: value for name, value in settings.options.items() if name in taken}
    group = {key: value for key, value in ours.items() if key not in options} | to_plain(options)
    lr = None if theirs.get("relative_step") else theirs["lr"]
    if (lr is None) != bool(ours.get("lr_is_scale")):
        raise StateError(f"{peer.name} was run with lr={lr!r}: construct this optimizer with lr={lr!r}")
    if lr is not None:
        group |= {key: theirs[key] for key in SCHEDULED if key in theirs}
        group["lr"] = torch.full_like(ours["lr"], lr) if isinstance(ours["lr"], Tensor) else float(lr)
    return group


def describe_changes(before: Sequence[Group], after: Sequence[Group]) -> str:
    """Options that a run has others of than groups here had, in words."""
    changes = set()
    for ours, theirs in zip(before, after, strict=True):
        cycled = ("momentum", "betas") if "base_momentum" in theirs else ()  # by a scheduler, with the learning rate
        idle = ("decoupled", "weight_decay_mode") if ours.get("weight_decay") == theirs.get("weight_decay") == 0 else ()
        for key in theirs.keys() - {*SCHEDULED, *cycled, *idle}:
            if differ(ours.get(key), theirs[key]):
                changes.add(f"{key}={theirs[key]!r} (here it was {ours.get(key)!r})")
    return ", ".join(sorted(changes))


def convert_entries(peer: Source, name: str, entries: Group, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a parameter's state as they are kept here. like: those that are expected."""
    peer.check_entries(f"the state of {name!r}", entries)
    found = {ours: entries[theirs].detach() for theirs, ours in peer.keys.items() if entries.get(theirs) is not None}
    for key in found.keys() & like.keys():
        if key in AVERAGED_OVER and found[key].ndim < like[key].ndim:  # ours keep that axis, with size 1
            found[key] = found[key].unsqueeze(AVERAGED_OVER[key])
        if found[key].shape == like[key].shape:  # others are refused
            found[key] = found[key].to(like[key].dtype)
    return found
