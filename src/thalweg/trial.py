"""A first look at a rule: whether it is complete, and whether its ``update`` does what every engine can do.

``update`` is run once over arrays without numbers. What would work in one array library alone, or change what it was
given, is refused there, with the line that does it.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import math
import sys
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, NoReturn

from thalweg.arrays import Shape, is_number
from thalweg.errors import OptimError, RuleError
from thalweg.rules import AROUND, RULES, Rule, Update
from thalweg.rules.around import parts_of
from thalweg.rules.entries import Entry
from thalweg.rules.options import is_structure, number_options
from thalweg.rules.places import beginning_of, called_from, files_of, place_in, place_of_error
from thalweg.settings import Handling, Setting, around_options
from thalweg.spaces import shapes
from thalweg.spaces.shapes import Memory, Meter, ShapeOnly, broadcast

#: Keys of state that stand for something else: in checkpoints, in programs, or in the states of optax.
RESERVED_KEYS = ("step", "p", "g", "t", "lr", "lr_scale", "count", "skipped", "Q", "L", "spikes")
#: What optimizers take, and groups have, beside options.
RESERVED_OPTIONS = (
    *("params", "param_names", "lr", "lr_scale", "lr_is_scale", "learning_rate", "variant", "overrides", "engine"),
    *("capturable", "foreach", "fused", "differentiable", "global_step", "specs", "rule", "rule_version", "layout"),
    *(f.name for f in fields(Handling)),
)
#: Of arrays, whose functions a rule does not call.
LIBRARIES = ("jax", "numpy", "torch", "scipy")
FUNCTIONS = "use the functions of xp, such as xp.sqrt, xp.where and xp.sums"
DECORATED = "write @dataclass(frozen=True, kw_only=True) above its class"


def is_shipped(rule: type[Rule]) -> bool:
    """Whether a rule comes with the package, as does all that is around it."""
    own, wrappers = parts_of(rule)
    return RULES.get(own.__name__) is own and set(wrappers) <= set(AROUND)


@functools.cache
def check_rule(rule: type[Rule]) -> None:
    """Say what a class lacks to be a rule."""
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        raise RuleError(f"a rule is a class derived from thalweg.Rule, got {rule!r:.80}")
    if is_shipped(rule):
        return
    name = rule.__name__
    known = {f.name for f in fields(rule)}
    for option, hint in inspect.get_annotations(rule).items():
        if option not in known and "ClassVar" not in str(hint):
            raise RuleError(f"{name} is no dataclass, and does not know its option {option!r}: {DECORATED}")
    if rule.__abstractmethods__:
        raise RuleError(f"{name} has no {' and no '.join(sorted(rule.__abstractmethods__))}: a rule has to define it")
    for f in fields(rule):
        if f.default is MISSING:
            wanted = "a number, a text, True or False, None or a tuple of these"
            raise RuleError(f"option {f.name!r} of {name} has no default: give it one, {wanted}")
        if f.name in {own.name for own in fields(Rule)}:
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


_seen: set[Hashable] = set()


def check_update(rule: Rule, shape: Shape) -> None:
    """Run ``update`` over arrays without numbers, for a parameter of this shape; once for options of each structure."""
    if is_shipped(type(rule)):
        return
    numbers = number_options(type(rule))
    rule = Setting(rule, Handling()).rule_at(1)
    options = {f.name: getattr(rule, f.name) for f in fields(rule)}
    structure = tuple((name, kinds(value) if name in numbers else value) for name, value in options.items())
    seen = type(rule), structure, shape
    try:
        if seen in _seen:
            return
    except TypeError:  # an option that has no hash is looked at each time
        seen = None  # type: ignore[assignment]
    Trial(rule, shape).run()
    if seen is not None:
        _seen.add(seen)


def kinds(value: Any) -> Hashable:
    """A number by what a rule may ask of it: whether it is there, and whether it is 0."""
    if isinstance(value, tuple):
        return tuple(map(kinds, value))
    return value if is_structure(value) else "a number"


class Trial:
    """One run of ``update``."""

    def __init__(self, rule: Rule, shape: Shape) -> None:
        self.rule, self.shape, self.name = rule, shape, type(rule).__name__
        self.files = files_of(type(rule))
        self.meter = Tracked(self)

    def array(self, shape: Shape = ()) -> Tried:
        return self.meter.array(shape, "float32")

    def symbol(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self.symbol, value))
        # what is off stays so: a rule may ask whether it is
        return value if is_structure(value) else self.array()

    def refused(self, what: str) -> NoReturn:
        place = place_in(self.files)
        raise RuleError(f"{self.name}, {place}: update {what}" if place else f"{self.name}: update {what}")

    def run(self) -> None:
        rule, p = self.rule, self.array(self.shape)
        entries = check_entries(rule, self.shape)
        state = {key: self.array(entry.shape(self.shape, rule.stacked_axes)) for key, entry in entries.items()}
        options = {name: self.symbol(getattr(rule, name)) for name in number_options(type(rule))}
        symbolic = replace(rule, **options)
        given: dict[str, Any] = dict(t=self.array(), lr=self.array(), lr_scale=self.array())
        noise = functools.partial(self.array, self.shape)
        try:
            update = symbolic.update(shapes, self.array(self.shape), Unchanged(self, state), p, **given, noise=noise)
        except OptimError:
            raise
        except Exception as error:
            place, called = place_of_error(self.files, error)
            said = f"{type(error).__name__}: {error}"
            if called in LIBRARIES:
                said = f"update calls a function of {called}: {FUNCTIONS}"
            hint = f"; the state has {', '.join(state) or 'no keys'}" if isinstance(error, KeyError) else ""
            raise RuleError(f"{self.name}, {place or 'update'}: {said}{hint}") from error
        self.check(update, state)

    def check(self, update: Any, state: Mapping[str, ShapeOnly]) -> None:
        where = f"{self.name}.update{beginning_of(type(self.rule))}"
        if not isinstance(update, Update):
            raise RuleError(f"{where} must return a thalweg.Update(delta, state), got a {type(update).__name__}")
        if not isinstance(update.state, Mapping) or set(update.state) != set(state):
            found = sorted(update.state) if isinstance(update.state, Mapping) else type(update.state).__name__
            raise RuleError(
                f"{where} must return the state that entries() declares, {sorted(state)}, got {found}: return every "
                "key, also one that has not changed, and declare a new one in entries()"
            )
        if self.spread(update.delta) != self.shape:
            raise RuleError(f"{where} returns a delta of shape {self.of(update.delta)} for a parameter of {self.shape}")
        for key, entry in state.items():
            if self.of(update.state[key]) != entry.shape:
                raise RuleError(
                    f"{where} returns state {key!r} of shape {self.of(update.state[key])}, and entries() declares "
                    f"{entry.shape}: state keeps its shape"
                )
        told = {} if update.finite is None else {"finite": update.finite}
        for key, value in {**told, **update.stats}.items():
            shape = self.of(value)
            if shape is None or math.prod(shape[self.rule.stacked_axes :]) != 1:
                raise RuleError(f"{where}: {key} must be one number for each tensor, such as a sum, got shape {shape}")

    def of(self, value: Any) -> Shape | None:
        """The shape of what a rule returns; None: it is no array."""
        if isinstance(value, ShapeOnly):
            return value.shape
        return () if is_number(value) else None

    def spread(self, value: Any) -> Shape | None:
        shape = self.of(value)
        try:
            return None if shape is None else broadcast([shape, self.shape])
        except ValueError:
            return None


class Tracked(Meter):
    """A meter of arrays that know the trial they are in."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.trial = trial

    def array(self, shape: Shape, dtype: str) -> Tried:
        return Tried(shape, dtype, Memory(self, 0))


