"""How fast this device moves memory, measured beside every step.

On CPUs the yardstick is torch's fused AdamW over four arrays of 256 MiB each. It reads four numbers and writes three in
place, once each, and all 28 bytes are counted. Of everything tried on two cores with 300 MiB of cache it moved the
most: 45 to 47 GB/s, where ``x.mul_(c)`` moved 36 to 38, fused SGD with momentum 41, a dot product, which only reads, 28
to 29. A copy is slower too, because it fetches the lines that it overwrites. One thread moves half of what two do.

On GPUs one stream saturates memory, and AdamW does not: the yardstick is an array that is scaled in place. Without
torch, numpy scales an array in place, in as many threads as there are cores.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from thalweg.show.devices import Device, count_threads

#: Bytes, much more than caches hold: the optimizer that is measured next finds nothing of its own in them.
SIZE = 2**30
#: Passes in a row on a GPU, whose host runs ahead of it.
QUEUED = 10

#: Measures bytes a second.
Measure = Callable[[], float]


@dataclass(frozen=True)
class Yardstick:
    """Passes over an array much larger than the caches."""

    name: str
    measure: Measure
    #: Other ways to go through memory, for ``benchmarks/bandwidth.py``.
    others: dict[str, Measure] = field(default_factory=dict)


def make_yardstick(device: Device, size: int = SIZE) -> Yardstick:
    """Take the one that moves the most of those that can be had here."""
    return torch_yardstick(device, size) if importlib.util.find_spec("torch") else numpy_yardstick(device, size)


def torch_yardstick(device: Device, size: int) -> Yardstick:
    import torch

    array = torch.full((size // 4,), 1e-3, device=device.name)
    left, right = array.chunk(2)
    p, g, m, v = array.chunk(4)
    p.grad = g
    adamw = torch.optim.AdamW([p], lr=0.0, fused=True)
    adamw.state[p] = {"step": torch.tensor(0.0, device=device.name), "exp_avg": m, "exp_avg_sq": v}
    passes = 1 if device.cuda is None else QUEUED

    def measuring(action: Callable[[], object], moved: float) -> Measure:
        def repeat() -> None:
            for _ in range(passes):
                action()

        return lambda: passes * moved / device.time(repeat)

    measures = {
        "torch.optim.AdamW(fused=True)": measuring(adamw.step, 7 / 4 * size),
        "scaling in place": measuring(lambda: array.mul_(1.0), 2 * size),
        "a copy": measuring(lambda: right.copy_(left), size),
        "reading alone": measuring(lambda: torch.dot(left, right), size),
    }
    chosen = "torch.optim.AdamW(fused=True)" if device.cuda is None else "scaling in place"
    return Yardstick(chosen, measures.pop(chosen), measures)


def numpy_yardstick(device: Device, size: int) -> Yardstick:
    import numpy as np

    parts = np.array_split(np.full(size // 4, 1e-3, np.float32), count_threads())
    pool = ThreadPoolExecutor(len(parts))

    def scale() -> None:
        for done in [pool.submit(np.multiply, part, np.float32(1), out=part) for part in parts]:
            done.result()

    return Yardstick("numpy.multiply in place", measure=lambda: 2 * size / device.time(scale))
