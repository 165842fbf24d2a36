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

    #: Until the step is done; on a GPU the time of the device alone.
    seconds: Mapping[str, float]
    #: The yardstick before every turn; nothing where the model is small.
    bandwidth: Sequence[float] = ()
    #: On a GPU: until ``step()`` returns.
    host: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Heat:
    """Contestants that were in memory together. Only ``rounds`` count."""

    rounds: Sequence[Round[Times]]
    left_out: Sequence[Round[Times]] = ()

    def has(self, name: str) -> bool:
        return name in self.rounds[0].result.seconds

    def seconds(self, name: str) -> list[float]:
        return [each.result.seconds[name] for each in self.rounds]

    def host(self, name: str) -> list[float]:
        return [each.result.host[name] for each in self.rounds if name in each.result.host]


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A contestant that ran."""

    package: str
    front_end: str
    #: The rule that it follows, or the mixture that it is.
    rule: str
    #: The engine that its steps used, where there is a choice.
    engine: str = ""
    #: Bytes that a step must move; None where memory is not the limit.
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
    #: Of the host, where the device has a time of its own.
    host: Sequence[float] = ()
    reference_host: Sequence[float] = ()
    #: Bytes a second, the median of the rounds that it took part in.
    bandwidth: float | None = None

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
        return median_ratio(self.seconds, self.reference_seconds)

    @property
    def host_median(self) -> float | None:
        return statistics.median(self.host) if self.host else None

    @property
    def host_ratio(self) -> float | None:
        return median_ratio(self.host, self.reference_host) if self.host else None

    @property
    def share_of_floor(self) -> float | None:
        """The time of moving what must be moved, at the bandwidth measured, divided by the median time."""
        if self.entrant.floor is None or self.bandwidth is None:
            return None
        return self.entrant.floor / self.bandwidth / self.median

    def figures(self) -> dict[str, Any]:
        """Everything that follows from the samples."""
        return {
            "contestant": self.contestant,
            **asdict(self.entrant),
            "median_s": self.median,
            "quartiles_s": self.quartiles,
            "ratio": self.ratio,
            "host_median_s": self.host_median,
            "host_ratio": self.host_ratio,
            "bandwidth": self.bandwidth,
            "share_of_floor": self.share_of_floor,
        }


def median_ratio(own: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(one / two for one, two in zip(own, other, strict=True))


@dataclass(kw_only=True)
class Comparison:
    """All heats of the optimizers on one model."""

    model: str
    about: str
    parameters: int
    tensors: int
    #: Bytes for each parameter and gradient.
    itemsize: int
    #: What the bandwidth was measured with; nothing where the model is small.
    yardstick: str = ""
    heats: list[Heat] = field(default_factory=list)
    entrants: dict[str, Entrant] = field(default_factory=dict)
    #: Who could not run, and why.
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """Whose time others' are divided by: the first that runs, which is in every heat."""
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
        bandwidths = [rate for heat in heats for each in heat.rounds for rate in each.result.bandwidth]
        return Row(
            contestant=name,
            entrant=entrant,
            parameters=self.parameters,
            seconds=[s for heat in heats for s in heat.seconds(name)],
            reference_seconds=[s for heat in heats for s in heat.seconds(self.reference)],
            host=[s for heat in heats for s in heat.host(name)],
            reference_host=[s for heat in heats for s in heat.host(self.reference)],
            bandwidth=statistics.median(bandwidths) if bandwidths else None,
        )

    def plain(self) -> dict[str, Any]:
        """For a file: the figures, and all samples."""
        about = ("model", "about", "parameters", "tensors", "itemsize", "yardstick", "reference", "disturbed")
        return {
            **{key: getattr(self, key) for key in about},
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
    moving_grads: bool
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
