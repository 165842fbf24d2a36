"""The gradients of a step seen as one vector, which decides how they are scaled and whether the step is taken."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.errors import NonFiniteError
from thalweg.kernels.threads import num_threads
from thalweg.rules.spikes import SpikeCheck, judge, warn_if_clipped
from thalweg.settings import Handling
from thalweg.spaces import torch as single
from thalweg.spaces.torch_sums import squares_of_each
from thalweg.storage import SPIKES
from thalweg.torch.engines.memory import held_in
from thalweg.torch.engines.native import addresses_in, squares_for
from thalweg.torch.engines.protocol import Bucket, Decision
from thalweg.torch.engines.squares import Squares, squares_by_kernels
from thalweg.torch.sharding.collectives import summed
from thalweg.torch.step.plan import MOST_REMEMBERED, StepPlan


class Outcome(NamedTuple):
    """What was decided, all of it on the device."""

    #: Multiplies all gradients.
    scale: Tensor | None
    #: Whether the step is taken.
    allowed: Tensor | None
    #: Which gradients are finite.
    finite: Tensor
    judgement: SpikeCheck | None


def decide(
    handling: Handling, squares: Tensor, unscale: Tensor | None, allowed: Tensor | None, norms: Tensor | None
) -> Outcome:
    """What all gradients decide together.

    squares: of every gradient, infinite where they overflow. unscale: multiplies all gradients before. norms: those of
    former steps.
    """
    limit, spikes = handling.max_grad_norm, handling.guard
    squares, finite = squares.double(), torch.isfinite(squares)
    guards, factors, judgement = [] if allowed is None else [allowed.to(squares.device)], [], None
    if handling.needs_norm:
        norm = (squares if unscale is None else squares * unscale.square()).sum().sqrt()
        if limit is not None:
            factors.append(1 / torch.clamp(norm / limit, min=1.0))
        if spikes:
            assert norms is not None
            judgement = judge(single, spikes, norm.to(norms.device).reshape(1), norms)
            if judgement.skips:
                guards.append(~judgement.is_spike.reshape(()).to(squares.device))
            else:
                factors.append(judgement.scale.reshape(()).to(squares.device))
    if handling.on_nonfinite == "skip":
        guards.append(finite.all())
    if unscale is not None:
        factors = [functools.reduce(torch.minimum, factors) * unscale] if factors else [unscale]
    scale = functools.reduce(torch.minimum, factors) if factors else None
    return Outcome(scale, functools.reduce(torch.logical_and, guards) if guards else None, finite, judgement)


class JointDecision(Decision):
    """What the gradients of a run's steps decide, in memory that stays where it is: recorded steps find it there."""

    def __init__(self, joint: JointGradient, names: Sequence[str]) -> None:
        self.joint, self.names = joint, names
        self.unscale: Tensor | None = None
        self.guard: Tensor | None = None
        self.scale: Tensor | None = None
        self.allowed: Tensor | None = None
        self.finite: Tensor | None = None
        #: Of each gradient: the number of the skipped step in which it was last not finite, from 1; 0: in none.
        self.guilty: Tensor | None = None
        self.judgement: SpikeCheck | None = None
        #: What sums the squares of gradients on the CPU, as long as the plan holds.
        self.table: Any = None

    def squares(self, buckets: Sequence[Bucket], every: Sequence[Tensor]) -> Tensor | None:
        """By native code, the sum of squares of each gradient on the CPU; None if it cannot tell."""
        addresses = addresses_in(buckets)
        if addresses is None or self.table is None:
            self.table, addresses = squares_for(every), array("Q", map(Tensor.data_ptr, every))
        if self.table is None:
            return None
        return torch.tensor(self.table.measure(addresses, num_threads(torch.get_num_threads)), dtype=torch.float64)

    def ask(self, handling: Handling, unscale: Tensor | None, allowed: Tensor | None, device: torch.device) -> None:
        """Take the numbers of a step."""
        self.handling, spikes, may_skip = handling, handling.guard, handling.may_skip
        self.unscale, self.guard = held_in(self.unscale, unscale), held_in(self.guard, allowed)
        scales = handling.max_grad_norm is not None or (spikes is not None and spikes.action != "skip")
        self.scale = place_for(self.scale, torch.float64, device) if scales or unscale is not None else None
        self.allowed = place_for(self.allowed, torch.bool, device) if may_skip or allowed is not None else None
        if may_skip and self.joint.skips is None:
            self.joint.skips = torch.zeros((), dtype=torch.int64, device=device)
        if handling.on_nonfinite == "skip" and self.guilty is None:
            self.guilty = torch.zeros(len(self.names), dtype=torch.int64, device=device)

    def key(self) -> Hashable:
        """What the launches of :meth:`take` depend on."""
        handling, read = self.handling, (self.unscale, self.guard, self.joint.norms)
        addresses = [None if x is None else x.data_ptr() for x in read]
        return handling.max_grad_norm, handling.guard, handling.on_nonfinite, *addresses

    def take(self, squares: Tensor) -> None:
        """Decide. squares: of each gradient."""
        outcome = decide(self.handling, squares, self.unscale, self.guard, self.joint.norms)
        self.scale, self.allowed = put(self.scale, outcome.scale), put(self.allowed, outcome.allowed)
        self.finite = put(self.finite, outcome.finite)
        if outcome.judgement is not None:
            former = self.judgement or [None] * len(outcome.judgement)
            self.judgement = SpikeCheck(*map(put, former, outcome.judgement))

    def commit(self) -> None:
        """Remember the norm, and a step that is skipped."""
        if self.judgement is not None and self.handling.guard and self.joint.norms is not None:
            self.joint.norms.copy_(self.judgement.kept)
        if self.handling.may_skip:
            assert self.joint.skips is not None
            assert self.allowed is not None
            self.joint.skips.add_((~self.allowed).to(self.joint.skips.device))
        if self.handling.on_nonfinite == "skip":
            assert self.finite is not None
            assert self.joint.skips is not None
            assert self.guilty is not None
            self.guilty.copy_(torch.where(self.finite, self.guilty, self.joint.skips.to(self.guilty.device)))


