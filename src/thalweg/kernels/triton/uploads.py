"""Copies of host tables on a device of torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

#: Of arrays.
TYPES = {"i": torch.int32, "q": torch.int64, "f": torch.float32}
#: Bytes up to which the driver takes a copy of the host's memory at once, so that it need not be pinned.
STAGED = 2**15
#: While a step is recorded that will be replayed: what tables are to hold when it is, and who fills them.
deferred: ContextVar[list[tuple[Uploads, Tensor, Tensor]] | None] = ContextVar("deferred", default=None)


class Uploads:
    """Copies of host tables on a device, made without waiting.

    A copy that becomes part of a CUDA graph is made again at every replay, from the same memory of the host: that is
    kept, and a spare one is laid by, since none can be had while a graph is captured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = device.type == "cuda"
        self.spare: Tensor | None = None
        self.captured: list[Tensor] = []

    def is_capturing(self) -> bool:
        return self.pinned and torch.cuda.is_current_stream_capturing()

    def empty(self, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        """Scratch memory that is kept: zeros at first, which figures of a first step show if it was refused."""
        return torch.zeros(tuple(shape), dtype=getattr(torch, dtype), device=self.device)

    def table(self, values: Tensor | array[Any], columns: int | None = None) -> Tensor:
        """A table that is made once."""
        if isinstance(values, array):
            dtype = TYPES[values.typecode]
            # a copy: what stays on the host would share the memory of the array
            values = torch.frombuffer(values, dtype=dtype).clone() if len(values) else torch.empty(0, dtype=dtype)
        if columns is not None:
            values = values.reshape(-1, columns)
        return (values.pin_memory() if self.pinned else values).to(self.device, non_blocking=True)

    def refill(self, table: Tensor, values: Sequence[int] | Tensor) -> None:
        """New numbers for a table, in place."""
        host = values if isinstance(values, Tensor) else torch.as_tensor(values, dtype=table.dtype)
        later = deferred.get()
        if later is not None:
            later.append((self, table, host.clone()))
            return
        if self.pinned:
            if not self.is_capturing():
                if host.nbytes > STAGED:
                    host = host.pin_memory()
                if self.spare is None or self.spare.numel() < host.nbytes:
                    self.spare = torch.empty(host.nbytes, dtype=torch.uint8, pin_memory=True)
            else:
                place = self.spare if self.spare is not None else torch.empty_like(host, pin_memory=True)
                host, self.spare = place.view(torch.uint8)[: host.nbytes].view(host.dtype).copy_(host), None
                self.captured.append(host)
        table.copy_(host, non_blocking=True)
