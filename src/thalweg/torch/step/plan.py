"""The plan of a step: engines lay out buckets of parameters once, and step them again as long as the plan holds.

Sorting parameters, checking them and laying out tables takes longer than the arithmetic of a small model. All of it
belongs to one object, which says itself when it no longer holds: :meth:`StepPlan.bind`.
"""

from __future__ import annotations

import operator
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, TypeAlias

from torch import Tensor

from thalweg.kernels.cpu.tables import Counts
from thalweg.settings import RuleOptions
from thalweg.torch.engines.counts import HostCounts
from thalweg.torch.engines.memory import are_the_same, note_form
from thalweg.torch.engines.protocol import Bucket, Engine, EngineKind, Run, Statistics
from thalweg.torch.private import LOCAL, SPEC, AsPlainTensors
from thalweg.torch.sharding.collectives import Computation, in_lockstep
from thalweg.torch.sharding.shards import is_distributed, local
from thalweg.torch.step.buckets import OfGroups

GRAD = operator.attrgetter("grad")
States: TypeAlias = Mapping[Tensor, Any]
#: Parameters, in lists as groups have them.
Given: TypeAlias = list[list[Tensor]]
#: Plans for steps of different parameters that are remembered at once: experts and adversaries take turns.
MOST_REMEMBERED = 8


