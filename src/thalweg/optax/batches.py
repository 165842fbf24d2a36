"""Leaves of a tree that are stepped together.

Small parameters of equal shape are stacked and stepped as one: a program with a kernel for each of hundreds of small
arrays spends its time on starting kernels, and is long to compile. Rules know stacks (``stacked_axes``), so that
nothing in them changes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from thalweg.boundary import finite_throughout, proposed, widened, written
from thalweg.codecs import scale_key
from thalweg.dtypes import NARROW
from thalweg.errors import ParameterError
from thalweg.optax.matrices import MatrixAxes, rule_of_axes
from thalweg.optax.shards import MeshAxes, Shards, gather_whole, own_part, typed_layout
from thalweg.optax.states import Entries
from thalweg.optax.values import in_precision, rule_in_precision
from thalweg.rules.entries import Count, Entry, PerSlice, Spread
from thalweg.rules.noise import normal, tensor_id
from thalweg.rules.rule import Rule, Update
from thalweg.rules.whole import Direction, Preparation, WholeRule
from thalweg.settings import Setting
from thalweg.spaces import jax as whole
from thalweg.storage import RECORD, arithmetic, coded_groups, first_state
from thalweg.trial import check_update

#: Parameters of at most so many elements are stacked with others of their shape.
SMALL = 2**16
#: Stacks have at most so many elements: what is computed of a stack is in memory at once.
LARGEST = 2**28


@dataclass(frozen=True, eq=False)
class Leaf:
    """A parameter as the tree has it, or several of one shape as a stack."""

    names: tuple[str, ...]
    p: Any
    setting: Setting
    #: How it is sharded inside shard_map; only empty tuples elsewhere.
    mesh_axes: MeshAxes
    #: Which matrix it is; None: as its rule sees it by itself.
    axes: MatrixAxes | None

    @property
    def space(self) -> Any:
        return Shards(self.mesh_axes) if any(self.mesh_axes) else whole

    def keys(self, role: type[Entry]) -> list[str]:
        """The entries of its state that have a role."""
        return self.setting.rule.keys(self.space.shape(self.p), role)

    def spread(self) -> list[str]:
        """The entries that are laid out like the parameter, with their scales and the record of rounding."""
        own = self.keys(Spread)
        return [*own, *map(scale_key, own), RECORD]


@dataclass(frozen=True, eq=False)
class Job(Leaf):
    g: Any
    state: Entries

    @property
    def precision(self) -> str:
        """That of the arithmetic."""
        return arithmetic(self.p.dtype.name)

    @property
    def tensor(self) -> int:
        """Its number for random bits."""
        return tensor_id(self.names[0])

    @property
    def is_apart(self) -> bool:
        """Whether it is no part of a stack, but for what a rule needs of whole tensors."""
        return self.p.size > SMALL or whole.over_devices(self.p)


@dataclass(frozen=True)
class Step:
    """What all parameters of one step share."""

    #: The number of the step, from 1.
    t: Any
    lr: Any
    grad_scale: Any
    #: Whether steps that are not finite are left out.
    guarded: bool


class LeafUpdate(NamedTuple):
    delta: Any
    state: Entries
    finite: Any
    #: Figures that the rule computed anyway.
    stats: Mapping[str, Any]


def first_entries(leaf: Leaf) -> Entries:
    """The state of a parameter before its first step."""
    rule, handling = leaf.setting.stored_rule, leaf.setting.handling
    check_update(rule, leaf.space.shape(leaf.p))
    check_groups(leaf)
    rule = rule if leaf.axes is None else rule_of_axes(rule, leaf.axes)
    inner = within(rule, leaf.mesh_axes)
    if not rule.needs_whole:
        return first_state(leaf.space, rule, handling, leaf.p)
    state, spread = first_state(whole, rule, handling, gather_whole(leaf.p, inner)), leaf.spread()
    return {
        key: own_part(entry, inner[: entry.ndim]) if key in spread else by_stack(entry, leaf.p, rule.stacked_axes)
        for key, entry in state.items()
    }


def check_groups(leaf: Leaf) -> None:
    """Refuse a parameter that is sharded within a group: scales are of positions in the whole."""
    shape, rule = leaf.space.shape(leaf.p), leaf.setting.stored_rule
    groups = coded_groups(rule, leaf.setting.handling, shape)
    if groups is None or not any(leaf.mesh_axes):
        return
    axis, row = groups.axis, math.prod(leaf.p.shape[groups.axis :])
    if leaf.p.shape[axis + 1 :] != shape[axis + 1 :] or row % groups.size:
        raise ParameterError(
            f"parameter {leaf.names[0]!r} of shape {shape} is sharded so that groups of {groups.size} neighbours that "
            "share a scale in eight bits are cut: shard it along its first axis, or keep its state in more bits with "
            f"overrides=[({leaf.names[0]!r}, dict(state_dtype='bfloat16', momentum_dtype=None))]"
        )


def by_stack(entry: Any, p: Any, stacked: int) -> Any:
    """Something that every tensor of a stack has one of, laid over devices as the stack is."""
    if not stacked or not whole.over_devices(p) or entry.ndim < stacked:
        return entry
    stack = jnp.sum(p, axis=tuple(range(stacked, p.ndim)))
    return whole.shard_like(entry, jnp.reshape(stack, stack.shape + (1,) * (entry.ndim - stacked)))


def within(rule: Rule, mesh_axes: MeshAxes) -> MeshAxes:
    """How single tensors are sharded, for rules that need them whole; the sharding of a stack is kept."""
    return ((),) * rule.stacked_axes + mesh_axes[rule.stacked_axes :] if rule.needs_whole else ()


def step_all(jobs: Sequence[Job], step: Step) -> list[LeafUpdate]:
    """One step of every parameter, in their order."""
    found: dict[int, LeafUpdate] = {}
    for members in batches(jobs):
        found |= zip(members, step_batch([jobs[i] for i in members], step), strict=True)
    return [found[i] for i in range(len(jobs))]


def batches(jobs: Sequence[Job]) -> Iterable[list[int]]:
    """Which of them go together."""
    found: dict[Any, list[int]] = defaultdict(list)
    for index, job in enumerate(jobs):
        # stacked, shards would come to be sharded alike; where types do not tell, it is not known whether they are
        typed, over_devices = typed_layout(job.p), whole.over_devices(job.p)
        is_apart = job.is_apart and not isinstance(job.setting.rule, WholeRule)
        if is_apart or (over_devices and typed is None) or job.setting.handling.is_random:
            found[index].append(index)
            continue
        entries = tuple((key, entry.shape, entry.dtype) for key, entry in job.state.items())
        layout = job.mesh_axes, job.axes, typed
        found[id(job.setting), job.p.shape, job.p.dtype, job.g.dtype, layout, entries].append(index)
    for members in found.values():
        most = max(1, LARGEST // max(1, jobs[members[0]].p.size))
        yield from (members[start : start + most] for start in range(0, len(members), most))


def step_batch(jobs: Sequence[Job], step: Step) -> list[LeafUpdate]:
    """One step of parameters that are alike."""
    if len(jobs) == 1:
        return [step_job(jobs[0], step)]
    if jobs[0].is_apart:
        return step_apart(jobs, step)
    result, counts = step_job(stack_jobs(jobs), step), jobs[0].keys(Count)
    return [unstack(result, place, len(jobs), counts) for place in range(len(jobs))]


def step_apart(jobs: Sequence[Job], step: Step) -> list[LeafUpdate]:
    """One step of parameters that are alike, by a rule that needs whole tensors: its middle alone is that of a stack.

    The rest goes element by element, and is traced once for all of them.
    """
    rule, stack = rule_for(jobs[0], step), rule_for(jobs[0], step, stacked=1)
    assert isinstance(rule, WholeRule)
    assert isinstance(stack, WholeRule)
    parts = [gather_parts(rule, job) for job in jobs]
    first = parts[0]

    def prepare(p: Any, g: Any, state: Entries) -> Preparation:
        handling, scale = first.setting.handling, in_precision(step.grad_scale, first.precision)
        wide, gradient, old, t = widened(whole, rule, handling, p, g, state, t=step.t, grad_scale=scale)
        return rule.prepare(whole, gradient, old, wide, t)

    def prepare_tensors(*arrays: Any) -> tuple[Any, ...]:
        return prepare(*arrays).tensors

    def apply(direction: Direction, p: Any, g: Any, state: Entries) -> Update:
        return ask_rule(rule.with_direction(direction), replace(first, p=p, g=g, state=state), step)

    if isinstance(first.p, jax.core.Tracer):
        prepare_tensors, apply = jax.jit(prepare_tensors), jax.jit(apply)
    arrays = [(part.p, part.g, part.state) for part in parts]
    tensors = tuple(map(jnp.stack, zip(*(prepare_tensors(*own) for own in arrays), strict=True)))
    entries = {
        key: jnp.stack([part.state[key].astype(part.precision) for part in parts]) for key in jobs[0].keys(PerSlice)
    }
    due = prepare(*arrays[0]).due  # the same for all of them: they have the same schedule
    names, like = [job.names[0] for job in jobs], tensors[0].astype(first.precision)
    noise = noise_of(names, like, ((), *first.mesh_axes), stack, first.setting, step)
    directions = stack.transform(whole, tensors, entries, due=due, noise=noise)
    updates = [apply(direction_at(directions, place, len(jobs)), *own) for place, own in enumerate(arrays)]
    for key in jobs[0].keys(Count):
        for update in updates[1:]:
            update.state[key] = updates[0].state[key]
    return [write(job, step, scatter_parts(rule, job, update)) for job, update in zip(jobs, updates, strict=True)]


def direction_at(stack: Direction, place: int, members: int) -> Direction:
    """That of one parameter, from that of a stack of them."""

    def own(figure: Any) -> Any:
        each = figure.shape[0] // members  # the matrices of a parameter may have one each
        return jax.lax.slice_in_dim(figure, place * each, (place + 1) * each)

    return Direction(
        jax.lax.index_in_dim(stack.tensor, place, keepdims=False),
        {key: own(figure) for key, figure in stack.figures.items()},
        {key: jax.lax.index_in_dim(entry, place, keepdims=False) for key, entry in stack.state.items()},
    )


def stack_jobs(jobs: Sequence[Job]) -> Job:
    """Several as one, with a leading axis more."""
    first = jobs[0]
    counts = first.keys(Count)
    state = {
        # the same for all of them: they have the same schedule, and have taken every step together
        key: entry if key in counts else jnp.stack([job.state[key] for job in jobs])
        for key, entry in first.state.items()
    }
    return Job(
        names=tuple(name for job in jobs for name in job.names),
        p=jnp.stack([job.p for job in jobs]),
        setting=first.setting,
        mesh_axes=((), *first.mesh_axes),
        axes=first.axes,
        g=jnp.stack([job.g for job in jobs]),
        state=state,
    )


def unstack(result: LeafUpdate, place: int, members: int, counts: Sequence[str]) -> LeafUpdate:
    """One of several. counts: the entries that are the same for all of them."""

    def own(figure: Any) -> Any:
        if not getattr(figure, "ndim", 0):
            return figure
        each = figure.shape[0] // members  # the matrices of a parameter may have one each
        return figure[place] if each == 1 else figure[place * each : (place + 1) * each]

    state = {key: entry if key in counts else entry[place] for key, entry in result.state.items()}
    stats = {key: own(value) for key, value in result.stats.items()}
    return LeafUpdate(result.delta[place], state, result.finite, stats)


def rule_for(job: Job, step: Step, stacked: int = 0) -> Rule:
    """The rule at this step. stacked: axes that a parameter has more than in the tree."""
    rule = rule_in_precision(job.setting.rule_at(step.t), job.precision)
    rule = replace(rule, stacked_axes=rule.stacked_axes + stacked) if stacked else rule
    return rule if job.axes is None else rule_of_axes(rule, job.axes)


def step_job(job: Job, step: Step) -> LeafUpdate:
    """One step of one parameter, or of one stack."""
    rule = rule_for(job, step, stacked=int(len(job.names) > 1))
    return write(job, step, scatter_parts(rule, job, ask_rule(rule, gather_parts(rule, job), step)))


def write(job: Job, step: Step, update: Update) -> LeafUpdate:
    """An update in the dtypes of the tree."""
    handling, delta, finite = job.setting.handling, update.delta, None
    rounded = handling.rounding != "nearest" and job.p.dtype.name in NARROW
    if rounded or step.guarded:
        new, record = written(job.space, handling, job.p, job.state, delta, tensor=job.tensor, t=step.t)
        update.state.update(record)
        finite = finite_throughout(job.space, update, new) if step.guarded else None
        delta = new.astype(delta.dtype) - job.p.astype(delta.dtype) if rounded else delta
    return LeafUpdate(delta.astype(jnp.promote_types(job.p.dtype, job.g.dtype)), update.state, finite, update.stats)


def gather_parts(rule: Rule, job: Job) -> Job:
    """A parameter, its gradient and its state as a rule needs them: whole, if it says so."""
    if not rule.needs_whole:
        return job
    inner, typed = within(rule, job.mesh_axes), typed_layout(job.p)

    def gather(x: Any) -> Any:
        if typed is None:
            return gather_whole(x, inner[: x.ndim])
        return jax.sharding.reshard(x, PartitionSpec(*typed.spec[: rule.stacked_axes]))

    spread = job.spread()
    state = {key: gather(entry) if key in spread else entry for key, entry in job.state.items()}
    return replace(job, p=gather(job.p), g=gather(job.g), state=state)


def scatter_parts(rule: Rule, job: Job, update: Update) -> Update:
    """An update of what was gathered, laid out as the parameter is."""
    if not rule.needs_whole:
        return update
    inner, stacked, typed = within(rule, job.mesh_axes), rule.stacked_axes, typed_layout(job.p)

    def scatter(x: Any) -> Any:
        if typed is None:
            return own_part(x, inner[: x.ndim])
        return jax.sharding.reshard(x, typed if x.shape == job.p.shape else PartitionSpec(*typed.spec[:stacked]))

    spread = job.spread()
    state = {
        key: scatter(entry) if key in spread else whole.replicate(entry, min(stacked, entry.ndim))
        for key, entry in update.state.items()
    }
    return update._replace(delta=scatter(update.delta), state=state)


def ask_rule(rule: Rule, job: Job, step: Step) -> Update:
    """The rule's answer. job: with parts gathered."""
    return proposed(
        whole if rule.needs_whole else job.space,
        rule,
        job.setting.handling,
        job.p,
        job.g,
        job.state,
        t=step.t,
        lr=in_precision(step.lr, job.precision),
        lr_scale=job.setting.lr_scale,
        tensor=job.tensor,
        grad_scale=in_precision(step.grad_scale, job.precision),
        noise=noise_of(job.names, job.p.astype(job.precision), job.mesh_axes, rule, job.setting, step),
    )


def noise_of(
    names: Sequence[str], like: Any, mesh_axes: MeshAxes, rule: Rule, setting: Setting, step: Step
) -> Callable[[], Any]:
    """Normal numbers, of each parameter its own, by positions in the whole stack."""
    gathered = ((),) * (like.ndim - rule.stacked_axes)
    sharded = (*mesh_axes[: rule.stacked_axes], *gathered) if rule.needs_whole else mesh_axes

    def draw(own: Any, tensor: Any) -> Any:
        axes = sharded[like.ndim - own.ndim :]
        return normal(Shards(axes) if any(axes) else whole, own, seed=setting.handling.seed, tensor=tensor, t=step.t)

    ids = list(map(tensor_id, names))
    if len(ids) == 1:
        return lambda: draw(like, ids[0])
    return lambda: jax.vmap(draw)(like, jnp.asarray(ids, jnp.uint32))
