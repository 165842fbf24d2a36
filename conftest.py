"""README and docs are tests: their Python runs, and what they show is what it prints. No test leaves files behind."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE
from multiprocessing.util import Finalize
from pathlib import Path

from missing import declare_operators, is_left_out

if importlib.util.find_spec("sybil") is not None:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

    pytest_collect_file = Sybil(
        parsers=[PythonCodeBlockParser(doctest_optionflags=ELLIPSIS | NORMALIZE_WHITESPACE), SkipParser()],
        patterns=["README.md", "CONTRIBUTING.md", "docs/*.md", "docs/recipes/*.md"],
    ).pytest()

if "PYTEST_XDIST_WORKER" not in os.environ:
    # pytest keeps the folders of the last few runs where it always does
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # all other temporary files, those of processes that tests start too, are gone after the run
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="thalweg-tests-")
    Finalize(None, shutil.rmtree, [tempfile.tempdir], {"ignore_errors": True}, exitpriority=-200)  # after all others
    # native code of rules that tests write is not kept among the user's
    os.environ.setdefault("THALWEG_CACHE", str(Path(tempfile.tempdir, "cache")))

if os.environ.get("THALWEG_INTEGRATIONS") == "required":
    declare_operators()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what needs packages that are not installed: ``make test-integrations`` has them all."""
    return is_left_out(collection_path, Path(__file__).parent) or None
