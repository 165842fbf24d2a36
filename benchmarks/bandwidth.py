"""How fast these cores move memory, measured beside every step.

The yardstick is torch's fused AdamW over four arrays of 256 MiB each: of everything tried it moves the most. It reads
four numbers and writes three in place, once each, and all 28 bytes are counted. What was found on the way, on 2 cores
with 300 MiB of third-level cache, in rounds that others left alone:

- a single stream does not saturate: ``x.mul_(c)`` over 1 GiB moved 36 to 38 GB/s, ``y += a z`` 36 to 37, fused SGD with
  momentum 41, fused AdamW 45 to 47. With ``mul_`` as the yardstick AdamW would reach 120% of what is possible;
- one thread moves about half of what two do: the cores are the limit, and all of them are needed;
- ``mul_``, ``add_`` and numpy's multiply by two Python threads came out about alike, and so did 1, 2 and 3 GiB, and
  pages of 4 KiB and of 2 MiB;
- reading alone (a dot product) moved 28 to 29, since written lines need not be waited for. Steps that read more than
  AdamW does for each number they write cannot reach the yardstick;
- a copy is slower too. It also fetches the lines that it overwrites, and those bytes are not counted.

``python benchmarks/bandwidth.py`` measures these for one thread and for all, at several sizes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from quiet import undisturbed

GIB = 2**30


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Bandwidth:
    """Passes over an array much larger than the caches, which also leave nothing of anyone else in them. In GB/s."""

    def __init__(self, size: int = GIB) -> None:
        self._array = torch.full((size // 4,), 1e-3)
        self._left, self._right = self._array.chunk(2)
        self._gigabytes = 1e-9 * size
        p, g, m, v = self._array.chunk(4)
        p.grad = g
        self._adamw = torch.optim.AdamW([p], lr=0.0, fused=True)
        self._adamw.state[p] = {"step": torch.tensor(0.0), "exp_avg": m, "exp_avg_sq": v}

    def update(self) -> float:
        """The yardstick: read four quarters of the array and write three of them."""
        return 7 / 4 * self._gigabytes / timed(self._adamw.step)

    def scale(self) -> float:
        """Read and write the array in one stream."""
        return 2 * self._gigabytes / timed(lambda: self._array.mul_(1.0))

    def copy(self) -> float:
        """Copy one half to the other: read and written bytes are counted, not the lines fetched to be overwritten."""
        return self._gigabytes / timed(lambda: self._right.copy_(self._left))

    def read(self) -> float:
        """Read both halves at a time."""
        return self._gigabytes / timed(lambda: torch.dot(self._left, self._right))


def main(sizes: Sequence[int] = (GIB // 4, GIB, 2 * GIB), repeats: int = 9) -> None:
    """Does the yardstick saturate? Sizes, threads, and the other kernels, in GB/s: median and best."""
    sys.stdout.write("| threads | MiB | fused AdamW | mul_ | copy | read |\n|---|---|---|---|---|---|\n")
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        for size in sizes:
            bandwidth = Bandwidth(size)
            measures = (bandwidth.update, bandwidth.scale, bandwidth.copy, bandwidth.read)
            passes, _ = undisturbed(lambda measures=measures: [measure() for measure in measures], repeats)
            kinds = zip(*(each.result for each in passes), strict=True)
            shown = " | ".join(f"{statistics.median(kind):.1f} (best {max(kind):.1f})" for kind in kinds)
            sys.stdout.write(f"| {threads} | {size // 2**20} | {shown} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
