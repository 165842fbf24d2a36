"""In the processes of tests that tools/faults.py runs: make its fault, and write down what tests fail and reach.

It is a plugin of pytest and the sitecustomize of all processes. PYTEST_DONT_REWRITE: it is there before pytest is.
"""

from __future__ import annotations

import inspect
import json
import linecache
import os
import sys
import threading
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

TOLD = json.loads(os.environ.get("FAULTS_WATCH", "{}"))
LOG = os.open(TOLD.get("log", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
#: The folder whose functions are watched, if any, and the code that this test has called.
SOURCE, SEEN = TOLD.get("source", ""), set[Any]()


def write(kind: str, what: object) -> None:
    os.write(LOG, f"{kind}\t{what}\n".encode())


def note(frame: Any, *_: Any) -> None:
    """Write down a function of the source when a test first calls it, also in processes that the test starts."""
    code = frame.f_code
    if code not in SEEN:
        SEEN.add(code)
        name = code.co_qualname.split(".<locals>")[0]
        # bodies of modules and classes run whenever they are imported
        if code.co_filename.startswith(SOURCE) and code.co_flags & inspect.CO_OPTIMIZED and name[0] != "<":
            write("function", f"{code.co_filename[len(SOURCE) + 1 :]}:{name}")


def make_fault(path: str, start: int, length: int, new: str) -> None:
    """Whoever imports this file, or reads its lines to compile them, has the fault in it. The file stays as it is."""
    source, plain = Path(path).read_bytes(), SourceFileLoader.get_code
    changed = source[:start] + new.encode() + source[start + length :]
    linecache.cache[path] = len(changed), None, changed.decode().splitlines(keepends=True), path
    SourceFileLoader.get_code = lambda self, name: (  # type: ignore[method-assign]
        compile(changed, path, "exec", dont_inherit=True) if self.path == path else plain(self, name)
    )


def pytest_collection_modifyitems(items: list[Any]) -> None:
    items[:] = [item for item in items if {item.nodeid, item.nodeid.partition("::")[0]} & {*TOLD["chosen"]}]


def pytest_runtest_logstart(nodeid: str) -> None:
    write("test", nodeid)
    SEEN.clear()


def pytest_runtest_logreport(report: Any) -> None:
    write("took", getattr(report, "duration", 0.0))
    if report.failed:
        write("failed", report.nodeid)


pytest_collectreport = pytest_runtest_logreport

if SOURCE:
    threading.setprofile(note)
    sys.setprofile(note)
if "fault" in TOLD:
    make_fault(*TOLD["fault"])
