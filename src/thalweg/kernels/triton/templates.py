"""What all kernels that are printed from rules have around their statements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
#: Which groups of codes a block has, and which of these are inside.
GROUPS = [
    "groups, groups_mask = groups_at(",
    "    start, left, origin, first, end, between, run, along, MODE, GROUP, LINES, WIDTH",
    ")",
    "if MODE == RUN:",
    "    groups_mask = None",
]
PASS = f"""\
@triton.jit
def piece_{{number}}(
    row, piece, part, tensor, cut, start, left, {GIVEN},
    {CONSTANTS},{{dtypes}} CHUNK: tl.constexpr,
    MODE: tl.constexpr, VECTOR: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr,
):
    \"\"\"{{words}}: one piece.\"\"\"
    if MODE <= END:
        position = tl.arange(0, WIDTH)[None, None, :]
        origin, between, run, along, first, end = 0, 0, 0, 0, 0, CHUNK // WIDTH
    else:
        between, after = tl.load(tensor + BETWEEN), tl.load(tensor + AFTER)
        origin, matrix, down, along, place = piece_of(tensor, cut, piece)
        position, inside, behind = lanes_of(tensor, along, place, MODE, VECTOR, STEPS, WIDTH)
        run, height = tl.load(tensor + ACROSS) * after, tl.load(cut + HEIGHT).to(tl.int32)
        first = down * height
        end = tl.minimum(first + height, tl.load(tensor + ROWS).to(tl.int32))
        column_entry, matrix_entry, matrix_mask = matrix * run + position, matrix * after + behind, behind < after
{{bases}}
{{once}}
    while first < end:
        i = first + tl.arange(0, LINES)[:, None, None]
        if MODE <= END:
            index, mask = i * WIDTH + position, None
            if MODE == END:
                mask = index < left
        else:
            line = origin + i * between
            mask, row_mask = (i < end) & inside, (i < end) & matrix_mask
            index, row_entry = line * run + position, line * after + behind
{{each}}
        first += LINES
{{end}}


@triton.jit
def pass_{{number}}(
    {GIVEN},
    {CONSTANTS},
    BACKWARDS: tl.constexpr, CUT: tl.constexpr, MODES: tl.constexpr,{{dtypes}} CHUNK: tl.constexpr,
{{sizes}}
):
    \"\"\"{{words}}.\"\"\"
{PROGRAM}
    row = row.to(tl.int64)
    tensor = tensors + row * TENSOR
    cut = cut_of(tensor, CUT)
    if MODES % 2 == 1:  # of runs
        start = piece.to(tl.int64) * CHUNK
        left = tl.multiple_of(tl.load(rows + row * COLUMNS + SIZE) - start, GROUP)
        mode = (left < CHUNK).to(tl.int64)
    else:
        start, left, mode = 0, 0, tl.load(cut + FORM)
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


#: What forms of blocks are compiled for.
SIZES = ("VECTOR", "LINES", "STEPS", "WIDTH")


def sizes(forms: Iterable[str]) -> list[str]:
    """The sizes of blocks, as a pass takes them."""
    return [" ".join(f"{form}_{size}: tl.constexpr," for size in SIZES) for form in forms]


def modes(number: int, entries: int, forms: Mapping[str, int]) -> list[str]:
    """Lines that call what goes through a piece, by the mode of its blocks."""
    lines, flags = [], ", ".join([*FLAGS, *(f"S{i}_DTYPE" for i in range(entries)), "CHUNK"])
    for form, mode in forms.items():
        own = ", ".join(f"{form}_{size}" for size in SIZES)
        given = ["row, piece, part, tensor, cut, start, left,", f"{GIVEN},", f"{flags},", f"{mode}, {own},"]
        call = [f"piece_{number}(", *indented(given, 4), ")"]
        lines += [f"if MODES // {1 << mode} % 2 == 1:", f"    if mode == {mode}:", *indented(call, 8)]
    return lines
