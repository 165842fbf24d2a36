"""A first look at a rule: whether it is complete, and whether its ``update`` does what every engine can do.

``update`` is run once over shapes. What would work in one array library alone, or change what it was given, is refused
there, with the line that does it.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import math
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from thalweg.arrays import Shape, is_number
from thalweg.errors import OptimError, RuleError
from thalweg.rules import AROUND, RULES, Rule, Update
from thalweg.rules.around import Wrapped, parts_of
from thalweg.rules.entries import Entry
from thalweg.rules.places import ALL_METHODS, beginning_of, files_of, place_of_error
from thalweg.rules.rule import replaced_numbers, stand_in
from thalweg.rules.whole import FORMER_NAMES, Direction, Preparation, WholeRule
from thalweg.settings import NUMERIC, Numerics, ParameterOptions, around_options
from thalweg.spaces.strict import AXES, NOTHING, SIZES, Shaped, Strict, broadcast
from thalweg.spaces.symbols import FUNCTIONS, LIBRARIES

#: Keys of state that stand for something else: in checkpoints, in programs, or in the states of optax.
RESERVED_KEYS = ("step", "p", "g", "t", "lr", "lr_scale", "count", "skipped", "Q", "L", "spikes")
#: What optimizers take, and groups have, beside options.
RESERVED_OPTIONS = (
    *("params", "param_names", "lr", "lr_scale", "lr_is_scale", "learning_rate", "variant", "overrides", "engine"),
    *("capturable", "foreach", "fused", "differentiable", "global_step", "specs", "rule", "rule_version", "layout"),
    *NUMERIC,
)
DECORATED = "write @dataclass(frozen=True, kw_only=True) above its class"


@functools.cache
def is_shipped(rule: type[Rule]) -> bool:
    """Whether a rule comes with the package, as does all that is around it; or that of which it is a part."""
    inner, wrappers = parts_of(getattr(rule, "PART_OF", rule))
    return RULES.get(inner.__name__) is inner and set(wrappers) <= set(AROUND)


def find_own(rule: Rule) -> list[type[Rule]]:
    """Which of the rules that make a step do not come with the package: the rule itself, and one that it is grafted
    on."""
    graft = getattr(rule, "graft", None)
    kinds = [type(rule), *([type(graft)] if isinstance(graft, Rule) else [])]
    return [parts_of(kind)[0] for kind in kinds if not is_shipped(kind)]


@functools.cache
def check_rule(rule: type[Rule]) -> None:
    """Say what a class lacks to be a rule."""
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        raise RuleError(f"a rule is a class derived from thalweg.Rule, got {rule!r:.80}")
    if is_shipped(rule):
        return
    name = rule.__name__
    declared = {f.name for f in fields(rule)}
    for option, hint in inspect.get_annotations(rule).items():
        if option not in declared and "ClassVar" not in str(hint):
            raise RuleError(f"{name} is no dataclass, and does not know its option {option!r}: {DECORATED}")
    for former, now in FORMER_NAMES.items():
        defines = any(callable(vars(kind).get(former)) and now not in vars(kind) for kind in rule.__mro__)
        if defines and issubclass(rule, WholeRule):
            raise RuleError(f"{name} defines {former}, which is called {now} since 0.3: rename it")
    if rule.__abstractmethods__:
        raise RuleError(f"{name} has no {' and no '.join(sorted(rule.__abstractmethods__))}: a rule has to define it")
    for f in fields(rule):
        if f.default is MISSING:
            wanted = "a number, a text, True or False, None or a tuple of these"
            raise RuleError(f"option {f.name!r} of {name} has no default: give it one, {wanted}")
        if f.name in {base_field.name for base_field in fields(Rule)}:
            continue
        owner = around_options().get(f.name)
        if f.name in RESERVED_OPTIONS or (owner is not None and not issubclass(rule, owner)):
            raise RuleError(f"option {f.name!r} of {name} is one that every optimizer has: give it another name")
        if hasattr(Rule, f.name):
            raise RuleError(f"option {f.name!r} of {name} hides what every rule has: give it another name")
    if not isinstance(rule.version, int) or isinstance(rule.version, bool) or rule.version < 1:
        raise RuleError(f"version of {name} must be a whole number from 1 on, got {rule.version!r}")


def check_entries(rule: Rule, shape: Shape) -> Mapping[str, Entry]:
    """The entries that a rule keeps for a parameter, refused where they are not entries or have another's name."""
    name, entries = type(rule).__name__, rule.entries(shape)
    if not isinstance(entries, dict) or not all(isinstance(entry, Entry) for entry in entries.values()):
        raise RuleError(
            f"{name}.entries must return a dict of entries, such as {{'exp_avg': thalweg.Moment()}}, got {entries!r}"
        )
    for key in entries:
        if key in RESERVED_KEYS:
            raise RuleError(
                f"{name} keeps {key!r}, a key that stands for something else: choose one that is not among "
                f"{', '.join(RESERVED_KEYS)}"
            )
        if not isinstance(key, str) or not key.isidentifier() or keyword.iskeyword(key) or key.startswith("_"):
            raise RuleError(f"{name} keeps {key!r}: a key must be a name, such as 'exp_avg'")
    return entries


