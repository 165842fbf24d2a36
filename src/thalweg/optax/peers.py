"""Runs that optax's own optimizers have started, continued by ours, whatever wrappers are around their states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from thalweg.errors import StateError, read_as
from thalweg.given import differ
from thalweg.optax.exchange import entries_by_name, import_part, is_own, own_parts, place_like
from thalweg.optax.explain import transformations
from thalweg.optax.trees import Named, Tree, named
from thalweg.peers import Rename, Report, check_same_names, refused_option, rename_parameter
from thalweg.rules import LAMB, LARS, SGD, Adafactor, AdamW, Muon, Rule
from thalweg.rules.lion import Lion
from thalweg.rules.options import number_options
from thalweg.settings import Setting, in_words

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
ADAM = {"exp_avg": (optax.ScaleByAdamState, "mu"), "exp_avg_sq": (optax.ScaleByAdamState, "nu")}
TRACE = {"momentum_buffer": (optax.TraceState, "trace")}
#: Of each rule what it continues, and for each key of its state the part and the field that optax has it in.
TAKEN: dict[type[Rule], tuple[str, dict[str, tuple[type[Any], str]]]] = {
    AdamW: ("optax.adamw", ADAM),
    LAMB: ("optax.lamb", ADAM),
    Lion: ("optax.lion", {"exp_avg": (optax.ScaleByLionState, "mu")}),
    SGD: ("optax.sgd", TRACE),
    LARS: ("optax.lars", TRACE),
    Muon: ("optax.contrib.muon", {"momentum_buffer": (optax.contrib.MuonState, "mu")}),
    Adafactor: (
        "optax.adafactor",
        {
            "row_var": (optax.FactoredState, "v_row"),
            "col_var": (optax.FactoredState, "v_col"),
            "variance": (optax.FactoredState, "v"),
            "exp_avg": (optax.EmaState, "ema"),
        },
    ),
}
#: Options that decide what entries of state mean, with the values that optax has.
MEANING: dict[type[Rule], dict[str, Any]] = {
    LAMB: {"grad_averaging": True},
    SGD: {"dampening": 0.0},
    Muon: {"momentum_mode": "ema"},
    Adafactor: {"momentum_mode": "after_lr"},
}


@dataclass
class PeerParameter:
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

    parameters: dict[str, PeerParameter] = field(default_factory=dict)
    #: Steps taken, of states that keep nothing for parameters.
    count: int | None = None
    wrappers: list[Any] = field(default_factory=list)


def import_peer(
    solver: optax.GradientTransformation,
    params: Tree,
    peer_state: Tree,
    *,
    rename: Rename | None = None,
    step: int | None = None,
) -> tuple[Tree, Report]:
    """The state with which ``solver`` continues a run of an optimizer of optax, and a report of what it took.

    peer_state: of ``optax.adafactor``, ``adam``, ``adamw``, ``lamb``, ``lars``, ``lion``, ``sgd`` or
    ``optax.contrib.muon``, also masked, partitioned, or within ``chain``, ``inject_hyperparams``, ``MultiSteps`` and
    ``apply_if_finite``; what these keep themselves goes on where the solver has them too. States do not tell options:
    give the solver those of the run. rename: from paths of parameters there to paths here. step: how many steps were
    taken, where the state does not tell (``optax.sgd`` without a schedule).

    >>> import optax
    >>> import jax.numpy as jnp
    >>> from thalweg.optax import lamb
    >>> params = {"w": jnp.ones((2, 2))}
    >>> theirs = optax.lamb(0.1)
    >>> _, their_state = theirs.update(params, theirs.init(params), params)
    >>> state, report = import_peer(lamb(0.1), params, their_state)
    >>> print(report.source, state.count)
    optax.lamb 1
    """
    found, start = named(params), solver.init(params)
    with read_as("this state"):
        return continue_run(solver, params, read_state(peer_state, rename), found, start, step)


def continue_run(
    solver: optax.GradientTransformation, params: Tree, peer: Peer, found: Named, start: Tree, step: int | None
) -> tuple[Tree, Report]:
    """The state of a solver with what a peer has, and the report. found: the parameters. start: a fresh state."""
    shapes = {name: tuple(jnp.shape(p)) for name, p in zip(found.names, found.leaves, strict=True)}
    settings = {leaf.names[0]: leaf.setting for _, leaves in transformations(solver, params).parts for leaf in leaves}
    entries = {name: own for _, part in own_parts(start) for name, own in entries_by_name(part, params).items() if own}
    check_same_names([*peer.parameters], [name for name in shapes if name in entries or name in peer.parameters])
    given: dict[str, dict[str, Any]] = {}
    pairs: dict[str, str] = {}
    for name, kept in peer.parameters.items():
        if name not in settings:
            raise StateError(
                f"no transformation of thalweg.optax steps {name!r} in this solver: import its parts apart"
            )
        found_here = take_entries(name, shapes[name], settings[name], entries.get(name, {}), kept, pairs)
        given[name] = {"step": steps_of(kept.count, step), **found_here}
    steps = max((entry["step"] for entry in given.values()), default=None)
    steps = steps_of(peer.count, step) if steps is None else steps
    state = renew_state(start, peer, params, given, steps)
    rules = list(dict.fromkeys(type(setting.rule) for setting in settings.values()))
    sources = in_words(TAKEN[rule][0] if rule in TAKEN else "optax" for rule in rules)
    untold = options_of(list(settings.values()), several=len(rules) > 1)
    names = in_words(rule.__name__ for rule in rules)
    return state, Report(sources, names, len(settings), steps, pairs, untold=untold)


def steps_of(found: int | None, step: int | None) -> int:
    """The number of steps that a state tells, or else the caller."""
    if found is not None and step not in (None, found):
        raise StateError(f"this state has taken {found} steps, and step={step} says otherwise: leave step out")
    known = step if found is None else found
    if known is None:
        raise StateError("this state does not tell how many steps it has taken: pass them as step=")
    return known


def take_entries(
    name: str,
    shape: tuple[int, ...],
    setting: Setting,
    own: Mapping[str, Any],
    kept: PeerParameter,
    pairs: dict[str, str],
) -> dict[str, Any]:
    """The entries of a parameter's state, from those of optax. pairs: filled with which became which."""
    rule, result = setting.rule, {}
    source, keys = TAKEN.get(type(rule), ("", {}))
    has = {kind for kind, _ in kept.entries}
    if has - {kind for kind, _ in keys.values()}:
        parts = ", ".join(sorted(kind.__name__ for kind in has))
        raise StateError(f"the state of {name!r} has {parts}, which {type(rule).__name__} cannot continue")
    check_meaning(name, rule, source, kept)
    left = {pair for pair, value in kept.entries.items() if value.size > 1 or pair[0] is not optax.FactoredState}
    for key, like in own.items():
        kind, attribute = keys.get(key, (None, ""))
        if isinstance(rule, Adafactor) and (axes := rule.factored_axes(shape)) and shape[axes[0]] > shape[axes[1]]:
            # optax calls rows what is left of the larger axis
            attribute = {"v_row": "v_col", "v_col": "v_row"}.get(attribute, attribute)
        value = kept.entries.get((kind, attribute)) if kind else None
        if kind is None or value is None:
            raise StateError(f"{type(rule).__name__} keeps {key!r} of {name!r}, and a state of {source} has none")
        if kind is optax.FactoredState and value.size == like.size:
            value = jnp.reshape(value, like.shape)  # with the axis that was averaged
        if value.shape != like.shape:
            raise StateError(
                f"the state of {name!r} does not fit: {attribute} of {source} has shape {value.shape}, and the options "
                f"of this solver need {like.shape}: give it the options of the run"
            )
        result[key] = -value if isinstance(rule, LARS) and kept.of_steps else value
        pairs[f"{kind.__name__}.{attribute}"] = key
        left.discard((kind, attribute))
    if left:
        parts = ", ".join(sorted(kind.__name__ for kind, _ in left))
        raise StateError(f"{parts} of {name!r} would be lost: give this solver the options of the run")
    return result


