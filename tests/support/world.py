"""Ranks for tests: processes that form one process group and run many cases in it.

A case is a function of a module in this folder. Every rank calls it with the same arguments, and the test gets what
each of them answered. Where a rank fails, all are ended, so that no test waits for a message that never comes; the next
case begins with new ones.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing.forkserver
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from thalweg.check import plugin
from thalweg.check.ranks import Ranks, Silence

#: Seconds that other ranks may take to answer after one has failed.
PATIENCE = 5.0
#: Seconds after which a message that nobody answers is an error: before the limit of an answer, so that ranks tell it.
MESSAGE_LIMIT = 60
#: What ranks are forked with: each would take seconds to import it.
MODULES = ["torch.distributed.fsdp", "world_checkpoints", "world_faults", "world_messages", "world_training"]
MODULES += ["check_faulty_ranks", "mixed", "own_rules", *(f"thalweg.check.{name}" for name in plugin.MODULES["ranks"])]


def start_server() -> None:
    """Start the process that all ranks are forked from, if it is not there yet."""
    multiprocessing.forkserver.set_forkserver_preload(MODULES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # this Python forgets to give it its own
        multiprocessing.forkserver.ensure_running()


class World:
    """Some ranks, started when they are first needed."""

    def __init__(self, size: int) -> None:
        start_server()
        self.ranks = Ranks(size, reply, message_limit=MESSAGE_LIMIT)

    def run(self, case: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """What each rank answers; fails with the words of all ranks if one of them does."""
        asked = pickle.dumps((case.__module__, case.__name__, arguments, named))
        said = self.ranks.ask(asked, patience=PATIENCE, hurries=lambda answer: not answer[0])
        answers = [(False, answer.value) if isinstance(answer, Silence) else answer for answer in said]
        if all(fine for fine, _ in answers):
            return [pickle.loads(answer) for _, answer in answers]
        self.ranks.close()
        words = "\n".join(f"rank {rank}: {'fine' if fine else said}" for rank, (fine, said) in enumerate(answers))
        raise AssertionError(f"{case.__name__} on {self.ranks.size} ranks\n{words}")


@functools.cache
def world(size: int) -> World:
    """The ranks that serve this run of the tests."""
    return World(size)


def reply(asked: tuple[str, str, tuple[Any, ...], Mapping[str, Any]]) -> tuple[bool, Any]:
    """Whether a case was fine on a rank, and what it answered, pickled, or how it failed."""
    module, function, arguments, named = asked
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return True, pickle.dumps(getattr(importlib.import_module(module), function)(*arguments, **named))
    except BaseException:
        return False, traceback.format_exc()