def kind_of(rule: Rule, shape: Shape) -> Hashable:
    """Parameters whose shapes are of equal kind may be stepped together, and by the same code."""
    looks_at = find_looks(rule, shape)
    return rule.kind(shape), len(shape) if looks_at == AXES else None, shape if looks_at == SIZES else None


def find_looks(rule: Rule, shape: Shape) -> int:
    """What a step looks at of this shape: nothing, where the rule itself says which shapes are alike."""
    looks_at = check_update(rule, shape)
    return NOTHING if all(map(says_kind, find_own(rule))) else looks_at


def says_kind(rule: type[Rule]) -> bool:
    """Whether a rule of the user's says itself which shapes are alike; one that it derives from cannot know."""
    owner = next(base for base in rule.__mro__ if "kind" in vars(base))
    return owner is not Rule and not is_shipped(owner)


def check_update(rule: Rule, shape: Shape) -> int:
    """Run ``update`` over shapes, for a parameter of this shape; once for options of each structure.

    Returns what it has looked at of the shape. Rules of the package are not tried: they say which shapes are alike.
    """
    if not find_own(rule):
        return NOTHING
    rule = stand_in(ParameterOptions(rule, Numerics()).rule_at(1))
    if isinstance(rule, Wrapped):  # the rule by itself: what is around it may stumble over its answer
        check_update(rule.RULE(**{f.name: getattr(rule, f.name) for f in fields(rule.RULE)}), shape)
    try:
        hash(rule)
    except TypeError:  # an option that has no hash is looked at each time
        return try_update(rule, shape)
    return try_once(rule, shape)


def try_update(rule: Rule, shape: Shape) -> int:
    """Run ``update`` over shapes, check what it returns, and tell what it has looked at."""
    name, files = type(rule).__name__, files_of(type(rule), ALL_METHODS)
    xp = Strict(name, files)
    entries = check_entries(rule, xp.shown(shape))
    g, p, t, lr, lr_scale = map(xp.array, (shape, shape, (), (), ()))
    state = {key: xp.array(entry.shape(shape, rule.stacked_axes)) for key, entry in entries.items()}
    symbolic = stand_in(rule)
    symbolic = replace(symbolic, **replaced_numbers(symbolic, lambda _: xp.array(())))
    goes_in_parts = isinstance(rule, WholeRule) and parts_of(type(rule))[0].update is WholeRule.update
    try:
        step: Any = step_in_parts if goes_in_parts else type(rule).update
        s = Unchanged(xp, state)
        answer = step(symbolic, xp, g, s, p, t=t, lr=lr, lr_scale=lr_scale, noise=lambda: xp.array(shape))
    except OptimError:
        raise
    except Exception as error:
        place, called = place_of_error(files, error)
        problem = f"{type(error).__name__}: {error}"
        if called in LIBRARIES:
            problem = f"update calls a function of {called}: {FUNCTIONS}"
        hint = f"; the state has {', '.join(state) or 'no keys'}" if isinstance(error, KeyError) else ""
        raise RuleError(f"{name}, {place or 'update'}: {problem}{hint}") from error
    check_answer(answer, shape, state, rule.stacked_axes, where(rule, "apply" if goes_in_parts else "update"))
    return xp.looks_at


