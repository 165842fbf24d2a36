"""README and docs are tests: their Python runs, and what they show is what it prints."""

from __future__ import annotations

import importlib.util
import os
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE
from pathlib import Path

from missing import declare_operators, is_left_out

if importlib.util.find_spec("sybil") is not None:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser

    pytest_collect_file = Sybil(
        parsers=[PythonCodeBlockParser(doctest_optionflags=ELLIPSIS | NORMALIZE_WHITESPACE)],
        patterns=["README.md", "CONTRIBUTING.md", "docs/*.md", "docs/recipes/*.md"],
    ).pytest()

if os.environ.get("THALWEG_INTEGRATIONS") == "required":
    declare_operators()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what needs packages that are not installed: ``make test-integrations`` has them all."""
    return is_left_out(collection_path, Path(__file__).parent) or None
