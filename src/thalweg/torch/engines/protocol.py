"""What every engine does in a step, whether its code is written by hand, derived from a rule, or torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from thalweg.settings import Setting
from thalweg.torch.engines.bucket import Bucket
from thalweg.torch.sharding.lockstep import Computation

#: Refuses a parameter whose state does not fit its setting.
CheckState: TypeAlias = Callable[[str, Tensor, Setting], None]
#: By name, what gives the statistics of a parameter's last step.
Statistics: TypeAlias = dict[str, Callable[[], dict[str, Any]]]


class Engine(Protocol):
    """An engine of one optimizer. Tables and buffers are kept from step to step."""

    def prepare(self, buckets: Sequence[Bucket], check_state: CheckState) -> None:
        """Lay out a step of these buckets; nothing is written. State that is new is checked."""

    def measure(self, on_nonfinite: str) -> Iterable[Computation]:
        """All that comes before writing; the computations yield the sums to be completed over ranks.

        on_nonfinite: unless it is "propagate", nothing is written before all is known to be finite.
        """

    def nonfinite(self) -> list[str]:
        """The parameters whose step is not finite, after :meth:`measure` with "raise". Waits for the device."""

    def write(self) -> Statistics:
        """Write parameters and state, in place."""

    def release(self, *, taken: bool) -> None:
        """Let go of gradients and of what one step alone has. taken: whether it was written."""
