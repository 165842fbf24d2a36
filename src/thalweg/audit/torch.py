"""The audit of one live step of an optimizer of torch, from any library."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.audit.model import faults_of_groups, remarks_on, replicas_apart, told_by_ranks
from thalweg.audit.page import SKIPPED, Arr, Step
from thalweg.audit.report import AuditError, Report, report_on
from thalweg.audit.treated import Treated, list_treated, name_state, read_state
from thalweg.boundary import seen
from thalweg.dtypes import DTYPES
from thalweg.errors import OptimError
from thalweg.settings import Handling
from thalweg.spaces import torch as xp
from thalweg.spaces.torch_sums import squares_of_each
from thalweg.storage import RECORD, SPIKES, arithmetic
from thalweg.torch.sharding.shards import count_ranks, whole
from thalweg.torch.step.joint import decide

#: Bytes of copies on the host, if none are said.
MEMORY = 64 * 2**20


class Audit:
    """A context manager around one step; afterwards :attr:`report` says whether it was the step of its page.

    optimizer: of torch or of any library, several in a list, or a wrapper with ``.optimizer`` or ``.optimizers``.
    model: to look for parameters that no group has, or two. memory: bytes of copies on the host: of what does not fit,
    the smallest and the largest tensors of each kind are audited. rule: the page of an optimizer that no table has: a
    rule such as ``thalweg.rules.Muon(momentum=0.95)``, or a function of a parameter's name and the parameter.
    """

    def __init__(
        self, optimizer: Any, model: nn.Module | None = None, *, memory: int = MEMORY, rule: Any = None
    ) -> None:
        self.optimizers, self.model, self.memory, self.rule = list(unwrapped(optimizer)), model, memory, rule
        self._report: Report | None = None

    @property
    def report(self) -> Report:
        if self._report is None:
            raise AuditError("there is no report yet: read it after the with block, which one step has to be in")
        return self._report

    def check(self) -> None:
        """Raise an AuditError if anything is not as the page."""
        self.report.check()

    def __str__(self) -> str:
        if self._report is not None and count_ranks() > 1 and torch.distributed.get_rank():
            return "the report is on rank 0"
        return str(self._report or "an audit that has seen no step")

    def __enter__(self) -> Audit:
        self._depth, self._stepped, self._problem, self._joint = 0, 0, "", 0.0
        #: The optimizers whose steps have begun, and those whose gradients were there.
        self._begun, self._given = list[int](), list[int]()
        self._taken: list[tuple[Treated, Step]] = []
        self._names = {} if self.model is None else {id(p): name for name, p in self.model.named_parameters()}
        self._before = {id(p): numbers_of(p) for p in choose(self.optimizers, self.memory)}
        before = [optimizer.register_step_pre_hook(self._begin) for optimizer in self.optimizers]
        self._hooks = [*before, *(optimizer.register_step_post_hook(self._end) for optimizer in self.optimizers)]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        try:
            if kind is None:
                self._report = self._replay()
        finally:
            self._before, self._taken = {}, []

    # ---- around the step

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, named: Any) -> Any:
        """Copy what the step is given: after its closure, if that makes gradients."""
        self._depth += 1
        if self._depth > 1:  # a step may call that of the class that it derives from
            return None
        self._begun.append(id(optimizer))
        if self._begun.count(id(optimizer)) > 1:
            return None
        closure = named.get("closure", args[1] if args[1:] else None)
        if closure is None:
            self._copy_all(optimizer)
            return None

        def seen_closure() -> Any:
            loss = closure()
            self._copy_all(optimizer)
            return loss

        return args[:1], {**named, "closure": seen_closure}

    def _end(self, *_: Any) -> None:
        self._depth -= 1

    @torch.no_grad()
    def _copy_all(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy what a step is given. What is wrong is said after it, and does not keep it from being taken."""
        if id(optimizer) in self._given:
            self._problem = "the step called its closure more than once, and an audit is of one gradient"
        self._given.append(id(optimizer))
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._problem = "a CUDA graph is being captured, where nothing can be read: audit a step before that"
        if self._problem:
            return
        try:
            stepped = [one for one in list_treated(optimizer, self.rule) if one.treatment.p.grad is not None]
            self._stepped += len(stepped)
            scale, joint = scale_all(optimizer, stepped)
            self._joint = math.hypot(self._joint, joint)
            sampled = [one for one in stepped if id(one.treatment.p) in self._before]
            self._taken += [(one, self._copy(one, scale)) for one in sampled]
        except OptimError as error:
            self._problem = str(error)

    def _copy(self, one: Treated, scale: float) -> Step:
        """What the step is given for one tensor."""
        name, p, group, setting, lr, factor, *_ = one.treatment
        dtype, kept = xp.dtype(p), name_state(one)
        before = host(seen(xp, whole(p.detach()), kept)) if RECORD in kept else self._before[id(p)]
        gradient: Any = p.grad
        dtypes = [dtype, *(xp.dtype(entry) for entry in kept.values() if xp.dtype(entry) in DTYPES)]
        narrowest = min(dtypes, key=lambda name: DTYPES[name].digits)
        return Step(
            name=self._names.get(id(p), name),
            setting=replace(setting, rule=setting.rule_at(one.t), lr_scale=float(factor) * setting.lr_scale),
            before=before,
            gradient=numbers_of(gradient),
            after=before,
            state={key: host(entry) for key, entry in read_state(one).items()},
            t=one.t,
            lr=None if lr is None else float(lr),
            scale=scale,
            group=group,
            dtype=dtype,
            arithmetic=arithmetic(dtype) if one.is_ours else narrowest,
            sums="float64" if one.is_ours else arithmetic(dtype),
            on_gpu=p.is_cuda,
            biases="" if one.is_ours else "float64",
            drawn_by=name,
        )

    # ---- after it

    @torch.no_grad()
    def _replay(self) -> Report:
        wanted = sorted(map(id, self.optimizers))
        if not self._problem and (sorted(self._begun) != wanted or sorted(self._given) != wanted):
            self._problem = (
                f"{len(self._begun) or 'no'} steps were taken within, and an audit is of one of each optimizer: call "
                "step() once in the with block. A GradScaler that found infinities, a replayed graph and "
                "step_parameter() take none"
            )
        if not self._problem and not self._stepped:
            self._problem = "no parameter had a gradient: call backward() before step()"
        if problem := next(filter(None, told_by_ranks(self._problem)), ""):
            raise AuditError(problem)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        treated, steps = [one for one, _ in self._taken], [complete(*each) for each in self._taken]
        faults = [*faults_of_groups(groups, self.model, steps), *replicas_apart(steps)]
        named, size = ", ".join(type(each).__name__ for each in self.optimizers), sum(len(g["params"]) for g in groups)
        title = f"audit of {named}: {len(steps)} of {size} tensors, joint norm of gradients {self._joint:.4g}"
        return report_on(title, steps, groups, faults, remarks_on(treated, steps, self._joint))


