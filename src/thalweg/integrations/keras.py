"""Optimizers for Keras 3, on its backends jax and torch: ``compile``, ``fit``, schedules and ``.keras`` files.

Rules step in the arrays of the backend. Keras itself clips, accumulates, averages and scales losses.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import keras

from thalweg.boundary import advance
from thalweg.errors import OptionError, StateError
from thalweg.explain import Explanation, explained
from thalweg.given import Overrides, Standard, as_written, check_known, check_overrides, matches
from thalweg.rules import RULES, Rule
from thalweg.rules.noise import tensor_id
from thalweg.settings import Setting, Settings, combined, option_names
from thalweg.signatures import defaults
from thalweg.storage import arithmetic, first_state
from thalweg.trial import check_rule

if TYPE_CHECKING:
    xp: Any
elif keras.backend.backend() == "jax":
    from thalweg.spaces import jax as xp
elif keras.backend.backend() == "torch":
    from thalweg.spaces import torch as xp
else:
    raise ImportError(
        f"thalweg.integrations.keras steps on the backends jax and torch, and Keras has {keras.backend.backend()!r}: "
        "set KERAS_BACKEND before Keras is imported"
    )

#: What Keras itself does for every optimizer. It also has weight_decay, which is the rule's here.
OF_KERAS = tuple(
    name
    for name in inspect.signature(keras.optimizers.Optimizer.__init__).parameters
    if name not in ("self", "learning_rate", "weight_decay", "kwargs")
)
#: Options of a whole step, and what Keras has for them.
ELSEWHERE = {
    "max_grad_norm": "use global_clipnorm",
    "on_nonfinite": "use keras.optimizers.LossScaleOptimizer, which skips such steps",
}


@dataclass(frozen=True)
class Stepped:
    """A variable that is stepped, with what holds for it and what is kept for it."""

    name: str
    setting: Setting
    entries: Mapping[str, Any]


class Optimizer(keras.optimizers.Optimizer):
    """A rule as an optimizer of Keras. ``learning_rate`` may be a number, a schedule of Keras or None for the default.

    options: those of the rule, ``variant``, ``overrides`` (patterns of paths such as ``dense.kernel``), and what every
    optimizer of Keras takes, such as ``global_clipnorm``. paths: written into files, because the variables of a model
    that Keras loads may have other paths than before.
    """

    rule: ClassVar[type[Rule]]

    def __init__(
        self,
        learning_rate: Any = None,
        *,
        variant: str | None = None,
        overrides: Overrides = (),
        paths: Sequence[str] = (),
        **options: Any,
    ) -> None:
        theirs = {name: options.pop(name) for name in OF_KERAS if name in options}
        for name, instead in ELSEWHERE.items():
            if name in options:
                raise OptionError(f"{name} is not available in Keras: {instead}")
        check_known(self.rule, options, [*option_names(self.rule), *OF_KERAS])
        entries = check_overrides(overrides)
        for name, value in (pair for own in (options, *(own for _, own in entries)) for pair in own.items()):
            if callable(value):
                raise OptionError(f"{name} cannot be a function in Keras, because no file could hold it")
        rate = self.rule.default_lr if learning_rate is None else learning_rate
        settings = Settings(self.rule, options, variant, entries)
        settings.validate_lr(1.0 if callable(rate) else rate)
        limit = settings.base.handling.max_grad_norm  # that of a variant
        if limit is not None and all(theirs.get(name) is None for name in ("clipnorm", "clipvalue", "global_clipnorm")):
            theirs["global_clipnorm"] = limit
        super().__init__(learning_rate=1.0 if rate is None else rate if callable(rate) else float(rate), **theirs)
        self._settings = settings
        #: Without a rate the rule has its own, which learning_rate multiplies.
        self._has_rate = rate is not None
        self._stepped: list[Stepped] = []
        self._paths = tuple(paths)
        self.weight_decay = settings.options.get("weight_decay")

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        own = [variable.path.replace("/", ".") for variable in variables]
        ends, known = ([path.rpartition(".")[2] for path in paths] for paths in (own, self._paths))
        names = self._paths if ends == known else own
        settings = [self._setting(name, variable) for name, variable in zip(names, variables, strict=True)]
        super().build(variables)
        self._stepped = [
            Stepped(name, setting, self._kept(variable, setting))
            for name, setting, variable in zip(names, settings, variables, strict=True)
        ]

    def _setting(self, name: str, variable: Any) -> Setting:
        """What holds for a variable."""
        base = self._settings.base
        if not self._use_weight_decay(variable) and hasattr(base.rule, "weight_decay"):
            base = combined(base, {"weight_decay": 0.0})
        setting, _ = self._settings.of(name, variable, base)
        setting.rule.check_shape(name, tuple(variable.shape))
        return setting

    def _kept(self, variable: Any, setting: Setting) -> dict[str, Any]:
        """New variables for the state of one."""
        state = first_state(xp, setting.settled, setting.handling, value_of(variable))
        return {
            key: self.add_variable(
                xp.shape(entry),
                initializer=lambda shape, dtype=None, entry=entry: entry,
                dtype=xp.dtype(entry),
                layout=getattr(variable, "_layout", None) if xp.shape(entry) == tuple(variable.shape) else None,
                name=f"{variable.path.replace('/', '_')}_{key}",
            )
            for key, entry in state.items()
        }

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        own = self._stepped[self._get_variable_index(variable)]
        setting, p = own.setting, value_of(variable)
        rate = xp.astype(keras.ops.convert_to_tensor(learning_rate), arithmetic(xp.dtype(p)))
        result = advance(
            xp,
            setting.settled,
            setting.handling,
            p,
            gradient,
            {key: value_of(entry) for key, entry in own.entries.items()},
            t=keras.ops.convert_to_tensor(self.iterations) + 1,
            lr=rate if self._has_rate else None,
            lr_scale=setting.lr_scale if self._has_rate else rate * setting.lr_scale,
            tensor=tensor_id(own.name),
        )
        self.assign(variable, result.p)
        for key, entry in result.state.items():
            self.assign(own.entries[key], entry)

    def _apply_weight_decay(self, variables: Any) -> None:
        """Nothing: the rule decays."""

    def explain(self) -> Explanation:
        """How each variable is treated and what it keeps, once the optimizer is built."""
        if not self.built:
            raise StateError("explain() needs the variables: call build(model.trainable_variables) first, or fit()")
        rate = self._learning_rate if self._has_rate else None
        lr = float(rate.numpy()) if isinstance(rate, keras.Variable) else rate
        pairs = list(zip(self._stepped, self._trainable_variables, strict=True))
        rows = [
            explained(own.name, tuple(v.shape), v.dtype, own.setting, lr=lr, rms=None, counter_bytes=0)
            for own, v in pairs
        ]
        patterns = [pattern for pattern, _ in self._settings.overrides if not isinstance(pattern, Standard)]
        unused = [pattern for pattern in patterns if not any(matches(pattern, o.name, v) for o, v in pairs)]
        return Explanation(rows, unused)

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config()
        del config["weight_decay"]
        if any(not isinstance(pattern, (str, Standard)) for pattern, _ in self._settings.overrides):
            raise OptionError("overrides that are no globs cannot be saved: write their patterns as strings")
        # Keras does not save exclude_from_weight_decay()
        pairs = zip(self._stepped, self._trainable_variables, strict=True) if self.built else ()
        apart = [[own.name, {"weight_decay": 0.0}] for own, v in pairs if not self._use_weight_decay(v)]
        overrides = apart + as_written(self._settings.overrides)
        rate = {} if self._has_rate else {"learning_rate": None}
        paths = [own.name for own in self._stepped] or list(self._paths)
        ours = {"variant": self._settings.variant, "overrides": overrides, "paths": paths}
        return {**config, **rate, **self._settings.given, **ours}


def value_of(variable: Any) -> Any:
    """The array of a variable, without the gradients that torch would keep of it."""
    value = variable.value
    return value.detach() if hasattr(value, "detach") else value


@functools.cache
def optimizer(rule: type[Rule]) -> type[Optimizer]:
    """The class of optimizers for Keras that step by a rule: its options are keyword arguments.

    Files of Keras name it by the rule; import or make it before you load one.
    """
    check_rule(rule)
    shipped = RULES.get(rule.__name__) is rule
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown = {"variant": None, "overrides": (), **{k: v for k, v in defaults(rule).items() if k not in ELSEWHERE}}
    parameters = [inspect.Parameter(name, keyword, default=value) for name, value in shown.items()]
    parameters += [
        p.replace(kind=keyword)
        for p in inspect.signature(keras.optimizers.Optimizer.__init__).parameters.values()
        if p.name in OF_KERAS
    ]
    rate = inspect.Parameter("learning_rate", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=rule.default_lr)
    body = {
        "rule": rule,
        "__doc__": f"{inspect.getdoc(rule) or rule.__name__} Options: those of the rule, and Keras's own.",
        "__module__": __name__ if shipped else rule.__module__,
        "__signature__": inspect.Signature([rate, *parameters]),
    }
    package = "thalweg" if shipped else rule.__module__
    found: type[Optimizer] = keras.saving.register_keras_serializable(package)(type(rule.__name__, (Optimizer,), body))
    return found


if TYPE_CHECKING:

    class SGD(Optimizer): ...

    class AdamW(Optimizer): ...

    class Lion(Optimizer): ...

    class LARS(Optimizer): ...

    class LAMB(Optimizer): ...

    class Adafactor(Optimizer): ...

    class Muon(Optimizer): ...

    class Kron(Optimizer): ...

else:
    globals().update({name: optimizer(rule) for name, rule in RULES.items()})
