"""Leaves of a tree that are stepped together.

Small parameters of equal shape are stacked and stepped as one: a program with a kernel for each of hundreds of small
arrays spends its time on starting kernels, and is long to compile. So are larger ones whose rule multiplies matrices:
products of a stack are one call, and the program of a refresh is compiled once. Rules know stacks (``stacked_axes``),
so that nothing in them changes.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import PartitionSpec

from thalweg.arrays import Term
from thalweg.boundary import finite_throughout, proposed, written
from thalweg.codecs import scale_key
from thalweg.dtypes import DTYPES, NARROW
from thalweg.errors import ParameterError
from thalweg.optax.matrices import MatrixAxes, rule_of_axes
from thalweg.optax.shards import MeshAxes, Shards, gather_whole, own_part, typed_layout
from thalweg.optax.states import Entries
from thalweg.optax.values import in_precision, rule_in_precision
from thalweg.rules.entries import Count, Entry, Spread
from thalweg.rules.kron import Kron, Whole
from thalweg.rules.noise import normal, tensor_id
from thalweg.rules.rule import Rule, Update
from thalweg.rules.whole import Direction, WholeRule
from thalweg.settings import ParameterOptions
from thalweg.spaces import jax as whole
from thalweg.storage import RECORD, arithmetic, coded_groups, first_state
from thalweg.trial import check_update

#: Parameters of at most so many elements are stacked with others of their shape.
SMALL = 2**16
#: Those of rules that need whole tensors are stacked as long as a stack has at most so many: it is in memory at once.
LARGE = 2**28
#: As many elements are transformed in one program of several shapes, for which all of them are in memory at once.
JOINT = 2**25
#: Vectors of at most so many elements are stacked with shorter ones, where zeros after these change nothing.
LONGEST = 2**14


@dataclass(frozen=True, eq=False)
class Leaf:
    """A parameter as the tree has it, or several of one shape as a stack."""

    names: tuple[str, ...]
    p: Any
    setting: ParameterOptions
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
        keys = self.keys(Spread)
        return [*keys, *map(scale_key, keys), RECORD]


@dataclass(frozen=True, eq=False)
class Job(Leaf):
    g: Any
    state: Entries
    #: Of a stack of vectors, after which zeros follow; empty: there are none.
    lengths: tuple[int, ...] = ()


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
    #: Whether, where a rule allows it, no more is stacked than what it transforms.
    lean: bool = False


@dataclass(frozen=True)
class LeafUpdate:
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


def step_all(jobs: Sequence[Job], step: Step) -> list[LeafUpdate]:
    """One step of every parameter, in their order."""
    by_index: dict[int, LeafUpdate] = {}
    groups: dict[Any, list[list[int]]] = defaultdict(list)
    for members in sorted(batches(jobs), key=lambda members: len(members) * jobs[members[0]].p.size):
        first, rule = jobs[members[0]], jobs[members[0]].setting.rule
        if step.lean and len(members) > 1 and isinstance(rule, WholeRule) and rule.is_stackable(first.p.shape):
            by_index.update(zip(members, step_lean([jobs[i] for i in members], step), strict=True))
        else:
            alike = id(first.setting), first.p.dtype, first.g.dtype
            total = sum(jobs[i].p.size for batch in (*groups.get(alike, ()), members) for i in batch)
            groups[alike if is_joint(first) and total <= JOINT else members[0]].append(members)
    for group in groups.values():
        lists = [[jobs[i] for i in members] for members in group]
        stacks = stack_jobs(lists, step.space)
        results = [step_job(stacks[0], step)] if len(stacks) == 1 else step_jointly(stacks, step)
        for members, updates in zip(group, unstack(lists, results, step.space), strict=True):
            by_index.update(zip(members, updates, strict=True))
    return [by_index[i] for i in range(len(jobs))]


def batches(jobs: Sequence[Job]) -> Iterable[list[int]]:
    """Which of them go together."""
    by_kind: dict[Any, list[int]] = defaultdict(list)
    for index, job in enumerate(jobs):
        if goes_alone(job) or (job.p.size > SMALL and not job.setting.rule.needs_whole):
            by_kind[index].append(index)
            continue
        shape = "vector" if is_vector(job) else job.p.shape
        entries = tuple(
            (key, entry.ndim if shape == "vector" else entry.shape, entry.dtype) for key, entry in job.state.items()
        )
        by_kind[id(job.setting), shape, job.p.dtype, job.g.dtype, job.mesh_axes, job.axes, entries].append(index)
    for members in by_kind.values():
        most = max(1, LARGE // max(1, jobs[members[0]].p.size))
        yield from (members[start : start + most] for start in range(0, len(members), most))


def is_joint(job: Job) -> bool:
    """Whether a parameter is transformed together with those of other shapes."""
    is_kron = getattr(type(job.setting.rule), "transform", None) is Kron.transform
    return is_kron and not goes_alone(job) and not any(job.mesh_axes)


def is_vector(job: Job) -> bool:
    """Whether zeros after it change nothing but means, so that it is stacked with longer ones."""
    rule: Any = job.setting.rule
    is_single = job.p.ndim == 1 and rule.stacked_axes == 0 and 0 < job.p.size <= LONGEST
    is_plain = all(entry.shape in ((), job.p.shape) for entry in job.state.values())
    return is_single and is_plain and is_joint(job) and rule.geometry != "eq"  # which divides by factors


def goes_alone(job: Job) -> bool:
    """Whether a parameter is never stacked: shards could be only if all were sharded alike, which is not known here."""
    return whole.over_devices(job.p) or job.setting.handling.is_random


def stack_jobs(lists: Sequence[Sequence[Job]], space: Any) -> list[Job]:
    """Each list as one job with one more leading axis; a list of one job as that job."""
    arrays: list[Any] = []
    for several in lists:
        if len(several) > 1:
            arrays += [[job.g for job in several], *collect_entries(several).values()]
    stacks = iter(space.stack_all(arrays))

    def stack(jobs: Sequence[Job]) -> Job:
        first, sizes = jobs[0], tuple(job.p.size for job in jobs)
        if len(jobs) == 1:
            return first
        return Job(
            names=tuple(name for job in jobs for name in job.names),
            p=whole.stack_all([[job.p for job in jobs]])[0],  # which compilers drop where a rule does not read it
            setting=first.setting,
            mesh_axes=((), *first.mesh_axes),
            axes=first.axes,
            g=next(stacks),
            state={**first.state, **{key: next(stacks) for key in collect_entries(jobs)}},
            lengths=() if len(set(sizes)) == 1 else sizes,
        )

    return list(map(stack, lists))


def collect_entries(jobs: Sequence[Job]) -> dict[str, list[Any]]:
    """The entries of which each has its own. Counts are the same: they have taken every step together."""
    counts = jobs[0].keys(Count)
    return {key: [job.state[key] for job in jobs] for key in jobs[0].state if key not in counts}


def unstack(lists: Sequence[Sequence[Job]], results: Sequence[LeafUpdate], space: Any) -> list[list[LeafUpdate]]:
    """The results of each job, by list. results: of each list, as one."""
    stacks, shapes = [], []
    for jobs, result in zip(lists, results, strict=True):
        if len(jobs) > 1:
            entries = collect_entries(jobs)
            stacks += [result.delta, *(result.state[key] for key in entries)]
            shapes += [[x.shape for x in arrays] for arrays in ([job.p for job in jobs], *entries.values())]
    columns = iter(space.take_apart(stacks, shapes))

    def part(jobs: Sequence[Job], result: LeafUpdate) -> list[LeafUpdate]:
        if len(jobs) == 1:
            return [result]
        deltas, states = next(columns), [dict(result.state) for _ in jobs]
        for key in collect_entries(jobs):
            for state, entry in zip(states, next(columns), strict=True):
                state[key] = entry
        rows = zip(deltas, states, figures_of(result.stats, len(jobs)), strict=True)
        return [LeafUpdate(delta, state, result.finite, figures) for delta, state, figures in rows]

    return list(map(part, lists, results))


def figures_of(figures: Mapping[str, Any], members: int) -> list[dict[str, Any]]:
    """The figures of each member of a stack; one may have several numbers, one for each of its matrices."""

    def divide(figure: Any) -> list[Any]:
        if not getattr(figure, "ndim", 0):
            return [figure] * members
        size = figure.shape[0] // members
        return list(figure) if size == 1 else jnp.split(figure, members)

    parts = {key: divide(figure) for key, figure in figures.items()}
    return [{key: rows[place] for key, rows in parts.items()} for place in range(members)]


def step_lean(jobs: Sequence[Job], step: Step) -> list[LeafUpdate]:
    """One step of several of one shape. State and parameters stay where they are; what is transformed is a stack."""

    def transform(shown: Sequence[Whole], due: Any) -> list[Direction]:
        rule: Any = rule_of(jobs[0], step, stacked=1)
        direction = rule.transform(step.space, (jnp.stack([operand.tensors[0] for operand in shown]),), {})
        pieces = zip(jnp.unstack(direction.tensor), figures_of(direction.figures, len(jobs)), strict=True)
        return [Direction(tensor, figures, {}) for tensor, figures in pieces]

    return step_shown(jobs, step, transform)


def step_jointly(jobs: Sequence[Job], step: Step) -> list[LeafUpdate]:
    """One step of several of one setting, all of which are due or none: they have taken every step together."""
    return step_shown(jobs, step, Kron.transform_all)


def step_shown(
    jobs: Sequence[Job], step: Step, transform: Callable[[Sequence[Whole], Any], list[Direction]]
) -> list[LeafUpdate]:
    """One step of several that are transformed together.

    Each is stepped twice: until it is known what is transformed, and with the result. Compilers drop the rest of the
    first.
    """
    shown: list[Whole] = []
    dues: list[Any] = []

    def show(rule: Any, xp: Any, tensors: Any, s: Any, *, due: Any = True, noise: Any = None) -> Direction:
        shown.append(Whole(rule, xp, tensors, s, noise))
        dues.append(due)
        return Direction(tensors[0], dict.fromkeys(rule.FIGURES, jnp.ones(())), dict(s))

    for job in jobs:
        step_job(job, step, partial(show, rule_of(job, step, stacked=int(len(job.names) > 1))))
    directions = transform(shown, dues[0])
    pairs = zip(jobs, directions, strict=True)
    return [step_job(job, step, lambda *args, direction=direction, **kwargs: direction) for job, direction in pairs]


def rule_of(job: Job, step: Step, stacked: int) -> Rule:
    """The rule of a step. stacked: how many axes of a stack there are beside the parameter's own."""
    rule = rule_in_precision(job.setting.rule_at(step.t), arithmetic(job.p.dtype.name))
    rule = replace(rule, stacked_axes=rule.stacked_axes + stacked)
    return rule if job.axes is None else rule_of_axes(rule, job.axes)


