"""A world of processes that runs one check of ranks after the other, and is replaced where one leaves it stuck."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from thalweg.check.ranks import Ranks, Silence
from thalweg.check.registry import ROOMS, Check, checks_of
from thalweg.check.run import FAILED, Verdict, judge, run_check
from thalweg.check.subject import subject_of
from thalweg.errors import CommandError
from thalweg.show.modules import describe_error

#: Seconds that other ranks may take to answer after the first one has.
PATIENCE = 10.0


class World:
    """Some ranks, started when they are first needed and ended when the block is left."""

    def __init__(self, size: int) -> None:
        self.ranks = Ranks(size, reply, preload=[f"thalweg.check.{room}" for room in ROOMS["ranks"]])

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: Any) -> None:
        self.ranks.end()

    def verdict(self, each: Check, given: Any, options: Mapping[str, Any], facts: Mapping[str, Any] | None) -> Verdict:
        """What the ranks say: the first failure, or what all of them say. Ranks that disagree are replaced."""
        said = self.ranks.ask(write_question(each, given, options, facts), patience=PATIENCE, hurries=lambda _: True)
        spoken = [verdict for verdict in said if isinstance(verdict, Verdict)]
        found = next((verdict for verdict in spoken if verdict.outcome == FAILED), None)
        if silent := [str(rank) for rank, verdict in enumerate(said) if isinstance(verdict, Silence)]:
            found = found or judge(each, FAILED, f"no answer of rank {', '.join(silent)}")
        if silent or len({verdict.outcome for verdict in spoken}) > 1:
            self.ranks.end()
        return found or spoken[0]


def write_question(each: Check, given: Any, options: Mapping[str, Any], facts: Mapping[str, Any] | None) -> bytes:
    """What ranks are asked, for :func:`reply`. Raises a CommandError for an optimizer that cannot be sent to them."""
    try:
        return pickle.dumps((each.name, given, dict(options), dict(facts or {})))
    except Exception as error:
        raise CommandError(
            f"{given!r} cannot be sent to other processes, which ranks=... needs ({describe_error(error)}); say where "
            "it is, as module:Class, and give options that can be pickled"
        ) from error


def reply(asked: tuple[str, Any, Mapping[str, Any], Mapping[str, Any]]) -> Verdict:
    """The verdict of a rank on a check."""
    name, given, options, facts = asked
    each = checks_of("ranks")[name]
    try:
        return run_check(each, subject_of(given, options, facts))
    except CommandError as error:
        return judge(each, FAILED, str(error))
