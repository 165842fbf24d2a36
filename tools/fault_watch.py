"""In the processes of tests that tools/faults.py runs: which functions each test reaches, and which tests fail.

It is a plugin of pytest and the sitecustomize of all processes. PYTEST_DONT_REWRITE: it is there before pytest is.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

#: The code that was called in this test, and where the test begins: in seconds, and in the list of what is reached.
SEEN: set[Any] = set()
BEGIN = [0.0, 0]


def watch() -> None:
    """Write down each function of the source when a test first calls it, also in processes that the test starts."""
    target = os.open(os.environ["FAULTS_REACHED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    source, watching = os.environ["FAULTS_SOURCE"] + os.sep, getattr(sys, "monitoring", None)

    def note(code: Any, *_: Any) -> Any:
        if code not in SEEN:
            SEEN.add(code)
            name = code.co_qualname.split(".<locals>")[0]
            # bodies of modules and classes run whenever they are imported
            if code.co_filename.startswith(source) and code.co_flags & inspect.CO_OPTIMIZED and name[0] != "<":
                os.write(target, f"{code.co_filename[len(source) :]}:{name}\n".encode())
        return watching and watching.DISABLE

    if watching:
        watching.use_tool_id(watching.COVERAGE_ID, "faults")
        watching.register_callback(watching.COVERAGE_ID, watching.events.PY_START, note)
        watching.set_events(watching.COVERAGE_ID, watching.events.PY_START)
    else:
        for set_profile in (threading.setprofile, sys.setprofile):
            set_profile(lambda frame, *_: note(frame.f_code))


def pytest_collection_modifyitems(items: list[Any]) -> None:
    chosen = json.loads(Path(os.environ["FAULTS_CHOSEN"]).read_text())
    items[:] = [item for item in items if chosen is None or item.nodeid in chosen]


def pytest_runtest_logstart() -> None:
    if reached := os.environ.get("FAULTS_REACHED"):
        BEGIN[:] = time.perf_counter(), os.path.getsize(reached)
        SEEN.clear()
        if hasattr(sys, "monitoring"):
            sys.monitoring.restart_events()


def pytest_runtest_logfinish(nodeid: str) -> None:
    if reached := os.environ.get("FAULTS_REACHED"):
        with open(reached, "rb") as file:
            file.seek(int(BEGIN[1]))
            functions = sorted(set(file.read().decode().split()))
        write_line("FAULTS_TESTS", [nodeid, time.perf_counter() - BEGIN[0], functions])


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        write_line("FAULTS_FAILED", report.nodeid)


def write_line(variable: str, what: Any) -> None:
    with open(os.environ[variable], "a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


pytest_collectreport = pytest_runtest_logreport

if "FAULTS_REACHED" in os.environ:
    watch()
