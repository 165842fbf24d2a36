"""What may be put around a rule: options and state of its own, and what it makes of the rule's step.

``around(AdamW, Cautious, Averaged)`` is a rule like any other. It is traced, stored, sharded and saved as one, so that
what goes element by element is computed in the passes that the rule takes anyway.
"""

from __future__ import annotations

import copyreg
import functools
from abc import ABCMeta
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from thalweg.arrays import A, Scalar, Shape, Space, State, Value
from thalweg.errors import RuleError
from thalweg.rules.entries import Entry
from thalweg.rules.rule import Rule, Update
from thalweg.rules.whole import Direction, Preparation, WholeRule

#: The key under which ``prepare`` leaves the gradient and the step to ``apply``.
CARRIED = "around"
#: The keys of the entries of Averaged and of ScheduleFree, and the beginning of those of Grafted.
AVERAGE, EVALUATED, GRAFTED = "average", "x", "graft_"
#: Said where parameters are to be evaluated at an average that nothing keeps.
NO_AVERAGE = "no parameter has an average: give the optimizer averaged=0.9999 or schedule_free=True"


@dataclass(frozen=True, kw_only=True)
class Around(Rule):
    """Something around a rule. Derive from it, and define some of the methods below; its fields are its options.

    ``self`` is the rule with all that is around it: the options of the rule are there too.
    """

    #: How to turn it on, for messages. The first option of one that comes with the package is off at None or False.
    EXAMPLE: ClassVar[str] = ""
    #: Whether it sums over a tensor, and so depends on which numbers form one.
    HAS_SUMS: ClassVar[bool] = False
    #: Whether ``change_update`` reads the gradient, which fused code of a rule's last part has not.
    READS_GRADIENT: ClassVar[bool] = True

    def extra_entries(self, shape: Shape) -> dict[str, Entry]:
        """What it keeps for a parameter of this shape between steps, under keys that the rule does not have."""
        return {}

    def check(self) -> None:
        """Raise an OptionError for options, of the rule too, that it cannot go with."""

    def change_gradient(self, xp: Space[A], g: A, s: State[A], p: A, *, t: Scalar) -> Value:
        """The gradient that the rule is given."""
        return g

    def scale_rate(self, xp: Space[A], t: Scalar) -> Scalar:
        """What multiplies the step size that the rule is given."""
        return 1.0

    def change_update(
        self, xp: Space[A], update: Update, g: A, s: State[A], p: A, *, t: Scalar, lr: Scalar | None, lr_scale: Scalar
    ) -> Update:
        """What becomes of the rule's answer: with another delta, and with what is kept here added to its state.

        g: the gradient of the parameter. s: the state before the step, that of the rule too.
        """
        return update

    def evaluate_at(self, xp: Space[A], s: State[A], p: A, t: Scalar) -> Value:
        """What a parameter is to be evaluated at after step t, where that is another value than in training."""
        return p


