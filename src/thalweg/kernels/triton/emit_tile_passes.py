"""Triton of one pass over tiles: what is computed once for a tile, for its rows, and for its elements."""

from __future__ import annotations

from thalweg.kernels.text import block, indented, summand
from thalweg.kernels.triton.emission import Lines, is_zero_where_nothing_is
from thalweg.kernels.triton.tile_emission import TileEmission, base_of, filled
from thalweg.programs.extents import COLUMN, ELEMENT, MATRIX, ROW, SMALL, TENSOR
from thalweg.programs.graph import Value
from thalweg.programs.schedule import Pass
from thalweg.programs.trace import GRADIENT, PARAMETER

#: Where the lanes of a tile find what they belong to, and which of them do.
ENTRIES = {
    ROW: ("row_entry", "row_mask"),
    COLUMN: ("column_entry", "inside"),
    MATRIX: ("matrix_entry", "matrix_mask"),
}
# Which lanes have a matrix, in the first tile along its rows or down its columns. Spelled without joining a scalar to a
# mask: of that the interpreter of Triton 3.9 makes a mask of whole numbers, and refuses it.
FIRST_ALONG, FIRST_DOWN = (f"behind < tl.where({place} == 0, after, 0)" for place in ("along", "down"))
PASS = """\
@triton.jit
def tile_{number}(
    tile, row, tensor, rows, gradients, sums, numbers, figures, partials, grad_scale, allowed, lr, lr_scale, count,
    tile_count, STAGE: tl.constexpr, SCALED: tl.constexpr, ALLOWED: tl.constexpr, STOCHASTIC: tl.constexpr,
    SPREAD: tl.constexpr, P_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr,{dtypes}
    GROUP: tl.constexpr, MODE: tl.constexpr, VECTOR: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    \"\"\"{words}: one tile.\"\"\"
    between, after = tl.load(tensor + BETWEEN), tl.load(tensor + AFTER)
    position, inside, behind = lanes_of(tensor, tile, MODE, VECTOR, STEPS, WIDTH)
    run, matrix = tl.load(tensor + ACROSS) * after, tl.load(tile + MATRIX).to(tl.int64)
    down, along, piece = tl.load(tile + DOWN), tl.load(tile + ALONG), tl.load(tile + PIECE)
    origin = (matrix // between) * tl.load(tensor + ROWS) * between + matrix % between  # the line of its first row
    column_entry, matrix_entry, matrix_mask = matrix * run + position, matrix * after + behind, behind < after
{once}
    first, end = tl.load(tile + FIRST_ROW), tl.load(tile + END_ROW)
    while first < end:
        i = first + tl.arange(0, LINES)[:, None, None]
        line = origin + i * between
        mask, row_mask = (i < end) & inside, (i < end) & matrix_mask
        offset, row_entry = line * run + position, line * after + behind
{each}
        first += LINES
{finally_}


@triton.jit
def pass_{number}(
    rows, gradients, tensors, tiles, sums, numbers, figures, partials, grad_scale, allowed, lr, lr_scale, count,
    tile_count, STAGE: tl.constexpr, BACKWARDS: tl.constexpr, SCALED: tl.constexpr, ALLOWED: tl.constexpr,
    GUARDED: tl.constexpr, STOCHASTIC: tl.constexpr, SPREAD: tl.constexpr,
    P_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr,{dtypes} GROUP: tl.constexpr, MODES: tl.constexpr,
    PLAIN_LINES: tl.constexpr, PLAIN_STEPS: tl.constexpr, PLAIN_WIDTH: tl.constexpr, PLAIN_VECTOR: tl.constexpr,
    COMB_LINES: tl.constexpr, COMB_STEPS: tl.constexpr, COMB_WIDTH: tl.constexpr, COMB_VECTOR: tl.constexpr,
    DEEP_LINES: tl.constexpr, DEEP_STEPS: tl.constexpr, DEEP_WIDTH: tl.constexpr, DEEP_VECTOR: tl.constexpr,
):
    \"\"\"{words}.\"\"\"
    index = tl.program_id(0)
    if BACKWARDS:  # what the last pass read is still in cache
        index = tile_count - 1 - index
    tile = tiles + index * TILE
    row = tl.load(tile + OWNER).to(tl.int64)
    if is_idle(figures, row, allowed, count, STAGE, ALLOWED, GUARDED):
        return
    tensor, mode = tensors + row * TENSOR, tl.load(tile + FORM)
{modes}
"""
#: What both of these are given.
SHARED = (
    "rows, gradients, sums, numbers, figures, partials, grad_scale, allowed, lr, lr_scale, count, tile_count, STAGE, "
    "SCALED, ALLOWED, STOCHASTIC, SPREAD, P_DTYPE, G_DTYPE,"
)


