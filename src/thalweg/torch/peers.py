"""Runs that optimizers of torch, transformers and timm have started: one table of their options and their state."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from thalweg.errors import ResumeWarning, StateError, read_as, warn
from thalweg.given import differ
from thalweg.peers import Source, choose
from thalweg.rules import LAMB, LARS, SGD, Adafactor, AdamW, Muon
from thalweg.torch.base import Optimizer
from thalweg.torch.params.checkpoints import check_is_state, check_sizes, order_groups, read_options
from thalweg.torch.params.groups import Group, homes_in, to_plain
from thalweg.torch.params.states import expected_entries

#: Makes our options of the value of one of theirs and of the dtypes of a group.
Convert: TypeAlias = Callable[[Any, Sequence[torch.dtype]], dict[str, Any]]


@dataclass(frozen=True)
class Peer(Source):
    """An optimizer of torch or of another library: its options and its state."""

    #: The options that all of its groups have, each with its name here or with what makes ours of it.
    options: Mapping[str, str | Convert]
    #: Its keys of state, each with ours, or "" for what every step makes anew. Without "step" its groups may count.
    keys: Mapping[str, str]
    #: Our options that make the rule equal whatever its groups say.
    always: Mapping[str, Any] = field(default_factory=dict)
    #: Options of which one value alone can be continued. Groups of older versions may lack them.
    only: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        only = ", ".join(f"{key}={value!r}" for key, value in self.only.items())
        return f"{self.name} ({only})" if only else self.name

    def is_like(self, group: Group) -> bool:
        """Whether a group may be one of this optimizer, and can be continued."""
        return self.options.keys() <= group.keys() and all(group.get(key, v) == v for key, v in self.only.items())

    def convert(self, group: Group, params: Sequence[Tensor]) -> dict[str, Any]:
        """Our options for parameters in one of its groups."""
        options, dtypes = dict(self.always), list({p.dtype for p in params})
        for key, name in self.options.items():
            options |= {name: group[key]} if isinstance(name, str) else name(group[key], dtypes)
        return options


def names(text: str) -> dict[str, Any]:
    """Names there, each with the name here: "momentum trust_clip=clip" has the first in common."""
    pairs = (word.partition("=") for word in text.split())
    return {theirs: ours or theirs for theirs, _, ours in pairs}


def torch_eps(eps: Any, dtypes: Sequence[torch.dtype]) -> dict[str, Any]:
    """Those of torch's Adafactor, of which the first follows the dtype if it is None."""
    if eps[0] is None and len(dtypes) != 1:
        raise StateError(f"eps=(None, ...) follows the dtype, and a group has {len(dtypes)}: divide it by dtype")
    return {"eps": (torch.finfo(dtypes[0]).eps if eps[0] is None else eps[0], eps[1])}


ADAM = names("betas eps weight_decay amsgrad maximize"), names("step exp_avg exp_avg_sq max_exp_avg_sq")
MOMENTUM = names("momentum_buffer")
TABLE = (
    Peer("torch.SGD", SGD, names("momentum dampening weight_decay nesterov maximize"), MOMENTUM),
    Peer("torch.Adam", AdamW, *ADAM, always={"decoupled": False}, only={"decoupled_weight_decay": False}),
    Peer("torch.AdamW", AdamW, *ADAM, always={"decoupled": True}, only={"decoupled_weight_decay": True}),
    Peer(
        "torch.Adafactor",
        Adafactor,
        names("beta2_decay weight_decay d=clip_threshold maximize") | {"eps": torch_eps},
        names("step row_var col_var variance"),
        always=Adafactor.VARIANTS["torch"],
    ),
    Peer(
        "torch.Muon",
        Muon,
        names("momentum nesterov weight_decay ns_coefficients ns_steps eps")
        | {"adjust_lr_fn": lambda value, dtypes: {"scaling": value or "original"}},
        MOMENTUM,
        always=Muon.VARIANTS["torch"],
    ),
    Peer(
        "transformers.Adafactor",
        Adafactor,
        names("eps clip_threshold decay_rate=beta2_decay beta1=momentum weight_decay scale_parameter warmup_init")
        | {"relative_step": lambda value, dtypes: {}},  # an lr of None tells it
        names("step exp_avg_sq_row=row_var exp_avg_sq_col=col_var exp_avg_sq=variance exp_avg") | {"RMS": ""},
        always=Adafactor.VARIANTS["hf"],
    ),
    Peer(
        "timm.Lamb",
        LAMB,
        names("betas eps weight_decay bias_correction grad_averaging always_adapt")
        | {
            "max_grad_norm": lambda value, dtypes: {"max_grad_norm": value or None},
            "trust_clip": lambda value, dtypes: {"trust_clip": (0.0, 1.0) if value else None},
            "decoupled_decay": lambda value, dtypes: {"weight_decay_mode": "decoupled" if value else "in_update"},
        },
        names("exp_avg exp_avg_sq"),
        always={"exempt": None},
        only={"caution": False, "corrected_weight_decay": False},
    ),
    Peer(
        "timm.Lars",
        LARS,
        names("momentum nesterov weight_decay eps always_adapt trust_coeff=trust_coefficient trust_clip=clip"),
        MOMENTUM,
        always=LARS.VARIANTS["timm"],
        only={"dampening": 0},
    ),
)
#: What groups have beside options: keys that change no numbers, and those that schedulers leave there.
WITHOUT_EFFECT = ("params", "param_names", "foreach", "fused", "capturable", "differentiable", "step")
SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
#: The axes over which factors of squares are averages, at all sources of the table.
AVERAGED_OVER = {"row_var": -1, "col_var": -2}


