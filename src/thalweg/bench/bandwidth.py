"""How fast this device moves memory, measured beside every step.

On CPUs the yardstick is torch's fused AdamW over four arrays of 256 MiB each: of everything tried it moves the most. It
reads four numbers and writes three in place, once each, and all 28 bytes are counted. What was found on the way, on 2
cores with 300 MiB of third-level cache, in rounds that others left alone:

- a single stream does not saturate: ``x.mul_(c)`` over 1 GiB moved 36 to 38 GB/s, ``y += a z`` 36 to 37, fused SGD with
  momentum 41, fused AdamW 45 to 47. With ``mul_`` as the yardstick AdamW would reach 120% of what is possible;
- one thread moves about half of what two do: the cores are the limit, and all of them are needed;
- ``mul_``, ``add_`` and numpy's multiply by two Python threads came out about alike, and so did 1, 2 and 3 GiB, and
  pages of 4 KiB and of 2 MiB;
- reading alone (a dot product) moved 28 to 29, since written lines need not be waited for. Steps that read more than
  AdamW does for each number they write cannot reach the yardstick;
- a copy is slower too. It also fetches the lines that it overwrites, and those bytes are not counted.

On GPUs one stream does saturate, and AdamW does not: the yardstick is an array that is scaled in place. Without torch,
numpy scales an array in place, in as many threads as there are cores.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from thalweg.bench.devices import Device, threads

#: Bytes, much more than caches hold: whoever is measured next finds nothing of its own in them.
SIZE = 2**30

#: Bytes a second of one pass over the array.
Measure = Callable[[], float]


@dataclass(frozen=True)
class Yardstick:
    """Passes over an array much larger than the caches."""

    name: str
    update: Measure
    #: Other ways to go through memory, for information.
    others: dict[str, Measure] = field(default_factory=dict)


def yardstick(device: Device, size: int | None = None) -> Yardstick:
    """The one that moves the most of those that can be had here."""
    size = size or SIZE
    return torch_yardstick(device, size) if importlib.util.find_spec("torch") else numpy_yardstick(device, size)


def torch_yardstick(device: Device, size: int) -> Yardstick:
    import torch

    array = torch.full((size // 4,), 1e-3, device=device.name)
    left, right = array.chunk(2)
    p, g, m, v = array.chunk(4)
    p.grad = g
    adamw = torch.optim.AdamW([p], lr=0.0, fused=True)
    adamw.state[p] = {"step": torch.tensor(0.0, device=device.name), "exp_avg": m, "exp_avg_sq": v}

    def passes(action: Callable[[], object], moved: float) -> Measure:
        def several() -> None:
            for _ in range(device.calls):
                action()

        return lambda: device.calls * moved / device.timed(several)

    measures = {
        "torch.optim.AdamW(fused=True)": passes(adamw.step, 7 / 4 * size),
        "scaling in place": passes(lambda: array.mul_(1.0), 2 * size),
        "a copy": passes(lambda: right.copy_(left), size),
        "reading alone": passes(lambda: torch.dot(left, right), size),
    }
    chosen = "torch.optim.AdamW(fused=True)" if device.name == "cpu" else "scaling in place"
    return Yardstick(chosen, measures.pop(chosen), measures)


def numpy_yardstick(device: Device, size: int) -> Yardstick:
    import numpy as np

    parts = np.array_split(np.full(size // 4, 1e-3, np.float32), threads())
    pool = ThreadPoolExecutor(len(parts))

    def scale() -> None:
        for done in [pool.submit(np.multiply, part, np.float32(1), out=part) for part in parts]:
            done.result()

    return Yardstick("numpy.multiply in place", update=lambda: 2 * size / device.timed(scale))