class Wrapped(Around):
    """The rule that :func:`around` makes: the step of a rule between what comes before and what comes after it."""

    RULE: ClassVar[type[Rule]]
    #: From the rule outwards.
    AROUND: ClassVar[tuple[type[Around], ...]]

    def entries(self, shape: Shape) -> dict[str, Entry]:
        inner, around = self.RULE.entries(self, shape), entries_around(self, shape)
        if shared := inner.keys() & around.keys():
            raise RuleError(
                f"{type(self).__name__} keeps {min(shared)!r} twice, for the rule and around it: rename one"
            )
        return {**inner, **around}

    def validate(self) -> None:
        self.RULE.validate(self)
        for wrapper in self.AROUND:
            wrapper.check(self)

    @property
    def looks_at_shapes(self) -> bool:
        declared: Any = self.RULE.looks_at_shapes
        looks: bool = declared.__get__(self) if isinstance(declared, property) else declared
        return looks or any(wrapper.HAS_SUMS for wrapper in self.AROUND)

    def treatment(self, shape: Shape) -> str:
        return ", ".join([self.RULE.treatment(self, shape), *(wrapper.__name__.lower() for wrapper in self.AROUND)])

    def own_state(self, xp: Space[A], s: State[A], p: A) -> State[A]:
        """The state of the rule alone."""
        around = keys_around(self, xp.shape(p))
        return {key: entry for key, entry in s.items() if key not in around}

    def rule_gradient(self, xp: Space[A], g: A, s: State[A], p: A, t: Scalar) -> Value:
        """The gradient that the rule is given, from the outermost to the innermost."""
        for wrapper in reversed(self.AROUND):
            g = wrapper.change_gradient(self, xp, g, s, p, t=t)
        return g

    def scale_rates(self, xp: Space[A], t: Scalar, lr_scale: Scalar) -> Scalar:
        for wrapper in self.AROUND:
            lr_scale = lr_scale * wrapper.scale_rate(self, xp, t)
        return lr_scale

    def finish(
        self, xp: Space[A], update: Update, g: A, s: State[A], p: A, t: Scalar, lr: Scalar | None, lr_scale: Scalar
    ) -> Update:
        for wrapper in self.AROUND:
            update = wrapper.change_update(self, xp, update, g, s, p, t=t, lr=lr, lr_scale=lr_scale)
        return update

    def update(self, xp, g, s, p, *, t, lr, lr_scale=1.0, noise=None) -> Update:
        if isinstance(self, WholeRule):
            return self.RULE.update(self, xp, g, s, p, t=t, lr=lr, lr_scale=lr_scale, noise=noise)
        lr_scale = self.scale_rates(xp, t, lr_scale)
        gradient, state = self.rule_gradient(xp, g, s, p, t), self.own_state(xp, s, p)
        update = self.RULE.update(self, xp, gradient, state, p, t=t, lr=lr, lr_scale=lr_scale, noise=noise)
        return self.finish(xp, update, g, s, p, t, lr, lr_scale)

    # ---- of a rule that needs whole tensors: the first part and the last

    def prepare(self, xp: Space[A], g: A, s: State[A], p: A, t: Scalar) -> Preparation:
        rule: Any = self.RULE
        gradient, own_state = self.rule_gradient(xp, g, s, p, t), self.own_state(xp, s, p)
        prepared: Preparation = rule.prepare(self, xp, gradient, own_state, p, t)
        return prepared._replace(state={**prepared.state, CARRIED: (g, t)})

    def apply(
        self, xp: Space[A], direction: Direction, s: State[A], p: A, state: State[A], *, due: Any, lr: Scalar
    ) -> Update:
        rule: Any = self.RULE
        new_state: Any = dict(state)
        g, t = new_state.pop(CARRIED)
        lr = self.scale_rates(xp, t, lr)
        update = rule.apply(self, xp, direction, self.own_state(xp, s, p), p, new_state, due=due, lr=lr)
        return self.finish(xp, update, g, s, p, t, lr, 1.0)

    def evaluate_at(self, xp: Space[A], s: State[A], p: A, t: Scalar) -> Value:
        outermost = next(w for w in reversed(self.AROUND) if w.evaluate_at is not Around.evaluate_at)
        return outermost.evaluate_at(self, xp, s, p, t)


def around(rule: type[Rule], *wrappers: type[Around]) -> type[Rule]:
    """A rule with something around it: the first is next to the rule, and the last has the last word.

    >>> from thalweg.rules import AdamW, Averaged, Cautious
    >>> around(AdamW, Cautious, Averaged).__name__
    'AdamW+cautious+averaged'
    """
    inner, before = parts_of(rule)
    wrappers = (*before, *wrappers)
    for wrapper in wrappers:
        if not (isinstance(wrapper, type) and issubclass(wrapper, Around)):
            raise RuleError(f"what is put around a rule is a class derived from thalweg.rules.Around, got {wrapper!r}")
    if len(set(wrappers)) < len(wrappers):
        raise RuleError(f"{', '.join(w.__name__ for w in wrappers)} around {inner.__name__}: give each once")
    if issubclass(inner, WholeRule) and inner.update is not WholeRule.update:
        raise RuleError(f"{inner.__name__} has an update of its own, and engines take its three parts: define those")
    return make_wrapped(inner, wrappers) if wrappers else rule


