"""The gradients of a step seen as one vector, which decides how they are scaled and whether the step is taken."""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.errors import NonFiniteError
from thalweg.rules.spikes import SpikeCheck, judge, warn_if_clipped
from thalweg.settings import Numerics
from thalweg.spaces import torch as single
from thalweg.spaces.sharded import Asked
from thalweg.spaces.torch_sums import squares_of_each
from thalweg.storage import SPIKES
from thalweg.torch.engines.protocol import Bucket, Table
from thalweg.torch.engines.squares import sums_by_kernels, sums_by_native_code
from thalweg.torch.sharding.stages import Compute, Reduce, Stage

#: Plans for steps of different parameters that are remembered at once: experts and adversaries take turns.
MOST_REMEMBERED = 8


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
    numerics: Numerics, squares: Tensor, unscale: Tensor | None, allowed: Tensor | None, norms: Tensor | None
) -> Outcome:
    """What all gradients decide together.

    squares: of every gradient, infinite where they overflow. unscale: multiplies all gradients before. norms: those of
    former steps.
    """
    limit, spikes = numerics.max_grad_norm, numerics.guard
    squares, finite = squares.double(), torch.isfinite(squares)
    guards, factors, judgement = [] if allowed is None else [allowed.to(squares.device)], [], None
    if numerics.needs_norm:
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
    if numerics.on_nonfinite == "skip":
        guards.append(finite.all())
    if unscale is not None:
        factors = [functools.reduce(torch.minimum, factors) * unscale] if factors else [unscale]
    scale = functools.reduce(torch.minimum, factors) if factors else None
    return Outcome(scale, functools.reduce(torch.logical_and, guards) if guards else None, finite, judgement)


