"""Which state of an optimizer belongs into the host's memory, and when it has arrived there."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thalweg.errors import OptionError
from thalweg.rules import Rule
from thalweg.storage import keys_like_parameter
from thalweg.torch.offload.lanes import LANES, Event, Lanes, is_capturing
from thalweg.torch.sharding.shards import is_distributed, local, make_dtensor, part_of

#: Bytes from which on it is worth a look whether an entry is of zeros.
LARGE = 2**20


class HostState:
    """The state of one optimizer as far as it is kept on the host."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        #: By device, when all that was sent to the host will be there.
        self.pending: dict[Lanes, Event] = {}
        self.is_stepping = False

    def wait(self) -> None:
        """Wait until all that was sent to the host is there."""
        while self.pending:
            self.pending.popitem()[1].synchronize()

    def wait_to_read(self) -> None:
        """The same for those who want to see it; a step leaves it to the device to wait."""
        if not self.is_stepping:
            self.wait()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Within: lanes wait for one another, and the host does not."""
        if self.wanted and is_capturing():
            raise OptionError(
                "offload_state=True cannot be captured in a CUDA graph, since a replay would not wait for the state: "
                "leave one of them out"
            )
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False

    def reason_against(self, name: str, p: Tensor, rule: Rule) -> str:
        """Why the state of a parameter stays beside it, "" if it goes to the host."""
        if p.device.type not in LANES:
            return f"parameters on {p.device.type} have their state there"
        if rule.needs_whole and any(part_of(name, p).groups):
            return f"the state of sharded parameters stays on the device, since {type(rule).__name__} needs them whole"
        return ""

    def keys(self, name: str, p: Tensor, rule: Rule, found: Sequence[str]) -> list[str]:
        """Those of the keys of a parameter's state whose entries are kept on the host."""
        if not self.wanted or self.reason_against(name, p, rule):
            return []
        return keys_like_parameter(rule, tuple(p.shape), found)


def with_local(entry: Tensor, held: Tensor) -> Tensor:
    """An entry with other memory in place of its own, or of this rank's shard of it."""
    if not is_distributed(entry):
        return held
    return make_dtensor(held, entry.device_mesh, entry.placements, entry.shape)  # type: ignore[attr-defined]


def on_host(entry: Tensor, large: int = LARGE) -> Tensor:
    """A new entry, or this rank's shard of it, on the host."""
    held = local(entry)
    if held.nbytes < large or not hasattr(mmap, "MAP_PRIVATE") or held.any():
        return with_local(entry, held.cpu())
    # Zeros, as new state is, have no pages before they are written: those in which they are pinned are the first.
    memory = mmap.mmap(-1, held.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    dense = torch.empty_like(held, device="meta")  # whose elements lie side by side, in whatever order
    return with_local(entry, torch.frombuffer(memory, dtype=held.dtype).as_strided(dense.shape, dense.stride()))


def move_entry(entry: Tensor, device: object) -> Tensor:
    """An entry, or this rank's shard of it, on another device."""
    return with_local(entry, local(entry).to(device))  # type: ignore[call-overload]
