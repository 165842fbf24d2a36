"""A step of each leaf of a tree. Rules that need whole tensors transform leaves of equal shape as one stack.

Products of a stack are one call, and the program of a refresh is compiled once. Rules know stacks (``stacked_axes``),
so that nothing in them changes; what goes element by element before and after (``WholeRule``) stays as the leaves are.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from thalweg.boundary import finite_throughout, proposed, widened, written
from thalweg.codecs import scale_key
from thalweg.dtypes import DTYPES, NARROW
from thalweg.errors import ParameterError
from thalweg.optax.matrices import MatrixAxes, rule_of_axes
from thalweg.optax.shards import MeshAxes, Shards, gather_whole, own_part, space_of, typed_layout
from thalweg.optax.states import Entries
from thalweg.optax.values import in_precision, rule_in_precision
from thalweg.rules.entries import Entry, PerSlice, Spread
from thalweg.rules.kron import Kron, Whole
from thalweg.rules.noise import normal, tensor_id
from thalweg.rules.rule import Rule, Update
from thalweg.rules.whole import Direction, Preparation, WholeRule
from thalweg.settings import ParameterOptions
from thalweg.spaces import jax as whole
from thalweg.storage import RECORD, arithmetic, coded_groups, first_state
from thalweg.trial import check_update

#: Leaves are stacked as long as a stack has at most so many elements: it is in memory at once.
LARGE = 2**28
#: As many elements are transformed in one program of several shapes, for which all of them are in memory at once.
JOINT = 2**25


@dataclass(frozen=True, eq=False)
class Leaf:
    """A parameter as the tree has it."""

    name: str
    p: Any
    setting: ParameterOptions
    #: How it is sharded inside shard_map; only empty tuples elsewhere.
    mesh_axes: MeshAxes
    #: Which matrix it is; None: as its rule sees it by itself.
    axes: MatrixAxes | None

    @property
    def space(self) -> Any:
        return space_of(self.mesh_axes)

    def keys(self, role: type[Entry]) -> list[str]:
        """The entries of its state that have a role."""
        return self.setting.rule.keys(self.space.shape(self.p), role)

    def spread(self) -> list[str]:
        """The entries that are laid out like the parameter, with their scales and the record of rounding."""
        keys = self.keys(Spread)
        return [*keys, *map(scale_key, keys), RECORD]


@dataclass(frozen=True, eq=False)
class Job(Leaf):
    g: Any
    state: Entries


@dataclass(frozen=True)
class Step:
    """What all parameters of one step share."""

    #: The number of the step, from 1.
    t: Any
    lr: Any
    grad_scale: Any
    #: Whether steps that are not finite are left out.
    guarded: bool
    #: What whole tensors are computed with.
    space: Any = whole


def first_entries(leaf: Leaf) -> Entries:
    """The state of a parameter before its first step."""
    rule, numerics = leaf.setting.stored_rule, leaf.setting.numerics
    check_update(rule, leaf.space.shape(leaf.p))
    check_groups(leaf)
    rule = rule_of_axes(rule, leaf.axes)
    inner = within(rule, leaf.mesh_axes)
    if not rule.needs_whole:
        return first_state(leaf.space, rule, numerics, leaf.p)
    state, spread = first_state(whole, rule, numerics, gather_whole(leaf.p, inner)), leaf.spread()
    return {
        key: own_part(entry, inner[: entry.ndim]) if key in spread else by_stack(entry, leaf.p, rule.stacked_axes)
        for key, entry in state.items()
    }


def check_groups(leaf: Leaf) -> None:
    """Refuse a parameter that is sharded within a group: scales are of positions in the whole."""
    shape, rule = leaf.space.shape(leaf.p), leaf.setting.stored_rule
    groups = coded_groups(rule, leaf.setting.numerics, shape)
    if groups is None or not any(leaf.mesh_axes):
        return
    axis, row = groups.axis, math.prod(leaf.p.shape[groups.axis :])
    if leaf.p.shape[axis + 1 :] != shape[axis + 1 :] or row % groups.size:
        raise ParameterError(
            f"parameter {leaf.name!r} of shape {shape} is sharded so that groups of {groups.size} neighbours that "
            "share a scale in eight bits are cut: shard it along its first axis, or keep its state in more bits with "
            f"overrides=[({leaf.name!r}, dict(state_dtype='bfloat16', momentum_dtype=None))]"
        )


def by_stack(entry: Any, p: Any, stacked: int) -> Any:
    """An entry that has one value for each tensor of a stack, laid over devices as the stack is."""
    if not stacked or not whole.over_devices(p) or entry.ndim < stacked:
        return entry
    typed = typed_layout(p)
    if typed is not None:
        return jax.sharding.reshard(entry, PartitionSpec(*typed.spec[:stacked]))
    stack = jnp.sum(p, axis=tuple(range(stacked, p.ndim)))
    return whole.shard_like(entry, jnp.reshape(stack, stack.shape + (1,) * (entry.ndim - stacked)))


def within(rule: Rule, mesh_axes: MeshAxes) -> MeshAxes:
    """How single tensors are sharded, for rules that need them whole; the sharding of a stack is kept."""
    return ((),) * rule.stacked_axes + mesh_axes[rule.stacked_axes :] if rule.needs_whole else ()


def step_all(jobs: Sequence[Job], step: Step) -> list[Update]:
    """One step of every parameter, in their order."""
    by_index: dict[int, Update] = {}
    for lists in find_stacks(jobs):
        if len(lists) == len(lists[0]) == 1:
            by_index[lists[0][0]] = step_job(jobs[lists[0][0]], step)
            continue
        for i, rule in zip(
            itertools.chain(*lists),
            transform_stacks([[jobs[i] for i in members] for members in lists], step),
            strict=True,
        ):
            by_index[i] = step_job(jobs[i], step, rule)
    return [by_index[i] for i in range(len(jobs))]


def find_stacks(jobs: Sequence[Job]) -> Iterable[list[list[int]]]:
    """Which of them go together: lists of those that are one stack, by what is transformed at once."""
    by_kind: dict[Any, list[int]] = defaultdict(list)
    for index, job in enumerate(jobs):
        entries = tuple((key, entry.shape, entry.dtype) for key, entry in job.state.items())
        alike = id(job.setting), job.p.shape, job.p.dtype, job.g.dtype, job.mesh_axes, job.axes, entries
        by_kind[index if goes_alone(job) else alike].append(index)
    stacks = []
    for members in by_kind.values():
        most = max(1, LARGE // max(1, jobs[members[0]].p.size))
        stacks += [members[start : start + most] for start in range(0, len(members), most)]
    joint: dict[Any, list[list[int]]] = defaultdict(list)
    for members in sorted(stacks, key=lambda members: len(members) * jobs[members[0]].p.size):
        first = jobs[members[0]]
        together = id(first.setting), first.p.dtype, first.g.dtype
        total = sum(jobs[i].p.size for stack in (*joint.get(together, ()), members) for i in stack)
        joint[together if is_joint(first) and total <= JOINT else members[0]].append(members)
    return joint.values()


def is_joint(job: Job) -> bool:
    """Whether a parameter is transformed together with those of other shapes."""
    is_kron = getattr(type(job.setting.rule), "transform", None) is Kron.transform
    return is_kron and not goes_alone(job) and not any(job.mesh_axes)


def goes_alone(job: Job) -> bool:
    """Whether a parameter is in no stack: it need not be whole, or it is divided over devices."""
    rule = job.setting.rule
    return not rule.needs_whole or whole.over_devices(job.p) or any(within(rule, job.mesh_axes))


class Transformed:
    """A rule of which the first two parts of a step are known."""

    def __init__(self, rule: WholeRule, prepared: Preparation, direction: Direction) -> None:
        self.rule, self.prepared, self.direction = rule, prepared, direction

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, lr_scale: Any, noise: Any) -> Update:
        state = {**self.prepared.state, **self.direction.state}
        return self.rule.apply(xp, self.direction, s, p, state, due=self.prepared.due, lr=lr * lr_scale)


class Prepared(NamedTuple):
    """The first part of a step of one parameter."""

    rule: WholeRule
    result: Preparation
    #: The entries with a shape of their own, as they were.
    state: dict[str, Any]


def prepare(job: Job, step: Step) -> Prepared:
    rule, scale = rule_of(job, step), in_precision(step.grad_scale, arithmetic(job.p.dtype.name))
    given = step.space, rule, job.setting.numerics, job.p, job.g, job.state
    p, g, state, t = widened(*given, t=step.t, grad_scale=scale)
    own = {key: state[key] for key in job.keys(PerSlice)}
    return Prepared(rule, rule.prepare(step.space, g, state, p, t), own)


def transform_stacks(lists: Sequence[Sequence[Job]], step: Step) -> Iterable[Transformed]:
    """The middle part of a step for parameters of one setting, each list as a stack: their rules, of which it is known.

    They have taken every step together, so the same is due for all.
    """
    parts = [[prepare(job, step) for job in jobs] for jobs in lists]
    stacks = iter(step.space.stack_all([[own.state[key] for own in part] for part in parts for key in part[0].state]))
    wholes = []
    for jobs, part in zip(lists, parts, strict=True):
        tensors = tuple(map(jnp.stack, zip(*(own.result.tensors for own in part), strict=True)))
        state = {key: next(stacks) for key in part[0].state}
        wholes.append(
            Whole(rule_of(jobs[0], step, stacked=1), step.space, tensors, state, partial(draw_noise, jobs, step))
        )
    due = parts[0][0].result.due
    if is_joint(lists[0][0]):
        directions = Kron.transform_all(wholes, due)
    else:
        directions = [own.rule.transform(own.xp, own.tensors, own.state, due=due, noise=own.noise) for own in wholes]
    columns = iter(step.space.take_apart([entry for direction in directions for entry in direction.state.values()]))
    for part, direction in zip(parts, directions, strict=True):
        state, figures = {key: next(columns) for key in direction.state}, figures_of(direction.figures, len(part))
        for place, (prepared, tensor) in enumerate(zip(part, jnp.unstack(direction.tensor), strict=True)):
            new = {key: entries[place] for key, entries in state.items()}
            yield Transformed(prepared.rule, prepared.result, Direction(tensor, figures[place], new))


def figures_of(figures: Mapping[str, Any], members: int) -> list[dict[str, Any]]:
    """The figures of each member of a stack; one may have several numbers, one for each of its matrices."""

    def divide(figure: Any) -> list[Any]:
        if not getattr(figure, "ndim", 0):
            return [figure] * members
        size = figure.shape[0] // members
        return list(figure) if size == 1 else jnp.split(figure, members)

    parts = {key: divide(figure) for key, figure in figures.items()}
    return [{key: rows[place] for key, rows in parts.items()} for place in range(members)]


def draw_noise(jobs: Sequence[Job], step: Step) -> Any:
    """The noise of parameters of one shape, as a stack: of each its own, by positions in the whole of it."""
    first = jobs[0]
    stacked = first.setting.rule.stacked_axes
    stack = first.mesh_axes[:stacked] + ((),) * (first.p.ndim - stacked)
    space: Any = Shards(stack) if any(stack) else step.space
    like: Any = jax.ShapeDtypeStruct(first.p.shape, arithmetic(first.p.dtype.name))
    # the host computes with these numbers: the program does not
    numbers: Any = np.array([tensor_id(job.name) for job in jobs], "uint32").reshape(-1, *[1] * first.p.ndim)
    return normal(space, like, seed=first.setting.numerics.seed, tensor=numbers, t=step.t)


def rule_of(job: Job, step: Step, stacked: int = 0) -> Any:
    """The rule of a step. stacked: how many axes of a stack there are beside the parameter's own."""
    rule = rule_in_precision(job.setting.rule_at(step.t), arithmetic(job.p.dtype.name))
    return rule_of_axes(replace(rule, stacked_axes=rule.stacked_axes + stacked), job.axes)


