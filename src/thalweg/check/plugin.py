"""Which checks there are, and their runs: ``thalweg check``, ``check()``, and as tests of pytest.

A check is a function ``test_*`` of a module here, which fails or skips as a test of pytest does. Its docstring says
what must hold and why it matters; its group is its module, unless ``GROUPS`` names another. As tests they are run by
``pytest -p thalweg.check.plugin --optimizer torch.optim.AdamW``.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, TypeAlias

from thalweg.check.ranks import Ranks, Silence
from thalweg.check.subject import Subject, keep_surroundings, parse_json, subject_of
from thalweg.errors import CommandError
from thalweg.show.arguments import split_words, suggest
from thalweg.show.extras import extra
from thalweg.show.modules import describe_error

with extra("check"):
    import pytest

#: Takes the subject; fails or skips as a test of pytest does.
Check: TypeAlias = Callable[[Any], None]
#: The modules with the checks of a framework, and of those that several processes run together, in their order.
MODULES = {
    "torch": [
        *("contract", "numbers", "state", "memory", "dtypes"),
        *("layouts", "bad_input", "non_finite", "companions", "devices"),
    ],
    "optax": ["transformations"],
    "ranks": ["replicas", "shards", "checkpoints"],
}
#: The groups of checks that are in another module: those of gradient transformations, and of messages.
GROUPS = {
    "contract": "step-moves-parameters trees-are-kept empty-trees inputs-untouched extra-arguments "
    "state-keeps-its-form",
    "numbers": "deterministic jit-agrees compiled-once scan-agrees vmap-agrees independent-of-other-parameters "
    "descends zero-gradients",
    "state": "resumes-to-the-bit",
    "dtypes": "bfloat16-moves",
    "layouts": "scalars-and-empty",
    "bad-input": "params-asked-for misspelt-option",
    "non-finite": "nan-stays-local",
    "companions": "schedules injected-hyperparameters masked multi-steps",
    "messages": "messages-do-not-grow collectives",
}
PASSED, FAILED, NOT_OFFERED = "passed", "failed", "not offered"
#: Seconds that other ranks may take to answer after the first one has.
PATIENCE = 10.0


class Verdict(NamedTuple):
    """What a check says of an optimizer."""

    check: str
    group: str
    #: What must hold, and why users care.
    holds: str
    #: ``passed``, ``failed`` or ``not offered``.
    outcome: str
    #: What was seen where it failed, or why it is not offered.
    seen: str = ""


class Report(NamedTuple):
    """All verdicts on one optimizer."""

    subject: str
    verdicts: list[Verdict]

    @property
    def failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.outcome == FAILED]


def check(
    optimizer: Any, *, only: str | None = None, ranks: int = 0, facts: Mapping[str, Any] | None = None, **options: Any
) -> Report:
    """Check an optimizer: a class, a function that makes one, or a reference such as ``torch.optim.AdamW``.

    Options are those of the optimizer. ``only`` names checks or groups; ``facts`` are what its author declares.
    With ``ranks``, the checks of replicas and shards of torch are run too, by so many processes.
    """
    subject = subject_of(optimizer, options, facts)
    with closing(make_world(ranks)) as world:
        return run_checks(subject, choose_checks(subject.kind, only, ranks), world)


def run_checks(subject: Subject, checks: Sequence[Check], world: Ranks) -> Report:
    """Run checks one after the other, and report what each of them says."""
    require_sendable(subject, checks)
    return Report(subject.name, [judge(check, subject, world) for check in checks])


def checks_of(kind: str) -> list[Check]:
    """The checks of torch, optax or ranks; their modules are imported."""
    modules = [vars(importlib.import_module(f"thalweg.check.{name}")) for name in MODULES[kind]]
    return [value for module in modules for name, value in module.items() if name.startswith("test_")]


def names_of(check: Check) -> tuple[str, str]:
    """The name of a check, and its group."""
    name, module = (word.replace("_", "-") for word in (check.__name__[5:], check.__module__.rpartition(".")[2]))
    return name, next((group for group, names in GROUPS.items() if name in names.split()), module)


def verdict_of(check: Check, outcome: str, seen: str) -> Verdict:
    return Verdict(*names_of(check), inspect.getdoc(check) or "", outcome, seen)


def choose_checks(kind: str, only: str | None, ranks: int) -> list[Check]:
    """The checks to run, those over ranks last: all, or those that ``only`` names.

    only: names of checks or groups, such as ``state,closure-loss``. ranks: how many processes there are, or 0.
    """
    checks = checks_of(kind) + (checks_of("ranks") if ranks and kind == "torch" else [])
    if only is None:
        return checks
    asked = [word.lower().replace("_", "-").replace(" ", "-") for word in split_words(only, "--only")]
    known = {name for check in checks for name in names_of(check)}
    for word in asked:
        if word not in known and kind == "torch" and any(word in names_of(check) for check in checks_of("ranks")):
            raise CommandError(f"{word} is checked by several processes: add --ranks 4")
        if word not in known:
            raise CommandError(f"there is no check or group {word!r}: {suggest(word, sorted(known))}")
    return [check for check in checks if not set(asked).isdisjoint(names_of(check))]


def is_over_ranks(check: Check) -> bool:
    return check.__module__.rpartition(".")[2] in MODULES["ranks"]


def pytest_addoption(parser: pytest.Parser) -> None:
    options = parser.getgroup("thalweg check")
    options.addoption("--optimizer", help="The optimizer to check, such as torch.optim.AdamW.")
    options.addoption("--options", metavar="JSON", help="Its options, such as '{\"lr\": 0.1}'.")
    options.addoption("--facts", metavar="JSON", help="What its author declares.")
    options.addoption("--check-ranks", metavar="N", type=int, default=0, help="Also the checks over N processes.")


def pytest_configure(config: pytest.Config) -> None:
    optimizer, ranks = config.getoption("optimizer"), config.getoption("check_ranks")
    if optimizer is None:
        return
    try:
        options, facts = (parse_json(config.getoption(name), f"--{name}") for name in ("options", "facts"))
        subject = subject_of(optimizer, options, facts)
        world = make_world(ranks)
        config.add_cleanup(world.close)
        config.pluginmanager.register(Tests(subject, choose_checks(subject.kind, None, ranks), world))
    except CommandError as error:
        raise pytest.UsageError(str(error)) from error


class Tests:
    """A plugin of pytest: its tests are these checks, of one optimizer."""

    def __init__(self, subject: Subject, checks: Sequence[Check], world: Ranks) -> None:
        require_sendable(subject, checks)
        self.subject, self.checks, self.world = subject, checks, world

    def pytest_configure(self, config: pytest.Config) -> None:
        config.args = [f"{inspect.getfile(check)}::{check.__name__}" for check in self.checks]

    @pytest.fixture
    def s(self) -> Subject:
        """The optimizer that is checked."""
        return self.subject

    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool:
        """Run a check: a test fails with its docstring and what was seen."""
        verdict = judge(pyfuncitem.obj, self.subject, self.world)
        if verdict.outcome == FAILED:
            pytest.fail(f"{verdict.holds} Seen: {verdict.seen}", pytrace=False)
        if verdict.outcome == NOT_OFFERED:
            pytest.skip(verdict.seen)
        return True


def require_sendable(subject: Subject, checks: Iterable[Check]) -> None:
    """Refuse a subject that checks need in other processes, and that cannot be sent there."""
    try:
        _ = pickle.dumps(subject) if any(map(is_over_ranks, checks)) else None
    except Exception as error:
        raise CommandError(
            f"{subject.given!r} cannot be sent to other processes, which ranks=... needs ({describe_error(error)}); "
            "say where it is, as module:Class, and give options that can be pickled"
        ) from error


def judge(check: Check, subject: Subject, world: Ranks) -> Verdict:
    return run_over_ranks(world, check, subject) if is_over_ranks(check) else run(check, subject)


def run(check: Check, subject: Subject) -> Verdict:
    """What a check says. Whatever it raises is a part of that, and its surroundings are kept."""
    outcome, seen = PASSED, ""
    with keep_surroundings(subject.kind):
        try:
            check(subject)
        except (pytest.skip.Exception, pytest.fail.Exception) as what:
            outcome, seen = NOT_OFFERED if isinstance(what, pytest.skip.Exception) else FAILED, str(what)
        except (Exception, SystemExit) as error:
            outcome, seen = FAILED, describe_error(error)
    return verdict_of(check, outcome, seen)


def make_world(size: int) -> Ranks:
    """Processes that run checks together; they start with the first check."""
    return Ranks(size, reply, preload=[f"thalweg.check.{name}" for name in MODULES["ranks"]])


def reply(asked: tuple[Check, Subject]) -> Verdict:
    """What a check says in a rank."""
    return run(*asked)


def run_over_ranks(world: Ranks, check: Check, subject: Subject) -> Verdict:
    """What the ranks say: the first failure, or what all of them say. Ranks that disagree are replaced."""
    answers = world.ask(pickle.dumps((check, subject)), patience=PATIENCE, hurries=lambda _: True)
    verdicts: list[Verdict] = [answer for answer in answers if not isinstance(answer, Silence)]
    silent = [str(rank) for rank, answer in enumerate(answers) if isinstance(answer, Silence)]
    if silent or len({verdict.outcome for verdict in verdicts}) > 1:
        world.close()
    failures = [verdict for verdict in verdicts if verdict.outcome == FAILED]
    if silent and not failures:
        return verdict_of(check, FAILED, f"no answer of rank {', '.join(silent)}")
    return (failures or verdicts)[0]
