"""Optimizers for Keras 3, on its backends jax and torch: ``compile``, ``fit``, schedules and ``.keras`` files.

Rules step in the arrays of the backend. Keras itself clips, accumulates, averages and scales losses.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import keras

from thalweg import rules
from thalweg.boundary import advance
from thalweg.errors import OptionError, ParameterError, StateError, UnusedOverrideWarning, say_where
from thalweg.explain import Explanation, GroupRow, explain_parameter
from thalweg.given import (
    OverrideList,
    Overrides,
    Standard,
    as_written,
    check_known,
    check_overrides,
    is_list,
    unused_patterns,
)
from thalweg.integrations.keras_roles import Role, Routing
from thalweg.rules import RULES, Rule
from thalweg.rules.checks import check_flag, check_number
from thalweg.rules.noise import tensor_id
from thalweg.settings import Setting, Settings, combined, option_names, rates_with_adamw
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
    "spikes": "use global_clipnorm, whose limit you choose yourself",
    "on_nonfinite": "use keras.optimizers.LossScaleOptimizer, which skips such steps",
}
#: What keras.optimizers.Muon and other front ends call the arguments of MuonAdamW.
INSTEAD = {
    "adam_beta_1": "adamw=dict(betas=(0.9, 0.999))",
    "adam_beta_2": "adamw=dict(betas=(0.9, 0.999))",
    "adam_weight_decay": "adamw=dict(weight_decay=...)",
    "epsilon": "adamw=dict(eps=...)",
    **dict.fromkeys(("muon_a", "muon_b", "muon_c"), "muon=dict(ns_coefficients=(a, b, c))"),
    "rms_rate": "muon=dict(scaling='match_rms_adamw', rms=...)",
    "lr": "learning_rate",
    **dict.fromkeys(("adamw_lr", "adamw_learning_rate"), "adam_lr_ratio, AdamW's rate over learning_rate"),
    "first": "include_layers, regular expressions that are searched for in paths",
    "other": "exclude_layers, regular expressions that are searched for in paths",
}
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Chosen:
    """What holds for a variable."""

    setting: Setting
    #: What learning_rate is multiplied by for its rule.
    share: float = 1.0
    hint: str = ""


@dataclass(frozen=True)
class Stepped:
    """A variable that is stepped, with what holds for it and what is kept for it."""

    name: str
    chosen: Chosen
    entries: Mapping[str, Any]


class Stepping(keras.optimizers.Optimizer):
    """What optimizers of one rule and of two have in common: each variable is stepped by what holds for it.

    theirs: arguments of Keras's own. paths: written into files, because the variables of a model that Keras loads may
    have other paths than before.
    """

    def __init__(self, learning_rate: Any, theirs: Mapping[str, Any], paths: Sequence[str]) -> None:
        rate = 1.0 if learning_rate is None else learning_rate
        super().__init__(learning_rate=rate if callable(rate) else float(rate), **theirs)
        #: Without a rate the rule has its own, which learning_rate multiplies.
        self._has_rate = learning_rate is not None
        self._stepped: list[Stepped] = []
        self._paths = tuple(paths)

    def _choose(self, names: Sequence[str], variables: Sequence[Any]) -> list[Chosen]:
        """What holds for each variable."""
        raise NotImplementedError

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        own = [variable.path.replace("/", ".") for variable in variables]
        ends, known = ([path.rpartition(".")[2] for path in paths] for paths in (own, self._paths))
        names = self._paths if ends == known else own
        chosen = self._choose(names, variables)
        super().build(variables)
        self._stepped = [
            Stepped(name, each, self._add_state(variable, each.setting))
            for name, each, variable in zip(names, chosen, variables, strict=True)
        ]

    def _setting(self, settings: Settings, name: str, variable: Any, known: Mapping[str, Any] = NO_OPTIONS) -> Setting:
        """What holds for a variable. known: what is known of it, where no override says otherwise."""
        options = dict(known)
        if not self._use_weight_decay(variable) and hasattr(settings.base.rule, "weight_decay"):
            options["weight_decay"] = 0.0
        setting, _ = settings.of(name, variable, combined(settings.base, options))
        check_matrix(name, tuple(variable.shape), setting.rule)
        setting.rule.check_shape(name, tuple(variable.shape))
        return setting

    def _add_state(self, variable: Any, setting: Setting) -> dict[str, Any]:
        """New variables for the state of one."""
        state = first_state(xp, setting.stored_rule, setting.handling, value_of(variable))
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
        setting, share, p = own.chosen.setting, own.chosen.share, value_of(variable)
        rate = xp.astype(keras.ops.convert_to_tensor(learning_rate), arithmetic(xp.dtype(p)))
        rate = rate if share == 1 else rate * share
        result = advance(
            xp,
            setting.stored_rule,
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

    def _pairs(self) -> list[tuple[Stepped, Any]]:
        return list(zip(self._stepped, self._trainable_variables, strict=True)) if self.built else []

    def _explain_all(self, overrides: OverrideList, groups: Sequence[GroupRow] = ()) -> Explanation:
        if not self.built:
            raise StateError("explain() needs the variables: call build(model.trainable_variables) first, or fit()")
        rate, pairs = self._learning_rate if self._has_rate else None, self._pairs()
        lr = float(rate.numpy()) if isinstance(rate, keras.Variable) else rate
        rows = [
            explain_parameter(
                own.name,
                tuple(v.shape),
                v.dtype,
                own.chosen.setting,
                lr=lr,
                rms=None,
                counter_bytes=0,
                hint=own.chosen.hint,
            )
            for own, v in pairs
        ]
        unused = unused_patterns((pattern for pattern, _ in overrides), ((own.name, v) for own, v in pairs))
        return Explanation(rows, unused, groups)

    def _overrides_to_save(self, settings: Settings) -> list[Any]:
        """Overrides for a file, with what exclude_from_weight_decay() named, which Keras does not save."""
        if any(not isinstance(pattern, (str, Standard)) for pattern, _ in settings.overrides):
            raise OptionError("overrides that are no globs cannot be saved: write their patterns as strings")
        apart = [
            [own.name, {"weight_decay": 0.0}]
            for own, v in self._pairs()
            if isinstance(own.chosen.setting.rule, settings.rule) and not self._use_weight_decay(v)
        ]
        return apart + as_written(settings.overrides)

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config()
        rate = {} if self._has_rate else {"learning_rate": None}
        return {**config, **rate, "paths": [own.name for own in self._stepped] or list(self._paths)}


class Optimizer(Stepping):
    """A rule as an optimizer of Keras. ``learning_rate`` may be a number, a schedule of Keras or None for the default.

    options: those of the rule, ``variant``, ``overrides`` (patterns of paths such as ``dense.kernel``), and what every
    optimizer of Keras takes, such as ``global_clipnorm``.
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
        settings = check_settings(self.rule, options, variant, overrides, OF_KERAS)
        rate = self.rule.default_lr if learning_rate is None else learning_rate
        settings.validate_lr(1.0 if callable(rate) else rate)
        limit = settings.base.handling.max_grad_norm  # that of a variant
        if limit is not None and all(theirs.get(name) is None for name in ("clipnorm", "clipvalue", "global_clipnorm")):
            theirs["global_clipnorm"] = limit
        super().__init__(rate, theirs, paths)
        self._settings = settings
        self.weight_decay = settings.options.get("weight_decay")

    def _choose(self, names: Sequence[str], variables: Sequence[Any]) -> list[Chosen]:
        settings = [self._setting(self._settings, name, v) for name, v in zip(names, variables, strict=True)]
        hints = [
            hint_of_kernel(n, tuple(v.shape), own.rule) for n, v, own in zip(names, variables, settings, strict=True)
        ]
        return [Chosen(setting, hint=hint) for setting, hint in zip(settings, hints, strict=True)]

    def explain(self) -> Explanation:
        """How each variable is treated and what it keeps, once the optimizer is built."""
        return self._explain_all(self._settings.overrides)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["weight_decay"]
        ours = {"variant": self._settings.variant, "overrides": self._overrides_to_save(self._settings)}
        return {**config, **self._settings.given, **ours}


