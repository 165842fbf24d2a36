"""A rule as a gradient transformation: ``init`` and ``update`` over trees."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from thalweg.arrays import Squares
from thalweg.errors import OptionError, StateError
from thalweg.given import OverrideList, Overrides, Standard, check_overrides, plain, warn_of_unused
from thalweg.optax.batches import Job, Leaf, Step, first_entries
from thalweg.optax.engines import Engine, apply_jobs, check_engine, step_jobs
from thalweg.optax.matrices import axes_in_tree, rule_of_axes
from thalweg.optax.products import space_for
from thalweg.optax.shards import check_whole, divisions_of
from thalweg.optax.states import Entries, StatsState, first_count, first_norms, pack, state_class_for, unpack
from thalweg.optax.steps import Solver
from thalweg.optax.trees import Named, Tree, by_leaf, check_gradients, parameters
from thalweg.optax.values import at_count, by_step, check_static, concrete, dtype_name, has_array
from thalweg.rules import Rule
from thalweg.rules.spikes import SpikeCheck, judge
from thalweg.settings import Numerics, ParameterOptions, RuleOptions
from thalweg.spaces import jax as whole
from thalweg.spaces.jax import replicated_with
from thalweg.storage import SPIKES, arithmetic, check_norms, check_shapes, describe_state


@dataclass(frozen=True)
class Choice:
    """An option that is decided leaf by leaf, by a tree or a function of the parameters."""

    name: str
    chosen: Any
    #: What a leaf with this value gets; other values are refused.
    options: Mapping[Any, Mapping[str, Any]]


@dataclass(frozen=True)
class Contents:
    """What is within a solver, whatever wrappers are around it."""

    #: Transformations with their parameters.
    parts: list[tuple[Transformation, list[Leaf]]] = field(default_factory=list)
    #: Patterns of mixtures that choose no parameter.
    unused_entries: list[Any] = field(default_factory=list)
    #: Mixtures of them.
    mixtures: list[Any] = field(default_factory=list)
    #: What is to be told of parameters, by name, and of transformations, by their ids.
    hints: dict[str, list[str]] = field(default_factory=dict)
    group_notes: dict[int, str] = field(default_factory=dict)


#: Filled by ``init`` where a caller asks for it.
CONTENTS: ContextVar[Contents | None] = ContextVar("CONTENTS", default=None)

#: Arrays of numpy have at most so many.
MOST_AXES = 64


def without_where_false(name: str, mask: Any, **options: Any) -> list[Choice]:
    """A mask: leaves where it is False get these options."""
    return [] if mask is None or mask is True else [Choice(name, mask, {True: {}, False: options})]


def stacks(stacked_axes: Any) -> list[Choice]:
    """Leading axes that index independent tensors: a number for all leaves, or a tree of numbers or truth values."""
    if isinstance(stacked_axes, jax.Array):
        raise OptionError(
            "stacked_axes must be a plain Python value; under optax.inject_hyperparams, name it in static_args"
        )
    if stacked_axes is None or (isinstance(plain(stacked_axes), int) and not isinstance(plain(stacked_axes), bool)):
        return []
    return [Choice("stacked_axes", stacked_axes, {n: {"stacked_axes": n} for n in range(MOST_AXES)})]


def as_transformation(
    rule: type[Rule],
    learning_rate: Any,
    options: Mapping[str, Any],
    *,
    variant: str | None = None,
    overrides: Overrides = (),
    choices: Sequence[Choice] = (),
    stacked_axes: Any = None,
    specs: Any = None,
    called: Mapping[str, str] = MappingProxyType({}),
    engine: Engine = "auto",
    layout: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """The transformation of a rule, options checked.

    called: what the caller calls some options, for messages. layout: which axes of a parameter are a matrix, for Muon.
    """
    check_engine(rule, engine)
    rate, choices = plain(learning_rate), (*choices, *stacks(stacked_axes))
    options = {
        name: dtype_name(called.get(name, name), value) if name.endswith("_dtype") else value
        for name, value in options.items()
        if not (name == "seed" and value is None)
    }
    if stacked_axes is not None and not any(choice.name == "stacked_axes" for choice in choices):
        options["stacked_axes"] = stacked_axes  # one number for all leaves
    try:
        check_names(check_overrides(overrides), called)
        settings = check_settings(rule, rate, options, variant, overrides)
    except OptionError as error:
        raise OptionError(in_words(str(error), {"lr": "learning_rate", **called})) from None
    return Transformation(settings, rate, choices, specs, engine, layout).transformation


def check_settings(
    rule: type[Rule], learning_rate: Any, options: Mapping[str, Any], variant: str | None, overrides: Overrides
) -> RuleOptions:
    """Options as rules have them. What is known already is checked; what is traced, or will be, cannot be."""
    check_static(rule.__name__.lower(), {"learning_rate": learning_rate, **options}, rule)
    if callable(options.get("max_grad_norm")):
        raise OptionError("max_grad_norm cannot be a function of the count: it must be a number, or None")
    given = {name: by_step(value) for name, value in options.items()}
    entries = [(pattern, by_steps(override)) for pattern, override in check_overrides(overrides)]
    settings = RuleOptions(rule, given, variant, entries)
    known = [(pattern, {name: concrete(value) for name, value in override.items()}) for pattern, override in entries]
    rate = concrete(at_count(learning_rate, 0))
    checked = RuleOptions(rule, {name: concrete(value) for name, value in given.items()}, variant, known)
    # inject_hyperparams passes every number as an array, also those that the caller did not give
    checked.validate_lr(rate, unasked=[name for name, value in options.items() if has_array(value)])
    if settings.base.numerics.on_nonfinite == "raise":
        raise OptionError(
            "on_nonfinite='raise' is not available in JAX, because compiled programs do not raise: use 'skip', "
            "or jax.config.update('jax_debug_nans', True) to find the cause"
        )
    return settings


def check_names(overrides: OverrideList, called: Mapping[str, str]) -> None:
    """Say so if an entry has the caller's name of an option, where it needs the rule's."""
    ours = {theirs: name.partition("[")[0] for name, theirs in called.items()}
    for pattern, options in overrides:
        for name in options:
            if name in ours and name != ours[name]:
                raise OptionError(
                    f"overrides, entry {pattern!r}: write {ours[name]!r} for {name!r}, as in all front ends"
                )


def by_steps(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: dtype_name(name, value) if name.endswith("_dtype") else by_step(value) for name, value in options.items()
    }


def in_words(message: str, called: Mapping[str, str]) -> str:
    """A message in the caller's own words. Overrides are in the words of the rules already."""
    if message.startswith("overrides") or not called:
        return message
    names = "|".join(re.escape(name) for name in sorted(called, key=len, reverse=True))
    return re.sub(rf"^({names})(?= must|=| under)|(?<=give )({names})\b", lambda match: called[match[0]], message)


