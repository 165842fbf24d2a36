"""What all kernels that are printed from rules have around their statements."""

from __future__ import annotations

from thalweg.kernels.text import indented

#: What every pass is given: by each of its programs, and to compile it.
GIVEN = "numbers, figures, partials, grad_scale, allowed, lr, lr_scale, count, parts"
FLAGS = ["STAGE", "SCALED", "ALLOWED", "GUARDED", "STOCHASTIC", "SPREAD", "P_DTYPE", "G_DTYPE", "GROUP"]
CONSTANTS = """\
STAGE: tl.constexpr, SCALED: tl.constexpr, ALLOWED: tl.constexpr, GUARDED: tl.constexpr, STOCHASTIC: tl.constexpr,
    SPREAD: tl.constexpr, P_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, GROUP: tl.constexpr"""

CHUNK_PASS = f"""\
@triton.jit
def pass_{{number}}(
    rows, gradients, chunks, {GIVEN},
    {CONSTANTS},
    BACKWARDS: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,{{dtypes}}
):
    \"\"\"{{words}}.\"\"\"
    part = tl.program_id(0)
    if BACKWARDS:  # what the last pass read is still in cache
        part = parts - 1 - part
    row = tl.load(chunks + 2 * part)
    if is_idle(figures, row, allowed, count, STAGE, ALLOWED, GUARDED):
        return
    first = tl.load(chunks + 2 * part + 1).to(tl.int64) * CHUNK
    left = tl.multiple_of(tl.load(rows + row * COLUMNS + SIZE) - first, GROUP)
{{bases}}
    for RAGGED in tl.static_range(2):  # a chunk that is full needs no mask, and is read and written in wider pieces
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
GROUPS_OF_CHUNKS = [
    "groups, groups_mask = tl.arange(0, PIECE // GROUP), None",
    "if RAGGED:",
    "    groups_mask = groups < (left - begin) // GROUP",
    "groups += (first + begin) // GROUP",
]
GROUPS_OF_TILES = ["groups, groups_mask = groups_at(origin, first, end, between, run, along, GROUP, LINES, WIDTH)"]
TILE_PASS = f"""\
@triton.jit
def tile_{{number}}(
    tile, part, row, tensor, rows, gradients, sums, {GIVEN},
    {CONSTANTS},{{dtypes}}
    MODE: tl.constexpr, VECTOR: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr,
):
    \"\"\"{{words}}: one tile.\"\"\"
    between, after = tl.load(tensor + BETWEEN), tl.load(tensor + AFTER)
    position, inside, behind = lanes_of(tensor, tile, MODE, VECTOR, STEPS, WIDTH)
    run, matrix = tl.load(tensor + ACROSS) * after, tl.load(tile + MATRIX).to(tl.int64)
    down, along, piece = tl.load(tile + DOWN), tl.load(tile + ALONG), tl.load(tile + PIECE)
    origin = (matrix // between) * tl.load(tensor + ROWS) * between + matrix % between  # the line of its first row
    column_entry, matrix_entry, matrix_mask = matrix * run + position, matrix * after + behind, behind < after
{{bases}}
{{once}}
    first, end = tl.load(tile + FIRST_ROW), tl.load(tile + END_ROW)
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
    rows, gradients, tensors, tiles, sums, {GIVEN},
    {CONSTANTS},
    BACKWARDS: tl.constexpr, MODES: tl.constexpr,{{dtypes}}
    PLAIN_VECTOR: tl.constexpr, PLAIN_LINES: tl.constexpr, PLAIN_STEPS: tl.constexpr, PLAIN_WIDTH: tl.constexpr,
    MIXED_VECTOR: tl.constexpr, MIXED_LINES: tl.constexpr, MIXED_STEPS: tl.constexpr, MIXED_WIDTH: tl.constexpr,
    DEEP_VECTOR: tl.constexpr, DEEP_LINES: tl.constexpr, DEEP_STEPS: tl.constexpr, DEEP_WIDTH: tl.constexpr,
):
    \"\"\"{{words}}.\"\"\"
    part = tl.program_id(0)
    if BACKWARDS:  # what the last pass read is still in cache
        part = parts - 1 - part
    tile = tiles + part * TILE
    row = tl.load(tile + OWNER).to(tl.int64)
    if is_idle(figures, row, allowed, count, STAGE, ALLOWED, GUARDED):
        return
    tensor, mode = tensors + row * TENSOR, tl.load(tile + FORM)
{{modes}}
"""
#: Which rows, columns or matrices a program has.
ENTRY = """\
    which, block = tl.load(blocks + 2 * tl.program_id(0)), tl.load(blocks + 2 * tl.program_id(0) + 1)
    row, kind = (which // KINDS).to(tl.int64), which % KINDS
    tensor = tensors + row * TENSOR
    entry = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < tl.load(tensor + ENTRIES + kind)"""
BETWEEN = f"""\
@triton.jit
def between_{{number}}(
    rows, counts, numbers, tensors, blocks, sums, totals, allowed, lr, lr_scale,
    ALLOWED: tl.constexpr,{{dtypes}} BLOCK: tl.constexpr,
):
    \"\"\"What holds for each row, column and matrix, from sums.\"\"\"
{ENTRY}
    nothing = tl.zeros((BLOCK,), tl.float32)
    elements_of_whole, rows_of_whole = tl.load(counts + 3 * row), tl.load(counts + 3 * row + 1)
    columns_of_whole = tl.load(counts + 3 * row + 2)
{{body}}
"""
DECIDE = """\
@triton.jit
def decide_{number}(
    rows, counts, numbers, tensors, sums, totals, figures, lr, lr_scale, count, BLOCK: tl.constexpr
):
    \"\"\"What holds for each tensor, from its sums.\"\"\"
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    nothing = tl.zeros((BLOCK,), tl.float32)
{body}
"""
KEEP = f"""\
@triton.jit
def keep(
    rows, tensors, blocks, sums, figures, failures, allowed, count,
    STAGE: tl.constexpr, ALLOWED: tl.constexpr, GUARDED: tl.constexpr,{{dtypes}} BLOCK: tl.constexpr,
):
    \"\"\"Write what was computed for rows and columns, or find out whether it can be stored.\"\"\"
{ENTRY}
    if is_idle(figures, row, allowed, count, STAGE, ALLOWED, GUARDED):
        return
{{body}}
"""


def modes(number: int, entries: int) -> list[str]:
    """Lines that call what goes through a tile, by the mode of its blocks."""
    lines, flags = [], ", ".join([*FLAGS, *(f"S{i}_DTYPE" for i in range(entries))])
    for form, mode in enumerate(("PLAIN", "MIXED", "DEEP")):
        sizes = ", ".join(f"{mode}_{size}" for size in ("VECTOR", "LINES", "STEPS", "WIDTH"))
        given = [f"tile, part, row, tensor, rows, gradients, sums, {GIVEN},", f"{flags},", f"{form}, {sizes},"]
        call = [f"tile_{number}(", *indented(given, 4), ")"]
        lines += [f"if MODES // {1 << form} % 2 == 1:", f"    if mode == {form}:", *indented(call, 8)]
    return lines
