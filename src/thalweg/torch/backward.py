"""Stepping parameters as soon as their gradients are ready, so that gradients need not all exist at once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from types import TracebackType

from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from thalweg.errors import OptionError, ParameterError
from thalweg.torch.base import Optimizer
from thalweg.torch.sharding.shards import count_ranks, is_distributed

#: Small tensors wait for one another until their gradients have so many bytes, and are stepped together: one by one, a
#: thousand of them take a hundred times as long.
WAITING_BYTES = 2**20


class InBackward:
    """Says that parameters are stepped in the backward pass, until :meth:`remove` (or the end of a ``with``)."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.accumulating = False
        self.looked = False
        self.waiting: dict[Tensor, None] = {}
        self.waiting_bytes = 0
        stepped = [p for p in optimizer.parameters() if p.requires_grad]
        self.handles = [p.register_post_accumulate_grad_hook(self._ready) for p in stepped]  # type: ignore[no-untyped-call]

    def _ready(self, p: Tensor) -> None:
        if self.accumulating:
            return
        if not self.looked:  # a wrapper may have been made since
            refuse_replicas(self.optimizer.parameters())
            self.looked = True
        if not self.waiting:
            Variable._execution_engine.queue_callback(self._step_waiting)  # at the end of this backward pass
        self.waiting[p] = None
        self.waiting_bytes += p.numel() * p.element_size()
        if self.waiting_bytes >= WAITING_BYTES or is_distributed(p):
            self._step_waiting()

    def _step_waiting(self) -> None:
        params = tuple(p for p in self.waiting if p.grad is not None)
        self.waiting, self.waiting_bytes = {}, 0
        if params:
            self.optimizer._step_some(params)
            setattr(self.optimizer, "_opt_called", True)  # noqa: B010  so that schedulers know that steps are taken
        for p in params:
            p.grad = None

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within: gradients are added up and nothing is stepped. The next backward pass outside steps the sum."""
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before

    def remove(self) -> None:
        """Step by ``optimizer.step()`` again."""
        for handle in self.handles:
            handle.remove()

    def __enter__(self) -> InBackward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def step_in_backward(model: nn.Module, optimizer: Optimizer) -> InBackward:
    """Step each parameter when its gradient is ready, and free the gradient.

    Small ones wait until they have a MiB of gradients together, or until the backward pass ends.
    ``loss.backward()`` is then the whole step; ``optimizer.step()`` finds no gradients and does
    nothing. Learning rates are read from the groups at that moment, so that schedulers work as ever.

    ``fully_shard`` (FSDP2) reduces a gradient over ranks before it is ready; DistributedDataParallel does
    so afterwards, and is refused, here or in the first backward pass.
    """
    if not isinstance(optimizer, Optimizer):
        raise ParameterError(f"step_in_backward needs an optimizer of thalweg.torch, got {type(optimizer).__name__}")
    for name in ("max_grad_norm", "spikes"):
        if any(group.get(name) for group in optimizer.param_groups):
            raise OptionError(
                f"{name} needs all gradients of a step at once, which step_in_backward never has: leave it out, or "
                "call optimizer.step() after backward() instead"
            )
    if any(group["on_nonfinite"] == "skip" for group in optimizer.param_groups):
        raise OptionError(
            "on_nonfinite='skip' decides by all gradients of a step at once: use 'propagate' or 'raise' here"
        )
    known = set(optimizer.parameters())
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p not in known]
    if missing:
        raise ParameterError(
            f"the optimizer does not have these parameters of the model: {', '.join(map(repr, missing))}; add them to "
            "it, or set requires_grad=False"
        )
    refuse_replicas(known)
    return InBackward(optimizer)


REPLICATED = (
    "DistributedDataParallel averages gradients over ranks after they are accumulated, and step_in_backward would step "
    "before that, so ranks would drift apart: call optimizer.step() after backward() instead (DDP's buckets hold all "
    "gradients in any case), or use torch.distributed.fsdp.fully_shard (FSDP2), which reduces gradients first"
)


def refuse_replicas(params: Iterable[Tensor]) -> None:
    """Refuse parameters whose gradients a DistributedDataParallel of this process will average.

    It leaves no mark on them that Python can see, and a model does not know its wrapper. So all objects of this process
    are looked through, where there are several ranks.
    """
    if count_ranks() == 1:
        return
    ids = set(map(id, params))
    if any(id(p) in ids for p in find_averaged()):
        gc.collect()  # ignore wrappers without references
        if any(id(p) in ids for p in find_averaged()):
            raise ParameterError(REPLICATED)


def find_averaged() -> Iterator[Tensor]:
    """The parameters of every DistributedDataParallel of several ranks there is."""
    objects = gc.get_objects()
    # by type: isinstance would ask proxies for their __class__, and some of them load a library then
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, DistributedDataParallel)}
    for wrapper in [candidate for candidate in objects if type(candidate) in kinds]:
        averaged = getattr(wrapper, "_module_parameters", ())
        if averaged and wrapper.process_group.size() > 1:
            yield from averaged
