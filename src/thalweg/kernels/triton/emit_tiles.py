"""Triton from a schedule of a rule that keeps rows and columns: passes over tiles, and what is computed between them.

As in ``emit``, formulas are the rule's. A value for each row, column or matrix is computed where the first pass needs
it, or between passes, from sums, and kept among the *statistics*, which passes read. Then a pass multiplies a row by
one number instead of computing it for every element.
"""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.kernels.triton.emit import indented
from thalweg.kernels.triton.emit_between import BETWEEN_PASSES, DECIDE, emit_between, emit_decision, emit_keep
from thalweg.kernels.triton.emit_tile_passes import emit_pass
from thalweg.kernels.triton.statistics import Statistic
from thalweg.kernels.triton.tile_emission import TileEmission, entry_kind, filled, inherited_by
from thalweg.programs.extents import SMALL, Kinds
from thalweg.programs.graph import Value
from thalweg.programs.schedule import Schedule


@dataclass
class EmittedTiles:
    """Source of kernels over tiles, and what the host has to know of them."""

    source: str
    #: Numbers of the options, in the order in which kernels read them behind the sign of the gradient.
    numbers: list[Value]
    #: Of each pass: the sums that it makes, whether it makes them for rows and columns, and how many come before it of
    #: those that are not.
    sums: list[tuple[Value, ...]]
    gathers: list[bool]
    begins: list[int]
    statistics: list[Statistic]
    #: By pass: for what something is computed after it (rows, columns, matrices), and whether for tensors.
    between: dict[int, tuple[str, ...]]
    decisions: set[int]
    #: Kinds of entries that only a guard lets be written.
    kept: tuple[str, ...]
    figures: int
    stats: dict[str, int | float]


def emit_tiles(found: Schedule, title: str, kinds: Kinds, *, guarded: bool) -> EmittedTiles:
    """Kernels of a schedule whose sums go over rows, columns, matrices and whole tensors."""
    emission = TileEmission(found, kinds=kinds, guarded=guarded)
    program, last = found.program, emission.last
    passes = [emit_pass(emission, number) for number in range(last + 1)]
    for value in program.stats.values():
        if isinstance(value, Value):
            emission.figure(value)
    small = {key: program.state[key] for key in found.small}
    emission.settled = max([0, *(emission.first_use[value] - 1 for value in emission.kept)])
    emission.settled = max([emission.settled, *(emission.rounds_before(value) - 1 for value in small.values())])
    if guarded:
        for value in small.values():
            emission.keep(value, emission.settled + 1)
    between, decisions, kernels = {}, set(), []
    for number in range(last + 1):
        texts = {kind: emit_between(emission, number, kind) for kind in SMALL}
        chosen = {kind: lines for kind, lines in texts.items() if lines}
        if chosen:
            between[number] = tuple(chosen)
            body = [
                line
                for kind, lines in chosen.items()
                for line in (f"if kind == {SMALL.index(kind)}:  # for each {kind}", *indented(lines, 4))
            ]
            kernels.append(filled(BETWEEN_PASSES, emission, number=number, body="\n".join(indented(body, 4))))
        if lines := emit_decision(emission, number):
            decisions.add(number)
            kernels.append(DECIDE.format(number=number, body="\n".join(indented(lines, 4))))
    if guarded:
        kernels.append(emit_keep(emission))
    stats: dict[str, int | float] = {
        name: emission.figure(value) if isinstance(value, Value) else float(value)
        for name, value in program.stats.items()
    }
    statistics = [
        Statistic(kinds.of(value), emission.source(value), emission.sums[value][1]) for value in emission.gathered
    ]
    inherited = inherited_by(emission)
    statistics += [Statistic(kinds.of(value), inherits=inherited.get(value, -1)) for value in emission.kept]
    size = f"TENSOR = tl.constexpr(GEOMETRY.value + FACTS.value * {len(statistics)})"
    words = f"{found}; between them, read and write {', '.join(found.small)}" if found.small else str(found)
    counts = [0 if emission.gathers(each) else len(each.sums) for each in found.passes]
    return EmittedTiles(
        "\n\n".join([f'"""{title}\n\n{words}\n"""', size, *passes, *kernels]),
        list(emission.numbers),
        [each.sums for each in found.passes],
        [emission.gathers(each) for each in found.passes],
        [sum(counts[:number]) for number in range(last + 2)],
        statistics,
        between,
        decisions,
        tuple(kind for kind in SMALL if guarded and any(entry_kind(emission, key) == kind for key in small)),
        len(emission.figures),
        stats,
    )
