"""What was measured: every sample, and the figures that follow from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from thalweg.bench.memory import Memory
from thalweg.bench.quiet import QUIET, Round


@dataclass(frozen=True)
class Times:
    """One round: seconds of everyone's step, and bytes a second of the memory meanwhile."""

    seconds: Mapping[str, float]
    #: The yardstick, before every step.
    bandwidth: Sequence[float]
    #: Other ways to go through memory, once, for information.
    other_passes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Heat:
    """Contestants that were in memory together. Only ``rounds`` count."""

    rounds: Sequence[Round[Times]]
    left_out: Sequence[Round[Times]] = ()

    def has(self, name: str) -> bool:
        return name in self.rounds[0].result.seconds

    def seconds(self, name: str) -> list[float]:
        return [each.result.seconds[name] for each in self.rounds]


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A contestant that ran."""

    package: str
    front_end: str
    #: The rule that it follows itself: the control is AdamW in every comparison.
    rule: str
    #: The engine that its steps used, where there is a choice.
    engine: str = ""
    #: Bytes that a step by its own rule must move; None where memory is not the limit.
    floor: int | None
    memory: Memory | None = None
    #: What its compiler told.
    compiled: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came out for one contestant."""

    contestant: str
    entrant: Entrant
    parameters: int
    #: Of one step, in every round that counts; and of the reference in the same rounds.
    seconds: Sequence[float]
    reference_seconds: Sequence[float]
    #: Bytes a second, the median of the rounds that it took part in.
    bandwidth: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """A quarter of the samples is below the first, a quarter above the second."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        first, _, last = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, last

    @property
    def ratio(self) -> float:
        """The median of its time divided by that of the reference in the same round."""
        return statistics.median(own / other for own, other in zip(self.seconds, self.reference_seconds, strict=True))

    @property
    def floor_rate(self) -> float | None:
        """Bytes a second, if it moved no more than it must."""
        return None if self.entrant.floor is None else self.entrant.floor / self.median

    @property
    def share_of_floor(self) -> float | None:
        """The time of moving what must be moved, at the bandwidth measured, divided by the median time."""
        return None if self.floor_rate is None else self.floor_rate / self.bandwidth

    def figures(self) -> dict[str, Any]:
        """Everything that follows from the samples."""
        return {
            "contestant": self.contestant,
            **asdict(self.entrant),
            "median_s": self.median,
            "quartiles_s": self.quartiles,
            "least_s": min(self.seconds),
            "most_s": max(self.seconds),
            "ratio": self.ratio,
            "bandwidth": self.bandwidth,
            "floor_rate": self.floor_rate,
            "share_of_floor": self.share_of_floor,
        }


@dataclass(kw_only=True)
class Comparison:
    """All heats of one rule on one model."""

    model: str
    about: str
    parameters: int
    tensors: int
    rule: str
    #: Bytes for each parameter and gradient.
    itemsize: int
    #: Bytes that a step must move; None where memory is not the limit.
    floor: int | None
    #: What the bandwidth was measured with.
    yardstick: str
    heats: list[Heat] = field(default_factory=list)
    entrants: dict[str, Entrant] = field(default_factory=dict)
    #: Who could not run, and why.
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """Whom others are compared with: the first that runs, which is in every heat."""
        return next(iter(self.entrants), "")

    @property
    def rounds(self) -> list[Round[Times]]:
        return [each for heat in self.heats for each in heat.rounds]

    @property
    def others(self) -> list[float]:
        """What share of the cores other processes took, in every round that counts."""
        return [each.others for each in self.rounds]

    @property
    def disturbed(self) -> bool:
        return max(self.others, default=0.0) > QUIET

    @property
    def bandwidths(self) -> list[float]:
        return [bandwidth for each in self.rounds for bandwidth in each.result.bandwidth]

    @property
    def rows(self) -> list[Row]:
        """One for each contestant, in the order in which they ran."""
        return [self._row(name, entrant) for name, entrant in self.entrants.items()]

    def _row(self, name: str, entrant: Entrant) -> Row:
        heats = [heat for heat in self.heats if heat.has(name)]
        return Row(
            contestant=name,
            entrant=entrant,
            parameters=self.parameters,
            seconds=[s for heat in heats for s in heat.seconds(name)],
            reference_seconds=[s for heat in heats for s in heat.seconds(self.reference)],
            bandwidth=statistics.median(
                bandwidth for heat in heats for each in heat.rounds for bandwidth in each.result.bandwidth
            ),
        )

    def plain(self) -> dict[str, Any]:
        """For a file: the figures, and all samples."""
        return {
            **{key: getattr(self, key) for key in ("model", "about", "parameters", "tensors", "rule", "itemsize")},
            "floor": self.floor,
            "yardstick": self.yardstick,
            "reference": self.reference,
            "disturbed": self.disturbed,
            "rows": [row.figures() for row in self.rows],
            "left_out": self.left_out,
            "heats": [asdict(heat) for heat in self.heats],
        }


@dataclass(kw_only=True)
class Bench:
    """One run: where, when and with what it was, and every comparison."""

    date: str
    device: str
    device_about: str
    machine: dict[str, Any]
    versions: dict[str, str]
    dtype: str
    engine: str
    inner: int
    repeats: int
    #: Packages that could have taken part and are not installed.
    absent: list[str]
    #: The command line that asked for it, if one did.
    command: str = ""
    #: It was stopped before all was measured.
    stopped: bool = False
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def disturbed(self) -> bool:
        return any(comparison.disturbed for comparison in self.comparisons)

    def plain(self) -> dict[str, Any]:
        """For a file, with all samples."""
        about = {key: value for key, value in vars(self).items() if key != "comparisons"}
        return {
            **about,
            "disturbed": self.disturbed,
            "comparisons": [comparison.plain() for comparison in self.comparisons],
        }