def join(numerics: Numerics, gradients: Sequence[tuple[Any, Any, Any]], norms: Any) -> tuple[Any, SpikeCheck | None]:
    """What multiplies gradients, each given with its space and its parameter, and whether their joint norm is a spike.

    norms: those of former steps.
    """
    if not gradients or not numerics.needs_norm:
        return None, None
    wide = [(space, g.astype(arithmetic(jnp.promote_types(g.dtype, p.dtype).name))) for space, g, p in gradients]
    squares = [space.sums(Squares(g, None)) for space, g in wide]
    widest = "float64" if any(square.dtype == "float64" for (square,) in squares) else "float32"
    norm = jnp.sqrt(sum(square.astype(widest) for (square,) in squares))
    limit, guard, scale = numerics.max_grad_norm, numerics.guard, None
    if limit is not None:
        scale = jnp.where(jnp.isfinite(norm), 1 / jnp.maximum(norm / limit, 1.0), jnp.nan)
    if guard is None:
        return scale, None
    judgement = judge(whole, guard, norm.astype(norms.dtype).reshape(1), norms)
    if not judgement.skips:
        factor = judgement.scale[0].astype(widest)
        scale = factor if scale is None else jnp.minimum(scale, factor)
    return scale, judgement


@dataclass(frozen=True, eq=False)
class Transformation(Solver):
    """A gradient transformation by one rule."""

    settings: RuleOptions
    learning_rate: Any
    choices: tuple[Choice, ...]
    specs: Any
    engine: Engine = "auto"
    layout: Any = None
    #: Whether its state has the figures of its steps too.
    observed: bool = False

    def state_class(self, leaves: Sequence[Leaf]) -> type[Any]:
        """The class of states for these parameters."""
        declared: dict[str, None] = {}
        keys: dict[str, None] = {}
        for leaf in leaves:
            shape, setting = leaf.space.shape(leaf.p), leaf.setting
            declared |= dict.fromkeys(setting.rule.entries(shape))
            keys |= dict.fromkeys(describe_state(setting.stored_rule, setting.numerics, shape, leaf.p.dtype.name))
        beside = tuple(key for key in keys if key not in declared)
        return state_class_for(self.settings.rule, tuple(declared), beside, is_spiked=bool(self.numerics.guard))

    @property
    def numerics(self) -> Numerics:
        """What holds for the whole step."""
        return self.settings.base.numerics

    def init(self, params: Tree) -> Any:
        flat = parameters(params)
        leaves = self.leaves(params, flat, report=True)
        contents = CONTENTS.get()
        if contents is not None:
            contents.parts.append((self, leaves))
        states, count = [first_entries(leaf) for leaf in leaves], first_count(flat.leaves)
        skipped = first_count(flat.leaves) if self.numerics.may_skip else None
        norms = {SPIKES: first_norms(self.numerics.guard, flat.leaves)} if self.numerics.guard else {}
        state = pack(self.state_class(leaves), flat.treedef, states, count=count, skipped=skipped, **norms)
        if not self.observed:
            return state
        _, after = jax.eval_shape(partial(self.step, applied=False), params, StatsState(state, {}), params)
        # beside the parameters from the start, like the count of steps
        place = replicated_with(flat.leaves[0]) if flat.leaves else None
        return StatsState(state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=place), after.stats))

    def update(self, updates: Tree, state: Any, params: Tree = None, **extra_args: Any) -> tuple[Tree, Any]:
        if self.engine == "native":
            raise OptionError(
                "engine='native' writes parameters in place, and update() leaves them as they are: take steps with "
                "make_step(solver), or use engine='auto'"
            )
        return super().update(updates, state, params, **extra_args)

    def step(self, params: Tree, state: Any, gradients: Tree, *, applied: bool, **extra_args: Any) -> tuple[Tree, Any]:
        if self.observed:
            if not isinstance(state, StatsState):
                raise StateError(f"with_stats() needs a state of its own init(), got one of {type(state).__name__}")
            state = state.inner_state
        flat = parameters(params)
        grads, leaves = check_gradients(gradients, flat), self.leaves(params, flat)
        state_class = self.state_class(leaves)
        states = unpack(state_class, state, flat.treedef)
        self.check_state(leaves, states, state)
        given = zip(leaves, grads, states, strict=True)
        jobs = [Job(**vars(leaf), g=g, state=entries) for leaf, g, entries in given]
        lr = at_count(self.learning_rate, state.count)
        summed = [(job.space, job.g, job.p) for job in jobs]
        scale, judgement = join(self.numerics, summed, getattr(state, SPIKES, None))
        is_guarded = self.numerics.on_nonfinite == "skip"
        step = Step(optax.safe_increment(state.count), lr, scale, is_guarded, space_for(self.engine))
        if applied:
            outcomes, fine = apply_jobs(jobs, step, self.engine, observed=self.observed)
        else:
            outcomes, fine = step_jobs(jobs, step, applied=False)
        count, skipped, norms, figures = step.t, state.skipped, {}, {}
        values, states = [outcome.value for outcome in outcomes], [outcome.state for outcome in outcomes]
        is_taken = True if fine is None else fine
        if judgement is not None:
            norms, figures = {SPIKES: judgement.kept}, judgement.figures
            if judgement.skips:
                is_spike, still = judgement.is_spike[0], [job.p if applied else 0 for job in jobs]
                is_taken &= ~is_spike
                values = [jnp.where(is_spike, old, new) for old, new in zip(still, values, strict=True)]
                before = [job.state for job in jobs]
                states = jax.tree.map(lambda old, new: jnp.where(is_spike, old, new), before, states)
        if skipped is not None:
            count = jnp.where(is_taken, count, state.count)
            skipped = jnp.where(is_taken, skipped, optax.safe_increment(skipped))
        result = pack(state_class, flat.treedef, states, count=count, skipped=skipped, **norms)
        new = flat.treedef.unflatten(values)
        if not self.observed:
            return new, result
        rates = [{} if lr is None else {"lr": lr * job.setting.lr_scale} for job in jobs]
        told = zip(jobs, rates, outcomes, strict=True)
        stats = {job.name: {**rate, **outcome.stats, **figures} for job, rate, outcome in told}
        return new, StatsState(result, jax.tree.map(as_figure, stats))

    def check_state(self, leaves: Sequence[Leaf], states: Sequence[Entries], state: Any) -> None:
        """Refuse state that these options do not make."""
        if self.numerics.guard:
            check_norms(self.numerics.guard, state.spikes.shape)
        if self.numerics.may_skip != (state.skipped is not None):
            raise StateError(
                "on_nonfinite='skip' and spikes that are skipped keep a counter in the state, and other values do not: "
                "make the state with init() of this optimizer"
            )
        shapes: dict[Any, Any] = {}
        for leaf, entries in zip(leaves, states, strict=True):
            alike = id(leaf.setting), leaf.p.shape, leaf.p.dtype, leaf.mesh_axes, leaf.axes
            if alike not in shapes:
                first = jax.eval_shape(lambda p, leaf=leaf: first_entries(replace(leaf, p=p)), leaf.p)
                shapes[alike] = {key: entry.shape for key, entry in first.items()}
            check_shapes(leaf.name, {key: jnp.shape(entry) for key, entry in entries.items()}, shapes[alike])

    def leaves(self, params: Tree, flat: Named, *, report: bool = False) -> list[Leaf]:
        """The parameters, with what holds for each."""
        if not flat.leaves:  # optax asks so, with a tree that stands for any
            return []
        divisions, settings = divisions_of(self.specs, params, flat), self.settings_of(params, flat)
        rules = [setting.rule for setting, _ in settings]
        axes = axes_in_tree(self.layout, params, flat, rules)
        result, matched = [], {entry for _, entries in settings for entry in entries}
        for index, (name, p) in enumerate(zip(flat.names, flat.leaves, strict=True)):
            if self.specs is None:
                check_whole(name, p)
            rule_of_axes(rules[index], axes[index]).check_shape(name, p.shape)
            result.append(Leaf(name, p, settings[index][0], divisions[index], axes[index]))
        if report:
            unused = [pattern for i, (pattern, _) in enumerate(self.settings.overrides) if i not in matched]
            warn_of_unused("overrides", [pattern for pattern in unused if not isinstance(pattern, Standard)])
        return result

    def settings_of(self, params: Tree, flat: Named) -> list[tuple[ParameterOptions, list[int]]]:
        """What holds for each parameter, and which entries of ``overrides`` match it."""
        chosen = [by_leaf(choice.chosen, params, choice.name) for choice in self.choices]
        pairs = enumerate(zip(flat.names, flat.leaves, strict=True))
        return [self.setting(name, p, tuple(values[index] for values in chosen)) for index, (name, p) in pairs]

    def setting(self, name: str, p: Any, values: tuple[Any, ...]) -> tuple[ParameterOptions, list[int]]:
        """What holds for a leaf: the options of all, those of its mask, those of its name."""
        first: dict[str, Any] = {}
        for choice, value in zip(self.choices, values, strict=True):
            known = plain(concrete(value))
            if not isinstance(known, int) or known not in choice.options:
                wanted = "True or False" if len(choice.options) == 2 else "a number of axes"
                raise OptionError(f"{choice.name} must be {wanted} for parameter {name!r}, got {value!r}")
            first |= choice.options[known]
        return self.settings.choose(name, p, first=tuple(first.items()))


def as_figure(x: Any) -> Any:
    """One number, or one for each tensor of a stack, with a dtype that no compiled step changes."""
    return jnp.squeeze(jnp.asarray(x, jnp.result_type(x)))
