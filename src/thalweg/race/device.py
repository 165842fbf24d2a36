"""Where tasks in torch run: what differs between a CPU and a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from thalweg.errors import CommandError
from thalweg.show.extras import extra


class Device:
    """A device by its name, such as cpu, cuda or cuda:1; memory is counted from here on."""

    def __init__(self, name: str) -> None:
        with extra("torch"):
            import torch

        self.name = name
        try:
            self.kind = torch.device(name).type
        except RuntimeError:
            raise CommandError(f"there is no device {name!r}: try cpu or cuda") from None
        self.cuda: Any = torch.cuda if self.kind == "cuda" else None
        if self.cuda is not None and not self.cuda.is_available():
            raise CommandError(f"there is no device {name!r}: torch finds no CUDA device here; try cpu")
        if self.cuda is not None:
            gc.collect()  # so that memory of an earlier training does not count
        self.occupied = 0 if self.cuda is None else self.cuda.memory_allocated(name)

    def about(self) -> dict[str, str]:
        """What a record says of it."""
        return {} if self.cuda is None else {"gpu": self.cuda.get_device_name(self.name)}

    def wait(self) -> None:
        """Return when all that was begun is done."""
        if self.cuda is not None:
            self.cuda.synchronize(self.name)

    def forget_peak(self) -> None:
        if self.cuda is not None:
            self.cuda.reset_peak_memory_stats(self.name)

    def peak_bytes(self) -> int | None:
        """The most memory in use since ``forget_peak``, without what was occupied before; None where nobody counts."""
        return None if self.cuda is None else int(self.cuda.max_memory_allocated(self.name)) - self.occupied

    @contextmanager
    def seeded(self, seed: int, step: int) -> Iterator[None]:
        """Random numbers of torch that depend on seed and step; afterwards those of the caller go on as before."""
        import torch

        with torch.random.fork_rng(devices=[] if self.cuda is None else [self.name]):
            torch.manual_seed(seed * 1_000_003 + step)
            yield

    def moved(self, batch: Any) -> Any:
        """A batch on the device: a tensor, or tuples, lists and dicts of them."""
        if isinstance(batch, (tuple, list)):
            parts = [self.moved(part) for part in batch]
            # named tuples want them singly
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        if isinstance(batch, dict):
            return {key: self.moved(part) for key, part in batch.items()}
        return batch.to(self.name) if hasattr(batch, "to") else batch

    def mixed_precision(self) -> AbstractContextManager[Any]:
        """Products in bfloat16 on a GPU."""
        import torch

        return nullcontext() if self.cuda is None else torch.autocast(self.kind, torch.bfloat16)
