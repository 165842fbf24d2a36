"""How many parameters are stepped together, so that temporaries stay bounded however large a model is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

#: Elements of a list that are stepped together, so that temporaries stay under 256 MiB: LAMB has ten of
#: float32 alive at a time, and Kron's random integers count for more.
CHUNK = 256 * 2**20 // (20 * 4)
#: Elements of a list on a GPU that a rule sees whole, as one stack: batches of products want to be large, and Muon has
#: ten to twenty bytes for each element alive at a time. A fourth of it takes Muon 12 % longer on Llama 1B's matrices.
WHOLE_CHUNK = 2**27
#: The same for rules with factors, which have more alive at a time, and which are recorded with a refresh and without.
FACTORS_CHUNK = 2**25
#: Elements of a stack, so that temporaries stay under 100 MiB: Kron has eighteen of float32 alive at a time, or 25 with
#: the options that need most. A larger stack is no faster.
STACK = 2**20


def extent(elements: int, state: Iterable[int]) -> int:
    """What a parameter counts for: its elements, or those of a dense factor that is larger."""
    return max(elements, *state, 1)


def pieces(extents: Iterable[int], limit: int) -> Iterator[range]:
    """Neighbours that are stepped together: of at most ``limit`` in all, or one that is larger."""
    start = end = total = 0
    for size in extents:
        if end > start and total + size > limit:
            yield range(start, end)
            start, total = end, 0
        total, end = total + size, end + 1
    yield range(start, end)
