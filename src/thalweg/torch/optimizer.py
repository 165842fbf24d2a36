"""The optimizer for torch: what all four have in common."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from thalweg.boundary import first_state
from thalweg.errors import NonFiniteError, OptionError, ParameterError, StateError, UnusedOverrideWarning
from thalweg.rules.checks import check_choice, check_flag, check_number, require
from thalweg.settings import Overrides, Setting, Settings, matches, plain
from thalweg.spaces import torch as xp
from thalweg.torch.checkpoints import check_entries, check_groups, place_of_counts, restored
from thalweg.torch.engines import ENGINES, Bucket, Engine, Result, engine_for
from thalweg.torch.explain import Explanation, explained
from thalweg.torch.groups import LAYOUT, GroupSettings, check_group, to_plain
from thalweg.torch.tensors import check_gradient, check_parameter

Rate: TypeAlias = float | Tensor | None
Params: TypeAlias = Iterable[Any]


#: Options that are decided for all groups together.
JOINT = ("max_grad_norm", "on_nonfinite")


class Optimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` around one of our rules.

    The four optimizers derive from it. Gradients are read, never written; parameters and state are
    written in place when the new values are known.
    """

    rule_name: ClassVar[str]

    def __init__(
        self,
        params: Params,
        lr: Rate,
        *,
        variant: str | None = None,
        overrides: Overrides = (),
        engine: Engine = "auto",
        capturable: bool = False,
        **options: Any,
    ) -> None:
        check_choice("engine", engine, "auto", "reference", "foreach", "fused")
        check_flag("capturable", capturable)
        check_group(self.rule_name, options)
        settings = Settings(self.rule_name, options, variant, overrides)
        check_rate(settings, lr)
        settings.validate_lr(lr)
        if engine == "fused":
            engine_for(engine, self.rule_name, alone=True)
        self._setup(settings.overrides, engine)
        lr = lr if isinstance(lr, Tensor) else plain(lr)
        beside = {"capturable": capturable, "rule": self.rule_name, "layout": LAYOUT}
        super().__init__(params, {"lr": lr, **to_plain(settings.options), **beside})

    def _setup(self, overrides: Overrides, engine: Engine) -> None:
        self._overrides, self._wanted_engine = overrides, engine
        self._group_settings = GroupSettings(self.rule_name, overrides)
        self._resolved: dict[int, tuple[Settings, Setting]] = {}
        self._engines_used: set[str] = set()
        self._reported = not overrides
        self._places: dict[Tensor, tuple[str, int]] = {}
        self._last: dict[str, dict[str, Any]] = {}
        self._last_finite: dict[str, Tensor] = {}
        self._skips: Tensor | None = None

    # ---- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with options of its own; everything is checked before anything is added."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        check_group(self.rule_name, param_group)
        given = {k: plain(v) for k, v in param_group.items() if k not in ("params", "lr")}
        for name in JOINT:
            if given.get(name, self.defaults[name]) != self.defaults[name]:
                raise OptionError(f"{name} concerns the whole step and cannot differ between groups")
        lr = param_group.get("lr", self.defaults["lr"])
        settings = self._group_settings.made({**self.defaults, **to_plain(given)})
        check_rate(settings, lr)
        settings.base.rule.validate_lr(plain(lr))
        before = len(self.param_groups)
        super().add_param_group({**param_group, **to_plain(given)})
        try:
            self._check_names()
            for name, p in self._named(before):
                check_parameter(name, p)
        except (OptionError, ParameterError):
            del self.param_groups[before:]
            raise
        self._reported, self._places = not self._overrides, {}

    def _check_names(self) -> None:
        by_name = [pattern for pattern, _ in self._overrides if not callable(pattern)]
        if by_name and any("param_names" not in group for group in self.param_groups):
            raise OptionError(
                f"overrides by name ({by_name[0]!r}) need names: pass model.named_parameters(), or use a function "
                "of (name, parameter) as the pattern"
            )
        names = [name for name, _ in self._named()]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ParameterError(
                f"two parameters are named {twice!r}: give names that differ, as model.named_parameters() has them"
            )

    def _named(self, first_group: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Every parameter with its name; those without one are named by their place."""
        place = sum(len(group["params"]) for group in self.param_groups[:first_group])
        for group in self.param_groups[first_group:]:
            names = group.get("param_names") or [str(place + i) for i in range(len(group["params"]))]
            place += len(group["params"])
            yield from zip(names, group["params"], strict=True)

    def parameters(self) -> Iterator[Tensor]:
        """Every parameter, in the order of the groups."""
        return (p for _, p in self._named())

    @property
    def num_parameters(self) -> int:
        return sum(len(group["params"]) for group in self.param_groups)

    @property
    def lr(self) -> Any:
        """The learning rate of all groups; setting it sets it for all."""
        rates = [group["lr"] for group in self.param_groups]
        if any(rate is not rates[0] and rate != rates[0] for rate in rates):
            raise OptionError(f"groups have different learning rates, {rates}: read them from param_groups")
        return rates[0]

    @lr.setter
    def lr(self, value: Rate) -> None:
        for index, group in enumerate(self.param_groups):
            settings = self._group_settings.of(index, group)
            check_rate(settings, value)
            settings.base.rule.validate_lr(plain(value))
        for group in self.param_groups:
            group["lr"] = value if isinstance(value, Tensor) else plain(value)

    @property
    def engine(self) -> str:
        """The engines that the last step used, or the one that was asked for."""
        return " + ".join(sorted(self._engines_used)) or self._wanted_engine

    # ---- stepping

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. A closure is evaluated first, and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step(None, compiling=torch.compiler.is_compiling())
        return loss

    def step_parameter(self, p: Tensor) -> None:
        """Step one parameter by itself, in the middle of a backward pass for example."""
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            raise OptionError("max_grad_norm needs all gradients of a step at once: use step()")
        if p not in self._place():
            raise ParameterError("step_parameter: this tensor is no parameter of this optimizer")
        with torch.no_grad():
            self._step(p, compiling=torch.compiler.is_compiling())

    def _report_unused(self) -> None:
        """Warn, once, of overrides that match no parameter."""
        if not self._reported:
            self._reported = True
            matched = self._matched()
            unused = [repr(pattern) for i, (pattern, _) in enumerate(self._overrides) if i not in matched]
            if unused:
                message = f"overrides that match no parameter: {', '.join(unused)}"
                warnings.warn(message, UnusedOverrideWarning, stacklevel=8)

    # Under torch.compile only the arithmetic of each bucket is compiled; what surrounds it runs as it is.
    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call]
    def _step(self, only: Tensor | None, *, compiling: bool) -> None:
        buckets = self._buckets(only, compiling)
        self._engines_used = set()
        results: Iterable[Result] = (result for bucket in buckets for result in self._run(bucket, compiling))
        if self.param_groups[0]["on_nonfinite"] == "raise":
            # nothing is written before everything is known to be finite
            results = list(results)
            self._raise_unless_finite(results)
        for result in results:
            self._commit(result)

    @torch.compiler.disable
    def _buckets(self, only: Tensor | None, compiling: bool) -> list[Bucket]:
        """Parameters that can be stepped together, checked, with their state made where there is none."""
        self._report_unused()
        places = self._place()
        chosen = places if only is None else {only: places[only]}
        named = [(name, p) for p, (name, _) in chosen.items() if p.grad is not None]
        for name, p in named:
            check_gradient(name, p, grad_of(p))
        settings = {i: self._checked_settings(i, self.param_groups[i]) for i in sorted({i for _, i in chosen.values()})}
        members: dict[Any, list[tuple[str, Tensor]]] = defaultdict(list)
        shared: dict[Any, tuple[Setting, Any, int | None]] = {}
        for name, p in named:
            index = places[p][1]
            group = self.param_groups[index]
            setting = self._setting(settings[index], name, p)
            state = self._state(p, setting, group)
            t = None if compiling or state["step"].device.type != "cpu" else int(state["step"]) + 1
            kind = setting.rule.kind(tuple(p.shape))
            key = (index, id(setting), p.device, p.dtype, grad_of(p).dtype, kind, t)
            members[key].append((name, p))
            lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
            shared[key] = scaled(setting, group), lr, t
        scale, allowed = self._joint(named)
        return [
            Bucket(
                [name for name, _ in bucket],
                [p for _, p in bucket],
                [grad_of(p) for _, p in bucket],
                [self.state[p] for _, p in bucket],
                *shared[key],
                None if scale is None else scale.to(bucket[0][1].device),
                None if allowed is None else allowed.to(bucket[0][1].device),
            )
            for key, bucket in members.items()
        ]

    def _place(self) -> dict[Tensor, tuple[str, int]]:
        """The name and the group of every parameter."""
        if len(self._places) != self.num_parameters:
            groups = [i for i, group in enumerate(self.param_groups) for _ in group["params"]]
            self._places = {p: (name, i) for (name, p), i in zip(self._named(), groups, strict=True)}
        return self._places

    def _checked_settings(self, index: int, group: Mapping[str, Any]) -> Settings:
        try:
            settings = self._group_settings.of(index, group)
            check_rate(settings, group["lr"])
            settings.base.rule.validate_lr(plain(group["lr"]))
            for name in JOINT:
                require(
                    group[name] == self.param_groups[0][name],
                    f"{name} concerns the whole step and cannot differ between groups",
                )
        except OptionError as error:
            raise OptionError(f"parameter group {index}: {error}") from None
        return settings

    def _setting(self, settings: Settings, name: str, p: Tensor) -> Setting:
        found = self._resolved.get(id(p))
        if found is None or found[0] is not settings:
            setting, _ = settings.of(name, p)
            # equal settings are one object, so that their parameters share a bucket
            setting = next((s for other, s in self._resolved.values() if other is settings and s == setting), setting)
            if setting.rule.stacked_axes > p.ndim:
                raise OptionError(
                    f"stacked_axes={setting.rule.stacked_axes}, but parameter {name!r} has shape {tuple(p.shape)}"
                )
            self._check_state(name, p, setting)
            self._resolved[id(p)] = found = settings, setting
        return found[1]

    def _check_state(self, name: str, p: Tensor, setting: Setting) -> None:
        """Say so if options have changed to such that need another state than there is."""
        found = {key: tuple(entry.shape) for key, entry in self.state.get(p, {}).items() if key != "step"}
        wanted = expected_shapes(setting, p)
        if p in self.state and self.state[p] and found != wanted:
            raise StateError(
                f"the state of {name!r} does not fit: with these options it has {wanted}, and there is {found}; "
                "restore the options it was made with, or begin anew with clear_state()"
            )

    def _state(self, p: Tensor, setting: Setting, group: Mapping[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            place = place_of_counts(p, group)
            state["step"] = torch.zeros((), dtype=torch.float32, device=place)
            state.update(first_state(xp, setting.rule_at(1), setting.handling, p.detach()))
            if (
                "refresh" in state and p.device.type != "meta"
            ):  # beside the step, so that the host can tell without a wait
                state["refresh"] = state["refresh"].to(place)
        return state

    def _joint(self, named: Sequence[tuple[str, Tensor]]) -> tuple[Tensor | None, Tensor | None]:
        """What depends on all gradients together: the scale of max_grad_norm, and whether to skip the step."""
        limit, policy = self.param_groups[0]["max_grad_norm"], self.param_groups[0]["on_nonfinite"]
        if not named or (limit is None and policy != "skip"):
            return None, None
        # in the precision of the arithmetic, and joined in float64: neither may overflow on the way
        norms = [
            torch.linalg.vector_norm(
                grad_of(p), dtype=torch.float64 if p.grad.dtype == torch.float64 else torch.float32
            )
            for _, p in named
            if p.grad is not None
        ]
        home = norms[0].device
        finite = torch.stack([torch.isfinite(norm.square()).to(home) for norm in norms])
        names = [name for name, _ in named]
        if policy == "raise":
            guilty = [name for name, fine in zip(names, finite.tolist(), strict=True) if not fine]
            if guilty:
                raise NonFiniteError(
                    f"the gradient is not finite, or too large to be squared: {', '.join(map(repr, guilty))}"
                )
        scale = None
        if limit is not None:
            total = torch.stack([norm.to(home, torch.float64) for norm in norms]).square().sum().sqrt()
            scale = 1 / torch.clamp(total / limit, min=1.0)
        if policy != "skip":
            return scale, None
        self._last_finite = dict(zip(names, finite.unbind(), strict=True))
        allowed = finite.all()
        skipped = (~allowed).to(torch.int64)
        self._skips = skipped if self._skips is None else self._skips + skipped
        return scale, allowed

    def _run(self, bucket: Bucket, compiling: bool) -> Iterator[Result]:
        # a compiler fuses what it can see, and it sees through single tensors
        alone = compiling or len(bucket.params) == 1
        name = engine_for(self._wanted_engine, self.rule_name, alone=alone)
        self._engines_used.add(name)
        return ENGINES[name](bucket)

    @torch.compiler.disable
    def _commit(self, result: Result) -> None:
        """Write new values, in place, and keep what there is to look at."""
        part = result.part
        torch._foreach_copy_(list(part.params), list(result.params))
        for key in result.states[0]:
            torch._foreach_copy_([s[key] for s in part.states], [new[key] for new in result.states])
        steps = [s["step"] for s in part.states]
        if result.finite is None:
            torch._foreach_add_(steps, 1)
        else:
            torch._foreach_add_(steps, [finite.to(steps[0].device, torch.float32) for finite in result.finite])
        for i, name in enumerate(part.names):
            self._last[name] = {key: values[i] for key, values in result.stats.items()}

    @torch.compiler.disable
    def _raise_unless_finite(self, results: Sequence[Result]) -> None:
        guilty = []
        for result in results:
            assert result.finite is not None
            flags = torch.stack([finite.reshape(()) for finite in result.finite]).tolist()
            guilty += [name for name, finite in zip(result.part.names, flags, strict=True) if not finite]
        if guilty:
            raise NonFiniteError(f"the gradient or the update is not finite: {', '.join(map(repr, guilty))}")

    # ---- looking inside

    def explain(self) -> Explanation:
        """How every parameter will be treated, what its state will cost, and what looks like a mistake."""
        homes = [(i, group) for i, group in enumerate(self.param_groups) for _ in group["params"]]
        rows = []
        for (name, p), (index, group) in zip(self._named(), homes, strict=True):
            setting = self._setting(self._checked_settings(index, group), name, p)
            rows.append(explained(name, p, setting, group["lr"]))
        return Explanation(
            rows, [pattern for i, (pattern, _) in enumerate(self._overrides) if i not in self._matched()]
        )

    def _matched(self) -> set[int]:
        """Which entries of ``overrides`` match some parameter."""
        return {
            i
            for i, (pattern, _) in enumerate(self._overrides)
            if any(matches(pattern, *pair) for pair in self._named())
        }

    def stats(self) -> dict[str, dict[str, Any]]:
        """What the last step of each parameter computed on its way, by name. Reading it waits for the device."""

        def shown(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.item() if value.numel() == 1 else value.squeeze().cpu()

        return {name: {key: shown(v) for key, v in values.items()} for name, values in self._last.items()}

    @property
    def skipped(self) -> int:
        """How many steps were skipped under ``on_nonfinite="skip"``. Reading it waits for the device."""
        return 0 if self._skips is None else int(self._skips)

    def nonfinite(self) -> list[str]:
        """The parameters whose gradients were not finite in the last step, under ``on_nonfinite="skip"``."""
        return [name for name, finite in self._last_finite.items() if not bool(finite)]

    # ---- state

    def clear_state(self) -> None:
        """Forget what has been learned; options stay."""
        self.state.clear()
        self._resolved.clear()
        self._last, self._last_finite, self._skips = {}, {}, None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state. State keeps the dtype it was saved in; on any error nothing is changed."""
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_groups(self.rule_name, state_dict, self.param_groups)
        groups = [{**self.defaults, **group} for group in state_dict["param_groups"]]
        check_entries(state_dict, list(self._named()), self._expected(groups))
        state_dict["param_groups"] = groups
        pre, post = self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks
        self._optimizer_load_state_dict_pre_hooks = type(pre)()
        self._optimizer_load_state_dict_post_hooks = type(post)()
        try:
            super().load_state_dict(state_dict)
        finally:
            self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks = pre, post
        # torch has cast the state to the dtype of its parameter; take it as it was saved
        for p, entries in restored(self.param_groups, state_dict).items():
            self.state[p] = entries
        self._resolved.clear()
        for finish in post.values():
            finish(self)

    def _expected(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, tuple[int, ...]]]:
        """The shapes of all states under the options of saved groups, which are checked on the way."""
        shapes = {}
        try:
            made = [self._group_settings.made(group) for group in groups]
            for settings, group in zip(made, groups, strict=True):
                check_rate(settings, group["lr"])
                settings.base.rule.validate_lr(plain(group["lr"]))
            for p, (name, index) in self._place().items():
                shapes[name] = expected_shapes(made[index].of(name, p)[0], p)
        except OptionError as error:
            raise StateError(f"the options of this state are not valid: {error}") from None
        return shapes

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_overrides": self._overrides, "_wanted_engine": self._wanted_engine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        overrides, engine = state.pop("_overrides", None), state.pop("_wanted_engine", None)
        super().__setstate__(state)
        if overrides is not None and engine is not None:
            self._setup(overrides, engine)


def grad_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def scaled(setting: Setting, group: Mapping[str, Any]) -> Setting:
    """The setting with the ``lr_scale`` that some schedulers write into groups."""
    factor = group.get("lr_scale", 1.0)
    check_number("lr_scale", factor, low=0.0)
    return setting if factor == 1.0 else replace(setting, lr_scale=setting.lr_scale * factor)


def expected_shapes(setting: Setting, p: Tensor) -> dict[str, tuple[int, ...]]:
    """The shapes of a parameter's state, without making it."""
    state = first_state(xp, setting.rule_at(1), setting.handling, torch.empty_like(p, device="meta"))
    return {key: tuple(entry.shape) for key, entry in state.items()}


def check_rate(settings: Settings, lr: Any) -> None:
    if callable(lr) and not isinstance(lr, Tensor):
        raise OptionError("lr cannot be a function here: use a scheduler of torch.optim.lr_scheduler")
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise OptionError(f"lr must be a number or a tensor of one element, got shape {tuple(lr.shape)}")