def place_for(place: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a number, that which there is already if there is."""
    return torch.ones((), dtype=dtype, device=device) if place is None else place


def put(place: Any, value: Any) -> Any:
    """A value where a former one is, if there is one."""
    return place.copy_(value) if isinstance(place, Tensor) and isinstance(value, Tensor) else value


class JointGradient:
    """The gradients of an optimizer's steps, each step's as one vector."""

    def __init__(self) -> None:
        #: How many steps were skipped.
        self.skips: Tensor | None = None
        #: What is kept of former norms, as all parameters have it in their state.
        self.norms: Tensor | None = None
        #: Those of the last steps with different gradients; and one that is still to be remembered.
        self.decisions: list[JointDecision] = []
        self.pending: JointDecision | None = None
        #: How many norms were judged, and whether users were told that they are clipped.
        self.judged, self.is_told = 0, False
        #: What measured gradients on GPUs before their steps.
        self.measured: dict[Hashable, Squares] = {}

    def share_norms(self, states: Iterable[dict[str, Tensor]]) -> None:
        """Make what the states of parameters have of former norms one tensor. It is the same in all of them."""
        guarded = [state for state in states if SPIKES in state]
        self.norms = guarded[0][SPIKES] if guarded else None
        for state in guarded:
            state[SPIKES] = guarded[0][SPIKES]

    def join(
        self,
        buckets: list[Bucket],
        plan: StepPlan,
        *,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        native: bool,
        in_order: Callable[[Iterable[str]], list[str]],
    ) -> list[Bucket]:
        """Buckets with what all gradients together decide, or with what will decide it once a run has their squares.

        grad_scale, found_inf: what a GradScaler leaves to the step. native: sum by native code.
        """
        if not buckets:
            return buckets
        handling = buckets[0].setting.handling  # what concerns the whole step is the same in all
        scale = None if grad_scale is None else grad_scale.double().reciprocal().reshape(())
        allowed = None if found_inf is None else (found_inf == 0).reshape(())
        if handling.needs_norm or handling.may_skip:
            device = buckets[0].params[0].device
            decision = plan.decision
            if decision is None:
                decision = plan.decision = JointDecision(self, names_in(buckets))
            self.decisions = [*(former for former in self.decisions if former is not decision), decision]
            del self.decisions[:-MOST_REMEMBERED]
            decision.ask(handling, scale, allowed, device)
            if plan.measures_gradients and handling.on_nonfinite != "raise":
                decided = dict(grad_scale=decision.scale, allowed=decision.allowed, decision=decision)
                return [bucket.renewed(**decided) for bucket in buckets]
            squares = squares_of(buckets, decision, self.measured if native else None)
            every = torch.cat([part.to(squares[0].device, torch.float64) for part in squares])
            if handling.on_nonfinite == "raise":
                check_all_finite(decision.names, torch.isfinite(every), in_order)
            decision.take(every)
            self.pending = decision
            scale, allowed = decision.scale, decision.allowed
        if scale is None and allowed is None:
            return buckets

        def at_home(value: Tensor | None, bucket: Bucket) -> Tensor | None:
            return None if value is None else value.to(bucket.params[0].device)

        return [
            bucket.renewed(grad_scale=at_home(scale, bucket), allowed=at_home(allowed, bucket)) for bucket in buckets
        ]

    def skips_a_spike(self) -> bool:
        """Whether the step that was decided last is not to be taken, though all of it is finite."""
        judgement = None if self.pending is None else self.pending.judgement
        return judgement is not None and judgement.skips and bool(judgement.is_spike)

    def commit(self) -> None:
        """Remember what was decided: the step is taken, or skipped."""
        if self.pending is not None:
            self.pending.commit()
        self.pending = None

    def tell_of_clipping(self, *, waits: bool = False) -> None:
        """Warn, once, where the norms of a window show that gradients are clipped before.

        waits: whether to read them now, from a GPU too; else where a window ends, if they are on the host.
        """
        if self.norms is None or self.is_told:
            return
        self.judged += not waits
        if waits or (self.norms.is_cpu and self.judged % (len(self.norms) - 1) == 0):
            self.is_told = warn_if_clipped(self.norms.tolist())

    @property
    def figures(self) -> dict[str, Any]:
        """For users to look at."""
        judgement = self.decisions[-1].judgement if self.decisions else None
        return {} if judgement is None else judgement.figures

    def nonfinite(self) -> list[str]:
        """The parameters whose gradients were not finite when a step was skipped last for that."""
        skips = [(past.names, past.guilty.tolist()) for past in self.decisions if past.guilty is not None]
        last = max((number for _, numbers in skips for number in numbers), default=0)
        return [
            name for names, numbers in skips for name, number in zip(names, numbers, strict=True) if number == last > 0
        ]


def names_in(buckets: Sequence[Bucket]) -> list[str]:
    return [name for bucket in buckets for name in bucket.names]


def squares_of(
    buckets: Sequence[Bucket], decision: JointDecision, known: dict[Hashable, Squares] | None
) -> list[Tensor]:
    """By bucket, sums of squares of whole gradients: in float64 or, infinite where that overflows, in float32.

    decision: of the plan of these buckets. known: what has measured gradients on GPUs before; None: neither native
    code nor kernels measure them.
    """
    wide = [torch.float64 if bucket.grads[0].dtype == torch.float64 else torch.float32 for bucket in buckets]
    every = [g for bucket in buckets for g in bucket.grads]
    sums = None
    if known is not None:
        sums = decision.squares(buckets, every) if every[0].is_cpu else squares_by_kernels(known, every)
    if sums is not None:
        parts = torch.split(sums, [len(bucket.grads) for bucket in buckets])
        by_bucket = [squares.to(kind) for squares, kind in zip(parts, wide, strict=True)]
    else:
        by_bucket = [squares_in(bucket.grads, kind) for bucket, kind in zip(buckets, wide, strict=True)]
    groups = [bucket.parts[0].across(None) if bucket.parts else () for bucket in buckets]
    return summed(list(zip(by_bucket, groups, strict=True)))


def squares_in(grads: Sequence[Tensor], kind: torch.dtype) -> Tensor:
    if any(type(g) is not Tensor for g in grads):  # torch may not sum lists of tensor subclasses
        return torch.stack([torch.linalg.vector_norm(g, dtype=kind) for g in grads]).square()
    return squares_of_each(grads, kind)


def check_all_finite(names: Sequence[str], finite: Tensor, in_order: Callable[[Iterable[str]], list[str]]) -> None:
    guilty = in_order(name for name, fine in zip(names, finite.tolist(), strict=True) if not fine)
    if guilty:
        raise nonfinite_error("the gradient is not finite, or too large to be squared", guilty, len(names))


def nonfinite_error(what: str, guilty: Sequence[str], total: int) -> NonFiniteError:
    """what is wrong with these parameters, of so many."""
    message = f"{what}: {', '.join(map(repr, guilty))}"
    if len(guilty) == total > 1:
        message += (
            ". All of them are: torch.nn.utils.clip_grad_norm_ makes every gradient NaN where one is; clip by "
            "max_grad_norm of the optimizer instead, and this error names that one"
        )
    return NonFiniteError(message)