@keras.saving.register_keras_serializable("thalweg")
class MuonAdamW(Stepping):
    """Hidden kernels (in, out) by Muon; embeddings, output layers, convolutions, norms and biases by AdamW.

    learning_rate: of Muon, a number, a schedule of Keras or None for the default. adam_lr_ratio: AdamW's over it; None
    is 1 where steps of both have one size, as under ``muon=dict(scaling="match_rms_adamw")``, and 0.015 elsewhere.
    weight_decay: of all matrices and kernels; None leaves it to each rule. Norms, biases and vectors do not decay.

    include_layers, exclude_layers: regular expressions that are searched for in paths such as ``net/dense/kernel``, of
    variables that go to Muon, or to AdamW, whatever they are found to be; those to include win. exclude_embeddings:
    give AdamW all paths with "embedding" in them. muon, adamw: further options of the rules, ``variant`` and
    ``overrides`` among them. theirs: what every optimizer of Keras takes. ``explain()`` shows who steps what.
    """

    def __init__(
        self,
        learning_rate: Any = None,
        *,
        adam_lr_ratio: float | None = None,
        weight_decay: float | None = None,
        include_layers: Sequence[str] = (),
        exclude_layers: Sequence[str] = (),
        exclude_embeddings: bool = True,
        muon: Mapping[str, Any] = NO_OPTIONS,
        adamw: Mapping[str, Any] = NO_OPTIONS,
        paths: Sequence[str] = (),
        **theirs: Any,
    ) -> None:
        check_arguments(theirs)
        included = check_expressions("include_layers", include_layers)
        excluded = check_expressions("exclude_layers", exclude_layers)
        check_flag("exclude_embeddings", exclude_embeddings)
        if adam_lr_ratio is not None:
            check_number("adam_lr_ratio", adam_lr_ratio, low=0.0)
        decay = {} if weight_decay is None else {"weight_decay": weight_decay}
        matrices = settings_of(rules.Muon, {"transposed": True, **decay, **muon}, "muon")
        others = settings_of(rules.AdamW, {**decay, **adamw}, "adamw")
        usual, beside = rates_with_adamw(rules.Muon, muon, None)
        rate = usual if learning_rate is None else learning_rate
        for settings in (matrices, others):
            settings.validate_lr(1.0 if callable(rate) else rate)
        super().__init__(rate, theirs, paths)
        self._muon, self._adamw = matrices, others
        self._share = beside / usual if adam_lr_ratio is None else adam_lr_ratio
        self._routing = Routing(included, excluded, exclude_embeddings)
        self._given = {
            "adam_lr_ratio": adam_lr_ratio,
            "include_layers": list(included),
            "exclude_layers": list(excluded),
            "exclude_embeddings": exclude_embeddings,
        }
        self.weight_decay = weight_decay

    def _choose(self, names: Sequence[str], variables: Sequence[Any]) -> list[Chosen]:
        paths = [name.replace(".", "/") for name in names]
        unused = self._routing.unused_expressions(paths)
        if unused:
            told = f"patterns of layers that are found in no path: {', '.join(map(repr, unused))}"
            warnings.warn(told, UnusedOverrideWarning, stacklevel=3)
        roles = self._routing.roles_of(paths, [tuple(v.shape) for v in variables])
        return [self._chosen(*each) for each in zip(names, variables, roles, strict=True)]

    def _chosen(self, name: str, variable: Any, role: Role) -> Chosen:
        if role.kind == "hidden":
            return Chosen(self._setting(self._muon, name, variable, role.options), 1.0, role.hint)
        known = {"weight_decay": 0.0} if role.kind == "vector" else {}
        return Chosen(self._setting(self._adamw, name, variable, known), self._share, role.hint)

    def explain(self) -> Explanation:
        """Which rule steps each variable, how, at which rate, and what it keeps, once the optimizer is built."""
        lr = float(keras.ops.convert_to_tensor(self.learning_rate))
        stepped = [own.chosen for own in self._stepped]
        groups = []
        for settings, share in ((self._muon, 1.0), (self._adamw, self._share)):
            count = sum(isinstance(own.setting.rule, settings.rule) for own in stepped)
            notes = () if share == 1 else (f"{share:g} of learning_rate",)
            groups.append(GroupRow(None, count, 0, float(f"{lr * share:.6g}"), notes, settings.rule.__name__))
        return self._explain_all([*self._muon.overrides, *self._adamw.overrides], groups)

    def get_config(self) -> dict[str, Any]:
        options = {
            name: {**settings.given, "variant": settings.variant, "overrides": self._overrides_to_save(settings)}
            for name, settings in (("muon", self._muon), ("adamw", self._adamw))
        }
        return {**super().get_config(), **self._given, **options}


