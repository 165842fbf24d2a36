"""A step of Kron for many parameters of one shape, on GPUs.

Whether factors are due is decided on the device, unless the host keeps the counts: then steps without a refresh do not
launch one. Scratch memory is shared by all parameters of an optimizer: see SCRATCH. Launches a step, for each shape and
each time its parameters fill the scratch memory:

    dense factors               none    one     two
    without a refresh           8       9       11
    with one                    19      33      49

Measured on an H200, in ms, refreshing at every step and not at all (max_size_dense=2048): GPT-2 of 124 M parameters in
float32, as a graph, 6.5 and 2.2, Llama of 1.2 G 98 and 27; with factors of bfloat16 Llama takes 64 and 21.
"""

from __future__ import annotations

import contextlib
import functools
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.triton.kron_batch import Batch, States, memory_of
from thalweg.kernels.triton.kron_formulas import Formulas, Options, formulas_for, numbers_of
from thalweg.kernels.triton.kron_launches import Launch, Launches, compile_together
from thalweg.kernels.triton.kron_layout import DUE, UPDATE_RMS
from thalweg.kernels.triton.kron_plan import Plan
from thalweg.kernels.triton.kron_refresh import Refresh
from thalweg.kernels.triton.kron_served import reason_unserved
from thalweg.kernels.triton.products import Device, ceiling
from thalweg.programs.parts import decide_by
from thalweg.rules import Kron
from thalweg.settings import Handling

__all__ = ["KronKernels", "Outcome", "reason_unserved"]


class Outcome(NamedTuple):
    """What came of a step, on the device. Later steps of the same parameters go on writing there."""

    #: For each parameter whether it was stepped; None under ``on_nonfinite="propagate"``.
    finite: Tensor | None
    #: By parameter, or by parameter and slice: ``update_rms``, and ``refreshed``, 1 where factors were.
    stats: dict[str, Tensor]


class Prepared(NamedTuple):
    """A step that is ready to be launched."""

    kernels: KronKernels
    batch: Batch
    begin: Callable[[], None]
    launches: Launches
    moving: Any
    #: Where tensors are that may be others in the next step.
    given: tuple[int, ...]
    #: Whether the host counts, whether there are slices, and whether a step that is not finite is skipped.
    counts: bool
    stacked: bool
    guarded: bool

    def key(self) -> Hashable:
        """What its launches depend on beside tables."""
        begin: Any = self.begin
        return id(self.launches), id(begin.func), self.batch.scratch_place, self.given

    def count_step(self) -> None:
        """The step is taken: count it, where the host does."""
        if self.counts:
            self.batch.count_step()

    def follow_scratch(self) -> None:
        self.batch.follow_scratch(self.kernels.scratch_for(self.batch))

    def launch(self) -> None:
        with torch.cuda.device(self.batch.device) if self.batch.device.type == "cuda" else contextlib.nullcontext():
            if self.moving is None:
                self.follow_scratch()
            else:
                self.moving.copy_addresses(self.batch)
            self.begin()
            if self.moving is None:
                self.launches()
            else:
                compile_together([self.launches])
                self.launches.launch_all()

    def outcome(self) -> Outcome:
        """What comes of it, on the device."""
        rms, refreshed = (self.batch.by_slice(which) for which in (UPDATE_RMS, DUE))
        if not self.stacked:
            rms, refreshed = rms[:, 0], refreshed[:, 0]
        return Outcome(self.batch.finite if self.guarded else None, {"update_rms": rms, "refreshed": refreshed})


#: Sets of parameters whose tables are kept: experts get their gradients by turns.
MOST_BATCHES = 32


