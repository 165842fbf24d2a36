"""The optimizer for torch: the step as a page, then groups, state, checkpoints and figures."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.errors import OptimError, OptionError, ParameterError, no_fused_code, refusal
from thalweg.explain import Explanation
from thalweg.given import Overrides
from thalweg.rules import Rule
from thalweg.rules.checks import check_flag
from thalweg.settings import RuleOptions
from thalweg.torch import private
from thalweg.torch.engines.admission import check_code, foresee_engine
from thalweg.torch.engines.lists import Lists
from thalweg.torch.engines.native import Native
from thalweg.torch.engines.protocol import Bucket, Engine, EngineKind
from thalweg.torch.engines.triton import Triton
from thalweg.torch.params.checkpoints import check_is_state, read_state, warn_if_made_otherwise
from thalweg.torch.params.checks import IdleWatch, warn_if_used_up
from thalweg.torch.params.explain import explain
from thalweg.torch.params.groups import (
    EVALUATED_LAYOUT,
    LAYOUT,
    EngineName,
    Groups,
    Params,
    Rate,
    check_given,
    check_options,
    choose_engine,
    homes_in,
    name_positional,
    read_rate,
    show_rate,
)
from thalweg.torch.params.parameter import Param
from thalweg.torch.params.rules import Rules, check_own
from thalweg.torch.params.states import States
from thalweg.torch.sharding.agreement import Agreement, in_words
from thalweg.torch.sharding.shards import local
from thalweg.torch.sharding.sharing import Sharing
from thalweg.torch.sharding.stages import Compute, Stage
from thalweg.torch.step.averages import RateWatch, averages_in_place, check_loaded, have_weights, put_in_place, take_out
from thalweg.torch.step.buckets import Sorter
from thalweg.torch.step.joint import MOST_REMEMBERED, JointDecision, JointGradient
from thalweg.torch.step.plan import Given, StepPlan, presence_of


def refuse_capture(counted: Bucket) -> None:
    """Refuse to record a step that the host counts in a CUDA graph of the user's: replays would repeat this one."""
    if torch.cuda.is_current_stream_capturing():
        raise OptionError(
            f"a CUDA graph is being captured, and the host counts the steps of {counted.names[0]!r}: replays would "
            "take this one step again and again; construct the optimizer with capturable=True"
        )


class Optimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` around a rule, or around several.

    Every optimizer derives from it. Gradients are read, never written; parameters and state are
    written in place when the new values are known.
    """

    #: What it steps by; a mixture has several rules, and none here.
    rule: ClassVar[type[Rule]]

    def __init__(
        self,
        params: Params,
        lr: Rate,
        *positional: Any,
        variant: str | None = None,
        overrides: Overrides = (),
        engine: EngineName = "auto",
        capturable: bool = False,
        replicas: Any = None,
        divide_work: bool | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        **options: Any,
    ) -> None:
        check_given(params)
        options |= name_positional(self.rule, positional, options)
        entry = check_options(self.rule, lr, options, variant, overrides)
        engine = choose_engine(engine, foreach, fused, differentiable)
        self._begin(params, Rules([("*", entry)]), engine, capturable, Sharing(replicas, divide_work))

    def _begin(self, params: Params, rules: Rules, engine: EngineName, capturable: bool, sharing: Sharing) -> None:
        """Take parameters that are to be stepped by these rules."""
        check_flag("capturable", capturable)
        sharing.check(engine)
        self._groups = Groups(rules)
        self._forget(engine, sharing)
        super().__init__(params, {**self._groups.defaults, "capturable": capturable, "layout": LAYOUT})
        if not self.param_groups:
            raise ParameterError("params has groups without any parameter: pass list(model.named_parameters()) in one")
        self.defaults.setdefault("lr", self.param_groups[0]["lr"])  # schedulers of transformers divide by it
        for p in self.parameters() if engine == "fused" else ():
            if missing := refusal(check_code, p):
                raise no_fused_code("", missing)

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
        return check_options(rule, lr, options, variant, overrides)

    def _forget(self, engine: EngineName, sharing: Sharing) -> None:
        """Begin as an optimizer that has taken no step."""
        self._wanted_engine, self._sharing = engine, sharing
        self._engines_used: set[str] = set()
        self._forget_memory()
        self._agreement = Agreement(sharing)
        self._joint = JointGradient()
        lists = Lists()
        self._engines: dict[EngineKind, Engine] = {"lists": lists, "native": Native(), "triton": Triton(lists.owners)}
        self._idle_watch, self._rate_watch = IdleWatch(), RateWatch()
        #: Whether averages are in the place of parameters.
        self._is_evaluated = False
        #: Held by a step from its first table to its last figure.
        self._lock = threading.RLock()

    def _forget_memory(self) -> None:
        """Drop what is known of parameters and their state, and all that keeps either alive."""
        self._sorter = Sorter(self._wanted_engine, self._sharing)
        self._states = States(self._sorter.is_launched)
        self._plans: dict[bytes, StepPlan] = {}
        #: Those of steps of some parameters alone.
        self._plans_of_some: dict[tuple[Tensor, ...], StepPlan] = {}
        #: The one that was taken last, if the next may be the same.
        self._latest: StepPlan | None = None
        self._last: dict[str, Callable[[], dict[str, Any]]] = {}
        #: The plan whose statistics were put there last.
        self._told: StepPlan | None = None

    # ---- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. A closure is evaluated first, and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        are_enabled = torch.is_grad_enabled()
        private.set_grad_enabled(False)
        try:
            self._step(None)
        finally:
            private.set_grad_enabled(are_enabled)
        return loss

    step = private.with_hooks(step)

    # A compiler that saw which parameter this is would take it for the one it was compiled for.
    @torch.compiler.disable
    def step_parameter(self, p: Tensor) -> None:
        """Step one parameter by itself, in the middle of a backward pass for example. It is never compiled."""
        for name in ("max_grad_norm", "spikes"):  # which are the same in all groups
            if any(group.get(name) for group in self.param_groups[:1]):
                raise OptionError(f"{name} needs all gradients of a step at once: use step()")
        self._step_some((p,))

    def _step_some(self, params: tuple[Tensor, ...]) -> None:
        """The same for several parameters at once."""
        with torch.no_grad():
            self._step(params)

    def _step(self, only: tuple[Tensor, ...] | None) -> None:
        self._refuse_in_eval_mode("a step")
        with self._guard():
            known, plan = len(self.state), None
            try:
                plan = self._plan(only)
                # a GradScaler leaves these here for the time of a step, and takes what it finds for a user's own
                plan.table.scaled_by = getattr(self, "grad_scale", None)
                plan.table.found_inf = getattr(self, "found_inf", None)
                self._engines_used = plan.ways
                if plan.buckets:
                    self._idle_watch.stop()
                else:
                    self._idle_watch.note_step(self.parameters())
                plan.run()
            except BaseException:
                if plan is None or plan.is_new:
                    for p in list(self.state)[known:]:  # what was made for a step that is not taken
                        del self.state[p]
                raise
            if plan is not self._told:  # which goes on telling the same
                self._told = plan
                self._last.update(plan.statistics)

    def _guard(self) -> AbstractContextManager[object]:
        """What is around a step: a lock, and autocast turned off where it is on."""
        if not private.is_any_autocast_enabled():
            return self._lock
        lowered = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        stack = ExitStack()
        stack.enter_context(self._lock)
        for device in lowered:  # products of matrices are in the precision that the rule is computed in
            stack.enter_context(torch.autocast(device, enabled=False))
        return stack

    def _plan(self, only: tuple[Tensor, ...] | None) -> StepPlan:
        """The plan of this step: one that is remembered if it still holds, or else a new one.

        only: the parameters that it is for; None: all that have gradients.
        """
        groups, latest = self.param_groups, self._latest
        if only is None:
            given, options = self._given(), partial(self._options, range(len(groups)))
            # with the same names ranks have agreed on all but options
            may_hold = self._groups.have_same_names(groups) and self._agreement.holds(groups)
            if latest is not None and may_hold and latest.bind(given, self.state, options):
                return latest
            places = self._look(one_by_one=False)
            plans, most = self._plans, MOST_REMEMBERED
            self._latest = self._find_plan(plans, presence_of(self._groups.params), most, places, given, options)
            return self._latest
        self._latest = None
        if self._places() is not self._agreement.places or not self._agreement.holds(groups):
            self._look(one_by_one=True)
        if not self._groups.places.keys() >= set(only):
            raise ParameterError("step_parameter: this tensor is not a parameter of this optimizer")
        places = {p: self._groups.places[p] for p in only}
        options = partial(self._options, {index for _, index in places.values()})
        plans_of_some, most = self._plans_of_some, len(self._groups.params)
        return self._find_plan(plans_of_some, only, most, places, [list(only)], options)

    def _find_plan(
        self,
        plans: dict[Any, StepPlan],
        key: Hashable,
        most: int,
        places: Mapping[Tensor, tuple[str, int]],
        given: Given,
        options: Callable[[], tuple[Mapping[int, RuleOptions], Mapping[int, tuple[Rate, float]]]],
    ) -> StepPlan:
        """One of these plans, of which so many are remembered, if it holds; or else a new one."""
        plan = plans.pop(key, None)
        if plan is None or not plan.bind(given, self._states_of(places), options):
            settings, _ = options()
            buckets = self._sorter.sort(self, places, settings)
            self._joint.share_norms(self.state.values())
            order = self._in_order(name for bucket in buckets for name in bucket.names)
            native = self._wanted_engine in ("auto", "fused")
            joint = JointDecision(self._joint, buckets, order, native=native) if buckets else None
            states, checks = self._states_of(places), self._list_checks(buckets)
            plan = StepPlan(buckets, self._engines, given, places, states, settings, joint, checks)
        plans[key] = plan
        if len(plans) > most:
            del plans[next(iter(plans))]
        return plan

    def _states_of(self, places: Mapping[Tensor, Any]) -> Mapping[Tensor, Any]:
        """The states of these parameters."""
        return self.state if places is self._groups.places else {p: self.state.get(p, {}) for p in places}

    def _list_checks(self, buckets: Sequence[Bucket]) -> Iterator[Stage]:
        """What is asked before each step of a plan, where something can be wrong."""
        if any(getattr(bucket.setting.rule, "schedule_free", False) for bucket in buckets):
            yield Compute("look for rates that change", partial(self._rate_watch.check, buckets))
        if counted := next((bucket for bucket in buckets if bucket.t is not None and bucket.params[0].is_cuda), None):
            yield Compute("look for a CUDA graph of the user's", partial(refuse_capture, counted))

    def _look(self, *, one_by_one: bool) -> dict[Tensor, tuple[str, int]]:
        """Look at all groups, agree with other ranks on what is new, and return the places of parameters."""
        groups, places = self.param_groups, self._places()
        self._groups.report(groups)
        rules = list(map(self._rule_of, groups))
        self._agreement.reach(rules, places, groups, self._groups.rules.overrides, one_by_one=one_by_one)
        return places

    def _given(self) -> list[list[Tensor]]:
        """The parameters that may be stepped, in lists as groups have them."""
        return [params if type(params := group["params"]) is list else list(params) for group in self.param_groups]

    def _options(self, indices: Iterable[int]) -> tuple[dict[int, RuleOptions], dict[int, tuple[Rate, float]]]:
        """The options and the rates of groups, by index."""
        groups, options, rates = self.param_groups, dict[int, RuleOptions](), dict[int, tuple[Rate, float]]()
        for index in indices:
            options[index] = self._groups.options_at(groups, index)
            rates[index] = self._rate(groups[index])
        if self._groups.rules.are_mixed:
            self._groups.compare_rates(groups)
        return options, rates

    # ---- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with options of its own; on any error nothing is added.

        The patterns of a mixture divide it, unless its ``"rule"`` says which rule steps it: options that ``options()``
        of a class has made, or the name of a rule of this optimizer.
        """
        index, entries = len(self.param_groups), len(self._groups.rules.entries)
        try:
            for group in self._groups.divide(param_group, self.num_parameters):
                complete = self._groups.complete(group, self.defaults)
                super().add_param_group(dict(complete))
                self._groups.check_added(self.param_groups, complete)
        except Exception:
            del self.param_groups[index:], self._groups.rules.entries[entries:]
            raise
        if not any(group["params"] for group in self.param_groups[index:]):
            warn_if_used_up(param_group["params"], f"parameter group {index}")

    def parameters(self) -> Iterator[Tensor]:
        """Every parameter, in the order of the groups."""
        return (p for _, p, _ in self._homes())

    @property
    def num_parameters(self) -> int:
        return sum(len(group["params"]) for group in self.param_groups)

    @property
    def lr(self) -> Any:
        """The learning rate of all groups, where they have the same; setting it sets it for all."""
        rates = [group["lr"] for group in self.param_groups]
        if any(rate is not rates[0] and rate != rates[0] for rate in rates):
            raise OptionError(f"groups have different learning rates, {rates}: read and write them in param_groups")
        return rates[0]

    @lr.setter
    def lr(self, value: Rate) -> None:
        _ = self.lr  # refused where reading it is
        rules = [self._groups.make_options({**group, "lr": value}).base.rule for group in self.param_groups]
        for rule, group in zip(rules, self.param_groups, strict=True):
            shown = show_rate(rule, value)
            group.update(shown if value is None else {"lr": shown["lr"]})

    def _homes(self) -> Iterator[tuple[str, Tensor, int]]:
        """Every parameter with its name and the index of its group."""
        return homes_in(self.param_groups)

    def _places(self) -> dict[Tensor, tuple[str, int]]:
        """The name and the group of every parameter. What was remembered by address is dropped if they have changed."""
        if self._groups.look_again(self.param_groups):
            self._forget_memory()
        return self._groups.places

    def _rule_of(self, group: Mapping[str, Any]) -> type[Rule]:
        """The rule of a group."""
        return self._groups.entry_of(group).rule

    def _rate(self, group: Mapping[str, Any]) -> tuple[Rate, float]:
        """The lr that the rule of a group is given, and the factor of the step size that it computes from that."""
        return read_rate(group, shown_only=bool(group.get("lr_is_scale")) and self._is_shown_only(group))

    def _is_shown_only(self, group: Mapping[str, Any]) -> bool:
        """Whether a scheduler writes the step size into a group for people to read, and not for us.

        ``AdafactorSchedule`` of transformers does, and takes ``initial_lr`` away, which all others leave in groups.
        """
        if not group.get("lr_is_scale") or "initial_lr" in group:
            return False
        return bool(getattr(self.step, "_wrapped_by_lr_sched", False))

    def _in_order(self, names: Iterable[str]) -> list[str]:
        """Names of parameters in the order of the groups, whatever they were stepped together with."""
        wanted = set(names)
        return [name for name, _, _ in self._homes() if name in wanted]

    def _treatments(self) -> Iterator[Param]:
        """Every parameter that is stepped, and what holds for it."""
        for name, p, index in self._homes():
            if p.requires_grad:
                group = self.param_groups[index]
                setting, _ = self._groups.options_at(self.param_groups, index).choose(name, p)
                setting.rule.check_shape(name, tuple(p.shape))
                yield Param(name, p, index, setting, *self._rate(group), self._groups.hints_about(name, group))

    def explain(self, *, code: bool = False) -> Explanation:
        """How every parameter will be treated, what its state will cost, and what looks like a mistake.

        Parameters that are frozen (``requires_grad=False``) are counted by group and have no row. code: show the source
        of the fused code too, once for each treatment.
        """
        groups = self.param_groups
        shown_only, unused = list(map(self._is_shown_only, groups)), self._groups.find_unused(groups)
        treatments = list(self._treatments())
        needed = self._count_temporaries(lambda p: tuple(local(p).shape))
        given = treatments, groups, shown_only, unused, self._sorter.reason_undivided
        return explain(*given, temporary_bytes=needed, code=code)

    def step_plan(self) -> StepPlan:
        """The plan of the last step: print it to see by which code parameters are stepped, and why not by faster.

        The next step has the same plan, the same object, as long as it repeats: see :meth:`StepPlan.bind` for when.
        """
        if self._latest is None:
            raise OptimError("step_plan() tells of the last step, and there was no step() yet: take one before")
        return self._latest

    def _count_temporaries(self, held: Callable[[Tensor], Shape]) -> int:
        """Bytes that a step needs at most beside parameters, gradients and state.

        held: the shape of what a rank has of a parameter; rules that need whole tensors have all of it.
        """
        by_engine: dict[EngineKind, list[Param]] = defaultdict(list)
        for param in self._treatments():
            shape = tuple(param.p.shape) if param.setting.rule.needs_whole else held(param.p)
            foreseen = param._replace(shape=shape)
            by_engine[foresee_engine(self._wanted_engine, foreseen)].append(foreseen)
        return sum(self._engines[kind].count_temporaries(params) for kind, params in by_engine.items())

    # ---- state

    def make_state(self) -> None:
        """Make the state of every parameter that has none, as it is before the first step.

        Checkpoint loaders that find no state make it by a step, which counts as the first.
        """
        self._refuse_in_eval_mode("make_state()")
        groups, places = self.param_groups, {p: (name, index) for name, p, index in self._homes()}
        options, _ = self._options(range(len(groups)))
        with torch.no_grad():
            self._states.convert_counts(self.state, places, options, groups)
            for p, (name, index) in places.items():
                if p.requires_grad:
                    capturable = groups[index]["capturable"]
                    self._states.make_ready(self.state, name, p, options[index], capturable=capturable)

    def clear_state(self) -> None:
        """Forget what has been learned; options stay."""
        self._refuse_in_eval_mode("clear_state()")
        self.state.clear()
        self._forget(self._wanted_engine, self._sharing)

    # ---- averages

    def averaged(self, model: torch.nn.Module | None = None) -> AbstractContextManager[None]:
        """Evaluate averages: within, they are in the place of the parameters, which come back to the bit after it.

        They are those of ``averaged`` or ``schedule_free``. Parameters that have none are as they are.
        model: what FSDP2 has sharded, if the modules that this process has are not to be asked for it. It is
        :meth:`eval`, and :meth:`train` at the end unless averages were in place before.
        """
        return averages_in_place(self, model)

    def eval(self, model: torch.nn.Module | None = None) -> None:
        """Put averages in the place of parameters until :meth:`train`; no step can be taken meanwhile.

        Saved meanwhile, the model has averages and the state dict of this optimizer the weights: a run that loads both
        is in eval mode, and :meth:`train` continues it. If averages are in place, or no parameter has one, nothing is
        done: trainers call this on every optimizer, and without averages the parameters are what is to be evaluated.
        """
        put_in_place(self, model)

    def train(self, model: torch.nn.Module | None = None) -> None:
        """Take averages out, so that steps can be taken; where there are none in place, nothing is done."""
        take_out(self, model)

    def _refuse_in_eval_mode(self, what: str) -> None:
        if self._is_evaluated:
            raise OptionError(
                f"{what} in eval mode: parameters are averages there; call train(), or leave averaged(), first"
            )

    def averaged_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """The state dict of a model with averages in the place of its parameters, as a copy."""
        with self.averaged(model):
            return deepcopy(model.state_dict())

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters and the options of all groups, for :meth:`load_state_dict`."""
        saved = super().state_dict()
        if isinstance(saved, dict) and isinstance(saved.get("param_groups"), list):  # which hooks may have changed
            shown = [{"lr": 1.0} if self._is_shown_only(group) else {} for group in self.param_groups]
            layout = EVALUATED_LAYOUT if have_weights(self.state) else LAYOUT
            beside = {"made_with": self._describe_arguments(), "layout": layout}
            saved["param_groups"] = [
                {**group, **rate, **beside} for group, rate in zip(saved["param_groups"], shown, strict=True)
            ]
        return saved

    def _describe_arguments(self) -> str:
        """What a checkpoint remembers of the arguments that are not in groups."""
        entries = [
            f"({in_words(pattern)}, {in_words(dict(options))})" for pattern, options in self._groups.rules.overrides
        ]
        return f"engine={self._wanted_engine!r}, overrides=[{', '.join(entries)}]"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state. State keeps the dtype it was saved in; on any error nothing is changed."""
        rules = list(map(self._rule_of, self.param_groups))
        check_is_state(rules, state_dict)
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_is_state(rules, state_dict)
        groups, state = read_state(
            state_dict, self._groups, self.param_groups, self.defaults, self._states.place_of_counts
        )
        check_loaded(state_dict["param_groups"], state, self.state)
        warn_if_made_otherwise(state_dict["param_groups"], self._describe_arguments())
        pairs = zip(groups, self.param_groups, strict=True)
        loaded = [{**deepcopy(saved), "params": present["params"]} for saved, present in pairs]
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": loaded})
        self._groups.note_shapes(self.param_groups)
        for finish in self._optimizer_load_state_dict_post_hooks.values():
            finish(self)
        self._forget_memory()
        self._agreement.forget()
        for engine in self._engines.values():
            engine.forget()

    def __getstate__(self) -> dict[str, Any]:
        ours = {"_rules": self._groups.rules, "_wanted_engine": self._wanted_engine, "_skips": self._joint.skips}
        # without the process group of replicas, which has no copies
        return {**super().__getstate__(), **ours, "_divide_work": self._sharing.divide_work}

    def __setstate__(self, state: dict[str, Any]) -> None:
        sharing = Sharing(None, state.pop("_divide_work", None))
        ours = {key: state.pop(key) for key in ("_rules", "_wanted_engine", "_skips") if key in state}
        super().__setstate__(state)
        if ours:  # a copy or a pickle, and not load_state_dict, which comes here too
            self._groups = Groups(ours["_rules"])
            self._forget(ours["_wanted_engine"], sharing)
            self._joint.skips = ours["_skips"]
        self._is_evaluated = have_weights(self.state)

    # ---- what steps have found

    @property
    def engine(self) -> str:
        """The engines that the last step used, or the requested one before the first step."""
        return " + ".join(sorted(self._engines_used)) or self._wanted_engine

    def stats(self) -> dict[str, dict[str, Any]]:
        """Statistics of the last step of each parameter, by name. Reading them waits for the device."""
        self._joint.tell_of_clipping(waits=True)

        def plain(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.item() if value.numel() == 1 else value.squeeze().cpu()

        last = {name: self._last[name]() for name in self._in_order(self._last)}
        by_name = {name: {**figures, **self._joint.figures} for name, figures in last.items() if figures}
        return {name: {key: plain(v) for key, v in figures.items()} for name, figures in by_name.items()}

    @property
    def skipped(self) -> int:
        """How many steps ``on_nonfinite="skip"`` or ``spikes`` has skipped. Reading it waits for the device."""
        return 0 if self._joint.skips is None else int(self._joint.skips)

    def nonfinite(self) -> list[str]:
        """The parameters whose gradients were not finite in the last step that ``on_nonfinite="skip"`` has skipped."""
        return self._in_order(self._joint.nonfinite())

    def _get_lr(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> float:
        """The step size of a group's first parameter, which ``AdafactorSchedule`` of transformers shows."""
        if not group.get("lr_is_scale"):
            raise OptionError(
                "AdafactorSchedule shows the steps of Adafactor without lr: this one has an lr, which it "
                "would overwrite; use a scheduler of torch.optim.lr_scheduler"
            )
        name = next(name for name, p, _ in self._homes() if p is group["params"][0])
        return float(self.stats().get(name, {}).get("step_size", group["lr"]))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler may leave ``grad_scale`` and ``found_inf`` to a step, which then waits for nothing."""
        groups = self.param_groups
        for index, group in enumerate(groups):
            # counts of a group live alike for all parameters of a dtype on a device: this is asked before every step
            examples = {(p.device, p.dtype): p for p in group["params"]}
            setting = self._groups.options_at(groups, index).base
            place = partial(self._states.place_of_counts, setting=setting, capturable=group["capturable"])
            if any(p.is_cpu or place(p) != p.device for p in examples.values()):
                return False
        return True
