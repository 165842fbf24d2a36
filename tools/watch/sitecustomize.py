"""In the processes of tests that tools/faults.py runs: write down what tests fail, and which functions they reach.

It is a plugin of pytest and the sitecustomize of all processes. PYTEST_DONT_REWRITE: it is there before pytest is.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
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
