"""New values of a bucket of shards, as one list: the rule's own operations, up to the sums that other ranks complete.

A rule is traced and its program is run round by round. One that needs whole tensors goes in three parts, of which the
owners do the middle one. One that can be neither traced nor parted sends its messages itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias, cast

from thalweg.arrays import Axes, Term
from thalweg.boundary import may_overflow, settle, stored, widened, written, written_entries
from thalweg.errors import RuleError
from thalweg.programs.evaluate import Order, order_for, update_by
from thalweg.rules import Around, Direction, Rule, Update, WholeRule
from thalweg.spaces.foreach import TensorList
from thalweg.spaces.sharded import Part, Partial, ReducedList, Sharded
from thalweg.storage import arithmetic, declared
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.engines.results import Operands, Result, as_list, has_whole_slices, request_of, unlisted
from thalweg.torch.sharding import collectives
from thalweg.torch.sharding.collectives import Question
from thalweg.torch.sharding.owners import Owners
from thalweg.torch.sharding.requests import Request

#: Yields questions to other ranks and is sent their answers.
Asking: TypeAlias = Generator[Question, Sequence[Any], Any]


def result_of_shards(bucket: Bucket, owners: Owners) -> Generator[Question, Sequence[Any], Result]:
    """The result of a bucket of shards."""
    space, setting, operands = Sharded(bucket.parts, collectives), bucket.setting, Operands.from_bucket(bucket)
    numerics, rule, p, s = setting.numerics, setting.rule_at(operands.t), operands.p, operands.s
    order = None
    if rule.needs_whole and not isinstance(rule, WholeRule):
        raise RuleError(
            f"{type(rule).__name__} needs whole tensors, and parameter {bucket.names[0]!r} is sharded: derive the rule "
            "from thalweg.rules.WholeRule, whose step is in three parts, so that one rank can see the whole tensor"
        )
    if not isinstance(rule, WholeRule):
        try:
            order = order_for(
                rule, setting.rule, tuple(declared(space, s)), bucket.shape, with_lr=bucket.lr is not None
            )
        except RuleError:
            return as_list(space, bucket)
    # taken out of it when they are needed, so that none outlives its last use
    wide = widened(space, rule, numerics, p, operands.g, s, t=operands.t, grad_scale=bucket.grad_scale)
    given = dict(zip("pgst", wide, strict=True))
    del wide
    update = yield from (
        updated_in_rounds(rule, order, bucket, space, given)
        if order is not None
        else updated_by_owners(cast(WholeRule, rule), bucket, space, given, owners)
    )
    state = stored(space, rule, numerics, p, s, update, tensor=operands.ids, t=operands.t)
    for key in may_overflow(space, rule, p, state):
        state[key] = space.where((yield from all_finite(space, state[key])), state[key], s[key])
    update = update._replace(state=state)
    new, record = written(space, numerics, p, s, update.delta, tensor=operands.ids, t=operands.t)
    update.state.update(record)
    finite = None
    if numerics.on_nonfinite != "propagate":
        finite = yield from every(space, update.finite)
        for entry in written_entries(space, update, new):
            finite = (yield from all_finite(space, entry)) & finite  # in this order: a rule may say True
    return unlisted(bucket, settle(space, numerics, p, s, update, new, finite, bucket.allowed))


def updated_in_rounds(rule: Rule, order: Order, bucket: Bucket, space: Sharded, given: dict[str, Any]) -> Asking:
    given.update(given.pop("s"), lr=bucket.lr, lr_scale=bucket.lr_scale)
    return update_by(rule, order, space, given, completed)


# ---- reductions


def completed(partials: Sequence[Partial]) -> Asking:
    """Reductions over all ranks, of each kind in one message."""
    reduced: dict[int, Any] = {}
    for kind, answer in (("sum", collectives.summed), ("max", collectives.largest)):
        of_kind = {i: partial for i, partial in enumerate(partials) if partial.kind == kind}
        asked = [figure for partial in of_kind.values() for figure in partial.asked]
        whole = iter((yield Question(answer, asked)) if collectives.is_sent(asked) else [x for x, _ in asked])
        reduced.update({i: partial.complete(whole) for i, partial in of_kind.items()})
    return [reduced[i] for i in range(len(partials))]


def all_finite(space: Sharded, x: Any) -> Asking:
    largest = space.largest(space.abs(space.astype(x, arithmetic(space.dtype(x)))), None)
    return space.isfinite(space.maximum((yield from completed([largest]))[0], 0.0))


def every(space: Sharded, by_slice: Any) -> Asking:
    """Whether something holds in every slice."""
    if isinstance(by_slice, bool):
        return by_slice
    failures = space.total((space.where(by_slice, 0.0, 1.0), None), averaged=False)
    return (yield from completed([failures]))[0] == 0


class Unanswered(Exception):
    """Reductions that other ranks have to complete."""


class Answering(Sharded):
    """A space whose reductions are known from before. One that is not known ends the computation."""

    def __init__(self, parts: Sequence[Part], known: Sequence[Any]) -> None:
        super().__init__(parts)
        self.known = iter(known)

    def reduce(self, begin: Callable[[], list[Partial]]) -> Any:
        answers = next(self.known, None)
        if answers is None:
            raise Unanswered(begin())
        return answers

    def sums(self, *terms: Term) -> Any:
        return self.reduce(lambda: [self.total(term, averaged=False) for term in terms])

    def means(self, *terms: Term) -> Any:
        return self.reduce(lambda: [self.total(term, averaged=True) for term in terms])

    def amax(self, x: Any, axes: Axes) -> Any:
        return self.reduce(lambda: [self.largest(x, axes)])[0]


def completed_as_asked(compute: Callable[..., Any], bucket: Bucket, *operands: Any) -> Asking:
    """Evaluate a pure function of a space, anew from its start with each answer: so all buckets ask together."""
    known: list[Any] = []
    while True:
        try:
            return compute(Answering(bucket.parts, known), *operands)
        except Unanswered as unanswered:
            (partials,) = unanswered.args
        known.append((yield from completed(partials)))


# ---- rules that need whole tensors


def updated_by_owners(rule: WholeRule, bucket: Bucket, space: Sharded, given: dict[str, Any], owners: Owners) -> Asking:
    """A step in three parts: the first and the last element by element on shards, the middle by owners."""
    p, g, s, t = (given.pop(name) for name in ("p", "g", "s", "t"))
    shown = yield from completed_as_asked(rule.prepare, bucket, g, s, p, t)
    del g
    tensors, state, due = shown
    request = request_of(rule, bucket, tensors, s, t, due)
    del shown, tensors
    (answer,) = yield Question(owners.make, [request])
    del request
    figures: dict[str, TensorList] = {key: TensorList(answer.figures[key]) for key in rule.FIGURES}
    # figures of a stack that is sharded are only of this rank's slices: others matter where one may refuse the step
    if not has_whole_slices(rule, bucket) or bucket.setting.numerics.on_nonfinite == "propagate":
        everywhere = tuple(range(len(bucket.shape)))
        figures = {key: ReducedList(figure.tensors, everywhere) for key, figure in figures.items()}
    entries = {key: TensorList(entry) for key, entry in answer.state.items()}
    direction = Direction(TensorList(answer.tensor), figures, entries)
    lr: Any = bucket.lr

    def apply(space: Any) -> Update:
        return rule.apply(space, direction, s, p, {**state, **direction.state}, due=due, lr=lr * bucket.lr_scale)

    # what is around a rule may sum over shards
    update: Update = (yield from completed_as_asked(apply, bucket)) if isinstance(rule, Around) else apply(space)
    return update


def outline_of(bucket: Bucket) -> Request:
    """What owners have to know of a bucket before its first request; gradients are not looked at."""
    rule = cast(WholeRule, bucket.setting.rule_at(bucket.t or 1))
    state = {key: TensorList([s[key] for s in bucket.states]) for key in bucket.states[0]}
    return request_of(rule, bucket, [TensorList(bucket.params)], state, bucket.t, due=False)
