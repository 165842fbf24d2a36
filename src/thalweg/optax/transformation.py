"""A rule as a gradient transformation: ``init`` and ``update`` over trees."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import optax

from thalweg.arrays import Squares
from thalweg.errors import OptionError, ParameterError, UnusedOverrideWarning
from thalweg.optax.batches import Job, Leaf, Moment, first_entries, stepped
from thalweg.optax.shards import check_whole, layout_of
from thalweg.optax.states import STATES, packed, unpacked
from thalweg.optax.trees import Named, Tree, by_leaf, by_spec, gradients, parameters
from thalweg.optax.values import by_step, check_static, concrete
from thalweg.rules import RULES
from thalweg.settings import Overrides, Setting, Settings, combined


@dataclass(frozen=True)
class Choice:
    """An option that is decided leaf by leaf, by a tree or a function of the parameters."""

    name: str
    chosen: Any
    #: What a leaf with this value gets; values without an entry leave it as it is.
    options: Mapping[Any, Mapping[str, Any]]


def without_where_false(name: str, mask: Any, **options: Any) -> list[Choice]:
    """A mask: leaves where it is False get these options."""
    return [] if mask is None or mask is True else [Choice(name, mask, {True: {}, False: options})]


def stacks(stacked_axes: Any) -> list[Choice]:
    """Leading axes that index independent tensors: a number for all leaves, or a tree of numbers or truth values."""
    if stacked_axes is None or (isinstance(stacked_axes, int) and not isinstance(stacked_axes, bool)):
        return []
    return [Choice("stacked_axes", stacked_axes, {n: {"stacked_axes": n} for n in range(16)})]


def as_transformation(
    rule_name: str,
    learning_rate: Any,
    options: Mapping[str, Any],
    *,
    variant: str | None = None,
    overrides: Overrides = (),
    choices: Sequence[Choice] = (),
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """The transformation of a rule, options checked."""
    check_static(rule_name.lower(), dict(options), RULES[rule_name])
    given = {name: by_step(value) for name, value in options.items()}
    entries = [(pattern, {name: by_step(value) for name, value in own.items()}) for pattern, own in overrides]
    settings = Settings(rule_name, given, variant, entries)
    # what is known already is checked; what is traced, or will be, cannot be
    checked = Settings(
        rule_name,
        {name: concrete(value) for name, value in given.items()},
        variant,
        [(pattern, {name: concrete(value) for name, value in own.items()}) for pattern, own in entries],
    )
    checked.validate_lr(concrete(learning_rate(0) if callable(learning_rate) else learning_rate))
    if settings.base.handling.on_nonfinite == "raise":
        raise OptionError(
            "on_nonfinite='raise' cannot be served: compiled programs do not raise; take 'skip', "
            "or jax.config.update('jax_debug_nans', True) to search for the cause"
        )
    parts = Transformation(settings, learning_rate, tuple(choices), specs)
    return optax.GradientTransformationExtraArgs(parts.init, parts.update)


@dataclass(frozen=True)
class Transformation:
    """The two functions of a gradient transformation."""

    settings: Settings
    learning_rate: Any
    choices: tuple[Choice, ...]
    specs: Any
    #: Settings by what was decided for a leaf, so that leaves of equal settings are known to be so.
    known: dict[Any, Setting] = field(default_factory=dict)

    @property
    def kind(self) -> type[Any]:
        return STATES[self.settings.rule_name]

    @property
    def guarded(self) -> bool:
        return self.settings.base.handling.on_nonfinite == "skip"

    def init(self, params: Tree) -> Any:
        found = parameters(params)
        leaves = self.leaves(params, found, report=True)
        states = [first_entries(leaf) for leaf in leaves]
        skipped = jnp.zeros([], jnp.int32) if self.guarded else None
        return packed(self.kind, found.treedef, states, count=jnp.zeros([], jnp.int32), skipped=skipped)

    def update(self, updates: Tree, state: Any, params: Tree = None, **extra_args: Any) -> tuple[Tree, Any]:
        if params is None:
            raise ParameterError("update() needs the parameters: update(gradients, state, params)")
        found = parameters(params)
        grads, states = gradients(updates, found), unpacked(self.kind, state, found.treedef)
        jobs = [
            Job(leaf.names, leaf.p, leaf.setting, leaf.layout, g, entries)
            for leaf, g, entries in zip(self.leaves(params, found), grads, states, strict=True)
        ]
        lr = self.learning_rate(state.count) if callable(self.learning_rate) else self.learning_rate
        moment = Moment(optax.safe_increment(state.count), lr, self.grad_scale(jobs), self.guarded)
        outcomes = stepped(jobs, moment)
        deltas, count, skipped = [o.delta for o in outcomes], moment.t, state.skipped
        news = [o.state for o in outcomes]
        if self.guarded:
            fine = jnp.all(jnp.stack([jnp.asarray(o.finite) for o in outcomes])) if outcomes else jnp.asarray(True)
            deltas = [jnp.where(fine, delta, 0) for delta in deltas]
            news = [{k: jnp.where(fine, new[k], old[k]) for k in new} for new, old in zip(news, states, strict=True)]
            count = jnp.where(fine, count, state.count)
            skipped = jnp.where(fine, skipped, optax.safe_increment(skipped))
        result = packed(self.kind, found.treedef, news, count=count, skipped=skipped)
        return found.treedef.unflatten(deltas), result

    def grad_scale(self, jobs: Sequence[Job]) -> Any:
        """What brings the joint norm of all gradients down to max_grad_norm."""
        limit = self.settings.base.handling.max_grad_norm
        if limit is None or not jobs:
            return None
        squares = [
            job.space.sums(Squares(job.g.astype(jnp.promote_types(job.g.dtype, "float32")), None)) for job in jobs
        ]
        norm = jnp.sqrt(sum(square for (square,) in squares))
        return jnp.where(jnp.isfinite(norm), 1 / jnp.maximum(norm / limit, 1.0), jnp.nan)

    def leaves(self, params: Tree, found: Named, *, report: bool = False) -> list[Leaf]:
        """The parameters, with what holds for each."""
        chosen = [by_leaf(choice.chosen, params, choice.name) for choice in self.choices]
        specs = None if self.specs is None else by_spec(self.specs, params)
        result, matched = [], set[int]()
        for index, (name, p) in enumerate(zip(found.names, found.leaves, strict=True)):
            setting, entries = self.setting(name, p, tuple(values[index] for values in chosen))
            matched.update(entries)
            if specs is None:
                check_whole(name, p)
            layout = ((),) * p.ndim if specs is None else layout_of(specs[index], p.ndim, name)
            if setting.rule.stacked_axes > p.ndim:
                raise OptionError(
                    f"stacked_axes={setting.rule.stacked_axes}, but parameter {name!r} has shape {p.shape}"
                )
            result.append(Leaf((name,), p, setting, layout))
        unused = [repr(pattern) for i, (pattern, _) in enumerate(self.settings.overrides) if i not in matched]
        if report and unused and result:
            message = f"overrides that match no parameter: {', '.join(unused)}"
            warnings.warn(message, UnusedOverrideWarning, stacklevel=4)
        return result

    def setting(self, name: str, p: Any, values: tuple[Any, ...]) -> tuple[Setting, list[int]]:
        """What holds for a leaf: the options of all, those of its mask, those of its name."""
        own, matched = self.settings.of(name, p)
        decided = []
        for choice, value in zip(self.choices, values, strict=True):
            if not isinstance(value, (int, bool)) or value not in choice.options:
                raise OptionError(f"{choice.name} must be True or False for parameter {name!r}, got {value!r}")
            decided.append(choice.options[value])
        key = (tuple(matched), tuple(map(id, decided)))
        if key not in self.known:
            for options in decided:
                own = combined(own, options) if options else own
            self.known[key] = own
        return self.known[key], matched