class KronKernels:
    """Kron's kernels for one optimizer, with tables, scratch memory and launches that are kept between steps."""

    def __init__(self, device: Device | None = None) -> None:
        """device: what the choice of blocks depends on; None: what parameters are on."""
        self.device = device
        self.batches: dict[tuple[str, ...], tuple[Any, Batch]] = {}
        self.scratch: dict[torch.device, Tensor] = {}
        #: Scratch memory that captured graphs go on using.
        self.captured: list[Tensor] = []

    def step(self, names: Sequence[str], params: Any, grads: Any, states: States, **given: Any) -> Outcome:
        """Step parameters of one shape and dtype; everything is written in place, nothing is waited for.

        given: as :meth:`prepare_step` takes it.
        """
        prepared = self.prepare_step(names, params, grads, states, **given)
        prepared.launch()
        prepared.count_step()
        return prepared.outcome()

    def prepare_step(
        self,
        names: Sequence[str],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: States,
        *,
        rule: Kron,
        handling: Handling,
        t: int | None,
        lr: float | Tensor,
        lr_scale: float = 1.0,
        grad_scale: Tensor | None = None,
        allowed: Tensor | None = None,
        batch: Batch | None = None,
        moving: Any = None,
        places: array[int] | None = None,
    ) -> Prepared:
        """Take the gradients and numbers of a step, and count it where the host does; nothing is launched.

        batch: that of these parameters, if the caller has seen that nothing has changed since it was made. moving: what
        copies addresses and numbers to the device, so that launches can be recorded. places: of gradients, if known.
        """
        if batch is None:
            batch = self.batch(names, params, grads, states, rule, handling)
        known = t is not None and states[0]["refresh"].is_cpu
        refreshing = True
        batch.follow_gradients(grads, moving, places)
        if known:
            refreshing = batch.look_at_refreshes(functools.partial(count_on, rule, t), states)
        number = t if known else None
        given = tuple(x.data_ptr() for x in (lr, grad_scale, allowed) if isinstance(x, Tensor))
        key = id(rule), id(handling), refreshing, batch.grads_aligned, id(moving), given
        known_step: tuple[Any, Prepared] | None = batch.prepared.get(key)
        if known_step is not None and moving is not None:  # it finds addresses and numbers where it found the last
            begin_numbers(batch, rule, number, lr, lr_scale, moving)
            return known_step[1]
        first = begin(batch, rule, handling, number, lr, lr_scale, grad_scale, allowed, moving=moving)
        launches = launches_of(batch, rule, handling, refreshing=refreshing, counted=not known)
        flags = known, rule.stacked_axes > 0, handling.on_nonfinite == "skip"
        while len(batch.prepared) >= KEPT:
            del batch.prepared[next(iter(batch.prepared))]
        prepared = Prepared(self, batch, first, launches, moving, given, *flags)
        batch.prepared[key] = (rule, handling), prepared  # with both, so that their ids remain their own
        return prepared

    def prepare(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Compile all that several steps will need, each given by its arguments, at once.

        Without this each would wait for its own kernels when it first runs: for nine shapes, nine times as long.
        """
        lists = []
        for given in steps:
            states, rule, handling = given["states"], given["rule"], given["handling"]
            batch = self.batch(given["names"], given["params"], given["grads"], states, rule, handling)
            batch.follow_gradients(given["grads"])
            known = given["t"] is not None and states[0]["refresh"].is_cpu
            for refreshing in (True, False) if known else (True,):
                lists.append(launches_of(batch, rule, handling, refreshing=refreshing, counted=not known))
        compile_together(lists)

    def batch(
        self,
        names: Sequence[str],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: States,
        rule: Kron,
        handling: Handling,
    ) -> Batch:
        known = self.batches.get(tuple(names))
        facts = layout_facts(rule, handling.seed), grads[0].dtype, memory_of(params, states)
        if known is None or known[0] != facts:
            batch = Batch(names, params, states, grads[0].dtype, rule, handling.seed, self.device)
            self.batches.pop(tuple(names), None)
            self.batches[tuple(names)] = known = facts, batch
            if len(self.batches) > MOST_BATCHES:
                del self.batches[next(iter(self.batches))]
        return known[1]

    def scratch_for(self, batch: Batch) -> Tensor:
        """Memory that is large enough for this batch; others follow when it has moved."""
        device, found = batch.device, self.scratch.get(batch.device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing() and found is not None:
            if not self.captured or self.captured[-1] is not found:
                self.captured.append(found)
        if found is None or found.numel() < batch.scratch_size:
            found = self.scratch[device] = torch.empty(batch.scratch_size, dtype=torch.uint8, device=device)
        return found


def count_on(rule: Kron, t: int | None, before: float) -> tuple[bool, float]:
    """Whether factors are due at step t, and what is left of their count."""
    assert t is not None
    is_due, after = decide_by(rule, "", {"refresh": before}, t)
    return is_due, after["refresh"]


def layout_facts(rule: Kron, seed: int) -> tuple[Any, ...]:
    """What tables and scratch memory depend on, beside shapes, dtypes and memory."""
    return rule.stacked_axes, rule.max_size_dense, rule.max_skew, rule.block_size, rule.merge, rule.geometry, seed


def formulas_of(
    batch: Batch, rule: Kron, *, knows_t: bool = True, knows_lr: bool = True, bare: bool = False
) -> Formulas:
    """As they were the last time: to compare rules takes longer than all else that a step of a batch takes."""
    key = id(rule), knows_t, knows_lr, bare
    known: tuple[Kron, Formulas] | None = batch.formulas.get(key)
    if known is None:
        given = dict(averages=batch.has_momentum, knows_t=knows_t, knows_lr=knows_lr, bare=bare)
        known = rule, formulas_for(rule, len(batch.grid.sizes), **given)
        while len(batch.formulas) >= KEPT:
            del batch.formulas[next(iter(batch.formulas))]
        batch.formulas[key] = known  # with the rule, so that its id remains its own
    return known[1]


def begin(
    batch: Batch,
    rule: Kron,
    handling: Handling,
    t: int | None,
    lr: float | Tensor,
    lr_scale: float,
    grad_scale: Tensor | None,
    allowed: Tensor | None,
    *,
    bare: bool = False,
    moving: Any = None,
) -> Callable[[], None]:
    """What tells the device what holds for this step. t: its number, where the host knows whose factors are due.

    moving: what copies numbers to the device.
    """
    formulas, rate, numbers = begin_numbers(batch, rule, t, lr, lr_scale, moving, bare=bare)
    tensors: dict[str, Tensor | None] = dict(lr=rate, grad_scale=grad_scale, allowed=allowed)
    kind = id(formulas), moving is None, *(None if each is None else each.dtype for each in tensors.values())
    launch = batch.begins.get(kind)
    if launch is None:
        constant: dict[str, Any] = dict(
            places=batch.places,
            figures=batch.figures,
            due_flags=batch.due_flags,
            count=batch.count,
            SCALED=grad_scale is not None,
            ALLOWED=allowed is not None,
            BLOCK=128,
            num_warps=4,
        )
        launch = batch.begins[kind] = Launch(formulas.begin, (ceiling(batch.count, 128),), constant)
    sign = -1.0 if handling.maximize else 1.0
    return functools.partial(launch, **tensors, **numbers, sign=sign)


def begin_numbers(
    batch: Batch,
    rule: Kron,
    t: int | None,
    lr: float | Tensor,
    lr_scale: float,
    moving: Any,
    *,
    bare: bool = False,
) -> tuple[Formulas, Tensor | None, Mapping[str, Any]]:
    """The formulas of a step, its rate where that is on the device, and the numbers that it begins with."""
    rate = lr if isinstance(lr, Tensor) and lr.device == batch.device else None
    formulas = formulas_of(batch, rule, knows_t=t is not None, knows_lr=rate is None, bare=bare)
    numbers = numbers_of(formulas, Options.of(rule), t, float(lr) if rate is None else None, lr_scale)
    return formulas, rate, numbers if moving is None else moving.numbers(batch, numbers)


#: Lists of launches that a batch keeps: with and without a refresh, and as many for options of another kind.
KEPT = 4


def launches_of(
    batch: Batch, rule: Kron, handling: Handling, *, refreshing: bool, counted: bool, bare: bool = False
) -> Launches:
    """All launches of a step but the first, as they were the last time if nothing has changed that they depend on."""
    formulas = formulas_of(batch, rule, bare=bare)
    key = id(formulas), handling, refreshing, counted, batch.grads_aligned
    known: Launches | None = batch.programs.pop(key, None)
    if known is None:
        known = Launches()
        for first in range(0, batch.count, batch.chunk):
            plan = Plan(known, batch, rule, formulas, handling, first)
            if refreshing:
                Refresh(plan).run()
            plan.precondition()
            plan.settle(counted=counted)
            plan.step(rehearsal=False)
            if plan.guarded and refreshing:
                plan.show_factors(refreshes=False, operands=False, state=True)
    batch.programs[key] = known  # the last of them: the first are the oldest
    while len(batch.programs) > KEPT:
        del batch.programs[next(iter(batch.programs))]
    return known
