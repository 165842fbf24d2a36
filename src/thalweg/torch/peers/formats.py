"""What is to be known of another optimizer to continue its runs: its groups, and what it keeps for a parameter."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.errors import OptionError, StateError
from thalweg.exchange import list_names
from thalweg.given import differ
from thalweg.peers import unlike
from thalweg.rules import RULES, SOAP, Adafactor, Kron, Muon, Rule
from thalweg.settings import Handling, Setting, Settings, option_names
from thalweg.torch.params.groups import Group

#: Stands for an option that the source does not save.
UNTOLD: Any = object()
#: Options that are decided otherwise than by their values: by the shapes of state, or by nothing at the source.
APART: Mapping[type[Rule], frozenset[str]] = {
    Adafactor: frozenset({"factored", "min_dim_size_to_factor", "factor_dims", "only_2d"}),
    Kron: frozenset({"max_size_dense", "max_skew", "block_size", "merge", "eps"}),
    Muon: frozenset({"ns_dtype"}),
    SOAP: frozenset({"one_sided", "block_size", "merge"}),
}


class Member(NamedTuple):
    """A parameter, with what the source saved of it."""

    name: str
    p: Tensor
    #: The index of its group here, and its group there.
    home: int
    group: Group
    state: Mapping[str, Any]

    @property
    def shape(self) -> Shape:
        return tuple(self.p.shape)


@dataclass(frozen=True)
class Peer:
    """The format of one optimizer's state dict."""

    #: Its library and class, as in "torch.AdamW".
    name: str
    #: The rules that have its mathematics, each with what makes it equal whatever a group tells; "variant" among it.
    rules: Mapping[str, Mapping[str, Any]]
    _: KW_ONLY
    #: Options that have the same values: by the same names, and ours with the names that they have there.
    same: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    #: What has a counterpart in some rules or in none, as it is when it is off.
    off: Mapping[str, Any] = field(default_factory=dict)
    #: Our options that follow otherwise from a group and a parameter, and further keys that all groups have.
    others: Callable[[Group, Tensor], dict[str, Any]] = lambda group, p: {}
    reads: str = ""
    #: Keys that only newer versions of it have, with their values.
    where: Mapping[str, Any] = field(default_factory=dict)
    #: Its keys of state, each with ours.
    keys: Mapping[str, str]
    #: Where it counts steps: with each parameter, in the group, or nowhere.
    counts: Literal["state", "group", "nowhere"] = "state"
    #: The axes that it factors, for Adafactor: that of rows, that of columns.
    axes: Callable[[Group, Shape], tuple[int, int] | None] = lambda group, shape: None

    @property
    def names(self) -> dict[str, str]:
        """Options that have the same values, each with its name there."""
        return {**{name: name for name in self.same.split()}, **self.renamed}

    @property
    def known_by(self) -> frozenset[str]:
        """Keys that all of its groups have, enough to know it by."""
        return frozenset((*self.names.values(), *self.reads.split()))

    def options(self, rule: type[Rule], group: Group, p: Tensor) -> dict[str, Any]:
        """Our options that make a rule equal to what a group and a parameter tell; "variant" among them."""
        lacking = {name: value for name, value in self.off.items() if name not in option_names(rule)}
        check_off(group, **lacking)
        own = {ours: group[theirs] for ours, theirs in self.names.items() if ours not in lacking}
        return {**own, **self.rules[rule.__name__], **self.others(group, p)}

    def saves(self, key: str) -> bool:
        """Whether it has what is kept here under this key."""
        return key in self.keys.values() or key.rstrip("0123456789").removesuffix("_") in self.keys

    def has_equal(self, rule: type[Rule]) -> bool:
        """Whether a rule has its mathematics."""
        return RULES.get(rule.__name__) is rule and rule.__name__ in self.rules

    def is_like(self, group: Group) -> bool:
        """Whether a group may be one of its own."""
        return self.known_by <= group.keys() and all(group.get(key, v) == v for key, v in self.where.items())


def check_off(group: Group, **off: Any) -> None:
    """Refuse options of the source that nothing here corresponds to, unless they are off."""
    for name, value in off.items():
        if group.get(name, value) != value:
            raise StateError(
                f"the source was run with {name}={group[name]!r}, which has no counterpart here: "
                f"only runs with {name}={value!r} can be continued"
            )


