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


@dataclass(kw_only=True)
class Row:
    """A contestant that ran, and what came out for it."""

    contestant: str
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
    #: The rounds that count, and the contestant that others are compared with in each.
    rounds: list[Times] = field(default_factory=list, repr=False)
    reference: str = ""

    @property
    def seconds(self) -> list[float]:
        return [each.seconds[self.contestant] for each in self.rounds]

    @property
    def host(self) -> list[float]:
        """Of the host, where the device has a time of its own."""
        return [each.host[self.contestant] for each in self.rounds if each.host]

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second, the median of the rounds that it took part in."""
        rates = [rate for each in self.rounds for rate in each.bandwidth]
        return statistics.median(rates) if rates else None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """A quarter of the samples is below the first, a quarter above the second."""
        if len(self.rounds) == 1:
            return self.median, self.median
        first, _, last = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, last

    @property
    def ratio(self) -> float:
        """The median of its time divided by that of the reference in the same round."""
        return self.median_ratio([each.seconds for each in self.rounds])

    @property
    def host_median(self) -> float | None:
        return statistics.median(self.host) if self.host else None

    @property
    def host_ratio(self) -> float | None:
        return self.median_ratio([each.host for each in self.rounds]) if self.host else None

    def median_ratio(self, times: Sequence[Mapping[str, float]]) -> float:
        return statistics.median(each[self.contestant] / each[self.reference] for each in times)

    @property
    def share_of_floor(self) -> float | None:
        """The time of moving what must be moved, at the bandwidth measured, divided by the median time."""
        if self.floor is None or self.bandwidth is None:
            return None
        return self.floor / self.bandwidth / self.median

    def figures(self) -> dict[str, Any]:
        """Everything that follows from the samples."""
        about = {key: value for key, value in vars(self).items() if key not in ("rounds", "reference")}
        return {
            **about,
            "memory": None if self.memory is None else asdict(self.memory),
            "median_s": self.median,
            "quartiles_s": self.quartiles,
            "ratio": self.ratio,
            "host_median_s": self.host_median,
            "host_ratio": self.host_ratio,
            "bandwidth": self.bandwidth,
            "share_of_floor": self.share_of_floor,
        }


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
    #: One for each contestant, in the order in which they ran.
    rows: list[Row] = field(default_factory=list)
    #: Who could not run, and why.
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """Whose time others' are divided by: the first that runs, which is in every heat."""
        return self.rows[0].contestant if self.rows else ""

    def add(self, heat: Heat) -> None:
        """Enter the samples of a heat, whose contestants have their rows."""
        self.heats.append(heat)
        for row in self.rows:
            row.rounds += [each.result for each in heat.rounds if row.contestant in each.result.seconds]

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
        comparisons = [comparison.plain() for comparison in self.comparisons]
        return {**vars(self), "disturbed": self.disturbed, "comparisons": comparisons}
