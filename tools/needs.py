"""What an extra of the package needs, a requirement a line: python tools/needs.py dev

So all of it can be installed while the package itself is built.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def needs_of(extra: str) -> Iterator[str]:
    for each in PROJECT["optional-dependencies"][extra]:
        if own := re.fullmatch(rf"{PROJECT['name']}\[(.*)\]", each):
            for other in own[1].split(","):
                yield from needs_of(other)
        else:
            yield each


sys.stdout.write("".join(f"{each}\n" for each in [*PROJECT["dependencies"], *needs_of(sys.argv[1])]))