def check_meaning(name: str, rule: Rule, source: str, kept: PeerParameter) -> None:
    """Refuse options under which the entries of state are something else."""
    wanted = dict(MEANING.get(type(rule), {}))
    if isinstance(rule, LARS):
        wanted["momentum_mode"] = "lr_inside" if kept.of_steps else "lr_outside"
    if isinstance(rule, SGD) and kept.of_steps:
        raise StateError(f"the trace of {name!r} is one of steps, as that of optax.lars: SGD has one of gradients")
    if isinstance(rule, Muon):
        given = rule.triples if isinstance(rule.ns_coefficients, str) else rule.ns_coefficients
        theirs, ours = jnp.asarray(kept.ns_coeffs), jnp.asarray(given, jnp.float32)
        if theirs.shape != ours.shape or not jnp.allclose(theirs, ours):
            wanted["ns_coefficients"] = theirs.tolist()
    for option, value in wanted.items():
        found = getattr(rule, option)
        if option not in rule.idle(1.0) and differ(value, found):
            raise refused_option(source, name, option, value, found, f"the solver with {option}={value!r}")


def renew_state(state: Tree, peer: Peer, params: Tree, given: Mapping[str, Any], steps: int) -> Tree:
    """A fresh state with the contents of another. Wrappers go on where both have them."""
    accumulating = [part for part in peer.wrappers if int(getattr(part, "mini_step", 0))]

    def renew(part: Any) -> Any:
        if is_own(part):
            new = import_part(part, params, given)
            return new if entries_by_name(part, params) else new._replace(count=place_like(steps, part.count))
        if is_counter(part):
            return part._replace(count=place_like(steps, part.count))
        if type(part) not in WRAPPERS:
            return part
        inner, own = WRAPPERS[type(part)], part._asdict()
        rest = own.pop(inner)
        theirs = [other for other in peer.wrappers if type(other) is type(part)]
        if len(theirs) == 1:
            own = {name: carry_over(value, getattr(theirs[0], name)) for name, value in own.items()}
            if [*map(id, accumulating)] == [id(theirs[0])] and alike(part.acc_grads, theirs[0].acc_grads):
                accumulating.clear()
        elif isinstance(part, optax.InjectStatefulHyperparamsState):
            own |= {"count": place_like(steps, part.count), "hyperparams_states": within(part.hyperparams_states)}
        return type(part)(**own, **{inner: within(rest)})

    def within(tree: Tree) -> Tree:
        return jax.tree.map(renew, tree, is_leaf=lambda x: is_own(x) or is_counter(x) or type(x) in WRAPPERS)

    result = within(state)
    if accumulating:
        raise StateError(
            f"this state has added up gradients of {int(accumulating[0].mini_step)} mini-steps of optax.MultiSteps, "
            "which would be lost: wrap the solver in optax.MultiSteps too, or import after a whole step"
        )
    return result


