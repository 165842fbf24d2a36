"""A bank of faults, each of which some test has to find: made one at a time, in copies of the source.

python tools/faults.py --list                   the faults, each with a name that stays while its function does
python tools/faults.py --baseline green.jsonl   run all tests on unbroken code: what each file takes and what it reaches
python tools/faults.py --baseline green.jsonl --record bank.jsonl    then make the faults; a second call goes on
python tools/faults.py ... --sample 40          only forty of them, drawn by the commit's hash or by --seed
python tools/faults.py --compare before.jsonl after.jsonl            by room what was killed, and what survives

Rooms and faults written by hand are in faults.txt; the others are changes of syntax, drawn by their names. Those tests
are asked about a fault that reach its function: files of the room and fast ones first, and the first failure ends it.
"""

from __future__ import annotations

import argparse
import contextlib
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

PYTEST = [
    "-q",
    "--tb=no",
    "-p",
    "no:cacheprovider",
    "-p",
    "sitecustomize",
    "--hypothesis-profile=few",
    "--hypothesis-seed=0",
]
PYTEST += ["-m", "not nightly and not gpu"]
LANE = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"}
LANE |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "THALWEG_TESTS_SOON"), "1")
LANE |= {"PYTHONDONTWRITEBYTECODE": ""}
#: Seconds: of tests that run before others are collected; of one file, unbroken; of its tests that a fault is tried by.
FIRST_RUN, FILE_LIMIT, MOST_OF_FILE = 10.0, 300.0, 20.0


class Worker:
    """A copy of the tree, in which one fault at a time is made."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.cache, self.site, self.made = folder / "tree", folder / "cache", folder / "site", 0
        self.notes = {name: folder / name for name in ("FAILED", "REACHED", "TESTS", "CHOSEN")}
        left_out = shutil.ignore_patterns(
            ".git", ".venv", ".envs", "build", "dist", "report", "__pycache__", ".*_cache"
        )
        shutil.copytree(ROOT, self.tree, ignore=left_out)
        self.site.mkdir()
        shutil.copy(ROOT / "tools/fault_watch.py", self.site / "sitecustomize.py")

    def run(self, files: list[str], chosen: list[str] | None, limit: float) -> str:
        """Run chosen tests of some files up to the first failure, or all and watch what they reach: how it ended."""
        for name, path in self.notes.items():
            path.write_text(json.dumps(chosen) if name == "CHOSEN" else "")
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
        paths = [self.site, self.tree / "src", os.environ.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "THALWEG_CACHE": str(self.cache)}
        own |= {f"FAULTS_{name}": str(path) for name, path in self.notes.items() if chosen is None or name != "REACHED"}
        own |= {"FAULTS_SOURCE": str(self.tree / "src/thalweg")}
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *PYTEST, *([] if chosen is None else ["-x"]), *files],
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
        """What the tests of a file take, and which functions each reaches: as bits of a number."""
        start, ended = time.perf_counter(), self.run([file], None, FILE_LIMIT)
        seconds, failed, tests = time.perf_counter() - start, read(self.notes["FAILED"]), read(self.notes["TESTS"])
        functions = sorted({name for _, _, reached in tests for name in reached})
        bits = {name: 1 << place for place, name in enumerate(functions)}
        kept = {name: [took, f"{sum(map(bits.get, reached)):x}"] for name, took, reached in tests if name not in failed}
        return {
            "name": file,
            "status": ended,
            "seconds": seconds,
            "failed": failed,
            "functions": functions,
            "tests": kept,
        }

    def try_fault(self, fault: Fault, green: list[Any], first: tuple[str, ...], limit: float) -> dict[str, Any]:
        """Make a fault, and see which test fails of those that reach its function."""
        start, asked = time.perf_counter(), choose_tests(fault, green, first)
        times = list(itertools.accumulate(cost for cost, _, _ in asked))
        cut, end = bisect(times, FIRST_RUN), max(1, bisect(times, 0.75 * limit))
        path, self.made, status, by = self.tree / "src/thalweg" / fault.path, self.made + 1, "survived", ""
        code, size = (SOURCE / fault.path).read_bytes(), len(fault.old.encode())
        path.write_bytes(code[: fault.start] + fault.new.encode() + code[fault.start + size :])
        os.utime(path, (self.made, self.made))  # compiled Python is known by its time, in seconds
        if fault.path.startswith("kernels/"):
            shutil.rmtree(self.cache, ignore_errors=True)
        for rows in filter(None, (asked[:cut], asked[cut:end])):
            chosen = [test for _, _, tests in rows for test in tests]
            ended = self.run([file for _, file, _ in rows], chosen, limit - time.perf_counter() + start)
            if ended != "passed":
                status = "timeout" if ended == "timeout" else "killed"
                by = next(iter(read(self.notes["FAILED"])), ended)
                break
        shutil.copy2(SOURCE / fault.path, path)
        timing = {"seconds": time.perf_counter() - start, "unbroken": sum(cost for cost, _, _ in asked[:end])}
        counts = {"limit": limit, "asked": sum(len(tests) for _, _, tests in asked[:end]), "left": len(asked[end:])}
        return {
            "name": fault.name,
            "room": fault.room,
            "says": fault.says,
            "status": status,
            "by": by,
            **timing,
            **counts,
        }


def choose_tests(fault: Fault, green: list[Any], first: tuple[str, ...]) -> list[tuple[float, str, list[str]]]:
    """The tests that reach a fault, by file, with what they take; none of a file beyond so many seconds."""
    startup, found = min(row["seconds"] for row in green), []
    function = f"{fault.path}:{fault.function}"
    whole = not any(function in row["functions"] for row in green)
    for row in green:
        mask = 0
        for place, name in enumerate(row["functions"]):
            mask |= (name == function or (whole and name.startswith(f"{fault.path}:"))) << place
        reaching = sorted((took, test) for test, (took, bits) in row["tests"].items() if int(bits, 16) & mask)
        within = bisect(list(itertools.accumulate(took for took, _ in reaching)), MOST_OF_FILE) or 1
        if reaching:
            others = row["seconds"] - startup - sum(took for took, _ in row["tests"].values())
            cost = max(0.1, others) + sum(took for took, _ in reaching[:within])
            found.append((cost, row["name"], [test for _, test in reaching[:within]]))
    return sorted(found, key=lambda row: (row[0] + 1) * (1 if row[1].startswith(first) else 4))


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


def read(path: Path) -> list[Any]:
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


if __name__ == "__main__":
    raise SystemExit(main())
