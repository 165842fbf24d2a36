"""README and docs are tests: their Python runs, and what they show is what it prints."""

from __future__ import annotations

import importlib.util
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE

if importlib.util.find_spec("sybil") is not None:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser

    pytest_collect_file = Sybil(
        parsers=[PythonCodeBlockParser(doctest_optionflags=ELLIPSIS | NORMALIZE_WHITESPACE)],
        patterns=["README.md", "CONTRIBUTING.md", "docs/*.md", "docs/recipes/*.md"],
    ).pytest()
