"""What is set for a whole process, kept as it is while an optimizer is tried."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import warnings
from collections.abc import Iterator


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