@functools.cache
def make_wrapped(rule: type[Rule], wrappers: tuple[type[Around], ...]) -> type[Rule]:
    names = [name for kind in (rule, *wrappers) for name in own_names(kind)]
    if clashing := sorted({name for name in names if names.count(name) > 1 or hasattr(Wrapped, name)}):
        raise RuleError(f"{clashing[0]!r} is a name in two of {rule.__name__} and what is around it: rename one")
    name = "+".join([rule.__name__, *(wrapper.__name__.lower() for wrapper in wrappers)])
    body = {"RULE": rule, "AROUND": wrappers, "__module__": rule.__module__, "__doc__": rule.__doc__}
    if issubclass(rule, WholeRule) and any(wrapper.READS_GRADIENT or wrapper.HAS_SUMS for wrapper in wrappers):
        body |= {"IN_PARTS": False, "goes_in_parts": lambda self: False}
    wrapped: Any = WrappedClass(name, (Wrapped, *reversed(wrappers), rule), body)
    kind: type[Rule] = dataclass(frozen=True, kw_only=True)(wrapped)
    return kind


def own_names(kind: type[Rule]) -> set[str]:
    """The names that a class has beside those that every rule, or everything around one, has."""
    shared = dir(Around) if issubclass(kind, Around) else dir(WholeRule)
    return {name for name in (*dir(kind), *own_fields(kind)) if name not in shared and not name.startswith("_")}


@functools.cache
def own_fields(kind: type[Rule]) -> list[str]:
    shared = {f.name for f in fields(Rule)}
    return [f.name for f in fields(kind) if f.name not in shared]


def keeps_average(rule: Rule) -> bool:
    """Whether parameters are evaluated at other values than they are trained at."""
    wrappers = rule.AROUND if isinstance(rule, Wrapped) else ()
    return any(wrapper.evaluate_at is not Around.evaluate_at for wrapper in wrappers)


def entries_around(rule: Rule, shape: Shape) -> dict[str, Entry]:
    """What is kept for a parameter beside the state of the rule itself."""
    if not isinstance(rule, Wrapped):
        return {}
    pairs = [pair for wrapper in rule.AROUND for pair in wrapper.extra_entries(rule, shape).items()]
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise RuleError(f"two of what is around {rule.RULE.__name__} keep an entry of one name, of {sorted(entries)}")
    return entries


def keys_around(rule: Rule, shape: Shape) -> set[str]:
    return set(entries_around(rule, shape))


def is_kept_around(key: str) -> bool:
    """Whether an entry is one that something around a rule keeps, of what comes with the package."""
    return key in (AVERAGE, EVALUATED) or key.startswith(GRAFTED)


def parts_of(kind: type[Rule]) -> tuple[type[Rule], tuple[type[Around], ...]]:
    """A rule, and what is around it."""
    return (kind.RULE, kind.AROUND) if issubclass(kind, Wrapped) else (kind, ())


def rewrap(rule: Rule, kind: type[Rule], **options: Any) -> Rule:
    """A rule of another kind with the same options, and the same around it."""
    options = {**{f.name: getattr(rule, f.name) for f in fields(rule)}, **options}
    return around(kind, *parts_of(type(rule))[1])(**options)


class WrappedClass(ABCMeta):
    """The type of rules with something around them: a pickle names their parts, and makes them again."""


def reduce_class(kind: Any) -> Any:
    rule, wrappers = parts_of(kind)
    return around, (rule, *wrappers)


copyreg.pickle(WrappedClass, reduce_class)


# ---- those that are options of every optimizer


def switch_of(wrapper: type[Around]) -> str:
    """The option that turns it on."""
    return own_fields(wrapper)[0]


def is_on(wrapper: type[Around], options: Mapping[str, Any]) -> bool:
    value = options.get(switch_of(wrapper))
    return value is not None and value is not False


@functools.cache
def options_of_all(known: tuple[type[Around], ...]) -> frozenset[str]:
    return frozenset(name for wrapper in known for name in own_fields(wrapper))


def with_options(rule: Rule, options: Mapping[str, Any], known: tuple[type[Around], ...]) -> Rule:
    """A rule with some options replaced, and of those that are ``known`` just those around it that are on."""
    if options_of_all(known).isdisjoint(options):
        return replace(rule, **options)
    values = {**{f.name: getattr(rule, f.name) for f in fields(rule)}, **options}
    inner, before = parts_of(type(rule))
    unknown = [wrapper for wrapper in before if wrapper not in known]
    kind = around(inner, *unknown, *(wrapper for wrapper in known if is_on(wrapper, values)))
    off = options_of_all(tuple(wrapper for wrapper in known if not issubclass(kind, wrapper)))
    return kind(**{name: value for name, value in values.items() if name not in off})
