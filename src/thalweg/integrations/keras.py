"""Optimizers for Keras 3, on its backends jax and torch: ``compile``, ``fit``, schedules and ``.keras`` files.

Rules step in the arrays of the backend. Keras itself clips, averages, adds up gradients and scales losses.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import keras

from thalweg import rules
from thalweg.boundary import advance
from thalweg.errors import OptionError, ParameterError, StateError
from thalweg.explain import Explanation, explain_parameter
from thalweg.given import Overrides, Standard, as_written, check_known, check_overrides
from thalweg.rules import RULES, Rule
from thalweg.rules.noise import tensor_id
from thalweg.settings import ParameterOptions, RuleOptions, defaults, option_names
from thalweg.storage import arithmetic, first_state
from thalweg.trial import check_rule

if TYPE_CHECKING:
    xp: Any

    def __getattr__(name: str) -> type[Optimizer]: ...  # a class for every rule, by its name
elif keras.backend.backend() == "jax":
    from thalweg.spaces import jax as xp
elif keras.backend.backend() == "torch":
    from thalweg.spaces import torch as xp
else:
    raise ImportError(
        f"thalweg.integrations.keras steps on the backends jax and torch, and Keras has {keras.backend.backend()!r}: "
        "set KERAS_BACKEND before Keras is imported"
    )

#: The arguments that every optimizer of Keras takes, but weight_decay, which is the rule's here.
KERAS_ARGUMENTS = {
    name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    for name, parameter in inspect.signature(keras.optimizers.Optimizer.__init__).parameters.items()
    if name not in ("self", "learning_rate", "weight_decay", "kwargs")
}
#: Options that Keras has itself, or that a model could not evaluate or save: refused, unless they are off.
NOT_IN_KERAS = {
    "max_grad_norm": "use global_clipnorm",
    "spikes": "use global_clipnorm, whose limit you choose yourself",
    "on_nonfinite": "use keras.optimizers.LossScaleOptimizer, which skips such steps",
    "averaged": "it would not be evaluated; use_ema=True keeps Keras's own average",
    "schedule_free": "its average would not be evaluated; use_ema=True keeps Keras's own average",
    "graft": "no file could hold a rule",
}


@dataclass(frozen=True)
class Stepped:
    """A variable of the model, its options, and the variables that hold its state."""

    name: str
    variable: Any
    setting: ParameterOptions
    state: Mapping[str, Any]


class Optimizer(keras.optimizers.Optimizer):
    """A rule as an optimizer of Keras. ``learning_rate`` may be a number, a schedule of Keras or None for the default.

    options: those of the rule, ``variant``, ``overrides`` (patterns of paths such as ``dense.kernel``), and what every
    optimizer of Keras takes, such as ``global_clipnorm``. paths: names of the variables, which files hold, because the
    variables of a model that Keras loads may have other paths than before.
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
        for_keras = {name: options.pop(name) for name in KERAS_ARGUMENTS if name in options}
        settings = check_settings(self.rule, options, variant, overrides)
        rate = self.rule.default_lr if learning_rate is None else learning_rate
        settings.validate_lr(1.0 if callable(rate) else rate)
        if all(for_keras.get(name) is None for name in ("clipnorm", "clipvalue", "global_clipnorm")):
            for_keras["global_clipnorm"] = settings.base.numerics.max_grad_norm  # that of a variant
        factor = 1.0 if rate is None else rate
        super().__init__(factor if callable(factor) else float(factor), **for_keras)
        #: Without a rate the rule has its own, which learning_rate multiplies.
        self._has_rate = rate is not None
        self.weight_decay = settings.options.get("weight_decay")
        self._settings = settings
        self._stepped: list[Stepped] = []
        self._paths = tuple(paths)

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        names = [variable.path.replace("/", ".") for variable in variables]
        if [path.rpartition(".")[2] for path in self._paths] == [name.rpartition(".")[2] for name in names]:
            names = list(self._paths)
        settings = [self._setting(name, variable) for name, variable in zip(names, variables, strict=True)]
        super().build(variables)
        self._stepped = [
            Stepped(name, variable, setting, self._add_state(variable, setting))
            for name, setting, variable in zip(names, settings, variables, strict=True)
        ]

    def _setting(self, name: str, variable: Any) -> ParameterOptions:
        """What holds for a variable, which may be one of those without weight decay."""
        decays = self._use_weight_decay(variable) or not hasattr(self._settings.base.rule, "weight_decay")
        setting, _ = self._settings.choose(name, variable, first=() if decays else (("weight_decay", 0.0),))
        check_matrix(name, tuple(variable.shape), setting.rule)
        setting.rule.check_shape(name, tuple(variable.shape))
        return setting

    def _add_state(self, variable: Any, setting: ParameterOptions) -> dict[str, Any]:
        """New variables for the state of a variable, placed like it where they have its shape."""
        state = first_state(xp, setting.stored_rule, setting.numerics, read_array(variable))
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
        stepped = self._stepped[self._get_variable_index(variable)]
        setting, p = stepped.setting, read_array(variable)
        rate = xp.astype(keras.ops.convert_to_tensor(learning_rate), arithmetic(xp.dtype(p)))
        result = advance(
            xp,
            setting.stored_rule,
            setting.numerics,
            p,
            gradient,
            {key: read_array(entry) for key, entry in stepped.state.items()},
            t=keras.ops.convert_to_tensor(self.iterations) + 1,
            lr=rate if self._has_rate else None,
            lr_scale=setting.lr_scale if self._has_rate else rate * setting.lr_scale,
            tensor=tensor_id(stepped.name),
        )
        self.assign(variable, result.p)
        for key, entry in result.state.items():
            self.assign(stepped.state[key], entry)

    def _apply_weight_decay(self, variables: Any) -> None:
        """Nothing: the rule decays."""

    def explain(self) -> Explanation:
        """How each variable is treated and what it keeps, once the optimizer is built."""
        if not self.built:
            raise StateError("explain() needs the variables: call build(model.trainable_variables) first, or fit()")
        rate = self._learning_rate if self._has_rate else None
        lr = float(rate.numpy()) if isinstance(rate, keras.Variable) else rate
        rows = []
        for stepped in self._stepped:
            name, shape, setting = stepped.name, tuple(stepped.variable.shape), stepped.setting
            hint = hint_of_kernel(name, shape, setting.rule)
            row = explain_parameter(
                name, shape, stepped.variable.dtype, setting, lr=lr, rms=None, counter_bytes=0, hints=[hint]
            )
            rows.append(row)
        named = [(stepped.name, stepped.variable) for stepped in self._stepped]
        return Explanation(rows, self._settings.unused_overrides(named))

    def get_config(self) -> dict[str, Any]:
        """What a file holds: Keras's own, the options, and overrides; what exclude_from_weight_decay() named is one."""
        settings = self._settings
        if any(not isinstance(pattern, (str, Standard)) for pattern, _ in settings.overrides):
            raise OptionError("overrides that are no globs cannot be saved: write their patterns as strings")
        without_decay = [
            [stepped.name, {"weight_decay": 0.0}]
            for stepped in self._stepped
            if not self._use_weight_decay(stepped.variable)
        ]
        config: dict[str, Any] = super().get_config()
        del config["weight_decay"]
        if not self._has_rate:
            config["learning_rate"] = None
        names = [stepped.name for stepped in self._stepped] or list(self._paths)
        overrides = without_decay + as_written(settings.overrides)
        return {**config, "paths": names, "overrides": overrides, "variant": settings.variant, **settings.given}