class StepPlan:
    """A step of some parameters, with all that was found out for it."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        engines: Mapping[EngineKind, Engine],
        given: Given,
        places: Mapping[Tensor, tuple[str, int]],
        states: States,
        settings: OfGroups[RuleOptions],
    ) -> None:
        """places: the name and group of those to be stepped. settings: of their groups, by index."""
        #: Each run of an engine, with the places of its buckets.
        self.runs: list[tuple[Run, list[int]]] = []
        for kind, engine in engines.items():
            indices = [i for i, bucket in enumerate(buckets) if bucket.engine == kind]
            if indices:
                self.runs.append((engine.lay_out([buckets[i] for i in indices]), indices))
        #: Whether all gradients are measured when it is time to write, and what they then decide.
        self.measures_gradients = len(self.runs) == 1 and self.runs[0][0].measures_gradients
        self.decision: Any = None
        # without gradients: they must not be kept alive after the step
        self.buckets, self.settings = [replace(bucket, grads=()) for bucket in buckets], settings
        named = {name: p for p, (name, _) in places.items()}
        stepped = [named[name] for bucket in buckets for name in bucket.names]
        self.remember(given, stepped, states)
        self.counts = [HostCounts([s["step"] for s in bucket.states]) for bucket in buckets]
        #: All that native code can read, at once: most are equal.
        readable = [counts.native.addresses for counts in self.counts if counts.native is not None]
        self.readable = Counts(chain.from_iterable(readable)) if readable else None
        #: Of each bucket: a parameter for each way in which options can reach one of its parameters.
        self.examples: list[list[tuple[str, Tensor]]] = []
        for bucket in buckets:
            examples: dict[Any, tuple[str, Tensor]] = {}
            for name in bucket.names:
                _, matched = settings[bucket.group].choose(name, named[name])
                examples.setdefault((named[name].shape, *matched), (name, named[name]))
            self.examples.append(list(examples.values()))

    def __str__(self) -> str:
        """For people: what decides over the whole step, and by which code each bucket is stepped."""
        if not self.buckets:
            return "a step of no parameters: none has a gradient"
        params = [p for bucket in self.buckets for p in bucket.params]
        lines = [f"a step of {len(params)} parameters ({count_elements(params)} elements)"]
        handling = self.buckets[0].setting.handling  # what concerns the whole step is the same in all
        options: dict[str, Any] = {"max_grad_norm": handling.max_grad_norm, "spikes": handling.guard}
        options["on_nonfinite"] = None if handling.on_nonfinite == "propagate" else handling.on_nonfinite
        if limits := [f"{name}={value!r}" for name, value in options.items() if value]:
            lines.append(f"before anything is written, by all gradients together: {', '.join(limits)}")
        for run, indices in self.runs:
            alike: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
            for bucket in [self.buckets[i] for i in indices]:
                first, name = bucket.params[0], type(bucket.setting.rule).__name__
                kind = f"{str(first.dtype).removeprefix('torch.')} on {first.device}{', sharded' * bool(bucket.parts)}"
                why = f"; no fused code: {bucket.refused}" * bool(bucket.refused)
                alike[f"{bucket.way:<9} {name}, group {bucket.group}", kind + why] += bucket.params
            for (what, how), tensors in alike.items():
                count = f"{len(tensors)} tensor{'s' * (len(tensors) > 1)}"
                lines.append(f"{what}: {count} ({count_elements(tensors)} elements), {how}")
            if run.recorded:
                lines.append(f"          recorded as CUDA graphs: {run.recorded} kinds of this step")
        return "\n".join(lines)

    # ---- whether it still holds

    def remember(self, given: Given, stepped: Sequence[Tensor], states: States) -> None:
        """Parameters, gradients and states, as they are now. stepped: those with gradients, as buckets have them."""
        self.sizes, self.objects = list(map(len, given)), list(objects_of(given, states))
        places = {p: i for i, p in enumerate(chain.from_iterable(given))}
        order = [places[p] for p in stepped]
        self.idle = len(places) - len(order)
        #: Puts gradients into the order of the buckets.
        self.sort: Callable[[Sequence[Any]], Sequence[Any]] = (
            operator.itemgetter(*order) if len(order) > 1 else lambda grads: [grads[i] for i in order]
        )
        tensors = [*stepped, *chain.from_iterable(map(dict.values, states.values()))]
        #: DTensors, and what this rank had of them. Those with gradients, with how these are placed.
        self.dtensors = list(filter(is_distributed, tensors))
        self.parts, self.specs = list(map(LOCAL, self.dtensors)), list(map(SPEC, stepped))
        self.tensors, grads = list(map(local_part, tensors)), list(map(local_part, read_gradients(stepped)))
        self.held, self.kinds = self.tensors[: len(stepped)], list(map(type, grads))
        self.negative = list(map(Tensor.is_neg, self.held))
        self.form, self.form_of_gradients = note_form(self.tensors, may_move=False), note_form(grads, may_move=True)

    def find_gradients(self, given: Given, states: States) -> tuple[Sequence[Any], array[int], bool] | None:
        """Gradients in the order of the buckets, where they are, and whether one is the negative of what is there.

        Of DTensors: what this rank has of them. None if they are stored otherwise, or anything else is not what or
        where it was.
        """
        if list(map(len, given)) != self.sizes or not are_the_same(list(objects_of(given, states)), self.objects):
            return None
        every = read_gradients(chain.from_iterable(given))
        if sum(map(operator.is_, every, repeat(None))) != self.idle:
            return None
        grads = list(self.sort(every))
        if any(map(operator.is_, grads, repeat(None))):
            return None
        if self.dtensors:
            if not all(map(operator.is_, map(LOCAL, self.dtensors), self.parts)):
                return None
            if not are_placed_alike(self.specs, list(map(SPEC, grads))):
                return None
            grads = list(map(local_part, grads))
        if list(map(type, grads)) != self.kinds or list(map(Tensor.is_neg, self.held)) != self.negative:
            return None
        try:
            if not self.form.holds(self.tensors) or not self.form_of_gradients.holds(grads):
                return None
        except (BufferError, RuntimeError):  # a gradient that has no memory, as sparse ones have none
            return None
        return grads, self.form_of_gradients.addresses, any(map(Tensor.is_neg, grads))

    def follow(self, settings: OfGroups[RuleOptions]) -> bool:
        """Take over options that differ in numbers alone; False if they differ in more."""
        if all(settings[bucket.group] is self.settings[bucket.group] for bucket in self.buckets):
            self.settings = settings
            return True
        followed = []
        for bucket, examples in zip(self.buckets, self.examples, strict=True):
            setting, *others = [settings[bucket.group].choose(*example)[0] for example in examples]
            if setting.kind != bucket.setting.kind or any(other is not setting for other in others):
                return False
            followed.append(replace(bucket, setting=setting))
        self.buckets, self.settings = followed, settings
        return True

    # ---- a step

    def bind(
        self,
        given: Given,
        states: States,
        options: Callable[[], tuple[OfGroups[RuleOptions], OfGroups[tuple[Any, float]]]],
    ) -> list[Bucket] | None:
        """The buckets of this step with the gradients, rates and numbers of now; None if the plan no longer holds.

        options: tells the settings and the rates of groups, by index, once these are known to have the same parameters.

        It holds as long as

        - groups have the same parameters, in the same order (their names are compared before);
        - the same parameters have gradients, of the same types, devices, dtypes, shapes and strides (that they have
          moved is for the run to follow), placed like their parameters where they are DTensors;
        - the options of their groups are the same but for numbers that are not 0, and none has gained or lost its lr;
        - parameters lie where they did, with the same dtypes, shapes and strides;
        - state lies in the same dictionaries, in the same tensors, at the same addresses;
        - the parameters of a bucket have been stepped equally often.

        On what loads, clears or moves state, the optimizer forgets its plans. The device, the engine and what hooks do
        follow from these.
        """
        gradients = self.find_gradients(given, states)
        if gradients is None:
            return None
        grads, addresses, negated = gradients  # if it is negated, what lies there is not what it is
        settings, rates = options()
        if settings is not self.settings and not self.follow(settings):
            return None
        all_equal = None if self.readable is None else self.readable.read()
        buckets, first = [], 0
        for bucket, counts in zip(self.buckets, self.counts, strict=True):
            lr, factor = rates[bucket.group]
            span = slice(first, first + len(bucket.params))
            first = span.stop
            t = bucket.t
            if t is not None:  # the host counts
                count = counts.read() if all_equal is None or counts.native is None else all_equal
                if count is None:
                    return None
                t = int(count) + 1
            if (lr is None) != (bucket.lr is None):
                return None
            place, scale = None if negated else addresses[span], bucket.setting.lr_scale * factor
            buckets.append(bucket.renewed(grads=grads[span], addresses=place, lr=lr, lr_scale=scale, t=t))
        return buckets

    def run(
        self,
        buckets: Sequence[Bucket],
        on_nonfinite: str,
        *,
        looks: bool,
        commit: Callable[[Sequence[str]], None],
    ) -> list[Statistics]:
        """Take a step with the gradients of these buckets; return its statistics, run by run.

        looks: whether to look for steps that are not finite, where that is an error. commit: is called with their names
        before anything is written, and raises where that must not be.
        """
        computations: list[Computation] = []
        prepared, taken = [], False
        statistics: list[Statistics] = []
        try:
            for run, indices in self.runs:
                prepared.append(run)
                run.prepare([buckets[i] for i in indices])
            for run in prepared:
                computations += run.measure(on_nonfinite)
            if computations:
                in_lockstep(computations)
            nonfinite = [name for run in prepared for name in run.nonfinite()] if looks else []
            commit(nonfinite)
            taken = True
            for run in prepared:
                statistics.append(run.write())
        finally:
            for run in prepared:
                run.release(taken=taken)
        return statistics


def count_elements(tensors: Sequence[Tensor]) -> str:
    return f"{sum(map(Tensor.numel, tensors)):,}"


def presence_of(params: Sequence[Tensor]) -> bytes:
    """Which parameters have a gradient, a byte for each."""
    return bytes(map(operator.is_not, map(GRAD, params), repeat(None)))


def objects_of(given: Given, states: States) -> Iterator[Any]:
    """What has to be the same objects: parameters, states and their entries."""
    entries = chain.from_iterable(map(dict.values, states.values()))
    return chain(chain.from_iterable(given), states.values(), entries)


def read_gradients(params: Iterator[Tensor] | Sequence[Tensor]) -> list[Any]:
    with AsPlainTensors():
        return list(map(GRAD, params))


def local_part(x: Tensor) -> Tensor:
    """The shard of a tensor that is here; waits for one that other ranks still send."""
    if not is_distributed(x):
        return x
    held = LOCAL(x)
    return held if type(held) is Tensor else local(x)


def are_placed_alike(params: Sequence[Any], grads: Sequence[Any]) -> bool:
    """By specifications: whether gradients are on the meshes of their parameters, with their placements."""
    # FSDP2 gives a gradient the very specification of its parameter
    return are_the_same(params, grads) or all(
        g is not None and p.placements == g.placements and p.mesh == g.mesh
        for p, g in zip(params, grads, strict=True)
        if p is not None
    )
