"""Does the yardstick of ``thalweg bench`` saturate? Several sizes and threads, and other ways to go through memory.

    python benchmarks/bandwidth.py

GB/s, median and best. What was found is in ``thalweg.bench.bandwidth``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

import torch

from thalweg.bench.bandwidth import torch_yardstick
from thalweg.bench.quiet import run_undisturbed
from thalweg.show.devices import Device


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[256, 1024, 2048], help="sizes (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="passes that count (default: %(default)s)")
    given = parser.parse_args(arguments)
    header: list[str] = []
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        for mib in given.mib:
            stick = torch_yardstick(Device("cpu"), mib * 2**20)
            measures = {stick.name: stick.measure, **stick.others}
            if not header:
                header = ["threads", "MiB", *measures]
                sys.stdout.write(f"| {' | '.join(header)} |\n{'|---' * len(header)}|\n")
            passes, _ = run_undisturbed(
                lambda measures=measures: [each() / 1e9 for each in measures.values()], given.repeats
            )
            kinds = zip(*(each.result for each in passes), strict=True)
            shown = " | ".join(f"{statistics.median(kind):.1f} (best {max(kind):.1f})" for kind in kinds)
            sys.stdout.write(f"| {threads} | {mib} | {shown} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
