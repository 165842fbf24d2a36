"""Values of options that click reads: a dtype, by any of its names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thalweg.dtypes import DTYPES
from thalweg.errors import CommandError
from thalweg.show.dtypes import known_dtype
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
            return known_dtype(str(value), self.known)
        except CommandError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in self.known if name.startswith(incomplete.lower())]
