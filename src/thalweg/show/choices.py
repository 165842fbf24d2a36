"""Options that click reads and shells complete: dtypes, lists of names, options of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from thalweg.errors import CommandError
from thalweg.rules import RULES
from thalweg.settings import option_names
from thalweg.show.arguments import parse_dtype
from thalweg.show.extras import extra

with extra("cli"):
    import click


def read_dtype(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A dtype, whatever it is called: ``bf16``, ``BFloat16``."""
    try:
        return None if value is None else parse_dtype(value)
    except CommandError as error:
        raise click.BadParameter(str(error), ctx, param) from None


#: Completes what is typed, as click asks for it.
Complete = Callable[[Any, Any, str], list[Any]]


def complete_one(names: Iterable[str]) -> Complete:
    """Complete one of these names."""
    known = list(names)
    return lambda ctx, param, incomplete: [name for name in known if name.startswith(incomplete.lower())]


def complete_words(names: Iterable[str], incomplete: str) -> list[str]:
    """Lists between commas whose last name is completed: each of the names once."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.lower().split(",")
    lower = (name.lower() for name in names)
    return [f"{before}{comma}{name}" for name in lower if name.startswith(last.lower()) and name not in taken]


def complete_list(names: Iterable[str]) -> Complete:
    """Complete the last word of a list."""
    known = list(names)
    return lambda ctx, param, incomplete: complete_words(known, incomplete)


def complete_option(ctx: Any, param: Any, incomplete: str) -> list[str]:
    """Names of options, for all optimizers or behind the name of one."""
    owner, dot, _ = incomplete.partition(".")
    chosen = [rule for rule in RULES if not dot or rule.lower() == owner.lower()]
    names = (f"{owner}.{name}=" if dot else f"{name}=" for rule in chosen for name in option_names(RULES[rule]))
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


#: Options that several verbs have.
option_option = click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    shell_complete=complete_option,
    help="Set an option for all that have it, or kron.NAME=VALUE for one; may be repeated.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print everything as JSON instead of a table.")
