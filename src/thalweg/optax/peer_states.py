"""What states of optax's own optimizers have, parameter by parameter, whatever wrappers are around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
import optax.contrib

from thalweg.errors import StateError
from thalweg.optax.trees import Tree, named
from thalweg.peers import Rename, renamed

#: The parts of states that can be continued, with their fields that are trees like the parameters.
KEPT: dict[type[Any], tuple[str, ...]] = {
    optax.ScaleByAdamState: ("mu", "nu"),
    optax.ScaleByLionState: ("mu",),
    optax.TraceState: ("trace",),
    optax.FactoredState: ("v_row", "v_col", "v"),
    optax.EmaState: ("ema",),
    optax.contrib.MuonState: ("mu",),
}
#: Wrappers with state of their own, and the field that has what they are around.
WRAPPERS: dict[type[Any], str] = {
    optax.MultiStepsState: "inner_opt_state",
    optax.ApplyIfFiniteState: "inner_state",
    optax.InjectStatefulHyperparamsState: "inner_state",
}


@dataclass
class Kept:
    """What optax keeps for one parameter."""

    #: Steps taken; None if the state does not tell.
    count: int | None
    #: By part and field.
    entries: dict[tuple[type[Any], str], Any] = field(default_factory=dict)
    #: Whether a trace is one of steps, which the learning rate and its sign have entered, as in optax.lars.
    of_steps: bool = False
    #: The coefficients that optax.contrib.muon has in its state.
    ns_coeffs: Any = None


@dataclass
class Peer:
    """What a state of optax has."""

    parameters: dict[str, Kept] = field(default_factory=dict)
    #: Steps taken, of states that keep nothing for parameters.
    count: int | None = None
    wrappers: list[Any] = field(default_factory=list)


def gathered(state: Tree, rename: Rename | None) -> Peer:
    """All that can be continued of a state; raise if it has anything else."""
    peer = Peer()

    def walk(part: Any, count: int | None, last: bool) -> None:
        """count: of the wrappers and the chain that this is in. last: whether it is the end of a chain."""
        kind = type(part)
        if kind in KEPT:
            keep(part, count_in(part, count), last)
        elif kind in WRAPPERS:
            peer.wrappers.append(part)
            walk(getattr(part, WRAPPERS[kind]), count_in(part, count), last)
        elif kind is optax.MaskedState:
            walk(part.inner_state, count, last)
        elif kind is optax.transforms.PartitionState:
            walk(part.inner_states, count, False)
        elif kind is tuple or isinstance(part, Mapping):
            chain = [*part.values()] if isinstance(part, Mapping) else [*part]
            for place, each in enumerate(chain):
                walk(each, own_count(chain, count), 0 < place == len(chain) - 1)
            peer.count = own_count(chain, count) if peer.count is None else peer.count
        elif kind is optax.ScaleByScheduleState:
            pass
        elif jax.tree.leaves(part):
            known = ", ".join(sorted(known.__name__ for known in KEPT))
            raise StateError(f"this state has a {kind.__name__}, which cannot be continued here: {known} can be")

    def keep(part: Any, count: int | None, last: bool) -> None:
        for attribute in KEPT[type(part)]:
            tree = named(getattr(part, attribute))
            for theirs, leaf in zip(tree.names, tree.leaves, strict=True):
                name = renamed(theirs, rename)
                kept = peer.parameters.setdefault(name, Kept(count))
                if (type(part), attribute) in kept.entries:
                    twice = f"this state has two {type(part).__name__} for parameter {name!r}"
                    raise StateError(f"{twice}: pass the part that is to be continued, or correct rename=")
                kept.entries[type(part), attribute] = leaf
                kept.of_steps = last
                kept.ns_coeffs = getattr(part, "ns_coeffs", None)

    walk(state, None, False)
    return peer


def own_count(chain: list[Any], count: int | None) -> int | None:
    """The number of steps that the parts of a chain have taken; count: if they do not tell."""
    told = {int(part.count) for part in chain if type(part) not in WRAPPERS and count_in(part, None) is not None}
    if len(told) > 1:
        raise StateError(
            f"parts of this state have taken different numbers of steps, {sorted(told)}: here is one count for all"
        )
    return min(told, default=count)


def count_in(part: Any, count: int | None) -> int | None:
    """The steps that a part has counted; count: if it does not. (Every tuple has a method of that name.)"""
    fields = getattr(part, "_fields", ())
    told = next((name for name in ("gradient_step", "count") if name in fields), None)
    return count if told is None else int(getattr(part, told))
