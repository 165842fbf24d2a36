"""What all kernels that are printed from rules have around their statements."""

from __future__ import annotations

from thalweg.kernels.text import indented
from thalweg.kernels.triton.sums import KINDS

#: What every pass is given: by each of its programs, and to compile it.
GIVEN = """\
rows, gradients, tensors, pieces, sums, numbers, figures, partials, grad_scale, allowed, lr, lr_scale, count, parts"""
FLAGS = ["STAGE", "SCALED", "ALLOWED", "GUARDED", "STOCHASTIC", "SPREAD", "P_DTYPE", "G_DTYPE", "GROUP"]
CONSTANTS = """\
STAGE: tl.constexpr, SCALED: tl.constexpr, ALLOWED: tl.constexpr, GUARDED: tl.constexpr, STOCHASTIC: tl.constexpr,
    SPREAD: tl.constexpr, P_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, GROUP: tl.constexpr"""
PROGRAM = """\
    part = tl.program_id(0)
    if BACKWARDS:  # what the last pass read is still in cache
        part = parts - 1 - part
    row, piece = tl.load(pieces + 2 * part), tl.load(pieces + 2 * part + 1)
    if is_idle(figures, row, allowed, count, STAGE, ALLOWED, GUARDED):
        return"""
#: A pass of a rule without rows and columns: through runs of elements.
RUNS = f"""\
@triton.jit
def pass_{{number}}(
    {GIVEN},
    {CONSTANTS},
    BACKWARDS: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,{{dtypes}}
):
    \"\"\"{{words}}.\"\"\"
{PROGRAM}
    first = piece.to(tl.int64) * CHUNK
    left = tl.multiple_of(tl.load(rows + row * COLUMNS + SIZE) - first, GROUP)
{{bases}}
    for RAGGED in tl.static_range(2):  # a run that is full needs no mask, and is read and written in wider pieces
        if (left < CHUNK) == (RAGGED == 1):
            PIECE: tl.constexpr = BLOCK // PIECES if RAGGED else BLOCK
            index = tl.arange(0, PIECE)
{{once}}
            for begin in range(0, CHUNK, PIECE):
                mask = None
                if RAGGED:
                    mask = index < left - begin
{{each}}
{{end}}
"""
#: Which groups of codes a block has, and which of these are inside.
GROUPS_OF_RUNS = [
    "groups, groups_mask = tl.arange(0, PIECE // GROUP), None",
    "if RAGGED:",
    "    groups_mask = groups < (left - begin) // GROUP",
    "groups += (first + begin) // GROUP",
]
GROUPS_OF_LINES = ["groups, groups_mask = groups_at(origin, first, end, between, run, along, GROUP, LINES, WIDTH)"]
#: A pass of a rule with rows and columns: through lines.
LINES = f"""\
@triton.jit
def lines_{{number}}(
    row, piece, part, tensor, cut, {GIVEN},
    {CONSTANTS},{{dtypes}}
    MODE: tl.constexpr, VECTOR: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr,
):
    \"\"\"{{words}}: one piece.\"\"\"
    between, after = tl.load(tensor + BETWEEN), tl.load(tensor + AFTER)
    origin, matrix, down, along, place = piece_of(tensor, cut, piece)
    position, inside, behind = lanes_of(tensor, along, place, MODE, VECTOR, STEPS, WIDTH)
    run = tl.load(tensor + ACROSS) * after
    column_entry, matrix_entry, matrix_mask = matrix * run + position, matrix * after + behind, behind < after
{{bases}}
{{once}}
    height = tl.load(cut + HEIGHT).to(tl.int32)
    first = down * height
    end = tl.minimum(first + height, tl.load(tensor + ROWS).to(tl.int32))
    while first < end:
        i = first + tl.arange(0, LINES)[:, None, None]
        line = origin + i * between
        mask, row_mask = (i < end) & inside, (i < end) & matrix_mask
        offset, row_entry = line * run + position, line * after + behind
{{each}}
        first += LINES
{{end}}


@triton.jit
def pass_{{number}}(
    {GIVEN},
    {CONSTANTS},
    BACKWARDS: tl.constexpr, CUT: tl.constexpr, MODES: tl.constexpr,{{dtypes}}
    PLAIN_VECTOR: tl.constexpr, PLAIN_LINES: tl.constexpr, PLAIN_STEPS: tl.constexpr, PLAIN_WIDTH: tl.constexpr,
    MIXED_VECTOR: tl.constexpr, MIXED_LINES: tl.constexpr, MIXED_STEPS: tl.constexpr, MIXED_WIDTH: tl.constexpr,
    DEEP_VECTOR: tl.constexpr, DEEP_LINES: tl.constexpr, DEEP_STEPS: tl.constexpr, DEEP_WIDTH: tl.constexpr,
):
    \"\"\"{{words}}.\"\"\"
{PROGRAM}
    row = row.to(tl.int64)
    tensor = tensors + row * TENSOR
    cut = cut_of(tensor, CUT)
    mode = tl.load(cut + FORM)
{{modes}}
"""
#: Which rows, columns or matrices a program has, or which tensor.
ENTRY = f"""\
    which, block = tl.load(blocks + 2 * tl.program_id(0)), tl.load(blocks + 2 * tl.program_id(0) + 1)
    row, kind = (which // {len(KINDS)}).to(tl.int64), which % {len(KINDS)}
    tensor = tensors + row * TENSOR
    entry = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < tl.load(tensor + ENTRIES + kind)"""
BETWEEN = f"""\
@triton.jit
def between_{{number}}(
    rows, counts, numbers, tensors, blocks, sums, figures, allowed, lr, lr_scale, count,
    ALLOWED: tl.constexpr,{{dtypes}} BLOCK: tl.constexpr,
):
    \"\"\"What follows from sums, for each row, column, matrix and tensor.\"\"\"
{ENTRY}
    nothing = tl.zeros((BLOCK,), tl.float32)
    elements_of_whole, rows_of_whole = tl.load(counts + 3 * row), tl.load(counts + 3 * row + 1)
    columns_of_whole = tl.load(counts + 3 * row + 2)
{{body}}
"""
KEEP = f"""\
@triton.jit
def keep(
    rows, tensors, blocks, sums, figures, failures, allowed, count,
    STAGE: tl.constexpr, ALLOWED: tl.constexpr, GUARDED: tl.constexpr,{{dtypes}} BLOCK: tl.constexpr,
):
    \"\"\"Write what was computed for tensors, rows and columns, or find out whether it can be stored.\"\"\"
{ENTRY}
    if is_idle(figures, row, allowed, count, STAGE, ALLOWED, GUARDED):
        return
{{body}}
"""


def modes(number: int, entries: int) -> list[str]:
    """Lines that call what goes through a piece, by the mode of its blocks."""
    lines, flags = [], ", ".join([*FLAGS, *(f"S{i}_DTYPE" for i in range(entries))])
    for form, mode in enumerate(("PLAIN", "MIXED", "DEEP")):
        sizes = ", ".join(f"{mode}_{size}" for size in ("VECTOR", "LINES", "STEPS", "WIDTH"))
        given = ["row, piece, part, tensor, cut,", f"{GIVEN},", f"{flags},", f"{form}, {sizes},"]
        call = [f"lines_{number}(", *indented(given, 4), ")"]
        lines += [f"if MODES // {1 << form} % 2 == 1:", f"    if mode == {form}:", *indented(call, 8)]
    return lines
