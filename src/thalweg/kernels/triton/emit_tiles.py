"""Triton from a schedule of a rule that keeps rows and columns: passes over tiles, and what is computed between them.

As in ``emit``, formulas are the rule's. A value for each row, column or matrix is computed where the first pass needs
it, or between passes, from sums, and kept among the *statistics*, which passes read. Then a pass multiplies a row by
one number instead of computing it for every element.
"""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.kernels.text import block, indented
from thalweg.kernels.triton.emission import Decision, Lines
from thalweg.kernels.triton.emit import Emitted
from thalweg.kernels.triton.emit_tile_passes import emit_pass
from thalweg.kernels.triton.memory import Stored
from thalweg.kernels.triton.statistics import Statistic
from thalweg.kernels.triton.tile_emission import TileEmission, base_of, entry_kind, filled, inherited_by
from thalweg.programs.extents import SMALL, TENSOR, Kinds
from thalweg.programs.graph import Value
from thalweg.programs.schedule import Schedule

BETWEEN_PASSES = """\
@triton.jit
def between_{number}(
    rows, counts, numbers, tensors, blocks, sums, totals, allowed, lr, lr_scale,
    ALLOWED: tl.constexpr,{dtypes} BLOCK: tl.constexpr,
):
    \"\"\"What holds for each row, column and matrix, from sums.\"\"\"
    which, block = tl.load(blocks + 2 * tl.program_id(0)), tl.load(blocks + 2 * tl.program_id(0) + 1)
    row, kind = (which // KINDS).to(tl.int64), which % KINDS
    tensor = tensors + row * TENSOR
    entry = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < tl.load(tensor + ENTRIES + kind)
    nothing = tl.zeros((BLOCK,), tl.float32)
    elements_of_whole, rows_of_whole = tl.load(counts + 3 * row), tl.load(counts + 3 * row + 1)
    columns_of_whole = tl.load(counts + 3 * row + 2)
{body}
"""
DECIDE = """\
@triton.jit
def decide_{number}(
    rows, counts, numbers, tensors, sums, totals, figures, lr, lr_scale, count,
    BLOCK: tl.constexpr
):
    \"\"\"What holds for each tensor, from its sums.\"\"\"
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    nothing = tl.zeros((BLOCK,), tl.float32)
    tensor = tensors + row.to(tl.int64) * TENSOR
    elements_of_whole = tl.load(counts + 3 * row, mask, other=1.0)
    rows_of_whole = tl.load(counts + 3 * row + 1, mask, other=1.0)
    columns_of_whole = tl.load(counts + 3 * row + 2, mask, other=1.0)
{body}
"""
KEEP = """\
@triton.jit
def keep(
    rows, tensors, blocks, sums, figures, failures, allowed, count,
    STAGE: tl.constexpr, ALLOWED: tl.constexpr, GUARDED: tl.constexpr,{dtypes} BLOCK: tl.constexpr,
):
    \"\"\"Write what was computed for rows and columns, or find out whether it can be stored.\"\"\"
    which, block = tl.load(blocks + 2 * tl.program_id(0)), tl.load(blocks + 2 * tl.program_id(0) + 1)
    row, kind = (which // KINDS).to(tl.int64), which % KINDS
    if is_idle(figures, row, allowed, count, STAGE, ALLOWED, GUARDED):
        return
    tensor = tensors + row * TENSOR
    entry = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < tl.load(tensor + ENTRIES + kind)
{body}
"""


@dataclass
class EmittedTiles(Emitted):
    """Source of kernels over tiles, and what the host has to know of them."""

    #: Of each pass: whether it makes sums for rows and columns, and how many come before it of those that are not.
    gathers: list[bool]
    begins: list[int]
    statistics: list[Statistic]
    #: By pass: for what something is computed after it (rows, columns, matrices), and whether for tensors.
    between: dict[int, tuple[str, ...]]
    decisions: set[int]
    #: Kinds of entries that only a guard lets be written.
    guarded_kinds: tuple[str, ...]


def emit_tiles(
    schedule: Schedule, title: str, kinds: Kinds, stored: tuple[Stored, ...], *, guarded: bool, random: bool
) -> EmittedTiles:
    """Kernels of a schedule whose sums go over rows, columns, matrices and whole tensors."""
    emission = TileEmission(schedule, stored, random, kinds=kinds, guarded=guarded)
    program, last = schedule.program, emission.last
    passes = [emit_pass(emission, number) for number in range(last + 1)]
    stats, scalars = emission.stats(), emission.kept_figures()
    small = {key: program.state[key] for key in emission.small}
    emission.settled = max([0, *(emission.first_use[value] - 1 for value in emission.lasting)])
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
            kernels.append(filled(BETWEEN_PASSES, emission, number=number, body=block(body, 4)))
        if lines := emit_decision(emission, number):
            decisions.add(number)
            kernels.append(DECIDE.format(number=number, body=block(lines, 4)))
    if guarded:
        kernels.append(emit_keep(emission))
    statistics = [
        Statistic(kinds.find(value), emission.source(value), emission.sums[value][1]) for value in emission.gathered
    ]
    inherited = inherited_by(emission)
    statistics += [Statistic(kinds.find(value), inherits=inherited.get(value, -1)) for value in emission.lasting]
    size = f"TENSOR = tl.constexpr(GEOMETRY.value + FACTS.value * {len(statistics)})"
    words = f"{schedule}; between them, read and write {', '.join(schedule.small)}" if schedule.small else str(schedule)
    counts = [0 if emission.gathers(pass_) else len(pass_.sums) for pass_ in schedule.passes]
    return EmittedTiles(
        "\n\n".join([f'"""{title}\n\n{words}\n"""', size, *passes, *kernels]),
        list(emission.numbers),
        [pass_.sums for pass_ in schedule.passes],
        len(emission.figures),
        stats,
        scalars,
        [emission.gathers(pass_) for pass_ in schedule.passes],
        [sum(counts[:number]) for number in range(last + 2)],
        statistics,
        between,
        decisions,
        tuple(kind for kind in SMALL if guarded and any(entry_kind(emission, key) == kind for key in small)),
    )


