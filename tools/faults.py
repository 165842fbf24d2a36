"""A bank of faults, each of which some test has to find: made one at a time, in copies of the source.

python tools/faults.py --list                   the faults, each with a name that stays while its function does
python tools/faults.py --baseline green.jsonl   run all tests on unbroken code: what each file takes and what it reaches
python tools/faults.py --baseline green.jsonl --record bank.jsonl    then make the faults; a second call goes on
python tools/faults.py ... --sample 40          only forty of them, drawn by the commit's hash or by --seed
python tools/faults.py --compare before.jsonl after.jsonl            by room what was killed, and what survives

Rooms and faults written by hand are in faults.txt; the others are changes of syntax, drawn by their names. A test file
is asked about a fault if it reaches the function: files of the room and fast ones first, and the first failure ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fault_list import ROOT, SOURCE, Fault, list_faults, order_of

PYTEST = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "faults", "--hypothesis-profile=few", "--hypothesis-seed=0"]
PYTEST += ["-m", "not nightly and not gpu"]
LANE = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"}
LANE |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "THALWEG_TESTS_SOON"), "1")
LANE |= {"PYTHONDONTWRITEBYTECODE": ""}
FIRST_RUN, FILE_LIMIT = 10.0, 300.0  # seconds: of tests that run before others are collected; of one file


# ---- in the process of tests


def watch() -> None:
    """Write down each function of the source when this process first calls it. Processes that it starts do too."""
    target = os.open(os.environ["FAULTS_REACHED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    source, seen = os.environ["FAULTS_SOURCE"] + os.sep, set()

    def note(code: Any, *_: Any) -> Any:
        if code not in seen:
            seen.add(code)
            name = code.co_qualname.split(".<locals>")[0]
            # bodies of modules and classes run whenever they are imported
            if code.co_filename.startswith(source) and code.co_flags & inspect.CO_OPTIMIZED and name[0] != "<":
                os.write(target, f"{code.co_filename[len(source) :]}:{name}\n".encode())
        return watching and watching.DISABLE

    watching: Any = getattr(sys, "monitoring", None)
    if watching:
        watching.use_tool_id(watching.COVERAGE_ID, "faults")
        watching.register_callback(watching.COVERAGE_ID, watching.events.PY_START, note)
        watching.set_events(watching.COVERAGE_ID, watching.events.PY_START)
    else:
        for set_profile in (threading.setprofile, sys.setprofile):
            set_profile(lambda frame, *_: note(frame.f_code))


def pytest_collection_modifyitems(items: list[Any]) -> None:
    left_out = json.loads(os.environ["FAULTS_LEFT_OUT"])
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        with open(os.environ["FAULTS_FAILED"], "a", encoding="utf-8") as file:
            file.write(json.dumps(report.nodeid) + "\n")


pytest_collectreport = pytest_runtest_logreport

# ---- running


class Worker:
    """A copy of the tree, in which one fault at a time is made."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.cache, self.site = folder / "tree", folder / "cache", folder / "site"
        self.failed, self.reached, self.made = folder / "failed", folder / "reached", 0
        left_out = shutil.ignore_patterns(
            ".git", ".venv", ".envs", "build", "dist", "report", "__pycache__", ".*_cache"
        )
        shutil.copytree(ROOT, self.tree, ignore=left_out)
        self.site.mkdir()
        for name in ("faults.py", "fault_list.py"):
            shutil.copy(ROOT / "tools" / name, self.site)
        shutil.copy(__file__, self.site / "sitecustomize.py")

    def run(self, files: Any, limit: float, more: list[str], left_out: Any = (), **watched: str) -> str:
        """Run test files: how it ended."""
        for path in (self.failed, self.reached):
            path.write_text("")
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
        paths = [self.site, self.tree / "src", os.environ.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "THALWEG_CACHE": str(self.cache)}
        own |= {"FAULTS_FAILED": str(self.failed), "FAULTS_LEFT_OUT": json.dumps(left_out), **watched}
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *PYTEST, *more, *files],
            **dict(cwd=self.tree, env={**os.environ, **LANE, **own}, start_new_session=True),
            **dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL),
        )
        try:
            return {0: "passed", 5: "passed", 1: "failed"}.get(process.wait(limit), "broken")
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def try_file(self, file: str) -> dict[str, Any]:
        start, watched = time.perf_counter(), {"FAULTS_REACHED": str(self.reached)}
        ended = self.run([file], FILE_LIMIT, [], FAULTS_SOURCE=str(self.tree / "src/thalweg"), **watched)
        failed = [json.loads(line) for line in self.failed.read_text().splitlines()]
        found = {"failed": failed, "reached": sorted(set(self.reached.read_text().split()))}
        return {"name": file, "status": ended, "seconds": time.perf_counter() - start, **found}

    def try_fault(self, fault: Fault, green: Any, first: Any, limit: float) -> dict[str, Any]:
        """Make a fault, and see which test fails of those that reach its function."""
        start, startup = time.perf_counter(), min(row["seconds"] for row in green)
        asked = [row for row in green if f"{fault.path}:{fault.function}" in row["reached"]]
        asked = asked or [row for row in green if any(name.startswith(f"{fault.path}:") for name in row["reached"])]
        asked.sort(key=lambda row: (row["seconds"] - startup + 1) * (1 if row["name"].startswith(first) else 4))
        times = list(itertools.accumulate(row["seconds"] - startup for row in asked))
        cut, end = bisect(times, FIRST_RUN), bisect(times, 0.75 * limit)
        path, self.made, status, by = self.tree / "src/thalweg" / fault.path, self.made + 1, "survived", ""
        code, size = (SOURCE / fault.path).read_bytes(), len(fault.old.encode())
        path.write_bytes(code[: fault.start] + fault.new.encode() + code[fault.start + size :])
        os.utime(path, (self.made, self.made))  # compiled Python is known by its time, in seconds
        if fault.path.startswith("kernels/"):
            shutil.rmtree(self.cache, ignore_errors=True)
        for rows in filter(None, (asked[:cut], asked[cut : max(end, 1)])):
            left, left_out = limit - time.perf_counter() + start, [name for row in rows for name in row["failed"]]
            ended = self.run([row["name"] for row in rows], left, ["-x"], left_out)
            if ended != "passed":
                status = "timeout" if ended == "timeout" else "killed"
                by = next(map(json.loads, self.failed.read_text().splitlines()), ended)
                break
        shutil.copy2(SOURCE / fault.path, path)
        unbroken = times[end - 1] if end else 0.0
        timing = {"seconds": time.perf_counter() - start, "unbroken": unbroken, "limit": limit, "asked": len(asked)}
        return {"name": fault.name, "room": fault.room, "says": fault.says, "status": status, "by": by, **timing}


