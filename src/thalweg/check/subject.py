"""Whom to check: an optimizer with its options, and what its author declares of it."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What an author declares of an optimizer, where it differs from what most of them do."""

    #: Nothing moves with a learning rate of 0.
    lr_zero_is_no_step: bool = True
    #: Only two-dimensional parameters are taken. An optimizer that refuses a vector has declared it by that.
    needs_matrices: bool = False
    #: Steps depend on other parameters too, as with clipping by a global norm.
    couples_parameters: bool = False
    #: Gradients times a power of two make the same steps.
    scale_invariant: bool = False
    #: Gradients and parameters with the opposite sign make steps with the opposite sign.
    odd: bool = False
    #: Temporary memory of a step is at most this multiple of the parameters' bytes.
    temporaries: float | None = None
    #: A step of sharded parameters takes at most so many collectives, however many parameters there are.
    collectives: int | None = None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An optimizer that is checked: checks make as many instances of it as they need."""

    name: str
    factory: Callable[..., Any]
    options: Mapping[str, Any]
    facts: Facts
    #: ``torch`` or ``optax``: which checks are run.
    kind: str

    def make(self, *params: Any, **more: Any) -> Any:
        """An instance with the subject's options, and others beside them or instead."""
        return self.factory(*params, **{**self.options, **more})


@contextlib.contextmanager
def keep_surroundings(kind: str) -> Iterator[None]:
    """Generators, warnings and torch's modes stay as they were; nothing is printed, logged or compiled meanwhile."""
    state, level = random.getstate(), logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if kind == "torch":
            import torch

            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            random.setstate(state)
            logging.disable(level)