# ---- between passes


class Between(Lines):
    """What is computed between passes for all rows, all columns or all matrices."""

    emission: TileEmission

    def __init__(self, emission: TileEmission, kind: str) -> None:
        super().__init__(emission)
        self.kind = kind

    def entry_of(self, value: Value) -> str:
        if self.emission.kinds.find(value) == self.kind:
            return "entry"
        if not any(line.startswith("matrix_entry") for line in self.lines):
            self.lines.append(f"matrix_entry = matrix_of_{self.kind}(tensor, entry)")
        return "matrix_entry"

    def text(self, value: Value) -> str:
        emission = self.emission
        if emission.kinds.find(value) == TENSOR:
            if value.op == "input":
                return emission.scalar(value)
            if value in emission.totals:
                total = f"tl.load(totals + {max(1, len(emission.totals))} * row + {emission.totals[value]})"
                return emission.counted(value, total)
            if value in emission.gathered:
                return emission.counted(value, f"tl.load(sums + first_of(tensor, {emission.gathered[value]}))")
        elif value.op == "input":
            return f"loaded({base_of(emission, value.name)} + {self.entry_of(value)}, mask)"
        elif value.is_reduction:
            place = f"sums + first_of(tensor, {emission.gathered[value]}) + {self.entry_of(value)}"
            return emission.counted(value, f"loaded({place}, mask)")
        return self.operation(value, sqrt="tl.sqrt_rn(nothing + {0})")


class TileDecision(Decision):
    """What is computed for all tensors at once."""

    emission: TileEmission

    def text(self, value: Value) -> str:
        emission = self.emission
        if value in emission.totals:
            total = (
                f"tl.load(totals + {max(1, len(emission.totals))} * row + {emission.totals[value]}, mask, other=0.0)"
            )
            return emission.counted(value, total)
        if value in emission.gathered:
            first = f"tl.load(statistic_of(tensor, {emission.gathered[value]}) + FIRST, mask, other=0)"
            return emission.counted(value, f"tl.load(sums + {first}, mask, other=0.0)")
        return super().text(value)


def emit_between(emission: TileEmission, number: int, kind: str) -> list[str]:
    """What is computed for each row, column or matrix after a pass."""
    lines, program = Between(emission, kind), emission.program
    stores = []
    for value, place in emission.lasting.items():
        if emission.kinds.find(value) == kind and emission.first_use[value] == number + 1:
            statistic = len(emission.gathered) + place
            stores.append(f"tl.store(sums + first_of(tensor, {statistic}) + entry, {lines.write(value)}, mask)")
    if number == emission.settled and not emission.guarded:
        writes = []
        for key in emission.small:
            if entry_kind(emission, key) == kind:
                i = emission.entries.index(key)
                text = f"as_stored(nothing + {lines.write(program.state[key])}, 0.0, S{i}_DTYPE, False)"
                writes.append(f"tl.store({base_of(emission, key)} + entry, {text}, mask)")
        if writes:
            stores += ["if is_allowed(allowed, ALLOWED):", *indented(writes, 4)]
    return [*lines.lines, *stores]


def emit_decision(emission: TileEmission, number: int) -> list[str]:
    """What is computed for each tensor after a pass, for those that follow and for people to look at."""
    last = emission.last
    lines = TileDecision(emission, counted=number == last)
    stores = []
    for value in emission.figures:
        stage = emission.first_use.get(value, last) - 1
        if emission.rounds_before(value) > last:
            stage = last
        if stage == number:
            stores.append(lines.write_figure(value))
    if number == last - 1:
        stores += lines.finite_by(last)
        stores.append("tl.store(figures + T * count + row, step_number(rows, row, mask), mask)")
    return [*lines.lines, *stores]


def emit_keep(emission: TileEmission) -> str:
    body = []
    for key in emission.small:
        i, value = emission.entries.index(key), emission.program.state[key]
        place = len(emission.gathered) + emission.lasting[value]
        new = f"tl.load(sums + first_of(tensor, {place}) + entry, mask, other=0.0)"
        body += [
            f"if kind == {SMALL.index(entry_kind(emission, key))}:  # {key}",
            f"    new = {new}",
            "    if STAGE == 1:",
            f"        tl.atomic_add(failures + row, tl.sum(failures_in(new.to(S{i}_DTYPE), mask)))",
            "    else:",
            f"        tl.store({base_of(emission, key)} + entry, as_stored(new, 0.0, S{i}_DTYPE, False), mask)",
        ]
    return filled(KEEP, emission, body=block(body, 4))