def step_job(job: Job, step: Step, transform: Callable[..., Direction] | None = None) -> LeafUpdate:
    """One step of one parameter, or of one stack. transform: in the place of the rule's."""
    handling, dtype = job.setting.handling, job.p.dtype.name
    rule, tensor = rule_of(job, step, stacked=int(len(job.names) > 1)), tensor_id(job.names[0])
    if transform is not None:
        rule = copy.copy(rule)
        vars(rule)["transform"] = transform
    update = propose_by(rule, job, step, tensor)
    delta, finite = update.delta, None
    rounded = handling.rounding != "nearest" and dtype in NARROW
    if rounded or step.guarded:
        new, record = written(Rounding(job.space), handling, job.p, job.state, delta, tensor=tensor, t=step.t)
        update.state.update(record)
        finite = finite_throughout(job.space, update, new) if step.guarded else None
        delta = new.astype(delta.dtype) - job.p.astype(delta.dtype) if rounded else delta
    return LeafUpdate(delta.astype(jnp.promote_types(job.p.dtype, job.g.dtype)), update.state, finite, update.stats)


class Padded:
    """A space of stacked vectors of these lengths, after which zeros follow."""

    def __init__(self, space: Any, lengths: npt.ArrayLike) -> None:
        self.space, self.lengths = space, np.reshape(lengths, (-1, 1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.space, name)

    def in_precision(self, precision: str) -> Padded:
        return Padded(self.space.in_precision(precision), self.lengths)

    def means(self, *terms: Term) -> tuple[Any, ...]:
        assert all(axes == (1,) for _, axes in terms)
        return tuple(total / self.lengths.astype(total.dtype) for total in self.space.sums(*terms))

    def mean_power(self, x: Any, power: int, unit: Any, axes: tuple[int, ...]) -> Any:
        whole, count = self.space.mean_power(x, power, unit, axes), x.shape[1]
        return whole * (count / self.lengths.astype(whole.dtype))

    def without_padding(self, x: Any) -> Any:
        return jnp.where(np.arange(x.shape[1]) < self.lengths, x, 0)


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
    xp = Padded(step.space, job.lengths) if job.lengths else step.space
    update = ask_rule(rule, replace(job, p=gather(job.p), g=gather(job.g), state=state), step, tensor, xp)
    entries = {key: scatter(entry) if key in spread else keep(entry) for key, entry in update.state.items()}
    return update._replace(delta=scatter(update.delta), state=entries)


def ask_rule(rule: Rule, job: Job, step: Step, tensor: int, xp: Any) -> Update:
    precision = arithmetic(job.p.dtype.name)

    def noise() -> Any:
        """Of each parameter its own, by positions in the whole stack."""
        stack = job.mesh_axes[: rule.stacked_axes] + ((),) * (job.p.ndim - rule.stacked_axes)
        numbers: Any = tensor
        if lead := int(len(job.names) > 1):  # the host computes with these numbers: the program does not
            ids = np.array([tensor_id(name) for name in job.names], "uint32")
            numbers = ids.reshape(-1, *[1] * (job.p.ndim - 1))
        space: Any = Shards(stack[lead:]) if any(stack) else xp
        like: Any = jax.ShapeDtypeStruct(job.p.shape[lead:], precision)
        drawn = normal(space, like, seed=job.setting.handling.seed, tensor=numbers, t=step.t)
        return xp.without_padding(drawn) if job.lengths else drawn

    return proposed(
        xp,
        rule,
        job.setting.handling,
        job.p,
        job.g,
        job.state,
        t=step.t,
        lr=in_precision(step.lr, precision),
        lr_scale=job.setting.lr_scale,
        tensor=tensor,
        grad_scale=in_precision(step.grad_scale, precision),
        noise=noise,
    )
