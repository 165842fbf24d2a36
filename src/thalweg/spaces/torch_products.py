"""Products of float32 matrices on GPUs in the precision that a rule asks for, whatever the switch of the process says.

torch has one switch for all products of a process and none for one of them. So it is set while a product is launched,
and put back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: Two optimizers in two threads do not put back what the other has set.
SWITCHING = threading.RLock()


@contextmanager
def in_precision(precision: str | None, x: Tensor) -> Iterator[None]:
    """Launch products of tensors like x in this precision, "float32" or "tf32"; None: as the switch is."""
    if precision is None or x.device.type != "cuda" or x.dtype != torch.float32:
        yield
        return
    switch = torch.backends.cuda.matmul
    name: str = "allow_tf32"
    wanted: bool | str = precision == "tf32"
    if hasattr(switch, "fp32_precision"):  # torch 2.9 and newer, where reading the older one may raise
        name, wanted = "fp32_precision", "tf32" if precision == "tf32" else "ieee"
    with SWITCHING:
        before = getattr(switch, name)
        if before == wanted:
            yield
            return
        setattr(switch, name, wanted)
        try:
            yield
        finally:
            setattr(switch, name, before)
