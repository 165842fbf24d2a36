"""A world of processes that runs one check of ranks after the other, and is replaced where one leaves it stuck."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thalweg.check.registry import ROOMS, Check, checks_of
from thalweg.check.run import FAILED, Verdict, judged, verdict_of
from thalweg.check.subject import subject_of
from thalweg.errors import CommandError

#: Seconds that a check may take, and that other ranks may take to answer after the first one has.
LIMIT, PATIENCE = 120.0, 10.0


class World:
    """Some ranks, started when they are first needed and ended when the block is left."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks: list[tuple[Any, Connection]] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def verdict(self, each: Check, given: Any, options: Mapping[str, Any], facts: Mapping[str, Any] | None) -> Verdict:
        """What the ranks say: the first failure, or what all of them say. Ranks that disagree are replaced."""
        try:
            asked = pickle.dumps((each.name, given, dict(options), dict(facts or {})))
        except Exception as error:
            raise CommandError(f"{given!r} cannot be sent to other processes; say where it is: module:Class") from error
        if not self.ranks:
            self.start()
        for _, connection in self.ranks:
            connection.send_bytes(asked)
        said = self.answers()
        spoken = [verdict for verdict in said if verdict is not None]
        found = next((verdict for verdict in spoken if verdict.outcome == FAILED), None)
        if silent := [str(rank) for rank, verdict in enumerate(said) if verdict is None]:
            found = found or judged(each, FAILED, f"no answer of rank {', '.join(silent)}")
        if silent or len({verdict.outcome for verdict in spoken}) > 1:
            self.end()
        return replace(found or spoken[0], ranks=self.size)

    def answers(self) -> list[Verdict | None]:
        """Of every rank; None where it waits for another, or has ended."""
        found: dict[int, Verdict | None] = {}
        waiting: dict[Any, int] = {connection: rank for rank, (_, connection) in enumerate(self.ranks)}
        deadline = time.monotonic() + LIMIT
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    found[rank] = self.ranks[rank][1].recv()
                except (EOFError, ConnectionResetError):
                    found[rank] = None
                deadline = min(deadline, time.monotonic() + PATIENCE)
        return [found.get(rank) for rank in range(self.size)]

    def start(self) -> None:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context: Any = multiprocessing.get_context(method)
        context.set_forkserver_preload([f"thalweg.check.{room}" for room in ROOMS["ranks"]])  # once for all ranks
        self.folder = tempfile.TemporaryDirectory()
        meeting = str(Path(self.folder.name, "meeting"))
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, self.size, meeting), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append((process, ours))

    def end(self) -> None:
        for process, connection in self.ranks:
            connection.close()
            process.kill()
            process.join()
        self.ranks = []
        if self.folder is not None:
            self.folder.cleanup()


def serve(connection: Connection, rank: int, size: int, meeting: str) -> None:
    """What a rank does: form the group, then one check after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", timedelta(seconds=LIMIT), world_size=size, rank=rank)
    checks = checks_of("ranks")
    while True:
        try:
            name, given, options, facts = connection.recv()
        except EOFError:  # nothing more is asked
            return
        try:
            found = verdict_of(checks[name], subject_of(given, options, facts))
        except CommandError as error:
            found = judged(checks[name], FAILED, str(error))
        connection.send(found)
