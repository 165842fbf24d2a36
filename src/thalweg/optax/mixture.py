"""Several transformations as one, each for the parameters that a pattern of their paths chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax

from thalweg.arrays import Squares
from thalweg.errors import OptionError
from thalweg.given import Pattern, check_entries, places_of, warn_of_unused
from thalweg.optax.shards import divisions_of, space_of
from thalweg.optax.states import MixtureState, SpikedMixtureState, first_count, first_norms
from thalweg.optax.steps import Solver, make_step, owner_of, step_by_update
from thalweg.optax.transformation import CONTENTS, Transformation, join
from thalweg.optax.trees import Named, Tree, check_gradients, parameters
from thalweg.rules.checks import check_choice
from thalweg.rules.spikes import Spikes
from thalweg.settings import JOINT, Numerics
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
class Mixture(Solver):
    """Several gradient transformations, each for its parameters."""

    #: What patterns are called in a warning.
    PATTERNS: ClassVar[str] = "entries of the mixture"

    entries: tuple[tuple[Pattern, Any], ...]
    #: What is decided by all gradients together.
    numerics: Numerics
    specs: Any

    def __post_init__(self) -> None:
        check_choice("on_nonfinite", self.numerics.on_nonfinite, "propagate", "skip")
        self.numerics.validate()

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
        states = tuple(
            optax.MaskedState(solver.init(keep_chosen(flat, flat.leaves, places, place)))
            for place, (_, solver) in enumerate(self.entries)
        )
        skipped = first_count(flat.leaves) if self.numerics.may_skip else None
        guard = self.numerics.guard
        return self.make_state(states, skipped, None if guard is None else first_norms(guard, flat.leaves))

    def make_state(self, states: tuple[Any, ...], skipped: Any, norms: Any) -> Any:
        return MixtureState(states, skipped) if norms is None else SpikedMixtureState(states, skipped, norms)

    def step(self, params: Tree, state: Any, gradients: Tree, *, applied: bool, **extra_args: Any) -> tuple[Tree, Any]:
        if applied and self.numerics.may_skip:  # what one transformation has written, another may forbid
            return step_by_update(self.transformation)(params, state, gradients, **extra_args)
        flat = parameters(params)
        grads, places = check_gradients(gradients, flat), self.places(flat)
        spaces = [space_of(division) for division in divisions_of(self.specs, params, flat)]
        given = list(zip(spaces, grads, flat.leaves, strict=True))
        scale, judgement = join(self.numerics, given, getattr(state, SPIKES, None))
        scaled = grads if scale is None else [scale_gradient(g, scale) for g in grads]
        results, inner_states = list(scaled), []
        for place, ((_, solver), old) in enumerate(zip(self.entries, state.inner_states, strict=True)):
            p, g = (keep_chosen(flat, leaves, places, place) for leaves in (flat.leaves, scaled))
            if applied:
                new, inner = make_step(solver)(p, old.inner_state, g, **extra_args)
            else:
                new, inner = solver.update(g, old.inner_state, p, **extra_args)
            inner_states.append(old._replace(inner_state=inner))
            chosen = zip(places, flat.treedef.flatten_up_to(new), results, strict=True)
            results = [x if other == place else result for other, x, result in chosen]
        states, skipped, norms = tuple(inner_states), state.skipped, None if judgement is None else judgement.kept
        if self.numerics.may_skip:
            is_taken = jnp.asarray(True)
            if self.numerics.on_nonfinite == "skip":
                for space, x in zip([*spaces, *spaces], [*grads, *results], strict=True):
                    is_taken &= is_finite(space, x)
            if judgement is not None and judgement.skips:
                is_taken &= ~judgement.is_spike[0]
            skipped = jnp.where(is_taken, skipped, optax.safe_increment(skipped))
            states = jax.tree.map(lambda new, old: jnp.where(is_taken, new, old), states, state.inner_states)
            results = [jnp.where(is_taken, delta, 0) for delta in results]
        return flat.treedef.unflatten(results), self.make_state(states, skipped, norms)

    def reached(self) -> set[int]:
        owners = [] if self.numerics.may_skip else [owner_of(solver) for _, solver in self.entries]
        return {number for owner in owners if owner is not None for number in owner.reached()}

    def unused_patterns(self, flat: Named, places: Sequence[int]) -> list[Pattern]:
        return [pattern for place, (pattern, _) in enumerate(self.entries) if place not in places]

    def places(self, flat: Named) -> list[int]:
        """For each parameter the place of the first entry that matches it."""
        return places_of(self.entries, list(zip(flat.names, flat.leaves, strict=True)))


def keep_chosen(flat: Named, leaves: Sequence[Any], places: Sequence[int], place: int) -> Tree:
    """The leaves of one place as a tree, as ``optax.masked`` shows it to a transformation."""
    pairs = zip(leaves, places, strict=True)
    return flat.treedef.unflatten([leaf if other == place else optax.MaskedNode() for leaf, other in pairs])


def scale_gradient(g: Any, scale: Any) -> Any:
    precision = arithmetic(g.dtype.name)
    return (g.astype(precision) * scale.astype(precision)).astype(g.dtype)


def is_finite(space: Any, x: Any) -> Any:
    """Whether all elements are finite, on all devices that have some of them."""
    (failures,) = space.sums(Squares(jnp.where(jnp.isfinite(x), 0.0, 1.0), None))
    return failures == 0
