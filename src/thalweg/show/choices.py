"""Values of options that click reads and shells complete: dtypes, lists of names, options of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from thalweg.dtypes import DTYPES
from thalweg.errors import CommandError
from thalweg.rules import RULES
from thalweg.settings import option_names
from thalweg.show.arguments import parse_dtype
from thalweg.show.extras import extra

with extra("cli"):
    import click
    from click.shell_completion import CompletionItem


class Dtype(click.ParamType):  # type: ignore[type-arg]  # it takes none before click 8.4
    """A dtype, whatever it is called: ``bf16``, ``BFloat16``."""

    name = "dtype"

    def __init__(self, known: Sequence[str] = tuple(DTYPES)) -> None:
        self.known = tuple(known)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"[{'|'.join(self.known)}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return parse_dtype(str(value), self.known)
        except CommandError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in self.known if name.startswith(incomplete.lower())]


#: Completes what is typed, as click asks for it.
Complete = Callable[[Any, Any, str], list[Any]]


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
