"""Triton from a schedule: one kernel for each pass over chunks, and one for what is decided after it, by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thalweg.kernels.text import block, indented
from thalweg.kernels.triton.emission import Decision, Elements, Emission
from thalweg.kernels.triton.memory import Memory, Stored
from thalweg.programs.graph import Value
from thalweg.programs.schedule import Schedule
from thalweg.programs.trace import PARAMETER

#: Blocks that one program goes through in turn where it has much to compute, and numbers are found once for all.
BLOCKS = 4
#: Keeps reads before what follows. Compilers spare registers by reading half a block when the other half is computed.
ALL_ASKED = "tl.debug_barrier()"
ARGUMENTS = """\
    rows, gradients, chunks, numbers, figures, partials, grad_scale, allowed, lr, lr_scale, count, chunk_count,
    STAGE: tl.constexpr, BACKWARDS: tl.constexpr, SCALED: tl.constexpr, ALLOWED: tl.constexpr, GUARDED: tl.constexpr,
    STOCHASTIC: tl.constexpr, SPREAD: tl.constexpr, ALIGNED: tl.constexpr,
    P_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr,{dtypes}
    GROUP: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
"""
HEAD = """\
@triton.jit
def pass_{number}(
{arguments}):
    \"\"\"{words}.\"\"\"
    chunk = tl.program_id(0)
    if BACKWARDS:  # what the last pass read is still in cache
        chunk = chunk_count - 1 - chunk
    row = tl.load(chunks + 2 * chunk)
    if is_idle(figures, row, allowed, count, STAGE, ALLOWED, GUARDED):
        return
    first = tl.load(chunks + 2 * chunk + 1).to(tl.int64) * CHUNK
    left = tl.multiple_of(tl.load(rows + row * COLUMNS + SIZE) - first, GROUP)
{bases}
    for RAGGED in tl.static_range(2):  # a chunk that is full needs no mask, and is read and written in wider pieces
        if (left < CHUNK) == (RAGGED == 1):
            PIECE: tl.constexpr = BLOCK // PIECES if RAGGED else BLOCK
            index = tl.arange(0, PIECE)
{before}
            for begin in range(0, CHUNK, PIECE):
                mask = None
                if RAGGED:
                    mask = index < left - begin
{each}
{after}
"""
DECIDE = """\
@triton.jit
def decide_{number}(
    rows, counts, numbers, totals, figures, lr, lr_scale, count, BLOCK: tl.constexpr
):
    \"\"\"What holds for each tensor, from its sums.\"\"\"
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    nothing = tl.zeros((BLOCK,), tl.float32)
{body}
"""


@dataclass
class Emitted:
    """Source of kernels, and what the host has to know of them."""

    source: str
    #: Numbers of the options, in the order in which kernels read them behind the sign of the gradient.
    numbers: list[Value]
    #: Of each pass: the sums that it makes.
    sums: list[tuple[Value, ...]]
    figures: int
    #: By name: the figure that shows it, or the number that it always is.
    stats: dict[str, int | float]
    #: Of what the state has one number of for each tensor: the place of the entry, and the figure of its new value.
    scalars: list[tuple[int, int]]
    #: Whether some of these are known after the last pass alone.
    late: bool = field(default=False, kw_only=True)
    #: How many blocks one program goes through in turn.
    blocks: int = field(default=1, kw_only=True)


def emit(schedule: Schedule, title: str, stored: tuple[Stored, ...], *, random: bool = False) -> Emitted:
    """Kernels of a schedule whose sums all go over whole tensors. random: whether state is rounded at random."""
    emission = Emission(schedule, stored, random)
    last = len(schedule.passes) - 1
    passes = [emit_pass(emission, number) for number in range(last + 1)]
    stats, scalars = emission.stats(), emission.kept_figures()
    late = any(max(1, emission.rounds_before(emission.program.state[key])) > last for key in emission.scalars)
    decided = range(last + 1 if schedule.passes[last].sums or late else last)
    decisions = [emit_decision(emission, number, last) for number in decided]
    source = "\n\n".join([f'"""{title}\n\n{schedule}\n"""', *passes, *decisions])
    sums, blocks = [pass_.sums for pass_ in schedule.passes], BLOCKS if emission.memory.has_codes else 1
    figures = len(emission.figures)
    return Emitted(source, list(emission.numbers), sums, figures, stats, scalars, late=late, blocks=blocks)


def emit_pass(emission: Emission, number: int) -> str:
    schedule, program, memory = emission.schedule, emission.program, emission.memory
    pass_, last = schedule.passes[number], len(schedule.passes) - 1
    lines = Elements(emission, number)
    keys = [key for key in program.memory if key in (*pass_.reads, *pass_.writes)]
    lines.lines = places_of(memory, keys)
    for key, value in schedule.loads(number).items():
        lines.read(key, value)
    # all that is large is asked for before anything waits for a number
    loads, lines.lines = lines.lines, []
    if not memory.has_codes:  # with codes it keeps nothing: what is computed goes before it
        loads.append(ALL_ASKED)
    sums = {f"sum_{emission.sums[value][0]}": lines.summed(value) for value in pass_.sums}
    before = [f"{name} = tl.zeros((PIECE // TOGETHER,), tl.float32)" for name in sums]
    after = [f"tl.store(partials + {name[4:]} * chunk_count + chunk, tl.sum({name}))" for name in sums]
    adding = [f"{name} += by_neighbours({text})" for name, text in sums.items()]
    results = {key: lines.write(program.state[key]) for key in pass_.writes if key != PARAMETER}
    before.append("now = " + ("tl.load(figures + T * count + row)" if number == last > 0 else "step_number(rows, row)"))
    stores = memory.write_all(results)
    if PARAMETER not in pass_.writes:
        body = [*lines.lines, *adding]
        if stores:
            body += ["if is_allowed(allowed, ALLOWED):", *indented(stores, 4)]
    else:
        new = f"{lines.write(program.inputs[PARAMETER])} + {lines.write(program.delta)}"
        body = [*lines.lines, *memory.rounded(new), "if STAGE == 1:", "    failures += failures_in(stored, mask)"]
        for key, text in results.items():
            failed = f"    failures += failures_in({text}.to({memory.dtype(key)}), mask)"
            body += indented([f"if {memory.dtype(key)} == tl.float16:", failed], 4)
        body += ["else:", *indented([*adding, *memory.write_rounded(), *stores], 4)]
        before.append("failures = tl.zeros((PIECE // TOGETHER,), tl.float32)")
        after = ["if STAGE == 1:", "    tl.store(partials + chunk, tl.sum(failures))", *otherwise(after)]
    # numbers are found once for a chunk of several blocks; else behind what is large
    home = before if memory.has_codes else loads
    home += lines.scalars.lines
    dtypes = "".join(f" S{i}_DTYPE: tl.constexpr," for i in range(len(emission.entries)))
    return HEAD.format(
        number=number,
        arguments=ARGUMENTS.format(dtypes=dtypes),
        words=str(pass_).capitalize(),
        bases=block(bases_of(memory, keys), 4),
        before=block(before, 12),
        each=block([*loads, *body], 16),
        after=block(after, 12),
    )


def otherwise(lines: Sequence[str]) -> list[str]:
    return ["else:", *indented(lines, 4)] if lines else []


def emit_decision(emission: Emission, number: int, last: int) -> str:
    """The kernel that computes what is known after a pass, and not before."""
    final = number == last
    lines = Decision(emission, counted=final and last > 0)
    stores = []
    for value in emission.figures:
        rounds = emission.rounds_before(value)
        if max(rounds, 1) == number + 1 or (final and rounds > number):
            stores.append(lines.write_figure(value))
    if number == max(last - 1, 0):
        lines.lines += lines.finite_by(number + 1)
        if last:
            lines.lines.append("tl.store(figures + T * count + row, step_number(rows, row, mask), mask)")
    body = [*lines.lines, *stores]
    return DECIDE.format(number=number, body=block(body, 4))


def bases_of(memory: Memory, keys: Sequence[str]) -> list[str]:
    """Lines that find where a tensor begins, and the scales of its groups where there are codes."""
    lines = [f"{memory.short(key)}_base = {memory.base(key)}" for key in keys]
    if PARAMETER in keys and memory.has_record:
        lines.append(f"record_base = {memory.record}")
    return lines + [f"{memory.short(key)}_scale_base = {memory.scales(key)}" for key in keys if memory.is_coded(key)]


def places_of(memory: Memory, keys: Sequence[str]) -> list[str]:
    """Lines that find the places of a block's elements, and those of its groups, with which of these there are."""
    names = [memory.short(key) for key in keys] + ["record"] * (PARAMETER in keys and memory.has_record)
    lines = [f"{name}_place = {name}_base + {memory.first} + {memory.index}" for name in names]
    coded = [memory.short(key) for key in keys if memory.is_coded(key)]
    if coded:
        lines += ["groups, groups_mask = tl.arange(0, PIECE // GROUP), None", "if RAGGED:"]
        lines += ["    groups_mask = groups < (left - begin) // GROUP"]
    return lines + [f"{name}_scales = {name}_scale_base + (first + begin) // GROUP + groups" for name in coded]