class Tile(Lines):
    """What one pass computes: once for a tile, for each block of rows, and for each of its elements."""

    emission: TileEmission

    def __init__(self, emission: TileEmission, number: int) -> None:
        super().__init__(emission)
        self.number = number
        self.once: list[str] = []
        #: What is read for rows, before all that is for elements: compilers lay out lanes as the last load wants it.
        self.rows: list[str] = []

    def let(self, value: Value, text: str) -> str:
        name, kind = super().let(value, text), self.emission.kinds.find(value)
        if kind not in (ROW, ELEMENT):
            self.once.append(self.lines.pop())
        elif kind == ROW and (self.number or value.op == "input"):
            self.rows.append(self.lines.pop())
        return name

    def base(self, name: str, text: str) -> str:
        """An address that is found once."""
        if f"{name} = {text}" not in self.once:
            self.once.append(f"{name} = {text}")
        return name

    def text(self, value: Value) -> str:
        kind = self.emission.kinds.find(value)
        if kind == TENSOR:
            if self.number:
                return self.emission.use(value, self.number)
            return self.emission.scalar(value) if value.op == "input" else self.operation(value)
        if kind in SMALL:
            entry, mask = ENTRIES[kind]
            if self.number:
                statistic = self.emission.keep(value, self.number)
                base = self.base(f"kept_{statistic}", f"sums + first_of(tensor, {statistic})")
                return f"loaded({base} + {entry}, {mask})"
            if value.op == "input":
                name = f"{self.emission.memory.short(value.name)}_base"
                return f"loaded({self.base(name, base_of(self.emission, value.name))} + {entry}, {mask})"
        if value.op == "div" and self.emission.kinds.find(value.args[0]) == ELEMENT:
            below = value.args[1]
            if self.emission.kinds.find(below) != ELEMENT:
                # one division for each tensor, row or column instead of one for each element
                return f"{self.write(value.args[0])} * {self.write(value.graph.apply('div', 1.0, below))}"
        return self.operation(value)


def emit_pass(emission: TileEmission, number: int) -> str:
    schedule, program, last, memory = emission.schedule, emission.program, emission.last, emission.memory
    pass_ = schedule.passes[number]
    lines = Tile(emission, number)
    loads = schedule.loads(number)
    if any(memory.is_coded(key) for key in (*loads, *pass_.writes)):
        groups = "groups_at(origin, first, end, between, run, along, GROUP, LINES, WIDTH)"
        lines.lines.append(f"groups, groups_mask = {groups}")
    for key in program.memory:
        name = memory.short(key)
        if key in loads or key in pass_.writes:
            place(lines, name, memory.base(key))
            if key == PARAMETER and memory.has_record:
                place(lines, "record", memory.record)
            if memory.is_coded(key):
                lines.once.append(f"{name}_scale_base = {memory.scales(key)}")
                lines.lines.append(f"{name}_scales = {name}_scale_base + groups")
        if key in loads:
            if key == GRADIENT:
                lines.once.append("factor = gradient_factor(numbers, grad_scale, SCALED)")
            if memory.is_coded(key):
                lines.lines.append(memory.read_codes(key))
                lines.let(loads[key], f"decoded({name}_codes, {name}_scale, GROUP)")
            else:
                lines.let(loads[key], f"{memory.read(key)}{' * factor' if key == GRADIENT else ''}")
    finally_ = (emit_gathering if emission.gathers(pass_) else emit_totals)(emission, lines, pass_, number)
    results = {key: lines.write(program.state[key]) for key in pass_.writes if key != PARAMETER}
    stores = memory.write_all(results)
    if any(map(memory.is_random, results)) or PARAMETER in pass_.writes:
        lines.once.append(
            "now = tl.load(figures + T * count + row)" if number == last > 0 else "now = step_number(rows, row)"
        )
    if PARAMETER not in pass_.writes:
        if stores:
            lines.lines += ["if is_allowed(allowed, ALLOWED):", *indented(stores, 4)]
    else:
        new = f"{lines.write(program.inputs[PARAMETER])} + {lines.write(program.delta)}"
        lines.once.append("failed = tl.zeros((LINES, STEPS, WIDTH), tl.float32)")
        lines.lines += memory.rounded(new)
        lines.lines += ["if STAGE == 1:", "    failed += failures_at(stored, mask)"]
        for key, text in results.items():
            lines.lines += [f"    if {memory.dtype(key)} == tl.float16:"]
            lines.lines += [f"        failed += failures_at(({text}).to({memory.dtype(key)}), mask)"]
        lines.lines += ["else:", *indented([*memory.write_rounded(), *stores], 4)]
        finally_ = [
            "if STAGE == 1:",
            "    tl.store(partials + tl.load(tile + INDEX), tl.sum(failed))",
            *(["else:", *indented(finally_, 4)] if finally_ else []),
        ]
    dtypes = "".join(f" S{i}_DTYPE," for i in range(len(emission.entries)))
    modes = []
    for form, mode in enumerate(("PLAIN", "COMB", "DEEP")):
        sizes = f"GROUP, {form}, {mode}_VECTOR, {mode}_LINES, {mode}_STEPS, {mode}_WIDTH"
        call = [f"tile_{number}(", f"    tile, row, tensor, {SHARED}{dtypes}", f"    {sizes}", ")"]
        modes += [f"if MODES // {1 << form} % 2 == 1:", f"    if mode == {form}:", *indented(call, 8)]
    return filled(
        PASS,
        emission,
        modes=block(modes, 4),
        number=number,
        words=str(pass_).capitalize() or "Sum what is known",
        once=block(lines.once, 4),
        each=block([*lines.rows, *lines.lines], 8),
        finally_=block(finally_, 4),
    )


