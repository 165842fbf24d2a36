"""From a graph to passes over memory, parted by the sums that must be complete before anything goes on.

What is as large as a parameter costs time: each pass reads it anew. So in which pass a result is written, and whether
it is read back or computed again, is chosen by counting bytes. What is smaller (a number for each tensor, a row, a
column) is computed between passes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from thalweg.arrays import Shape
from thalweg.programs.extents import spread_shapes
from thalweg.programs.graph import Value, needed_by
from thalweg.programs.trace import PARAMETER, Program, example_of, trace
from thalweg.programs.verify import verify_schedule
from thalweg.rules import Rule
from thalweg.rules.rule import stand_in


@dataclass(frozen=True)
class Pass:
    """One way through the tensors: what is read, what is summed, what is written."""

    reads: tuple[str, ...]
    #: Reductions that are complete when all tensors have been gone through.
    sums: tuple[Value, ...]
    writes: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{verb} {', '.join(keys)}" for verb, keys in (("read", self.reads), ("write", self.writes)) if keys]
        return " and ".join(parts)


@dataclass(frozen=True)
class Schedule:
    program: Program
    passes: tuple[Pass, ...]
    #: What is smaller than a parameter, and is read and written once between passes.
    small: tuple[str, ...]

    @property
    def rounds(self) -> int:
        """How often ranks wait for one another's sums before they can go on, if tensors are sharded."""
        return len(self.passes) - 1

    def count_bytes(self, size: Mapping[str, int]) -> int:
        """Bytes that go to memory or come from it. size: of p, g and each entry of the state."""
        large = sum(size[name] for pass_ in self.passes for name in (*pass_.reads, *pass_.writes))
        return large + sum(2 * size[name] for name in self.small)

    def loads(self, number: int) -> dict[str, Value]:
        """What a pass reads, by name: as it was before the step, or as an earlier pass has written it."""
        program, written = self.program, {key for pass_ in self.passes[:number] for key in pass_.writes}
        reads = self.passes[number].reads
        return {key: program.state[key] if key in written else program.inputs[key] for key in reads}

    def __str__(self) -> str:
        """In words: what each pass reads and writes."""
        return "; then ".join(map(str, self.passes))


def schedule(
    program: Program,
    size: Mapping[str, int],
    *,
    exact: Iterable[str] = (),
    guarded: bool = False,
    complete: bool = False,
) -> Schedule:
    """The passes that move the fewest bytes.

    size: bytes of p, g and each entry of the state. exact: entries that are stored in the precision of the arithmetic,
    so that reading them back gives what was written. guarded: nothing is written before all is known to be finite.
    complete: all sums are complete before the last pass, those that are for people to look at too.
    """
    all_axes = program.memory[PARAMETER]
    small = tuple(key for key in program.state if program.memory[key] != all_axes)
    large = {key: value for key, value in program.results.items() if key not in small}
    depth = depths(program)
    finite = rounds_before([program.finite], depth) if guarded else 0
    # p + delta reads p; a result cannot be written before its sums are known
    earliest = {key: max(rounds_before([value], depth), finite) for key, value in large.items()}
    every_sum = reductions_of(program)
    last = max(*earliest.values(), rounds_before(every_sum, depth) if complete else 0)
    # what is small is written when the last pass is over
    last = max(last, rounds_before([program.state[key] for key in small], depth) - 1)
    earliest[PARAMETER] = last  # a step that fails on the way leaves parameters as they were
    waited_for = reductions_before([*program.results.values(), *([program.finite] if guarded else [])])
    waited_for |= set(every_sum) if complete else set()
    free = [value for value in every_sum if value not in waited_for]
    best: tuple[tuple[int, int], tuple[Pass, ...]] | None = None
    for chosen in itertools.product(*(range(first, last + 1) for first in earliest.values())):
        written = dict(zip(earliest, chosen, strict=True))
        passes = lay_out(program, written, last, depth, waited_for, free, set(exact), size)
        if passes is None:
            continue
        cost = Schedule(program, passes, ()).count_bytes(size)
        # of equals, the one that writes early: less is left for the end
        rank = cost, sum(written.values())
        if best is None or rank < best[0]:
            best = rank, passes
    assert best is not None, "to write everything in the last pass is always possible"
    chosen_schedule = Schedule(program, best[1], small)
    verify_schedule(chosen_schedule, set(exact), guarded=guarded, complete=complete)
    return chosen_schedule


