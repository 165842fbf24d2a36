"""The plan of a step, a list of stages: laid out once, and taken again as long as the plan holds.

Sorting parameters, checking them and laying out tables takes longer than the arithmetic of a small model. All of it
belongs to one object, which says itself when it no longer holds: :meth:`StepPlan.bind`.
"""

from __future__ import annotations

import operator
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, TypeAlias

from torch import Tensor

from thalweg.kernels.cpu.tables import Counts
from thalweg.settings import RuleOptions
from thalweg.torch.engines.counts import HostCounts
from thalweg.torch.engines.memory import are_the_same, note_form
from thalweg.torch.engines.protocol import Bucket, Engine, EngineKind, Table, count_tensors
from thalweg.torch.engines.recorder import Recorder
from thalweg.torch.private import LOCAL, SPEC, AsPlainTensors
from thalweg.torch.sharding.shards import is_distributed, local
from thalweg.torch.sharding.stages import Compute, Layout, Stage, find_end, merge, split_at_write
from thalweg.torch.step.buckets import OfGroups
from thalweg.torch.step.joint import JointDecision

GRAD = operator.attrgetter("grad")
States: TypeAlias = Mapping[Tensor, Any]
#: Parameters, in lists as groups have them.
Given: TypeAlias = list[list[Tensor]]


