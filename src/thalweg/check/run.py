"""Which checks there are, and what one of them says of an optimizer.

A check is a function ``test_*`` of a module here. Its docstring says what must hold and why it matters; its group is
its module, unless it names another.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from thalweg.check.ranks import Ranks, Silence
from thalweg.check.subject import Subject, keep_surroundings
from thalweg.errors import CommandError
from thalweg.show.arguments import split_words, suggest
from thalweg.show.extras import extra
from thalweg.show.modules import describe_error

with extra("check"):
    import pytest

Check = Callable[[Any], None]
#: The modules with the checks of a framework, and of those that several processes run together, in their order.
MODULES = {
    "torch": [
        "contract",
        "numbers",
        "state",
        "memory",
        "dtypes",
        "layouts",
        "bad_input",
        "non_finite",
        "companions",
        "devices",
    ],
    "optax": ["transformations"],
    "ranks": ["replicas", "shards", "messages", "checkpoints"],
}
PASSED, FAILED, NOT_OFFERED = "passed", "failed", "not offered"
#: Seconds that other ranks may take to answer after the first one has.
PATIENCE = 10.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a check says of an optimizer."""

    check: str
    group: str
    holds: str
    #: ``passed``, ``failed`` or ``not offered``.
    outcome: str
    #: What was seen where it failed, or why it is not offered.
    seen: str = ""


def group(name: str) -> Callable[[Check], Check]:
    """Put a check into a group that is not its module."""

    def put(check: Check) -> Check:
        vars(check)["group"] = name
        return check

    return put


def name_of(check: Any) -> str:
    return str(check.__name__).removeprefix("test_").replace("_", "-")


def group_of(check: Any) -> str:
    return getattr(check, "group", "") or module_of(check).replace("_", "-")


def module_of(check: Any) -> str:
    return str(check.__module__).rpartition(".")[2]


def is_over_ranks(check: Check) -> bool:
    """Whether several processes run it together."""
    return module_of(check) in MODULES["ranks"]


def checks_of(kind: str) -> dict[str, Check]:
    """The checks of torch, optax or ranks by their names; their modules are imported."""
    modules = [vars(importlib.import_module(f"thalweg.check.{name}")) for name in MODULES[kind]]
    return {name_of(value): value for module in modules for name, value in module.items() if name.startswith("test_")}


def choose_checks(kind: str, only: str | None = None, ranks: int = 0) -> list[Check]:
    """The checks to run, those over ranks last: all, or those that ``only`` names.

    only: names of checks or groups, such as ``state,closure-loss``. ranks: how many processes there are, or 0.
    """
    checks = list(checks_of(kind).values())
    if ranks and kind == "torch":
        checks += checks_of("ranks").values()
    if only is None:
        return checks
    asked = [word.lower().replace("_", "-").replace(" ", "-") for word in split_words(only, "--only")]
    known = names_of(checks)
    for word in asked:
        if word in known:
            continue
        if kind == "torch" and word in names_of(checks_of("ranks").values()):
            raise CommandError(f"{word} is checked by several processes: add --ranks 4")
        raise CommandError(f"there is no check or group {word!r}: {suggest(word, sorted(known))}")
    return [check for check in checks if not names_of([check]).isdisjoint(asked)]


def names_of(checks: Iterable[Check]) -> set[str]:
    """What one can ask for: checks and their groups."""
    return {name for check in checks for name in (name_of(check), group_of(check))}


def run_check(check: Check, subject: Subject) -> Verdict:
    """What a check says. Whatever it raises is a part of that, and its surroundings are kept."""
    with keep_surroundings(subject.kind):
        try:
            check(subject)
        except pytest.skip.Exception as why:
            return judge(check, NOT_OFFERED, str(why))
        except pytest.fail.Exception as what:
            return judge(check, FAILED, str(what))
        except (Exception, SystemExit) as error:
            return judge(check, FAILED, describe_error(error))
    return judge(check, PASSED)


def judge(check: Check, outcome: str, seen: str = "") -> Verdict:
    holds = (check.__doc__ or "").strip()
    return Verdict(check=name_of(check), group=group_of(check), holds=holds, outcome=outcome, seen=seen)


def make_ranks(size: int) -> Ranks:
    """Processes that run checks together; they start with the first check."""
    return Ranks(size, reply, preload=[f"thalweg.check.{name}" for name in MODULES["ranks"]])


def reply(asked: tuple[Check, Subject]) -> Verdict:
    """What a rank says of a check."""
    return run_check(*asked)


def run_over_ranks(ranks: Ranks, check: Check, subject: Subject) -> Verdict:
    """What the ranks say: the first failure, or what all of them say. Ranks that disagree are replaced."""
    answers = ranks.ask(write_question(check, subject), patience=PATIENCE, hurries=lambda _: True)
    verdicts = [answer for answer in answers if isinstance(answer, Verdict)]
    found = next((verdict for verdict in verdicts if verdict.outcome == FAILED), None)
    if silent := [str(rank) for rank, answer in enumerate(answers) if isinstance(answer, Silence)]:
        found = found or judge(check, FAILED, f"no answer of rank {', '.join(silent)}")
    if silent or len({verdict.outcome for verdict in verdicts}) > 1:
        ranks.end()
    return found or verdicts[0]


def write_question(check: Check, subject: Subject) -> bytes:
    """What ranks are asked, for :func:`reply`. Raises a CommandError for an optimizer that cannot be sent to them."""
    try:
        return pickle.dumps((check, subject))
    except Exception as error:
        raise CommandError(
            f"{subject.given!r} cannot be sent to other processes, which ranks=... needs ({describe_error(error)}); say "
            "where it is, as module:Class, and give options that can be pickled"
        ) from error
