"""The optimizer for torch: what all of them have in common."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import NonFiniteError, OptionError, ParameterError
from thalweg.given import Overrides, check_overrides
from thalweg.rules import Rule
from thalweg.rules.checks import check_flag
from thalweg.settings import Entry, RuleOptions, Settings, check_own
from thalweg.torch.engines.choice import reason_missing_for
from thalweg.torch.engines.lists import Lists
from thalweg.torch.engines.native import Native
from thalweg.torch.engines.protocol import Bucket, Engine, EngineKind, Statistics
from thalweg.torch.engines.triton import Triton
from thalweg.torch.offload.host import HostState
from thalweg.torch.params.grouped import Params
from thalweg.torch.params.groups import LAYOUT, EngineName, check_options, defaults_of, engine_meant
from thalweg.torch.params.members import check_given
from thalweg.torch.params.rates import Rate, check_rate
from thalweg.torch.params.stateful import StatefulOptimizer
from thalweg.torch.sharding.agreement import Agreement
from thalweg.torch.step.buckets import Sorter
from thalweg.torch.step.gradients import JointGradient
from thalweg.torch.step.remembered import GRAD, MOST_REMEMBERED, RememberedStep, presence_of
from thalweg.torch.step.runs import Runs
from thalweg.torch.step.turns import Turns


class Optimizer(StatefulOptimizer):
    """A ``torch.optim.Optimizer`` around a rule, or around several.

    Every optimizer derives from it. Gradients are read, never written; parameters and state are
    written in place when the new values are known.
    """

    def __init__(
        self,
        params: Params,
        lr: Rate,
        *positional: Any,
        variant: str | None = None,
        overrides: Overrides = (),
        engine: EngineName = "auto",
        offload_state: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        **options: Any,
    ) -> None:
        check_given(params)
        options |= name_positional(self.rule, positional, options)
        entry = checked_options(self.rule, lr, options, variant, overrides)
        engine = engine_meant(engine, foreach, fused, differentiable)
        self._begin(
            params,
            [(None, entry)],
            defaults_of(entry),
            engine=engine,
            offload_state=offload_state,
            capturable=capturable,
        )

    def _begin(
        self,
        params: Params,
        entries: list[Entry],
        defaults: Mapping[str, Any],
        *,
        engine: EngineName,
        offload_state: bool,
        capturable: bool,
    ) -> None:
        """Take parameters that are to be stepped by the rules of these entries."""
        check_flag("capturable", capturable)
        check_flag("offload_state", offload_state)
        self._forget(engine, offload_state)
        super().__init__(params, entries, {**defaults, "capturable": capturable, "layout": LAYOUT})
        for p in self.parameters() if engine == "fused" else ():
            missing = reason_missing_for(p)
            if missing is not None:
                raise OptionError(
                    f"engine='fused' cannot run: {missing}; "
                    "use engine='auto', which takes the fastest engine that can run"
                )

    @classmethod
    def options(cls, **options: Any) -> RuleOptions:
        """This rule with a learning rate and options, checked, for an entry of a :class:`Mixture`.

        Without ``lr`` it is the rule's default. ``variant`` and ``overrides`` are as in the constructor.

        >>> import thalweg.torch
        >>> thalweg.torch.AdamW.options(lr=3e-4, weight_decay=0.1)
        AdamW.options(lr=0.0003, weight_decay=0.1)
        """
        rule = check_own(getattr(cls, "rule", None), options)
        lr = options.pop("lr", rule.default_lr)
        variant, overrides = options.pop("variant", None), options.pop("overrides", ())
        return checked_options(rule, lr, options, variant, overrides)

    def _forget(self, engine: EngineName, offload_state: bool) -> None:
        """Have seen no step yet."""
        self._wanted_engine = engine
        self._host = HostState(wanted=offload_state)
        self._turns = Turns()
        self._engines_used: set[str] = set()
        self._last: Statistics = {}
        self._sorter = Sorter(engine)
        self._agreement = Agreement()
        self._steps: dict[Hashable, RememberedStep] = {}
        self._joint = JointGradient()
        self._engines: dict[EngineKind, Engine] = {
            "lists": Lists(),
            "native": Native(),
            "triton": Triton(),
        }
        #: Held by a step from its first table to its last figure.
        self._lock = threading.RLock()

    @property
    def engine(self) -> str:
        """The engines that the last step used, or the requested one before the first step."""
        return " + ".join(sorted(self._engines_used)) or self._wanted_engine

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. A closure is evaluated first, and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        compiling = torch.compiler.is_compiling()
        # asked before gradients are turned off: a compiler that stops in between has a graph of nothing but that
        stays_eager = compiling and any(
            self._host.wanted or self._rule_of(group).needs_whole for group in self.param_groups
        )
        with torch.no_grad():
            if stays_eager:
                self._step_uncompiled()
            elif compiling:
                self._step_eagerly(None, compiling=True)
            else:
                self._step(None)
        return loss

    # A compiler that saw which parameter this is would take it for the one it was compiled for.
    @torch.compiler.disable
    def step_parameter(self, p: Tensor) -> None:
        """Step one parameter by itself, in the middle of a backward pass for example. It is never compiled."""
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            raise OptionError("max_grad_norm needs all gradients of a step at once: use step()")
        if p not in self._places():
            raise ParameterError("step_parameter: this tensor is not a parameter of this optimizer")
        with torch.no_grad():
            self._step(p)

    # A compiler needs minutes for the products and refreshes of a few tensors, and would compute every refresh, due or
    # not. The engines of an eager step have BLAS, native noise and kernels for them.
    @torch.compiler.disable
    def _step_uncompiled(self) -> None:
        self._step(None)

    def _step(self, only: Tensor | None, *, compiling: bool = False) -> None:
        with self._lock, self._host.stepping(), without_autocast():
            known, self._written = len(self.state), False
            try:
                prepare = self._prepare_eagerly if compiling else self._prepare
                buckets, runs = prepare(only, compiling=compiling)
                self._engines_used = {bucket.way for bucket in buckets}
                if not buckets and not self._last:
                    self._idleness.note_step(self.parameters())
                if self._host.wanted:
                    self._take_turns(buckets)
                else:
                    self._take(runs, buckets, compiling=compiling)
            finally:
                if not self._written:
                    for p in list(self.state)[known:]:  # what was made for a step that is not taken
                        del self.state[p]

    # Under torch.compile only the arithmetic of each bucket is compiled; what surrounds it runs as it is.
    _step_eagerly = torch.compiler.disable(_step, recursive=False)  # type: ignore[no-untyped-call]

    def _prepare(self, only: Tensor | None, *, compiling: bool) -> tuple[list[Bucket], Runs]:
        buckets, runs = self._recall(only, compiling=compiling)
        return self._joined(buckets), runs

    _prepare_eagerly = torch.compiler.disable(_prepare)  # type: ignore[no-untyped-call]

    def _recall(self, only: Tensor | None, *, compiling: bool) -> tuple[list[Bucket], Runs]:
        """The buckets of this step and how they are laid out: as remembered if that still holds, or else anew.

        only: the one parameter to be stepped; None for all.
        """
        groups, places = self.param_groups, self._places()
        present: Hashable = presence_of(list(map(GRAD, self._members.params))) if only is None else id(only)
        self._report_unused()
        self._agreement.reach(
            [self._rule_of(group) for group in groups], places, groups, self._overrides, one_by_one=only is not None
        )
        settings = self._current_settings()
        step = None if compiling else self._steps.get(present)
        if step is not None:
            rates = [self._rate(groups[bucket.group]) for bucket in step.buckets]
            buckets = step.recall(self._states_of(only), settings, rates)
            if buckets is not None:
                return buckets, step.runs
        chosen = places if only is None else {only: places[only]}
        buckets = self._sorter.sort(self, chosen, settings, compiling=compiling)
        runs = self._lay_out(() if self._host.wanted else buckets, compiling=compiling)
        if not compiling:
            self._steps.pop(present, None)
            self._steps[present] = RememberedStep(buckets, runs, chosen, self._states_of(only), settings)
            whole = [key for key in self._steps if isinstance(key, bytes)]
            if len(whole) > MOST_REMEMBERED:
                del self._steps[whole[0]]
        return buckets, runs

    def _states_of(self, only: Tensor | None) -> Mapping[Tensor, Any]:
        """The states of one parameter, or of all."""
        return self.state if only is None else {only: self.state.get(only, {})}

    def _lay_out(self, buckets: Sequence[Bucket], *, compiling: bool = False) -> Runs:
        return Runs(self._engines, buckets, self._check_state, compiling=compiling)

    def _take_turns(self, buckets: Sequence[Bucket]) -> None:
        """Step buckets whose state is on the host, as much of it at a time as the device has room for."""
        if self.param_groups[0]["on_nonfinite"] == "raise":
            # a first time without writing, since nothing is written before everything is known to be finite
            nonfinite: list[str] = []

            def note(names: Sequence[str]) -> bool:
                nonfinite.extend(names)
                return False

            self._turns.take(self, buckets, self._lay_out, functools.partial(self._take, commit=note), writes=False)
            raise_if_nonfinite(self._in_order(nonfinite))
        self._turns.take(self, buckets, self._lay_out, functools.partial(self._take, looks=False))

    def _take(
        self,
        runs: Runs,
        buckets: Sequence[Bucket],
        *,
        looks: bool = True,
        commit: Callable[[Sequence[str]], bool] | None = None,
        compiling: bool = False,
    ) -> None:
        """Step buckets as one. looks: for steps that are not finite, where that is an error."""
        on_nonfinite = self.param_groups[0]["on_nonfinite"]
        found = runs.take(buckets, on_nonfinite, looks=looks and on_nonfinite == "raise", commit=commit or self._commit)
        self._last.update(found)

    def _commit(self, nonfinite: Sequence[str]) -> bool:
        """Before anything is written: refuse a step that is not finite."""
        if nonfinite:
            raise_if_nonfinite(self._in_order(nonfinite))
        self._written = True
        return True

    def _joined(self, buckets: list[Bucket]) -> list[Bucket]:
        """Buckets with what depends on all gradients together."""
        return self._joint.joined(
            buckets,
            limit=self.param_groups[0]["max_grad_norm"],
            on_nonfinite=self.param_groups[0]["on_nonfinite"],
            # a GradScaler leaves these here for the time of a step, and takes what it finds for a user's own
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            native=self._wanted_engine in ("auto", "fused"),
            in_order=self._in_order,
        )

    def _forget_memory(self) -> None:
        super()._forget_memory()
        self._sorter.forget()
        self._steps.clear()

    def _place_of_counts(self, p: Tensor, group: Mapping[str, Any]) -> torch.device:
        launched = self._sorter.is_launched(self._rule_of(group), p)
        return p.device if launched else super()._place_of_counts(p, group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler may leave ``grad_scale`` and ``found_inf`` to a step, which then waits for nothing."""
        homes = [(p, group) for group in self.param_groups for p in group["params"]]
        return all(not p.is_cpu and self._place_of_counts(p, group) == p.device for p, group in homes)

    @property
    def skipped(self) -> int:
        """How many steps were skipped under ``on_nonfinite="skip"``. Reading it waits for the device."""
        return 0 if self._joint.skips is None else int(self._joint.skips)

    def nonfinite(self) -> list[str]:
        """The parameters whose gradients were not finite in the last step, under ``on_nonfinite="skip"``."""
        return self._in_order(self._joint.nonfinite())

    def _in_order(self, names: Iterable[str]) -> list[str]:
        """Names of parameters in the order of the groups, whatever they were stepped together with."""
        found = set(names)
        return [name for name, _ in self._named() if name in found]

    def _get_lr(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> float:
        """The step size of a group's first parameter, which ``AdafactorSchedule`` of transformers shows."""
        if not group.get("lr_is_scale"):
            raise OptionError(
                "AdafactorSchedule shows the steps of Adafactor without lr: this one has an lr, which it "
                "would overwrite; use a scheduler of torch.optim.lr_scheduler"
            )
        name = next(name for name, p in self._named() if p is group["params"][0])
        return float(self.stats().get(name, {}).get("step_size", group["lr"]))

    def stats(self) -> dict[str, dict[str, Any]]:
        """What the last step of each parameter computed on its way, by name. Reading it waits for the device."""

        def plain(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.item() if value.numel() == 1 else value.squeeze().cpu()

        found = {name: self._last[name]() for name in self._in_order(self._last)}
        return {name: {key: plain(v) for key, v in figures.items()} for name, figures in found.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._turns.forget()
        self._forget_memory()
        self._agreement.forget()
        for engine in self._engines.values():
            engine.forget()

    def clear_state(self) -> None:
        """Forget what has been learned; options stay."""
        self.state.clear()
        self._resolved.clear()
        self._forget(self._wanted_engine, self._host.wanted)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_entries": self._entries, "_wanted_engine": self._wanted_engine, "_skips": self._joint.skips}
        return {**super().__getstate__(), **own, "_offload_state": self._host.wanted}

    def __setstate__(self, state: dict[str, Any]) -> None:
        offload_state = state.pop("_offload_state", False)
        own = {key: state.pop(key) for key in ("_entries", "_wanted_engine", "_skips") if key in state}
        super().__setstate__(state)
        if own:  # a copy or a pickle, and not load_state_dict, which comes here too
            self._remember(own["_entries"])
            self._forget(own["_wanted_engine"], offload_state)
            self._joint.skips = own["_skips"]


@contextmanager
def without_autocast() -> Iterator[None]:
    """Products of matrices in the precision that the rule is computed in, also where autocast would lower it."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def name_positional(rule: type[Rule], positional: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that were given by position after lr, by name: in the order of torch, where torch has the optimizer."""
    order = ", ".join(("params", "lr", *rule.TORCH))
    if len(positional) > len(rule.TORCH):
        raise TypeError(
            f"{rule.__name__} takes {order} by position, and {2 + len(positional)} were given: give all other options "
            "by name, such as weight_decay=0.01"
        )
    given = dict(zip(rule.TORCH, positional, strict=False))
    for name in given:
        if name in options:
            raise TypeError(f"{rule.__name__} got {name} twice, by position and by name: by position it takes {order}")
    return given


def checked_options(
    rule: type[Rule], lr: Any, options: Mapping[str, Any], variant: str | None, overrides: Overrides
) -> RuleOptions:
    """Options and a learning rate as torch has them, checked."""
    check_options(rule, options)
    settings = Settings(rule, options, variant, check_overrides(overrides))
    check_rate(lr)
    settings.validate_lr(lr)
    return RuleOptions(settings, lr)


def raise_if_nonfinite(names: Sequence[str]) -> None:
    if names:
        raise NonFiniteError(f"the gradient or the update is not finite: {', '.join(map(repr, names))}")