def step_job(job: Job, step: Step, rule: Any = None) -> Update:
    """One step of one parameter, rounded if it is to be. rule: of which parts are known."""
    numerics, dtype, tensor = job.setting.numerics, job.p.dtype.name, tensor_id(job.name)
    rule = rule_of(job, step) if rule is None else rule
    update = propose_by(rule, job, step, tensor)
    delta, finite = update.delta, None
    rounded = numerics.rounding != "nearest" and dtype in NARROW
    if rounded or step.guarded:
        new, record = written(Rounding(job.space), numerics, job.p, job.state, delta, tensor=tensor, t=step.t)
        update.state.update(record)
        finite = finite_throughout(job.space, update, new) if step.guarded else None
        delta = new.astype(delta.dtype) - job.p.astype(delta.dtype) if rounded else delta
    return update._replace(delta=delta.astype(jnp.promote_types(job.p.dtype, job.g.dtype)), finite=finite)


class Rounding:
    """A space in which numbers are rounded before they are narrowed.

    Compilers take what is narrowed and widened again for what it was, and the record of what rounding costs for 0.
    """

    def __init__(self, space: Any) -> None:
        self.space = space

    def __getattr__(self, name: str) -> Any:
        return getattr(self.space, name)

    def astype(self, x: Any, dtype: str) -> Any:
        if dtype == "bfloat16":
            x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        elif dtype == "float16":  # whose smallest numbers that would take for 0
            distance = self.space.spacing(x, DTYPES[dtype].digits, DTYPES[dtype].least)
            x = jnp.where(jnp.isfinite(x), jnp.round(x / distance) * distance, x)
        return x.astype(dtype)


