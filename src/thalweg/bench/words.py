"""The figures of a comparison in words and cells, alike in the terminal, in Markdown and in pictures."""

from __future__ import annotations

import statistics

from thalweg.bench.record import Bench, Comparison, Row
from thalweg.bench.rules import RULES
from thalweg.show.units import human_bytes

NOT_TO_BE_QUOTED = "Disturbed by other processes: these figures are not to be quoted."


def title(found: Comparison) -> str:
    return f"{RULES[found.rule].title}, {found.model}"


def work(found: Comparison) -> str:
    """What was stepped, and how many bytes that must move."""
    rule = RULES[found.rule]
    floor = f"No floor: {rule.why}" if found.floor is None else f"Floor: {a_parameter(found)} ({rule.why})"
    return f"{found.about}: {found.parameters:,} parameters in {found.tensors} tensors. {floor}."


def a_parameter(found: Comparison) -> str:
    """The floor, by parameter."""
    return f"{(found.floor or 0) / found.parameters:.3g} bytes a parameter"


def bandwidth(found: Comparison) -> str:
    """How fast memory was meanwhile."""
    measured = found.bandwidths
    said = f"Bandwidth: {gigabytes(statistics.median(measured))} GB/s (best {gigabytes(max(measured))}) by "
    said += found.yardstick
    passes = [each.result.other_passes for each in found.rounds]
    kinds = [f"{gigabytes(statistics.median(p[kind] for p in passes))} by {kind}" for kind in passes[0]]
    return said + (f"; for information, {', '.join(kinds)}." if kinds else ".")


def disturbance(found: Comparison) -> str:
    """How many rounds there were, and how quiet."""
    counted = " + ".join(str(len(heat.rounds)) for heat in found.heats)
    left_out = sum(len(heat.left_out) for heat in found.heats)
    return (
        f"Rounds: {counted}, and {left_out} left out as more disturbed; in those that count, other processes took "
        f"{statistics.median(found.others):.0%} of the cores (at most {max(found.others):.0%})."
    )


def gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.1f}" if rate < 1e12 else f"{rate / 1e9:.0f}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds >= 0.01 else f"{1e3 * seconds:.3g}"


def columns(memory: bool) -> list[str]:
    """What a table has; all but the first two are numbers."""
    shown = ["contestant", "engine", "ms", "quartiles, ms", "ratio", "GB/s at the floor", "share of the floor"]
    return [*shown, "extra memory", "of the parameters"] if memory else shown


def cells(row: Row, itemsize: int, memory: bool) -> list[str]:
    """A row of that table."""
    low, high = row.quartiles
    shown = [
        row.contestant,
        row.entrant.engine,
        milliseconds(row.median),
        f"{milliseconds(low)} to {milliseconds(high)}",
        f"{row.ratio:.2f}",
        "" if row.floor_rate is None else gigabytes(row.floor_rate),
        "" if row.share_of_floor is None else f"{row.share_of_floor:.0%}",
    ]
    if not memory:
        return shown
    known = row.entrant.memory
    if known is None or known.extra is None:
        return [*shown, "not known", ""]
    return [*shown, human_bytes(known.extra), f"{known.extra / (itemsize * row.parameters):.1%}"]


def has_memory(found: Comparison) -> bool:
    return any(entrant.memory is not None for entrant in found.entrants.values())


def remarks(found: Comparison) -> list[str]:
    """Who is missing, and what could not be measured."""
    said = [f"Left out: {name} ({why})" for name, why in found.left_out.items()]
    for name, entrant in found.entrants.items():
        if entrant.memory is not None and entrant.memory.extra is None:
            said.append(f"Memory of {name} is not known ({entrant.memory.how})")
    return said


def surroundings(found: Bench) -> str:
    """Where, when and with what."""
    shown = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    row = f", {found.inner} steps a measurement" if found.inner > 1 else ""
    return f"{found.date}. {found.device_about}, {processor(found)}; {found.dtype}{row}; {shown}."


def processor(found: Bench) -> str:
    """The cores, their architecture and the vectors of the native core, as far as the record has them."""
    said = [f"{found.machine['cores']} cores"]
    if "architecture" in found.machine:
        said.append(found.machine["architecture"])
    if found.device == "cpu" and "native_core" in found.machine:
        level = found.machine["native_core"]
        said.append("no native core" if level is None else f"native core at level {level}")
    return ", ".join(said)