def import_peer(optimizer: Optimizer, state_dict: Any, source: str | None = None) -> None:
    """Continue a run that an optimizer of torch, transformers or timm has started. On any error nothing is changed.

    state_dict: what its ``state_dict()`` returned, or the path of a file of that. source: its name, as in
    "torch.AdamW", if its state does not tell.

    Learning rates and options become those of the run, as ``load_state_dict`` has it; a ResumeWarning tells which were
    others here. What has no equal here is refused.
    """
    if not isinstance(optimizer, Optimizer) or optimizer._groups.rules.are_mixed:
        raise StateError(f"this needs an optimizer of thalweg.torch with one rule, got {type(optimizer).__name__}")
    if optimizer._groups.rules.overrides:
        raise StateError("this optimizer has overrides, and the run had none: divide parameters into groups instead")
    with read_as("this state"):
        saved, homes = read_state_dict(state_dict), optimizer.param_groups
        may_be = [peer for peer in TABLE if all(map(peer.is_like, saved["param_groups"]))]
        peer = choose(TABLE, may_be, source, optimizer._rule_of(homes[0]))
        theirs = order_groups(saved["param_groups"], homes)
        check_sizes(theirs, homes)
        ours, changed = optimizer.state_dict()["param_groups"], set[str]()
        groups = [convert_group(peer, *trio, changed) for trio in zip(theirs, ours, homes, strict=True)]
        keys = [key for group in theirs for key in group["params"]]
        settings, state = read_options(optimizer._groups, groups, homes), {}
        for place, (name, p, index) in enumerate(homes_in(homes)):
            if entries := saved["state"].get(keys[place]):
                count = {} if "step" in peer.keys else {"step": theirs[index].get("step", 1)}
                state[place] = convert_entries(peer, entries, expected_entries(settings[place], p, name)) | count
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    if changed:
        message = f"options are now those of the run of {peer.name}: {', '.join(sorted(changed))}"
        warn(message, ResumeWarning)


def read_state_dict(given: Any) -> Any:
    """The state dict that was given, or the one in a file, which torch.load reads without running code from it."""
    if isinstance(given, (str, os.PathLike)):
        try:
            given = torch.load(given, map_location="cpu", weights_only=True)
        except Exception as error:
            raise StateError(f"{given} cannot be read by torch.load(weights_only=True): {error!s:.300}") from error
    check_is_state([], given)
    for group in given["param_groups"]:
        if "rule" in group:
            raise StateError("this is a state of thalweg.torch: load_state_dict takes it")
        if not all(isinstance(key, int) for key in group["params"]):
            raise StateError("the groups of this state must number their parameters, as optimizer.state_dict() does")
    return given


def convert_group(peer: Peer, theirs: Group, ours: Group, home: Group, changed: set[str]) -> dict[str, Any]:
    """One of thalweg's groups with the learning rate and options of theirs. home: the group with its parameters.

    changed: takes down the options that have another value than here.
    """
    known = (*peer.options, *peer.only)
    if unknown := [key for key in theirs if key not in (*known, *WITHOUT_EFFECT, *SCHEDULED)]:
        raise StateError(
            f"its groups have {unknown[0]!r}, and of {peer.name} it is known what {', '.join(known)} are: without "
            f"{unknown[0]!r}, if it changes no numbers, this run can be continued"
        )
    options = {"maximize": False, **vars(peer.rule()), **peer.convert(theirs, home["params"])}
    group = {key: value for key, value in ours.items() if key not in options} | to_plain(options)
    for key in options:
        if differ(ours.get(key), group.get(key)):
            changed.add(f"{key}={group.get(key)!r} (here it was {ours.get(key)!r})")
    lr = None if theirs.get("relative_step") else theirs["lr"]
    if (lr is None) != bool(ours.get("lr_is_scale")):
        raise StateError(f"{peer.name} was run with lr={lr!r}: construct this optimizer with lr={lr!r}")
    if lr is not None:
        group |= {key: theirs[key] for key in SCHEDULED if key in theirs}
        group["lr"] = torch.full_like(ours["lr"], lr) if isinstance(ours["lr"], Tensor) else float(lr)
    return group


def convert_entries(peer: Peer, entries: Group, like: Mapping[str, Tensor]) -> dict[str, Any]:
    """The entries of a parameter's state as they are kept here. like: those that are expected; others are refused."""
    state = {peer.keys.get(key, key): entry for key, entry in entries.items() if entry is not None}
    state.pop("", None)
    for key in state.keys() & like.keys():
        entry = state[key].detach()
        if key in AVERAGED_OVER and entry.ndim < like[key].ndim:  # ours keep that axis, with size 1
            entry = entry.unsqueeze(AVERAGED_OVER[key])
        state[key] = entry.to(like[key].dtype) if entry.shape == like[key].shape else entry
    return state
