"""Ranks for tests: processes that form one process group and run many cases in it.

A case is a function of a module in this folder. Every rank calls it with the same arguments, and the test gets what
each of them answered. Where a rank fails, all are ended, so that no test waits for a message that never comes; the next
case begins with new ones.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

#: Seconds that a case may take, and that other ranks may take to answer after one has failed.
LIMIT, PATIENCE = 120.0, 5.0
#: Seconds after which a message that nobody answers is an error in the rank that waits for it.
MESSAGE_LIMIT = 60


class World:
    """Some ranks, started when they are first needed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks: list[tuple[Any, Connection]] = []

    def run(self, case: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """What each rank answers; fails with the words of all ranks if one of them does."""
        if not self.ranks:
            self.start()
        for _, connection in self.ranks:
            connection.send((case.__module__, case.__name__, arguments, named))
        answers = self.answers()
        if all(fine for fine, _ in answers):
            return [answer for _, answer in answers]
        self.stop()
        words = "\n".join(f"rank {rank}: {'fine' if fine else said}" for rank, (fine, said) in enumerate(answers))
        raise AssertionError(f"{case.__name__} on {self.size} ranks\n{words}")

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.tensor", "thalweg.torch"])  # imported once for all ranks
        meeting = os.path.join(tempfile.mkdtemp(), "ranks")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, self.size, meeting), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append((process, ours))

    def answers(self) -> list[tuple[bool, Any]]:
        found: dict[int, tuple[bool, Any]] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self.ranks)}
        deadline = time.monotonic() + LIMIT
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    found[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    found[rank] = False, "ended without an answer"
                if not found[rank][0]:
                    deadline = min(deadline, time.monotonic() + PATIENCE)
        return [found.get(rank, (False, "still at work, or waiting for another")) for rank in range(self.size)]

    def stop(self) -> None:
        for process, connection in self.ranks:
            connection.close()
            process.kill()
            process.join()
        self.ranks = []


@functools.cache
def world(size: int) -> World:
    """The ranks that serve this run of the tests."""
    return World(size)


def serve(connection: Connection, rank: int, size: int, meeting: str) -> None:
    """What a rank does: form the group, then one case after the other."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=MESSAGE_LIMIT),
    )
    while True:
        try:
            module, function, arguments, named = connection.recv()
        except EOFError:  # the tests are over
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                answer = getattr(importlib.import_module(module), function)(*arguments, **named)
            connection.send((True, answer))
        except BaseException:
            connection.send((False, traceback.format_exc()))