def lay_out(
    program: Program,
    written: Mapping[str, int],
    last: int,
    depth: Mapping[Value, int],
    waited_for: set[Value],
    free: Sequence[Value],
    exact: set[str],
    size: Mapping[str, int],
) -> tuple[Pass, ...] | None:
    """Passes that write each result in the chosen pass; None if a pass would need what is overwritten by then."""
    sums: list[list[Value]] = [[] for _ in range(last + 1)]
    for value in sorted(waited_for, key=lambda value: value.index):
        sums[depth[value]].append(value)
    passes: list[tuple[str, ...] | None] = []
    for number in range(last + 1):
        passes.append(reads_of(program, written, number, sums[number], exact, size))
        if passes[-1] is None:
            return None
    for value in free:  # for people to look at, and nothing waits for it: wherever that costs least
        places = []
        for number in range(depth[value], last + 1):
            reads = reads_of(program, written, number, [*sums[number], value], exact, size)
            if reads is not None:
                places.append((sum(size[name] for name in reads) - bytes_of(passes[number], size), number, reads))
        if not places:
            return None
        _, number, reads = min(places)
        sums[number].append(value)
        passes[number] = reads
    order = {name: place for place, name in enumerate(program.memory)}
    return tuple(
        Pass(
            tuple(sorted(reads or (), key=order.__getitem__)),
            tuple(sums[number]),
            tuple(sorted((key for key, place in written.items() if place == number), key=order.__getitem__)),
        )
        for number, reads in enumerate(passes)
    )


def bytes_of(names: Iterable[str] | None, size: Mapping[str, int]) -> int:
    return sum(size[name] for name in names or ())


def reads_of(
    program: Program,
    written: Mapping[str, int],
    number: int,
    sums: Sequence[Value],
    exact: set[str],
    size: Mapping[str, int],
) -> tuple[str, ...] | None:
    """What a pass has to read for its sums and results; None if that is overwritten, or was rounded when written."""
    targets: list[object] = [arg for value in sums for arg in value.args]
    targets += [program.results[key] for key, place in written.items() if place == number]
    gone = {key for key, place in written.items() if place < number}
    results = {value: key for key, value in program.state.items() if key in gone and key in exact}
    choices = []
    for chosen in subsets([value for value in results if isinstance(value, Value)]):
        names = leaves(program, targets, stop=chosen)
        if not names & gone:
            choices.append(names | {results[value] for value in chosen if value in reach(program, targets, chosen)})
    if written[PARAMETER] == number:
        choices = [names | {PARAMETER} for names in choices if PARAMETER not in gone]
    return tuple(min(choices, key=lambda names: (bytes_of(names, size), sorted(names)))) if choices else None


def subsets(values: Sequence[Value]) -> Iterator[set[Value]]:
    for count in range(len(values), -1, -1):
        yield from map(set, itertools.combinations(values, count))


def reach(program: Program, targets: Iterable[object], stop: set[Value]) -> set[Value]:
    """The values as large as a parameter that targets are computed from, up to those in ``stop`` and to sums."""
    all_axes = program.memory[PARAMETER]
    reached: set[Value] = set()
    waiting = [value for value in targets if isinstance(value, Value)]
    while waiting:
        value = waiting.pop()
        if value in reached or value.extent != all_axes:
            continue
        reached.add(value)
        if value not in stop:
            waiting += value.values
    return reached


def leaves(program: Program, targets: Iterable[object], stop: set[Value]) -> set[str]:
    """The names of the inputs as large as a parameter that targets are computed from."""
    return {v.name for v in reach(program, targets, stop) if v.op == "input" and v not in stop and v.name}


def depths(program: Program) -> dict[Value, int]:
    """For each value how many rounds of sums come before it can be computed."""
    depth: dict[Value, int] = {}
    for value in program.graph.values:  # in the order in which they were computed
        depth[value] = max((depth[arg] + arg.is_reduction for arg in value.values), default=0)
    return depth


def rounds_before(values: Iterable[object], depth: Mapping[Value, int]) -> int:
    return max((depth[value] + value.is_reduction for value in values if isinstance(value, Value)), default=0)


def reductions_before(values: Iterable[object]) -> set[Value]:
    return {value for value in needed_by(values) if value.is_reduction}


def reductions_of(program: Program) -> list[Value]:
    """All reductions that are needed for something."""
    return sorted((value for value in program.needed if value.is_reduction), key=lambda value: value.index)


def needs_sums(rule: Rule, shape: Shape) -> bool:
    """Whether a step of a parameter depends on sums; some are for people to look at alone."""
    return example_needs_sums(stand_in(rule), example_of(rule, shape))


@functools.lru_cache(maxsize=256)
def example_needs_sums(rule: Rule, shape: Shape) -> bool:
    program = trace(rule, shape, spread_shapes(rule.entries(shape), shape))
    return bool(reductions_before([program.delta, *program.state.values()]))
