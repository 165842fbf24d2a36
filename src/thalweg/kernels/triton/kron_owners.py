"""Kron's kernels without parameters, for who owns tensors that are divided over ranks: gradients in, whitened ones out.

Parameters and momentum lie with the ranks that hold them, which take the step themselves. Here what was whitened and
clipped takes the place of a parameter. Tables are made anew only when factors have moved: all else may lie elsewhere at
every step.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.triton.kron import KronKernels, begin, formulas_of, launches_of, layout_facts
from thalweg.kernels.triton.kron_batch import Batch, States
from thalweg.kernels.triton.kron_formulas import Formulas, Options, numbers_of
from thalweg.kernels.triton.kron_launches import compile_together
from thalweg.kernels.triton.kron_layout import H_SQUARE, M, P
from thalweg.kernels.triton.tables import ALIGNMENT
from thalweg.kernels.triton.uploads import Uploads
from thalweg.rules import Kron
from thalweg.settings import Handling

#: Rules, with other options each, whose numbers are kept on the device; formulas of a rule, and numbers of one.
MOST_RULES, MOST_FORMULAS, OWN_NUMBERS = 64, 16, 32


class Job(NamedTuple):
    """Tensors of one shape that are whitened together, and what holds for them."""

    names: Sequence[str]
    #: What factors learn from, and what is preconditioned: the same tensors, or others. All are float32.
    learned: Sequence[Tensor]
    shown: Sequence[Tensor]
    #: Written in place where they are due.
    factors: States
    rule: Kron
    seed: int
    t: int
    due: list[bool]

    @property
    def averaged(self) -> bool:
        return self.shown is not self.learned


@dataclass
class Known:
    """A batch as it was at the last step, and where that had what moves."""

    facts: Any
    batch: Batch
    places: dict[int, list[int]] = field(default_factory=dict)


class Numbers:
    """What steps of one rule begin with, on the device, where recorded launches find that of now."""

    def __init__(self, rule: Kron, device: torch.device) -> None:
        self.rule, self.uploads = rule, Uploads(device)
        #: By their ids, formulas with the places of their numbers; each has as much room.
        self.known: dict[int, tuple[Formulas, dict[str, Tensor]]] = {}
        self.table = self.uploads.empty((MOST_FORMULAS * OWN_NUMBERS,))
        self.host = array("f", bytes(self.table.nbytes))
        #: The same memory as a tensor: the driver has taken what it copies of it when a copy returns.
        self.view = torch.frombuffer(self.host, dtype=torch.float32)

    def follow(self, t: int) -> None:
        """Take the numbers of a step, all in one copy."""
        options, has_news = Options.of(self.rule), False
        for place, (formulas, _) in enumerate(self.known.values()):
            own = array("f", numbers_of(formulas, options, t, 0.0, 1.0).values())
            held = slice(place * OWN_NUMBERS, place * OWN_NUMBERS + len(own))
            if self.host[held] != own:
                self.host[held], has_news = own, True
        if has_news:
            self.uploads.refill(self.table, self.view)

    def has_room(self, formulas: Formulas) -> bool:
        return id(formulas) in self.known or len(self.known) < MOST_FORMULAS

    def places_of(self, formulas: Formulas, t: int) -> dict[str, Tensor]:
        if id(formulas) not in self.known:
            begin, names = OWN_NUMBERS * len(self.known), numbers_of(formulas, Options.of(self.rule), t, 0.0, 1.0)
            assert len(names) <= OWN_NUMBERS
            own = {name: self.table[begin + i : begin + i + 1] for i, name in enumerate(names)}
            self.known[id(formulas)] = formulas, own
        self.follow(t)
        return self.known[id(formulas)][1]


class At(NamedTuple):
    """Where the numbers of a batch are."""

    places: Mapping[str, Tensor]

    def numbers(self, batch: Batch, given: Mapping[str, float]) -> Mapping[str, Tensor]:
        return self.places


class OwnerKernels(KronKernels):
    """Those of one rank, with tables, scratch memory and launches that are kept between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[tuple[str, ...], Known] = {}
        #: Of each rule.
        self.numbers: dict[Kron, Numbers] = {}
        self.latest: tuple[Kron | None, int] = None, 0
        #: How often numbers were dropped, which recorded launches may look for.
        self.age = 0

    def follow(self, rule: Kron, t: int) -> None:
        """Take the numbers of a step of this rule."""
        if rule is not self.latest[0] or t != self.latest[1]:
            self.latest = rule, t
            if rule in self.numbers:
                self.numbers[rule].follow(t)

    def numbers_for(self, job: Job, batch: Batch) -> At:
        formulas, known = formulas_of(batch, job.rule, bare=True), self.numbers.get(job.rule)
        is_full = len(self.numbers) == MOST_RULES if known is None else not known.has_room(formulas)
        if is_full:
            self.numbers.clear()
            self.age += 1
        if job.rule not in self.numbers:
            self.numbers[job.rule] = Numbers(job.rule, batch.device)
        return At(self.numbers[job.rule].places_of(formulas, job.t))

    def whitened(self, jobs: Sequence[Job]) -> list[tuple[Tensor, Tensor]]:
        """For each job its tensors whitened and clipped, stacked, and the means of squares by tensor and slice.

        The means are where the next step will write its own.
        """
        laid_out, fresh = [], []
        for job in jobs:
            first = job.shown[0]
            h = torch.empty((len(job.names), *first.shape), dtype=torch.float32, device=first.device)
            batch, is_new = self.batch_for(job, h)
            laid_out.append((job, h, batch))
            if is_new:
                fresh += [self.launches(job, batch, refreshing=refreshing) for refreshing in (True, False)]
        compile_together(fresh)
        for job, _, batch in laid_out:
            with torch.cuda.device(batch.device) if batch.device.type == "cuda" else contextlib.nullcontext():
                batch.follow_scratch(self.scratch_for(batch))
                batch.due = []  # a replayed step may have left its own on the device
                batch.follow_due(job.due)
                moving = self.numbers_for(job, batch)
                begin(batch, job.rule, Handling(), job.t, 0.0, 1.0, None, None, bare=True, moving=moving)()
                self.launches(job, batch, refreshing=any(job.due))()
        return [(h, batch.by_slice(H_SQUARE)) for _, h, batch in laid_out]

    def launches(self, job: Job, batch: Batch, *, refreshing: bool) -> Any:
        return launches_of(batch, job.rule, Handling(), refreshing=refreshing, counted=False, bare=True)

    def batch_for(self, job: Job, h: Tensor) -> tuple[Batch, bool]:
        """The tables of a job, and whether they are new."""
        moving = {P.value: list(h.unbind()), **({M.value: job.shown} if job.averaged else {})}
        memory = [[(key, entry.data_ptr(), entry.dtype) for key, entry in own.items()] for own in job.factors]
        aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensors in moving.values() for tensor in tensors)
        facts = layout_facts(job.rule, job.seed), h.device, h.shape, memory, job.averaged, aligned
        known = self.known.get(tuple(job.names))
        is_new = known is None or known.facts != facts
        if known is None or is_new:
            nowhere = torch.zeros(())  # the host counts, and tells what is due
            beside = [{"momentum_buffer": x} for x in job.shown] if job.averaged else [{}] * len(job.names)
            states = [
                {**own, **more, "step": nowhere, "refresh": nowhere}
                for own, more in zip(job.factors, beside, strict=True)
            ]
            batch = Batch(job.names, moving[P.value], states, torch.float32, job.rule, job.seed)
            self.known[tuple(job.names)] = known = Known(facts, batch)
        batch = known.batch
        for column, tensors in moving.items():
            places = [tensor.data_ptr() for tensor in tensors]
            if known.places.get(column) != places:
                known.places[column] = places
                batch.uploads.refill(batch.places[column], batch.spread(places, torch.float32))
        batch.follow_gradients(job.learned)
        return batch, is_new