#: What goes around rules elsewhere, and what to do in Keras.
UNEVALUATED = {
    "averaged": "it would not be evaluated; use_ema=True keeps Keras's own average",
    "schedule_free": "its average would not be evaluated; use_ema=True keeps Keras's own average",
    "graft": "no file could hold a rule",
}


def check_settings(
    rule: type[Rule],
    options: Mapping[str, Any],
    variant: str | None = None,
    overrides: Overrides = (),
    beside: Sequence[str] = (),
) -> Settings:
    """The settings of a rule, of which Keras's files can hold all. beside: what else might have been meant."""
    for name, instead in ELSEWHERE.items():
        if name in options:
            raise OptionError(f"{name} is not available in Keras: {instead}")
    check_known(rule, options, [*option_names(rule), *beside])
    entries = check_overrides(overrides)
    for name, value in (pair for own in (options, *(own for _, own in entries)) for pair in own.items()):
        if callable(value):
            raise OptionError(f"{name} cannot be a function in Keras, because no file could hold it")
        if name in UNEVALUATED and value not in (None, False):
            raise OptionError(f"{name} is not available in Keras: {UNEVALUATED[name]}")
    return Settings(rule, options, variant, entries)


def settings_of(rule: type[Rule], given: Mapping[str, Any], argument: str) -> Settings:
    """The settings of one rule of a mixture."""
    options = {name: value for name, value in given.items() if name not in ("variant", "overrides")}
    with say_where(argument):
        return check_settings(rule, options, given.get("variant"), given.get("overrides", ()))


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments that MuonAdamW has not, and say where they belong."""
    for name in given:
        if name in OF_KERAS:
            continue
        if name in ELSEWHERE:
            raise OptionError(f"{name} is not available in Keras: {ELSEWHERE[name]}")
        owners = [rule for rule in (rules.Muon, rules.AdamW) if name in option_names(rule)]
        places = [f"{owner.__name__.lower()}=dict({name}=...)" for owner in owners]
        places = [INSTEAD[name]] if name in INSTEAD else places
        known = [n for n in inspect.signature(MuonAdamW.__init__).parameters if n not in ("self", "paths", "theirs")]
        check_known("muon_adamw", {} if places else {name: None}, [*known, *OF_KERAS])
        raise OptionError(f"muon_adamw has no option {name!r}: write {' or '.join(places)}")


def check_expressions(argument: str, patterns: Any) -> tuple[str, ...]:
    if not is_list(patterns) or not all(isinstance(pattern, str) for pattern in patterns):
        wanted = "must be a list of regular expressions, such as ['output_dense']"
        raise OptionError(f"{argument} {wanted}, got {patterns!r}")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise OptionError(f"{argument}: {pattern!r} is no regular expression: {error}") from None
    return tuple(patterns)


def check_matrix(name: str, shape: tuple[int, ...], rule: Rule) -> None:
    """Refuse kernels of which Muon would make another matrix than the layer computes with."""
    if isinstance(rule, rules.Muon) and len(shape) > rule.stacked_axes + 2:
        rows, columns = rule.matrix(shape)
        raise ParameterError(
            f"parameter {name!r} has shape {shape}: Keras keeps kernels of convolutions as (height, width, in, out), "
            f"and Muon would take this one for a matrix {rows} x {columns}. Give it to AdamW, as muon_adamw() does; "
            f"or, if it is a stack of matrices, say overrides=[({name!r}, dict(stacked_axes={len(shape) - 2}))]"
        )


def hint_of_kernel(name: str, shape: tuple[int, ...], rule: Rule) -> str:
    """What to say of a kernel whose scale is that of its transpose."""
    if not isinstance(rule, rules.Muon) or rule.transposed or rule.scaling != "original":
        return ""
    is_kernel = "kernel" in name.rpartition(".")[2] and len(set(shape[rule.stacked_axes :])) > 1
    return "Keras keeps kernels as (in, out): transposed=True scales steps by outputs over inputs" if is_kernel else ""


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

    class LARS(Optimizer): ...

    class LAMB(Optimizer): ...

    class Adafactor(Optimizer): ...

    class Muon(Optimizer): ...

    class Kron(Optimizer): ...

    class SOAP(Optimizer): ...

    class AdEMAMix(Optimizer): ...

    class Lion(Optimizer): ...

    class MARS(Optimizer): ...

else:
    globals().update({name: optimizer(rule) for name, rule in RULES.items()})

#: As other front ends call it.
muon_adamw = MuonAdamW