def propose_by(rule: Rule, job: Job, step: Step, tensor: int) -> Update:
    """The rule's answer; where it needs whole tensors, what is sharded is gathered, and the answer divided again."""
    if not rule.needs_whole:
        return ask_rule(rule, job, step, tensor, job.space)
    inner, stacked, typed = within(rule, job.mesh_axes), rule.stacked_axes, typed_layout(job.p)

    def gather(x: Any) -> Any:
        if typed is None:
            return gather_whole(x, inner[: x.ndim])
        return jax.sharding.reshard(x, PartitionSpec(*typed.spec[:stacked]))

    def scatter(x: Any) -> Any:
        if typed is None:
            return own_part(x, inner[: x.ndim])
        return jax.sharding.reshard(x, typed if x.shape == job.p.shape else PartitionSpec(*typed.spec[:stacked]))

    def keep(x: Any) -> Any:
        lead = min(stacked, x.ndim)
        return whole.replicate(x, lead) if typed is None else jax.sharding.reshard(x, PartitionSpec(*typed.spec[:lead]))

    spread = job.spread()
    state = {key: gather(entry) if key in spread else entry for key, entry in job.state.items()}
    update = ask_rule(rule, replace(job, p=gather(job.p), g=gather(job.g), state=state), step, tensor, step.space)
    entries = {key: scatter(entry) if key in spread else keep(entry) for key, entry in update.state.items()}
    return update._replace(delta=scatter(update.delta), state=entries)


def ask_rule(rule: Rule, job: Job, step: Step, tensor: int, xp: Any) -> Update:
    precision = arithmetic(job.p.dtype.name)

    return proposed(
        xp,
        rule,
        job.setting.numerics,
        job.p,
        job.g,
        job.state,
        t=step.t,
        lr=in_precision(step.lr, precision),
        lr_scale=job.setting.lr_scale,
        tensor=tensor,
        grad_scale=in_precision(step.grad_scale, precision),
        noise=lambda: draw_noise([job], step)[0],
    )