def refusing(what: str, library: str = "") -> Any:
    """A method that says what a rule does. library: of arrays, that it says; another may have called it."""

    def method(self: Any, *_: Any, **__: Any) -> Any:
        trial = trial_of(self)
        called = called_from(trial.files)
        trial.refused(what.replace(library, called) if library and called in LIBRARIES else what)

    return method


def trial_of(x: Any) -> Trial:
    meter: Any = object.__getattribute__(x, "memory").meter
    found: Trial = meter.trial
    return found


class Tried(ShapeOnly):
    """An array of a trial: it does arithmetic, and says of all else how to write it."""

    __slots__ = ()

    def view(self, shape: Shape, *, is_turned: bool = False, dtype: str | None = None) -> ShapeOnly:
        return self.meter.array(shape, dtype or self.dtype)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            trial = trial_of(self)
            place = place_in(trial.files)
            # the space itself asks for shapes and dtypes
            if place is not None and is_asked_by_rule(trial.files):
                instead = "xp.shape(x)" if name in ("shape", "ndim", "size") else "the functions of xp, such as xp.sums"
                trial.refused(f"asks an array for .{name}, which not every array has: use {instead}")
        return object.__getattribute__(self, name)

    __bool__ = refusing(
        "branches on a value that is known only when it runs: use xp.where, not if, and, or, not, min or max; an "
        "option that decides how to compute is a bool, a text or an int"
    )
    __float__ = __int__ = __index__ = __complex__ = refusing(
        f"turns a value into a Python number, which is known only when it runs: {FUNCTIONS}, not those of math"
    )
    __array__ = __array_ufunc__ = __array_function__ = refusing(f"calls a function of numpy: {FUNCTIONS}", "numpy")
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = refusing(
        "changes a value in place, which may be the gradient or the parameter itself: write x = x + y, not x += y"
    )
    __setitem__ = __delitem__ = refusing("changes a part of a value in place: use xp.where")
    __getitem__ = __iter__ = __len__ = refusing("takes a part of a value: a rule works on whole arrays, by xp")
    __matmul__ = __rmatmul__ = refusing("uses @: use xp.matmul")
    __floordiv__ = __mod__ = __divmod__ = __round__ = refusing("uses //, % or round(): use xp.floor")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next((x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tried)), None)
        assert found is not None
        trial_of(found).refused(f"calls a function of torch: {FUNCTIONS}")


def is_asked_by_rule(files: frozenset[str]) -> bool:
    """Whether the caller of the caller is a line of a rule."""
    return sys._getframe(2).f_code.co_filename in files


class Unchanged(dict[str, Any]):
    """The state that comes in: it can be read."""

    def __init__(self, trial: Trial, state: Mapping[str, Any]) -> None:
        super().__init__(state)
        self.trial = trial

    def refuse(self, *_: Any, **__: Any) -> Any:
        self.trial.refused("changes the state that came in: make a new dict of all keys and return it in the Update")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = refuse