class Verdict:
    """What the gradients of some parameters have decided last; it keeps none of them alive."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        #: Of each gradient: the number of the skipped step in which it was last not finite, from 1; 0: in none.
        self.guilty: Tensor | None = None
        self.judgement: SpikeCheck | None = None


class JointDecision:
    """What the gradients of a plan's steps decide, in memory that stays where it is: recorded steps find it there."""

    def __init__(self, joint: JointGradient, buckets: Sequence[Bucket], order: Sequence[str], *, native: bool) -> None:
        """order: names as groups have them. native: whether code of ours may sum up gradients."""
        self.joint, self.buckets, self.table, self.native = joint, buckets, Table(), native
        for bucket in buckets:
            bucket.table = self.table
        self.order, self.names = order, [name for bucket in buckets for name in bucket.names]
        self.numerics, self.device = buckets[0].setting.numerics, buckets[0].params[0].device
        #: Whether gradients decide anything, and not a GradScaler alone.
        self.is_joint = self.numerics.needs_norm or self.numerics.may_skip
        self.unscale: Tensor | None = None
        self.guard: Tensor | None = None
        self.finite: Tensor | None = None
        self.verdict = Verdict(self.names)
        #: By bucket, the sums of squares of gradients; and what finds them by their addresses.
        self.squares: Sequence[Tensor] = ()
        self.sums: Callable[[array[int]], Tensor] | None = None

    # ---- as stages

    def taking_numbers(self) -> Stage:
        return Compute("ask for a GradScaler", self.take_numbers)

    def stages(self) -> list[Stage]:
        """Where the host waits for what is decided."""
        if not self.is_joint:
            return []
        stages: list[Stage] = [Compute(f"squares of {len(self.names)} gradients", self.measure)]
        if any(bucket.parts for bucket in self.buckets):
            stages.append(Reduce("squares of gradients", self.ask))
        return [*stages, Compute(f"decide: {self.say_limits()}", self.decide)]

    def launches(self, measure: Callable[[], Tensor]) -> list[Stage]:
        """The same by launches alone. measure: finds the squares of all gradients."""

        def decide() -> None:
            self.take(measure())

        what = f"squares of {len(self.names)} gradients, and decide: {self.say_limits()}"
        return [Compute(what, decide, launches=True)]

    def committing(self, *, launches: bool) -> list[Stage]:
        """Comes first of all that writes. launches: whether nothing of it is for the host."""
        if not self.is_joint:
            return []
        return [Compute("remember what was decided", self.commit, writes=True, launches=launches)]

    def telling(self) -> list[Stage]:
        """Comes last."""
        if not self.numerics.guard:
            return []
        return [Compute("warn where all is clipped", self.joint.tell_of_clipping, writes=True)]

    def say_limits(self) -> str:
        on_nonfinite = None if self.numerics.on_nonfinite == "propagate" else self.numerics.on_nonfinite
        limits = dict(max_grad_norm=self.numerics.max_grad_norm, spikes=self.numerics.guard, on_nonfinite=on_nonfinite)
        return ", ".join(f"{name}={value!r}" for name, value in limits.items() if value)

    # ---- what they do

    def take_numbers(self) -> None:
        """Take what a GradScaler leaves to the step, and say where in memory decisions will be."""
        table, numerics = self.table, self.numerics
        scale = None if table.scaled_by is None else table.scaled_by.double().reciprocal().reshape(())
        allowed = None if table.found_inf is None else (table.found_inf == 0).reshape(())
        self.unscale, self.guard = put(self.unscale, scale), put(self.guard, allowed)
        if not self.is_joint:
            table.grad_scale, table.allowed = self.unscale, self.guard
            return
        joint, spikes, device = self.joint, numerics.guard, self.device
        joint.decisions = [*(former for former in joint.decisions if former is not self.verdict), self.verdict]
        del joint.decisions[:-MOST_REMEMBERED]
        scales = numerics.max_grad_norm is not None or (spikes is not None and spikes.action != "skip")
        is_guarded = numerics.may_skip or allowed is not None
        table.grad_scale = place_for(table.grad_scale, torch.float64, device) if scales or scale is not None else None
        table.allowed = place_for(table.allowed, torch.bool, device) if is_guarded else None
        if numerics.may_skip and joint.skips is None:
            joint.skips = torch.zeros((), dtype=torch.int64, device=device)
        if numerics.on_nonfinite == "skip" and self.verdict.guilty is None:
            self.verdict.guilty = torch.zeros(len(self.names), dtype=torch.int64, device=device)

    def measure(self) -> None:
        """Find the sums of squares of gradients, by bucket: infinite in float32 where that overflows."""
        wide = [torch.float64 if bucket.grads[0].dtype == torch.float64 else torch.float32 for bucket in self.buckets]
        every = [g for bucket in self.buckets for g in bucket.grads]
        known = [bucket.addresses for bucket in self.buckets if bucket.addresses is not None]
        are_known = len(known) == len(self.buckets)
        if self.native and not (are_known and self.sums is not None):
            self.sums = (sums_by_native_code if every[0].is_cpu else sums_by_kernels)(every)
        if self.sums is not None:
            places = functools.reduce(operator.add, known) if are_known else array("Q", map(Tensor.data_ptr, every))
            parts = torch.split(self.sums(places), [len(bucket.grads) for bucket in self.buckets])
            self.squares = [squares.to(kind) for squares, kind in zip(parts, wide, strict=True)]
        else:
            self.squares = [squares_in(bucket.grads, kind) for bucket, kind in zip(self.buckets, wide, strict=True)]

    def ask(self) -> list[Asked]:
        pairs = zip(self.squares, self.buckets, strict=True)
        return [(squares, bucket.parts[0].across(None) if bucket.parts else ()) for squares, bucket in pairs]

    def decide(self) -> None:
        squares, self.squares = self.squares, ()
        every = torch.cat([part.to(squares[0].device, torch.float64) for part in squares])
        if self.numerics.on_nonfinite == "raise":
            finite = torch.isfinite(every).tolist()
            self.refuse_names("the gradient is not finite, or too large to be squared", finite)
        self.take(every)

    def key(self) -> Hashable:
        """What the launches of :meth:`take` depend on."""
        read = self.unscale, self.guard, self.joint.norms
        addresses = [None if x is None else x.data_ptr() for x in read]
        return (*addresses, self.table.grad_scale is None, self.table.allowed is None)

    def take(self, squares: Tensor) -> None:
        """Decide. squares: of each gradient."""
        table, outcome = self.table, decide(self.numerics, squares, self.unscale, self.guard, self.joint.norms)
        table.grad_scale, table.allowed = put(table.grad_scale, outcome.scale), put(table.allowed, outcome.allowed)
        self.finite = put(self.finite, outcome.finite)
        if outcome.judgement is not None:
            former = self.verdict.judgement or [None] * len(outcome.judgement)
            self.verdict.judgement = SpikeCheck(*map(put, former, outcome.judgement))

    def refuse(self) -> None:
        """Raise if a step is not finite, unless it is not to be taken anyway."""
        judgement = self.verdict.judgement
        if self.table.nonfinite and not (judgement is not None and judgement.skips and bool(judgement.is_spike)):
            guilty = set(self.table.nonfinite)
            self.refuse_names("the gradient or the update is not finite", [name not in guilty for name in self.names])

    def refuse_names(self, what: str, finite: Sequence[bool]) -> None:
        if not all(finite):
            guilty = {name for name, fine in zip(self.names, finite, strict=True) if not fine}
            raise nonfinite_error(what, [name for name in self.order if name in guilty], len(self.names))

    def commit(self) -> None:
        """Remember the norm, and a step that is skipped."""
        if self.verdict.judgement is not None and self.numerics.guard and self.joint.norms is not None:
            self.joint.norms.copy_(self.verdict.judgement.kept)
        if self.numerics.may_skip:
            assert self.joint.skips is not None
            assert self.table.allowed is not None
            self.joint.skips.add_((~self.table.allowed).to(self.joint.skips.device))
        if self.numerics.on_nonfinite == "skip":
            assert self.finite is not None
            assert self.joint.skips is not None
            assert self.verdict.guilty is not None
            self.verdict.guilty.copy_(
                torch.where(self.finite, self.verdict.guilty, self.joint.skips.to(self.verdict.guilty.device))
            )


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
        #: Those of the last steps with different gradients.
        self.decisions: list[Verdict] = []
        #: How many norms were judged, and whether users were told that they are clipped.
        self.judged, self.is_told = 0, False

    def share_norms(self, states: Iterable[dict[str, Tensor]]) -> None:
        """Make what the states of parameters have of former norms one tensor. It is the same in all of them."""
        guarded = [state for state in states if SPIKES in state]
        self.norms = guarded[0][SPIKES] if guarded else None
        for state in guarded:
            state[SPIKES] = guarded[0][SPIKES]

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


def squares_in(grads: Sequence[Tensor], kind: torch.dtype) -> Tensor:
    if any(type(g) is not Tensor for g in grads):  # torch may not sum lists of tensor subclasses
        return torch.stack([torch.linalg.vector_norm(g, dtype=kind) for g in grads]).square()
    return squares_of_each(grads, kind)


def nonfinite_error(what: str, guilty: Sequence[str], total: int) -> NonFiniteError:
    """what is wrong with these parameters, of so many."""
    message = f"{what}: {', '.join(map(repr, guilty))}"
    if len(guilty) == total > 1:
        message += (
            ". All of them are: torch.nn.utils.clip_grad_norm_ makes every gradient NaN where one is; clip by "
            "max_grad_norm of the optimizer instead, and this error names that one"
        )
    return NonFiniteError(message)