class StepPlan:
    """A step of some parameters as a list of stages, with all that was found out for it."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        engines: Mapping[EngineKind, Engine],
        given: Given,
        places: Mapping[Tensor, tuple[str, int]],
        states: States,
        settings: OfGroups[RuleOptions],
        joint: JointDecision | None,
        checks: Iterable[Stage],
    ) -> None:
        """places: the name and group of those to be stepped. settings: of their groups, by index.

        joint: what all gradients decide; None: there are none. checks: come before all else.
        """
        self.buckets, self.settings = buckets, settings
        self.table = Table() if joint is None else joint.table
        #: Whether nothing was ever written by it; and whether it may still raise where it has begun.
        self.is_new, self.may_refuse = True, False
        self.statistics: dict[str, Any] = {}
        #: As ``optimizer.engine`` tells it.
        self.ways = {bucket.way for bucket in buckets}
        for bucket in buckets:
            bucket.table = self.table
        self.read, self.stages, self.layouts = list(checks), list[Stage](), list[Layout]()
        self.recorder: Recorder | None = None
        if joint is not None:
            self.lay_out(engines, joint)
        named = {name: p for p, (name, _) in places.items()}
        self.remember(given, [named[name] for bucket in buckets for name in bucket.names], states)
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

    def lay_out(self, engines: Mapping[EngineKind, Engine], decision: JointDecision) -> None:
        """Make the list: what reads and decides, up to the guard what writes nothing, and then what writes."""
        by_kernels = [bucket for bucket in self.buckets if bucket.parts and bucket.engine != "lists"]
        #: Shards that are not contiguous, with the copies that are stepped in their place.
        self.copies = [pair for bucket in by_kernels for pair in bucket.copy_shards()]
        for kind, engine in engines.items():
            if chosen := [bucket for bucket in self.buckets if bucket.engine == kind]:
                self.layouts += engine.lay_out(chosen)
        for layout in self.layouts:
            self.statistics.update(layout.statistics)
        keys = [layout.key for layout in self.layouts if layout.key is not None]
        steps = [layout.step for layout in self.layouts]
        numerics = self.buckets[0].setting.numerics  # what concerns the whole step is the same in all
        self.may_refuse = numerics.on_nonfinite == "raise"
        squares = self.layouts[0].squares if len(self.layouts) == 1 and numerics.on_nonfinite != "raise" else None
        self.read += [decision.taking_numbers(), *(decision.stages() if squares is None else [])]
        if self.copies:
            self.read.append(Compute(f"copy {len(self.copies)} tensors that are not contiguous", self.copy_in))
        self.read += chain.from_iterable(layout.read for layout in self.layouts)
        if numerics.on_nonfinite == "propagate":  # no stage looks: one engine may write before another has measured
            before, writing = split_at_write(merge(steps))
        else:
            halves = [split_at_write(stages) for stages in steps]
            before, writing = merge([first for first, _ in halves]), merge([second for _, second in halves])
        if squares is not None:
            self.stages += decision.launches(squares)
            keys.append(decision.key)
        self.stages += before
        if numerics.on_nonfinite == "raise":
            self.stages.append(Compute("raise if a step is not finite", partial(self.look, decision)))
        self.stages += [*decision.committing(launches=squares is not None), *writing]
        if self.copies:
            on_gpu = all(copy.is_cuda for _, copy in self.copies)
            self.stages.append(Compute("copy them back", self.copy_back, writes=True, launches=on_gpu))
        self.stages += decision.telling()
        # where engines ask together, what they do between is not only launched
        if keys and sum(bool(find_end(stages)) for stages in steps) < 2:
            device = next(bucket.params[0].device for bucket in self.buckets if bucket.engine == "triton")
            self.recorder = Recorder(device, lambda: tuple([key() for key in keys]))

    def __str__(self) -> str:
        """For people: each stage in words, and why no faster code takes some parameters."""
        if not self.buckets:
            return "a step of no parameters: none has a gradient"
        lines = [f"a step of {count_tensors([p for bucket in self.buckets for p in bucket.params])}"]
        lines[0] = lines[0].replace("tensor", "parameter", 1)
        stages = [*self.read, *self.stages]
        guard = next(i for i, stage in enumerate(stages) if stage.writes)
        for number, stage in enumerate(stages):
            if number == guard:
                lines.append("  ---- guard: nothing above writes parameters or state ----")
            lines.append(f"{number:4} {type(stage).__name__:8} {stage.what}")
        refused: dict[str, list[Tensor]] = defaultdict(list)
        for bucket in self.buckets:
            refused[bucket.refused] += bucket.params if bucket.refused else ()
        lines += [f"no fused code for {count_tensors(params)}: {why}" for why, params in refused.items() if why]
        if self.recorder is not None and self.recorder.recorded:
            lines.append(f"recorded as CUDA graphs: {self.recorder.recorded} kinds of this step")
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
        followed = []
        for bucket, examples in zip(self.buckets, self.examples, strict=True):
            setting, *others = [settings[bucket.group].choose(*example)[0] for example in examples]
            if setting.kind != bucket.setting.kind or any(other is not setting for other in others):
                return False
            followed.append(setting)
        for bucket, setting in zip(self.buckets, followed, strict=True):
            bucket.setting = setting
        self.settings = settings
        return True

    # ---- a step

    def bind(
        self,
        given: Given,
        states: States,
        options: Callable[[], tuple[OfGroups[RuleOptions], OfGroups[tuple[Any, float]]]],
    ) -> bool:
        """Give the buckets the gradients, rates and numbers of now; False if the plan no longer holds.

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
            return False
        grads, addresses, negated = gradients  # if it is negated, what lies there is not what it is
        settings, rates = options()
        is_same = all(map(operator.is_, settings.values(), self.settings.values()))
        if not is_same and not self.follow(settings):
            return False
        all_equal = None if self.readable is None else self.readable.read()
        numbers: list[int | None] = []
        for bucket, counts in zip(self.buckets, self.counts, strict=True):
            count = None
            if bucket.t is not None:  # the host counts
                count = counts.read() if all_equal is None or counts.native is None else all_equal
                if count is None:
                    return False
            if (rates[bucket.group][0] is None) != (bucket.lr is None):
                return False
            numbers.append(None if count is None else int(count) + 1)
        first = 0
        for bucket, t in zip(self.buckets, numbers, strict=True):
            span = slice(first, first + len(bucket.params))
            first = span.stop
            bucket.grads, bucket.addresses, bucket.t = grads[span], None if negated else addresses[span], t
            bucket.lr, factor = rates[bucket.group]
            bucket.lr_scale = bucket.setting.lr_scale * factor
        return True

    def run(self) -> None:
        """Take the step that is bound."""
        taken = False
        try:
            for stage in self.read:
                stage.run()
            self.is_new = self.is_new and self.may_refuse
            for stage in self.stages if self.recorder is None else self.recorder.choose(self.stages):
                stage.run()
            taken = True
        finally:
            for bucket in self.buckets:
                bucket.grads = ()  # keep no gradient alive
            for layout in self.layouts:
                if layout.release is not None:
                    layout.release(taken)
            self.table.release()

    def copy_in(self) -> None:
        for tensor, copy in self.copies:
            copy.copy_(tensor)

    def copy_back(self) -> None:
        for tensor, copy in self.copies:
            tensor.copy_(copy)

    def look(self, decision: JointDecision) -> None:
        """Raise if a step is not finite; nothing is written before."""
        decision.refuse()
        self.is_new = False


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
