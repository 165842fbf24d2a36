"""What a check says of an optimizer."""

from __future__ import annotations

import time
from dataclasses import dataclass

from thalweg.check.registry import Check, Failed, NotOffered
from thalweg.check.subject import Subject, keep_surroundings
from thalweg.show.modules import describe_error

PASSED, FAILED, NOT_OFFERED = "passed", "failed", "not offered"
#: The group, and the only check, of an optimizer that cannot be constructed.
CONSTRUCTION = "construction"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a check said of an optimizer."""

    check: str
    group: str
    holds: str
    outcome: str
    #: What was seen where it failed, or why it is not offered.
    seen: str = ""
    seconds: float = 0.0
    #: By how many processes, where it was checked by several.
    ranks: int = 0


def run_check(each: Check, subject: Subject) -> Verdict:
    begin, outcome, seen = time.perf_counter(), PASSED, ""
    with keep_surroundings(subject.kind):
        try:
            each.run(subject)
        except NotOffered as why:
            outcome, seen = NOT_OFFERED, str(why)
        except Failed as what:
            outcome, seen = FAILED, str(what)
        except Exception as error:
            outcome, seen = FAILED, describe_error(error)
    return judge(each, outcome, seen, time.perf_counter() - begin)


def judge(each: Check, outcome: str, seen: str, seconds: float = 0.0) -> Verdict:
    return Verdict(check=each.name, group=each.group, holds=each.holds, outcome=outcome, seen=seen, seconds=seconds)