def recognize(
    peers: Mapping[str, Peer], groups: Sequence[Group], source: str | None, rules: Sequence[type[Rule]]
) -> Peer:
    """The format of a state dict, as its groups tell it or as it is named; raise unless a rule can continue it."""
    if source is not None and source not in peers:
        lowered = {name.lower(): name for name in peers}
        close = difflib.get_close_matches(str(source).lower(), lowered, n=1, cutoff=0.5)
        hint = f"did you mean {lowered[close[0]]!r}?" if close else f"it must be one of {', '.join(peers)}"
        raise StateError(f"source={source!r} is not known: {hint}")
    if source is not None:
        peer = peers[source]
        for group in groups:
            lacking = sorted(peer.known_by - group.keys())
            if lacking:
                raise StateError(f"this is no state of {source}: its groups lack {list_names(lacking)}")
            if not peer.is_like(group):
                others = ", ".join(f"{key}={group[key]!r}" for key in peer.where)
                raise StateError(f"this is no state of {source}: its groups have {others}")
    else:
        alike = [peer for peer in peers.values() if groups and all(map(peer.is_like, groups))]
        best = [peer for peer in alike if not any(peer.known_by < other.known_by for other in alike)]
        if len(best) > 1:
            names = " or ".join(f"source={peer.name!r}" for peer in best)
            raise StateError(f"the groups of this state do not tell which optimizer made it: pass {names}")
        if not best:
            known = ", ".join(peers)
            raise StateError(f"the groups of this state are not those of an optimizer that is known: {known}")
        (peer,) = best
    if not any(peer.has_equal(rule) for rule in rules):
        names = " and ".join(dict.fromkeys(rule.__name__ for rule in rules))
        raise StateError(
            f"{names} {'do' if ' and ' in names else 'does'} not have the mathematics of {peer.name}: import its state "
            f"into {' or '.join(peer.rules)}"
        )
    return peer


# ---- options


class Wanted:
    """What has to hold here for a parameter to be stepped as a group of the source asks for."""

    def __init__(self, peer: Peer, rule: type[Rule], group: Group, p: Tensor) -> None:
        options = peer.options(rule, group, p)
        variant = options.pop("variant", None)
        self.untold = frozenset(name for name, value in options.items() if value is UNTOLD)
        self.shape = tuple(p.shape)
        told = {name: value for name, value in options.items() if name not in self.untold}
        try:
            self.settings = Settings(rule, told, variant)
        except OptionError as error:
            raise StateError(f"{rule.__name__} cannot continue this run of {peer.name}: {error}") from None

    def differences(self, found: Setting, lr: Any) -> Iterator[tuple[str, Any, Any]]:
        """Options that are not as they have to be, with the values wanted and found."""
        apart = self.untold | APART.get(self.settings.rule, frozenset())
        theirs = self.settings.base.for_shape(self.shape).rule
        yield from unlike(normalize(theirs, lr), normalize(found.rule, lr), lr, apart)
        for name in (name for name in self.settings.given if hasattr(Handling, name)):
            wish, ours = getattr(self.settings.base.handling, name), getattr(found.handling, name)
            if differ(wish, ours):
                yield name, wish, ours
        if found.lr_scale != 1.0:
            yield "lr_scale", 1.0, found.lr_scale

    def construct(self, lr: Any) -> str:
        """A call that makes such an optimizer."""
        settings = self.settings
        variant = {"variant": settings.variant} if settings.variant else {}
        given = {name: v for name, v in settings.given.items() if differ(v, settings.without(name))}
        words = [f"{name}={value!r}" for name, value in {"lr": lr, **variant, **given}.items()]
        return f"{settings.rule.__name__}(..., {', '.join(words)})"


def normalize(rule: Rule, lr: Any) -> Rule:
    """A rule with one form for options that mean the same beside the others."""
    if getattr(rule, "weight_decay", None) == 0:  # then nothing tells where decay would go
        default = type(rule)()
        names = ("decoupled", "weight_decay_mode")
        rule = replace(rule, **{name: getattr(default, name) for name in names if hasattr(rule, name)})
    if isinstance(rule, Adafactor):
        sign = -abs(rule.beta2_decay)
        rule = replace(rule, relative_step=rule.is_relative(lr), scale_parameter=rule.is_scaled(lr), beta2_decay=sign)
    return rule


# ---- entries of state

