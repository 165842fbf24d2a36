"""Processes that form one process group and answer one question after the other, all of them the same."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

#: Seconds that an answer may take.
LIMIT = 120.0


class Silence(Enum):
    """Why a rank gives no answer."""

    ENDED = "ended without an answer"
    BUSY = "still at work, or waiting for another"


class Ranks:
    """Some ranks, started when they are first asked, and anew when they are asked after their end."""

    def __init__(
        self, size: int, reply: Callable[[Any], Any], *, preload: Sequence[str] = (), message_limit: float = LIMIT
    ) -> None:
        """reply: what a rank calls with a question; a function of a module. preload: modules imported once for all.

        message_limit: seconds after which an unanswered message is an error in the rank that waits for it.
        """
        self.size = size
        self.reply = reply
        self.preload = preload
        self.message_limit = message_limit
        self.processes: list[tuple[Any, Connection]] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def ask(self, question: bytes, *, patience: float, hurries: Callable[[Any], bool]) -> list[Any]:
        """What each rank answers, or why it does not.

        question: pickled, so that no rank is asked what cannot be sent. patience: seconds that other ranks have after
        one has ended, or has given an answer that hurries.
        """
        if not self.processes:
            self.start()
        for _, pipe in self.processes:
            pipe.send_bytes(question)
        answers: list[Any] = [Silence.BUSY] * self.size
        waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self.processes)}
        deadline = time.monotonic() + LIMIT
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = self.processes[rank][1].recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = Silence.ENDED
                if answers[rank] is Silence.ENDED or hurries(answers[rank]):
                    deadline = min(deadline, time.monotonic() + patience)
        return answers

    def start(self) -> None:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context: Any = multiprocessing.get_context(method)
        context.set_forkserver_preload(list(self.preload))
        self.folder = tempfile.TemporaryDirectory()
        meeting = str(Path(self.folder.name, "meeting"))
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            given = theirs, self.reply, rank, self.size, meeting, self.message_limit
            process = context.Process(target=serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self.processes.append((process, ours))

    def close(self) -> None:
        for process, connection in self.processes:
            connection.close()
            process.kill()
            process.join()
        self.processes = []
        if self.folder is not None:
            self.folder.cleanup()


def serve(
    connection: Connection, reply: Callable[[Any], Any], rank: int, size: int, meeting: str, message_limit: float
) -> None:
    """What a rank does: form the group, then answer one question after the other."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", timedelta(seconds=message_limit), world_size=size, rank=rank)
    while True:
        try:
            question = connection.recv_bytes()
        except EOFError:  # nothing more is asked
            return
        connection.send(reply(pickle.loads(question)))