def check_settings(
    rule: type[Rule], options: Mapping[str, Any], variant: str | None, overrides: Overrides
) -> RuleOptions:
    """The settings of a rule, all of which a file of Keras can hold."""
    check_known(rule, options, [*option_names(rule), *KERAS_ARGUMENTS])
    entries = check_overrides(overrides)
    for given in (options, *(override for _, override in entries)):
        for name, value in given.items():
            if callable(value):
                raise OptionError(f"{name} cannot be a function in Keras, because no file could hold it")
            if name in NOT_IN_KERAS and value not in (None, False):
                raise OptionError(f"{name} is not available in Keras: {NOT_IN_KERAS[name]}")
    return RuleOptions(rule, options, variant, entries)


def check_matrix(name: str, shape: tuple[int, ...], rule: Rule) -> None:
    """Refuse kernels of which Muon would make another matrix than the layer computes with."""
    if isinstance(rule, rules.Muon) and len(shape) > rule.stacked_axes + 2:
        rows, columns = rule.matrix(shape)
        raise ParameterError(
            f"parameter {name!r} has shape {shape}: Keras keeps kernels of convolutions as (height, width, in, out), "
            f"and Muon would take this one for a matrix {rows} x {columns}. Train it with keras.optimizers.Muon, which "
            f"gives it to AdamW; or, if it is a stack of matrices, say overrides=[({name!r}, "
            f"dict(stacked_axes={len(shape) - 2}))]"
        )


def hint_of_kernel(name: str, shape: tuple[int, ...], rule: Rule) -> str:
    """What to say of a kernel whose scale is that of its transpose."""
    if not isinstance(rule, rules.Muon) or rule.transposed or rule.scaling != "original":
        return ""
    is_kernel = "kernel" in name.rpartition(".")[2] and len(set(shape[rule.stacked_axes :])) > 1
    return "Keras keeps kernels as (in, out): transposed=True scales steps by outputs over inputs" if is_kernel else ""


def read_array(variable: Any) -> Any:
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
    options = {"learning_rate": rule.default_lr, "variant": None, "overrides": (), **defaults(rule)}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in options.items()
        if name not in NOT_IN_KERAS
    ]
    parameters[0] = parameters[0].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    body = {
        "rule": rule,
        "__doc__": f"{inspect.getdoc(rule) or rule.__name__} Options: those of the rule, and Keras's own.",
        "__module__": __name__ if shipped else rule.__module__,
        "__signature__": inspect.Signature([*parameters, *KERAS_ARGUMENTS.values()]),
    }
    register = keras.saving.register_keras_serializable("thalweg" if shipped else rule.__module__)
    optimizer: type[Optimizer] = register(type(rule.__name__, (Optimizer,), body))
    return optimizer


globals().update({name: optimizer(rule) for name, rule in RULES.items()})