try_once = functools.lru_cache(maxsize=4096)(try_update)


def step_in_parts(
    rule: WholeRule, xp: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, lr_scale: Any, noise: Any
) -> Any:
    """The update of a rule that needs whole tensors, with a look at what its first two parts return."""
    prepared: Any = rule.prepare(xp, g, s, p, t)
    check_part(rule, "prepare", prepared, Preparation, "tensors, state")
    direction: Any = rule.transform(xp, prepared.tensors, s, due=prepared.due, noise=noise)
    check_part(rule, "transform", direction, Direction, "tensor, figures, state")
    for part, tensors in (("prepare", prepared.tensors), ("transform", [direction.tensor])):
        for tensor in tensors:
            if shape_of(tensor) != p.sizes:
                raise RuleError(
                    f"{where(rule, part)} returns a tensor of shape {shape_of(tensor)} for a parameter of {p.sizes}"
                )
    if set(direction.figures) != set(rule.FIGURES):
        raise RuleError(
            f"{where(rule, 'transform')} returns the figures {sorted(direction.figures)}, and FIGURES declares "
            f"{sorted(rule.FIGURES)}"
        )
    state = {**prepared.state, **direction.state}
    return rule.apply(xp, direction, s, p, state, due=prepared.due, lr=lr * lr_scale)


def check_part(rule: Rule, part: str, answer: Any, kind: type, holds: str) -> None:
    if not isinstance(answer, kind):
        wanted = f"thalweg.rules.{kind.__name__}({holds})"
        raise RuleError(f"{where(rule, part)} must return a {wanted}, got a {type(answer).__name__}")


def where(rule: Rule, method: str) -> str:
    """A method of a rule, and where it is written."""
    return f"{type(rule).__name__}.{method}{beginning_of(getattr(parts_of(type(rule))[0], method))}"


def check_answer(update: Any, shape: Shape, state: Mapping[str, Shaped], stacked_axes: int, place: str) -> None:
    """Refuse an answer that is no update, or has other state or other shapes than it should."""
    if not isinstance(update, Update):
        raise RuleError(f"{place} must return a thalweg.Update(delta, state), got a {type(update).__name__}")
    if not isinstance(update.state, Mapping) or set(update.state) != set(state):
        got = sorted(update.state) if isinstance(update.state, Mapping) else type(update.state).__name__
        raise RuleError(
            f"{place} must return the state that entries() declares, {sorted(state)}, got {got}: return every "
            "key, also one that has not changed, and declare a new one in entries()"
        )
    delta = shape_of(update.delta)
    if delta is None or not fits(delta, shape):
        raise RuleError(f"{place} returns a delta of shape {delta} for a parameter of {shape}")
    for key, entry in state.items():
        if shape_of(update.state[key]) != entry.sizes:
            raise RuleError(
                f"{place} returns state {key!r} of shape {shape_of(update.state[key])}, and entries() declares "
                f"{entry.sizes}: state keeps its shape"
            )
    figures = {} if update.finite is None else {"finite": update.finite}
    for key, value in {**figures, **update.stats}.items():
        sizes = shape_of(value)
        if sizes is None or math.prod(sizes[stacked_axes:]) != 1:
            raise RuleError(f"{place}: {key} must be one number for each tensor, such as a sum, got shape {sizes}")


def shape_of(value: Any) -> Shape | None:
    """The shape of what a rule returns; None: it is no array."""
    if isinstance(value, Shaped):
        return value.sizes
    return () if is_number(value) else None


def fits(delta: Shape, shape: Shape) -> bool:
    """Whether a delta can be added to a parameter."""
    try:
        return broadcast([delta, shape]) == shape
    except ValueError:
        return False


class Unchanged(dict[str, Any]):
    """The state that comes in: it can be read."""

    def __init__(self, xp: Strict, state: Mapping[str, Any]) -> None:
        super().__init__(state)
        self.xp = xp

    def refuse(self, *_: Any, **__: Any) -> Any:
        self.xp.refuse("changes the state that came in: make a new dict of all keys and return it in the Update")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = refuse
