"""Which tests and pages are left out because they import packages that are not installed."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

#: An import that is not inside a function, in Python or in an example of a page.
IMPORT = re.compile(r"^(?:>>> )?(?:import (\w+)|from (\w+)[\w.]* import )", re.MULTILINE)
#: Where packages are imported that the package itself does not need.
FOLDERS = ("src/thalweg/integrations", "tests/integrations", "docs/recipes")


def missing_packages(source: str) -> list[str]:
    """The packages that a source imports and that are not installed."""
    found = {name for pair in IMPORT.findall(source) for name in pair if name}
    return sorted(name for name in found - {"__future__"} if importlib.util.find_spec(name) is None)


def is_left_out(path: Path, root: Path) -> bool:
    """Whether a file is not collected, for want of a package. Where all are to be there, that is an error."""
    if path.suffix not in (".py", ".md") or not any(path.is_relative_to(root / folder) for folder in FOLDERS):
        return False
    missing = missing_packages(path.read_text())
    if missing and os.environ.get("THALWEG_INTEGRATIONS") == "required":
        raise ModuleNotFoundError(f"{path} imports {', '.join(missing)}, which is not installed")
    return bool(missing)
