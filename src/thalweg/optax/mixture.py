"""Several transformations as one, each for the parameters that a pattern of their paths chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax

from thalweg.arrays import Squares
from thalweg.errors import OptionError, ParameterError
from thalweg.given import Pattern, check_entries, places_of, warn_of_unused
from thalweg.optax.shards import Shards, mesh_axes_of
from thalweg.optax.states import MixtureState, SpikedMixtureState, first_count, first_norms
from thalweg.optax.steps import Stepping, make_step, owner_of, step_by_update
from thalweg.optax.transformation import CONTENTS, Transformation, join
from thalweg.optax.trees import Named, Tree, by_spec, gradients, parameters
from thalweg.rules.checks import check_choice
from thalweg.rules.spikes import SpikeCheck, Spikes
from thalweg.settings import JOINT, Numerics
from thalweg.spaces import jax as whole
from thalweg.storage import SPIKES, arithmetic

MixtureEntries: TypeAlias = Sequence[tuple[Pattern, optax.GradientTransformation]]


def mixture(
    entries: MixtureEntries,
    *,
    max_grad_norm: float | None = None,
    on_nonfinite: Literal["propagate", "skip"] = "propagate",
    specs: Any = None,
    spikes: bool | Spikes = False,
) -> optax.GradientTransformationExtraArgs:
    """Several gradient transformations as one: the first entry whose pattern matches a parameter transforms it.

    entries: a list of (pattern, transformation). A pattern is a glob, a compiled regular expression or a function of a
    path and a parameter; paths are written as in ``overrides``, such as ``layers.0.w``. Transformations may be any,
    also optax's. max_grad_norm, on_nonfinite, spikes: decided by all gradients together. specs: as of transformations.

    >>> import jax.numpy as jnp
    >>> from thalweg.optax import adamw, sgd
    >>> solver = mixture([("*.w", adamw(0.1, weight_decay=0.0)), ("*", sgd(0.5))])
    >>> params = {"dense": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}}
    >>> updates, state = solver.update(params, solver.init(params), params)
    >>> print(updates["dense"]["w"][0].round(3), updates["dense"]["b"])
    [-0.1 -0.1] [-0.5 -0.5]
    """
    wanted = "a mixture is a list of (pattern, transformation), such as [('*.w', kron(3e-4)), ('*', adamw(3e-4))]"
    checked = check_entries(entries, optax.GradientTransformation, wanted)
    for entry in checked:
        check_own(*entry)
    extended = tuple((pattern, optax.with_extra_args_support(solver)) for pattern, solver in checked)
    whole = Numerics(max_grad_norm=max_grad_norm, on_nonfinite=on_nonfinite, spikes=spikes)
    return Mixture(extended, whole, specs).transformation


def check_own(pattern: Pattern, transformation: Any) -> None:
    """Refuse options of the whole step, which cannot belong to one of several transformations."""
    owner = owner_of(transformation)
    if isinstance(owner, Transformation):
        numerics = owner.settings.base.numerics
        for name in JOINT:
            if getattr(numerics, name) != getattr(Numerics, name):
                raise OptionError(f"entry {pattern!r}: {name} concerns the whole step: give it to mixture()")


@dataclass(frozen=True, eq=False)
class Mixture(Stepping):
    """The functions ``init`` and ``update`` of a mixture."""

    #: What patterns are called in a warning.
    PATTERNS: ClassVar[str] = "entries of the mixture"

    entries: tuple[tuple[Pattern, Any], ...]
    #: What is decided by all gradients together.
    numerics: Numerics
    specs: Any

    def __post_init__(self) -> None:
        check_choice("on_nonfinite", self.numerics.on_nonfinite, "propagate", "skip")
        self.numerics.validate()

    @property
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    @property
    def guarded(self) -> bool:
        return self.numerics.on_nonfinite == "skip"

    def init(self, params: Tree) -> Any:
        flat = parameters(params)
        places = self.places(flat)
        idle, contents = self.unused_patterns(flat, places), CONTENTS.get()
        if contents is not None:
            contents.mixtures.append(self)
        if flat.leaves:
            if contents is not None:
                contents.unused_entries.extend(idle)
            warn_of_unused(self.PATTERNS, idle)
        states = tuple(solver.init(params) for solver in self.mask_entries(flat, places))
        skipped = first_count(flat.leaves) if self.numerics.may_skip else None
        guard = self.numerics.guard
        return self.make_state(states, skipped, None if guard is None else first_norms(guard, flat.leaves))

    def make_state(self, states: tuple[Any, ...], skipped: Any, norms: Any) -> Any:
        return MixtureState(states, skipped) if norms is None else SpikedMixtureState(states, skipped, norms)

    def update(self, updates: Tree, state: Any, params: Tree = None, **extra_args: Any) -> tuple[Tree, Any]:
        if params is None:
            raise ParameterError("update() needs the parameters: update(gradients, state, params)")
        flat = parameters(params)
        grads, spaces = gradients(updates, flat), self.spaces(params, flat)
        scaled, judgement = self.join(list(zip(spaces, grads, flat.leaves, strict=True)), state)
        new, news = flat.treedef.unflatten(scaled), []
        for solver, old in zip(self.mask_entries(flat, self.places(flat)), state.inner_states, strict=True):
            new, inner = solver.update(new, old, params, **extra_args)
            news.append(inner)
        norms, skipped, inner_states = None if judgement is None else judgement.kept, state.skipped, tuple(news)
        if not self.numerics.may_skip:
            return new, self.make_state(inner_states, skipped, norms)
        fine = jnp.asarray(True)
        if self.guarded:
            changes = flat.treedef.flatten_up_to(new)
            for space, x in zip([*spaces, *spaces], [*grads, *changes], strict=True):
                fine &= is_finite(space, x)
        if judgement is not None and judgement.skips:
            fine &= ~judgement.is_spike[0]
        skipped = jnp.where(fine, skipped, optax.safe_increment(skipped))
        guarded = jax.tree.map(lambda new, old: jnp.where(fine, new, old), inner_states, state.inner_states)
        return jax.tree.map(lambda delta: jnp.where(fine, delta, 0), new), self.make_state(guarded, skipped, norms)

    def apply(self, params: Tree, state: Any, updates: Tree, **extra_args: Any) -> tuple[Tree, Any]:
        if self.numerics.may_skip:  # what one transformation has written, another may forbid
            return step_by_update(self.transformation)(params, state, updates, **extra_args)
        flat = parameters(params)
        given = zip(self.spaces(params, flat), gradients(updates, flat), flat.leaves, strict=True)
        grads, judgement = self.join(list(given), state)
        places, norms = self.places(flat), None if judgement is None else judgement.kept
        results, news = list(flat.leaves), []
        for place, ((_, solver), old) in enumerate(zip(self.entries, state.inner_states, strict=True)):
            mine = [place == other for other in places]
            p, g = (keep_chosen(flat, leaves, mine) for leaves in (flat.leaves, grads))
            new, inner = make_step(solver)(p, old.inner_state, g, **extra_args)
            news.append(old._replace(inner_state=inner))
            pairs = zip(mine, flat.treedef.flatten_up_to(new), results, strict=True)
            results = [x if is_mine else other for is_mine, x, other in pairs]
        return flat.treedef.unflatten(results), self.make_state(tuple(news), state.skipped, norms)

    def reached(self) -> set[int]:
        owners = [] if self.numerics.may_skip else [owner_of(solver) for _, solver in self.entries]
        return {number for owner in owners if owner is not None for number in owner.reached()}

    def join(self, given: Sequence[tuple[Any, Any, Any]], state: Any) -> tuple[list[Any], SpikeCheck | None]:
        """The gradients, scaled as their joint norm asks, and whether it is a spike. given: as ``join`` has it."""
        scale, judgement = join(self.numerics, given, getattr(state, SPIKES, None))
        return [g if scale is None else scale_gradient(g, scale) for _, g, _ in given], judgement

    def unused_patterns(self, flat: Named, places: Sequence[int]) -> list[Pattern]:
        return [pattern for place, (pattern, _) in enumerate(self.entries) if place not in places]

    def mask_entries(self, flat: Named, places: Sequence[int]) -> list[Any]:
        """The transformations, each for its parameters alone."""
        masks = [flat.treedef.unflatten([place == other for other in places]) for place in range(len(self.entries))]
        return [optax.masked(solver, mask) for (_, solver), mask in zip(self.entries, masks, strict=True)]

    def places(self, flat: Named) -> list[int]:
        """For each parameter the place of the first entry that matches it."""
        return places_of(self.entries, list(zip(flat.names, flat.leaves, strict=True)))

    def spaces(self, params: Tree, flat: Named) -> list[Any]:
        """Of each parameter the space that sums over its shards."""
        if self.specs is None:
            return [whole] * len(flat.leaves)
        specs = by_spec(self.specs, params)
        triples = zip(specs, flat.leaves, flat.names, strict=True)
        divisions = [mesh_axes_of(spec, p.ndim, name) for spec, p, name in triples]
        return [Shards(division) if any(division) else whole for division in divisions]


def keep_chosen(flat: Named, leaves: Sequence[Any], chosen: Sequence[bool]) -> Tree:
    """A tree of leaves, as ``optax.masked`` shows it to a transformation."""
    pairs = zip(leaves, chosen, strict=True)
    return flat.treedef.unflatten([leaf if is_chosen else optax.MaskedNode() for leaf, is_chosen in pairs])


def scale_gradient(g: Any, scale: Any) -> Any:
    precision = arithmetic(g.dtype.name)
    return (g.astype(precision) * scale.astype(precision)).astype(g.dtype)


def is_finite(space: Any, x: Any) -> Any:
    """Whether all elements are finite, on all devices that have some of them."""
    (failures,) = space.sums(Squares(jnp.where(jnp.isfinite(x), 0.0, 1.0), None))
    return failures == 0