#: Under which bitsandbytes hides all but the count from FSDP, and the lengths of blocks that have a scale each: of its
#: versions from 0.44 on, and of those before.
HIDDEN, BLOCKS = "__bnb_optimizer_quant_state__", (256, 2048)


def unhide(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of a parameter, with what was hidden in it."""
    return {**state, **state[HIDDEN]} if isinstance(state.get(HIDDEN), Mapping) else state


def read_entries(peer: Peer, member: Member, rule: Rule) -> dict[str, Tensor]:
    """The state of a parameter that the source has stepped, as this rule keeps it but for dtypes."""
    found = {ours: member.state[key] for key, ours in peer.keys.items() if member.state.get(key) is not None}
    if "unorm_vec" in member.state:
        raise StateError(f"the state of {member.name!r} has 'unorm_vec': it was run with max_unorm, as LAMB is")
    for place, (key, x) in enumerate(found.items(), 1):
        if hasattr(x, "codes"):  # of torchao, whose tensors of few bits decode themselves
            found[key] = x.dequantize()
        elif isinstance(x, Tensor) and x.dtype == torch.uint8:
            found[key] = decode_blocks(member, x, member.state[f"qmap{place}"], member.state[f"absmax{place}"])
    if isinstance(rule, Adafactor):
        return expand_statistics(found, check_axes(peer, member.group, member.name, member.shape, rule), member.shape)
    if isinstance(rule, SOAP):
        found["basis_age"] = torch.tensor(float((int(member.group["step"]) - 1) % rule.precondition_frequency + 1))
    return unpack_factors(found, member)


def decode_blocks(member: Member, codes: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    """Moments of bitsandbytes: codes for a table of numbers, and a scale for each block."""
    block = next((n for n in BLOCKS if -(-codes.numel() // n) == scales.numel()), None)
    if block is None:
        told = f"{scales.numel()} scales for {codes.numel()} codes"
        raise StateError(f"the state of {member.name!r} is damaged: {told}")
    scale = scales.repeat_interleave(block)[: codes.numel()]
    return (table[codes.long()].flatten() * scale).reshape(codes.shape)


def expand_statistics(found: dict[str, Tensor], axes: tuple[int, int] | None, shape: Shape) -> dict[str, Tensor]:
    """Adafactor's averages of squares: ours keep axes that were averaged over, with size 1, where others drop them."""
    if axes is None or not {"row_var", "col_var"} <= found.keys():
        return found
    if axes[0] > axes[1]:  # its rows are our columns
        found["row_var"], found["col_var"] = found["col_var"], found["row_var"]
    for key, axis in (("row_var", max(axes)), ("col_var", min(axes))):
        found[key] = found[key] if found[key].ndim == len(shape) else found[key].unsqueeze(axis)
    return found


def check_axes(peer: Peer, group: Group, name: str, shape: Shape, rule: Rule) -> tuple[int, int] | None:
    """The axes over which a source factors a parameter; refuse others here."""

    def in_words(axes: tuple[int, int] | None) -> str:
        return "unfactored" if axes is None else f"factored over axes {min(axes)} and {max(axes)}"

    theirs, ours = peer.axes(group, shape), rule.factored_axes(shape) if isinstance(rule, Adafactor) else None
    if (theirs and tuple(sorted(theirs))) != ours:
        raise StateError(
            f"{peer.name} has {name!r} of shape {shape} {in_words(theirs)}, and here it is {in_words(ours)}: set "
            "min_dim_size_to_factor, factor_dims or factored, in overrides if need be"
        )
    return theirs


def unpack_factors(found: dict[str, Any], member: Member) -> dict[str, Tensor]:
    """Factors, which others keep in lists, and Kron's momentum, which they keep as they see the parameter."""
    for key in ("Q", "GG"):
        kept = found.pop(key, ())
        if not isinstance(kept, (list, tuple)):
            raise StateError(f"the state of {member.name!r} is damaged: {key!r} must be a list of factors")
        for i, q in enumerate(kept):
            if isinstance(q, Tensor):  # an axis without one has an empty list
                found[f"{key}_{i}"] = q if q.ndim else q.reshape(1)
    momentum, merged = found.get("momentum_buffer"), "merged_shape" in member.state or member.group.get("flatten")
    if momentum is not None and merged and momentum.numel() == member.p.numel():
        found["momentum_buffer"] = momentum.reshape(member.shape)
    return found