def work(tasks: Any, do: Any, record: Path, workers: int, end: float) -> None:
    """Do what is not recorded yet, by workers beside one another and while there is time."""
    waiting: Any = queue.SimpleQueue()
    known, lock = {row["name"] for row in read(record)}, threading.Lock()
    for task in tasks:
        if getattr(task, "name", task) not in known:
            waiting.put(task)

    def go_on(number: int) -> None:
        worker = Worker(Path(folder, str(number)))
        with contextlib.suppress(queue.Empty):
            while time.monotonic() < end:
                row = do(worker, waiting.get_nowait())
                with lock, record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                    print(f"{row['status']:9}{row['seconds']:7.1f} s  {row['name']}  {row.get('by', '')}", flush=True)

    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(workers) as executor:
        list(executor.map(go_on, range(workers)))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def is_killed(row: dict[str, Any]) -> bool:
    return row["status"] == "killed" or (row["status"] == "timeout" and row["unbroken"] < row["limit"] / 2)


def compare(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> bool:
    """Print what was killed by room, and what survives; whether nothing survives that was killed before."""
    killed = {row["name"] for row in before if is_killed(row)}
    print(f"{'room':<30}{'made':>7}{'killed before':>15}{'killed after':>14}")
    for room in [*sorted({row["room"] for row in after}), "all"]:
        rows = [row for row in after if room in ("all", row["room"])]
        print(f"{room:<30}{len(rows):7}{sum(r['name'] in killed for r in rows):15}{sum(map(is_killed, rows)):14}")
    survivors = sorted((row for row in after if not is_killed(row)), key=lambda row: row["name"])
    for row in survivors:
        print(f"{row['status']:9}{'LOST ' * (row['name'] in killed)}{row['name']}: {row['says']}")
    return not any(row["name"] in killed for row in survivors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--compare", nargs=2, type=Path)
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--only", default="", help="faults whose names begin so")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds-per-fault", type=float, default=60.0)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds, after which nothing is begun")
    given = parser.parse_args()
    end = time.monotonic() + given.budget
    if given.compare:
        return 0 if compare(*map(read, given.compare)) else 1
    rooms, faults = list_faults()
    faults = [fault for fault in faults if fault.name.startswith(given.only)]
    if given.sample:
        seed = given.seed or subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
        faults = sorted(faults, key=lambda fault: order_of(fault, seed))[: given.sample]
    if given.list or not given.baseline:
        print(*(f"{fault.name}\n    {fault.says}: {fault.old!r} -> {fault.new!r}" for fault in faults), sep="\n")
        return 0
    found = sorted(ROOT.glob("tests/**/test_*.py"), key=lambda path: -path.stat().st_size)
    files = [path.relative_to(ROOT).as_posix() for path in found if path.parent.name != "gpu"]
    work(files, Worker.try_file, given.baseline, given.workers, end)
    if given.record:
        green = [row for row in read(given.baseline) if row["status"] in ("passed", "failed")]

        def do(worker: Worker, fault: Fault) -> dict[str, Any]:
            return worker.try_fault(fault, green, rooms[fault.room][2], given.seconds_per_fault)

        work(faults, do, given.record, given.workers, end)
        rows = read(given.record)
        compare(rows, rows)
    return 0


if __name__ == "sitecustomize" and "FAULTS_REACHED" in os.environ:
    watch()
if __name__ == "__main__":
    raise SystemExit(main())