def is_counter(part: Any) -> bool:
    """Whether something does nothing but count steps, as schedules do."""
    return getattr(part, "_fields", None) == ("count",)


def carry_over(own: Any, theirs: Any) -> Any:
    """What another state has, where this one has it too."""
    if alike(own, theirs):
        return jax.tree.map(place_like, theirs, own)
    if isinstance(own, dict) and isinstance(theirs, dict):
        return {name: carry_over(value, theirs[name]) if name in theirs else value for name, value in own.items()}
    return own


def alike(first: Tree, second: Tree) -> bool:
    """Whether two trees have the same structure."""
    structure: Any = jax.tree.structure(first)
    return bool(structure == jax.tree.structure(second))


def options_of(settings: list[Setting], *, several: bool) -> dict[str, Any]:
    """Numbers that rules have as options, as they hold for the first parameter of each rule."""
    found: dict[str, Any] = {}
    for setting in settings:
        kind = type(setting.rule)
        for option in sorted(number_options(kind) - setting.rule.idle(1.0).keys() - {"stacked_axes"}):
            found.setdefault(f"{kind.__name__}.{option}" if several else option, getattr(setting.rule, option))
    return found


# ---- what a state of optax has


def read_state(state: Tree, rename: Rename | None) -> Peer:
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
                name = rename_parameter(theirs, rename)
                kept = peer.parameters.setdefault(name, PeerParameter(count))
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