def place(lines: Tile, name: str, base: str) -> None:
    """Lines that find the places of a block's elements."""
    lines.once.append(f"{name}_base = {base.replace('ALIGNED', 'False')}")
    lines.lines.append(f"{name}_place = {name}_base + offset")
    lines.lines.append(f"if VECTOR > 1:\n            {name}_place = tl.multiple_of({name}_place, (1, 1, 16))")


def masked(emission: TileEmission, lines: Tile, value: Value) -> str:
    """What is added up, 0 where nothing is. Each is computed once."""
    text = summand(value, lines.write(value.args[0]))
    kind = emission.source(value)
    if kind == ELEMENT and is_zero_where_nothing_is(value.args[0], emission.large):
        return text
    mask = {
        ELEMENT: "mask",
        ROW: "row_mask & (along == 0)",
        COLUMN: "inside & (down == 0)",
        MATRIX: "matrix_mask & (along == 0) & (down == 0)",
    }[kind]
    return f"tl.where({mask}, {text}, 0.0)"


def emit_totals(emission: TileEmission, lines: Tile, pass_: Pass, number: int) -> list[str]:
    """Sums over whole tensors, of which each tile has a part."""
    ends = []
    for value in pass_.sums:
        place = emission.totals[value]
        lines.once.append(
            f"sum_{place} = tl.zeros((LINES, STEPS, WIDTH), tl.float32)  # across threads at the end alone"
        )
        lines.lines.append(f"sum_{place} += {masked(emission, lines, value)}")
        ends.append(f"tl.store(partials + {place} * tile_count + tl.load(tile + INDEX), tl.sum(sum_{place}))")
    return ends


def emit_gathering(emission: TileEmission, lines: Tile, pass_: Pass, number: int) -> list[str]:
    """Sums over columns, rows, matrices and whole tensors."""
    ends: list[str] = []
    summed: dict[tuple[Value, bool], list[Value]] = {}
    for value in pass_.sums:
        summed.setdefault((value.args[0], value.is_squared), []).append(value)
    for targets in summed.values():
        source = emission.source(targets[0])
        kinds = {emission.kinds.find(value) for value in targets}
        x = f"x_{emission.gathered[targets[0]]}"
        total = f"sum_{emission.gathered[targets[0]]}"
        home = lines.lines if source in (ROW, ELEMENT) else lines.once
        text = masked(emission, lines, targets[0])
        home.append(f"{x} = {text}")
        if source == ELEMENT and kinds != {ROW}:
            lines.once.append(f"{total} = tl.zeros((LINES, STEPS, WIDTH), tl.float32)")
            home.append(f"{total} += {x}")
        elif source == ROW:
            lines.once.append(f"{total} = tl.zeros((LINES, 1, behind.shape[2]), tl.float32)")
            home.append(f"{total} += {x}")
        for value in targets:
            gather(emission, lines, ends, value, x, total)
    return ends


def gather(emission: TileEmission, lines: Tile, ends: list[str], value: Value, x: str, total: str) -> None:
    """Leave a tile's part of one sum where it belongs."""
    place, source, kind = emission.gathered[value], emission.source(value), emission.kinds.find(value)
    home = f"home_{place}"
    copy = {
        (ELEMENT, ROW): "along",
        (ELEMENT, COLUMN): "down",
        (ELEMENT, MATRIX): "down * tl.load(tensor + ALONGS) + along",
        (ROW, MATRIX): "down",
        (COLUMN, MATRIX): "along",
    }.get((source, kind), "piece")
    lines.once.append(f"{home} = sums + copy_of(statistic_of(tensor, {place}), {copy})")
    if kind == TENSOR:
        ends.append(f"tl.store({home}, tl.sum({x if source in (COLUMN, MATRIX) else total}))")
    elif (source, kind) == (ELEMENT, ROW):
        stored = f"by_place({x}, MODE)"
        lines.lines.append(f"tl.store({home} + row_entry, {stored}, row_mask)")
    elif (source, kind) == (ELEMENT, COLUMN):
        ends.append(f"tl.store({home} + column_entry, tl.sum({total}, 0)[None, :, :], inside)")
    elif (source, kind) == (ELEMENT, MATRIX):
        stored = f"by_place(tl.sum({total}, 0)[None, :, :], MODE)"
        ends.append(f"tl.store({home} + matrix_entry, {stored}, matrix_mask)")
    elif (source, kind) == (ROW, MATRIX):
        ends.append(f"tl.store({home} + matrix_entry, tl.sum({total}, 0)[None, :, :], {FIRST_ALONG})")
    else:
        stored = f"by_place({x}, MODE)"
        ends.append(f"tl.store({home} + matrix_entry, {stored}, {FIRST_DOWN})")
