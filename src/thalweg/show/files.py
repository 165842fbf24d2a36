"""Files that commands are given."""

from __future__ import annotations

from pathlib import Path

from thalweg.errors import CommandError


def check_file(path: Path) -> None:
    """Refuse what is not a plain file: a pipe or a device would be read for ever."""
    if not path.is_file():
        raise CommandError(f"{path} is not a file" if path.exists() else f"there is no file {path}")
