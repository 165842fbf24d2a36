"""Stepping each parameter as soon as its gradient is ready, so that gradients need not all exist at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

from torch import Tensor, nn

from thalweg.errors import OptionError, ParameterError
from thalweg.torch.optimizer import Optimizer


class InBackward:
    """Says that parameters are stepped in the backward pass, until :meth:`remove` (or the end of a ``with``)."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.accumulating = False
        stepped = [p for p in optimizer.parameters() if p.requires_grad]
        self.handles = [p.register_post_accumulate_grad_hook(self._ready) for p in stepped]  # type: ignore[no-untyped-call]

    def _ready(self, p: Tensor) -> None:
        if not self.accumulating:
            self.optimizer.step_parameter(p)
            setattr(self.optimizer, "_opt_called", True)  # noqa: B010  so that schedulers know that steps are taken
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

    ``loss.backward()`` is then the whole step; ``optimizer.step()`` finds no gradients and does
    nothing. Learning rates are read from the groups at that moment, so that schedulers work as ever.
    """
    if not isinstance(optimizer, Optimizer):
        raise ParameterError(f"step_in_backward needs an optimizer of thalweg.torch, got {type(optimizer).__name__}")
    if any(group["max_grad_norm"] is not None for group in optimizer.param_groups):
        raise OptionError(
            "max_grad_norm needs all gradients of a step at once, and in the backward pass they never are"
        )
    if any(group["on_nonfinite"] == "skip" for group in optimizer.param_groups):
        raise OptionError(
            "on_nonfinite='skip' decides by all gradients of a step at once: use 'propagate' or 'raise' here"
        )
    known = set(optimizer.parameters())
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p not in known]
    if missing:
        raise ParameterError(
            f"parameters of the model that the optimizer does not have: {', '.join(map(repr, missing))}"
        )
    return InBackward(optimizer)