#: Around one step: copy a sample of tensors, replay the step by its page in float64, and say where it differs.
audit = Audit


def complete(one: Treated, step: Step) -> Step:
    """A step with what it has made of the tensor and its state."""
    kept, p = name_state(one), one.treatment.p
    return replace(
        step,
        after=host(seen(xp, whole(p.detach()), kept)) if RECORD in kept else numbers_of(p),
        state_after={key: host(entry) for key, entry in read_state(one).items() if key in kept},
        state_dtypes={key: xp.dtype(entry) for key, entry in kept.items()},
    )


def unwrapped(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers of torch that are given, or within a wrapper."""
    inner = getattr(optimizer, "optimizers", None) or getattr(optimizer, "optimizer", None)
    if isinstance(optimizer, (list, tuple)):
        yield from (single for one in optimizer for single in unwrapped(one))
    elif inner is not None:
        yield from unwrapped(inner)
    elif isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
    else:
        kind = type(optimizer).__name__
        raise AuditError(f"{kind} is no optimizer of torch, and has none as .optimizer: give the one that is stepped")


def numbers_of(p: Tensor) -> Arr:
    return host(whole(p.detach()))


def host(x: Tensor) -> Arr:
    """A copy on the host, with all digits."""
    copy: Arr = (x if x.dtype is torch.float64 else x.float()).to("cpu", copy=True).numpy()
    return copy


def choose(optimizers: Sequence[torch.optim.Optimizer], memory: int) -> list[Tensor]:
    """All parameters, or of each kind the smallest and the largest, of which copies fit into so many bytes."""
    kinds: dict[Any, list[tuple[int, Tensor]]] = defaultdict(list)
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for p in (p for p in group["params"] if p.requires_grad and p.numel()):
                state = sum(e.numel() for e in optimizer.state.get(p, {}).values() if isinstance(e, Tensor))
                size = (3 * p.numel() + (state or 2 * p.numel())) * (8 if p.dtype is torch.float64 else 4)
                kinds[id(optimizer), index, p.ndim, p.dtype].append((size, p))
    if sum(size for kind in kinds.values() for size, _ in kind) <= memory:
        return [p for kind in kinds.values() for _, p in kind]
    chosen: dict[int, Tensor] = {}
    for which in (min, max):
        for kind in sorted(kinds.values(), key=lambda kind: max(size for size, _ in kind)):
            if fitting := [(size, p) for size, p in kind if size <= memory]:
                size, p = which(fitting, key=lambda one: one[0])
                memory -= 0 if id(p) in chosen else size
                chosen[id(p)] = p
    return list(chosen.values())


def scale_all(optimizer: torch.optim.Optimizer, stepped: Sequence[Treated]) -> tuple[float, float]:
    """What multiplies all gradients in a step, by a GradScaler, clipping and spikes; and their joint norm."""
    gradients = [whole(one.treatment.p.grad.detach()) for one in stepped if one.treatment.p.grad is not None]
    wide = [squares_of_each([g], torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    squares = torch.cat([each.double().cpu() for each in wide] or [torch.zeros(1)])
    handling = stepped[0].treatment.setting.handling if stepped else Handling()
    scaler, infinite = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    unscale = None if scaler is None else 1 / scaler.double().cpu()
    allowed = None if infinite is None else (infinite == 0).cpu()
    norms = [one.state[SPIKES].cpu() for one in stepped if SPIKES in one.state]
    first = [torch.zeros(handling.guard.kept_shape, dtype=torch.float64)] if handling.guard else [None]
    outcome = decide(handling, squares, unscale, allowed, (norms or first)[0])
    joint = math.sqrt(float(squares.sum())) * (1.0 if unscale is None else float(unscale))
    scale = 1.0 if outcome.scale is None else float(outcome.scale)
    return SKIPPED if outcome.allowed is not None and not bool(outcome.allowed) else scale, joint
