"""A bank of faults, each of which some test has to find: made one at a time, in copies of the source.

python tools/faults.py list                                 the faults, each with a name
python tools/faults.py green.jsonl bank.jsonl               make them; a second call goes on
python tools/faults.py green.jsonl bank.jsonl 40            only forty of them, drawn by the commit's hash
python tools/faults.py compare before.jsonl after.jsonl     by room what was killed, and what survives

First all tests run on unbroken code: what each takes, and which functions it reaches. Those tests are asked about a
fault that reach its function, and the first failure ends it. faults.txt has the rooms, the faults that are written by
hand, and the survivors that are known; other faults are changes of syntax, drawn by their names.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import hashlib
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE, WRITTEN = ROOT / "src/thalweg", ROOT / "tools/faults.txt"
#: What only people read, what only costs time, and what only a build or a GPU runs: no test can say that it is wrong.
FOR_PEOPLE = ("__repr__", "__str__", "explain", "warn", "refuse", "tell", "reason", "in_words", "cost", "count_prod")
FOR_SPEED = ("warn", "cache_clear", "flush", "fsync", "mkdir", "unlink", "simplefilter")
ELSEWHERE = ("kernels/cpu/shipped.py", "kernels/triton/launching.py", "check/command.py", "check/devices.py")
UNREAD = (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments, ast.While, ast.ExceptHandler)
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "sitecustomize", "-m", "not gpu"]
PYTEST += ["--hypothesis-profile=few", "--hypothesis-seed=0"]
LANE = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "THALWEG_TESTS_SOON"), "1")
LANE |= {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"}
#: Seconds: of a whole file, unbroken; of a fault; of tests that run before others are collected; of one file's tests.
FILE_LIMIT, FAULT_LIMIT, FIRST_RUN, MOST_OF_FILE = 300.0, 60.0, 10.0, 20.0
#: What a copy of the tree is made without.
LEFT_OUT = (".git", ".venv", ".envs", "build", "dist", "report", "__pycache__", ".*_cache")


class Fault(NamedTuple):
    name: str
    room: str
    path: str
    function: str
    old: str
    new: str
    #: Where it begins in the file, in bytes; -1 if it is written, and what it takes out is not there.
    start: int
    says: str


def changes(node: Any) -> Iterator[tuple[str, Any, Any]]:
    """What may be done to a node: the kind of fault, what is taken out, and what comes in its place."""
    if isinstance(node, ast.BinOp) and not any(map(is_text, (node.left, node.right))):
        pairs = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
        if type(node.op) in pairs:
            yield "operator", node, ast.BinOp(node.left, pairs[type(node.op)](), node.right)
            yield "dropped", node, node.left
        if isinstance(node.op, (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)):
            yield "swapped", node, ast.BinOp(node.right, node.op, node.left)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "sign", node, node.operand
    elif isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
        yield "guard", node.test, ast.Constant(False)
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield "negated", node.test, ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.BoolOp):
        yield "and-or", node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield "all-taken", node.ifs[0], ast.Constant(True)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = getattr(node.value.func, "attr", getattr(node.value.func, "id", ""))
        if called not in FOR_SPEED:
            yield "not-done", node, ast.Pass()
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
        yield "not-stored", node, ast.Pass()
    elif isinstance(node, (ast.Subscript, ast.Compare)):
        for part in [node.slice] if isinstance(node, ast.Subscript) else node.comparators:
            if isinstance(part, ast.Constant) and type(part.value) is int:
                yield "off-by-one", part, ast.Constant(part.value + 1)


def is_text(node: ast.AST) -> bool:
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict))


def walk(nodes: Iterable[Any], around: str = "", inside: bool = False) -> Iterator[tuple[str, Any]]:
    """Every node of every function, with the name that Python has for the outermost function around it."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if not node.name.lstrip("_").startswith(tuple(name.lstrip("_") for name in FOR_PEOPLE)):
                name = around if inside else f"{around}.{node.name}".lstrip(".")
                yield from walk(node.body, name, inside or isinstance(node, ast.FunctionDef))
        elif not isinstance(node, UNREAD):
            if inside:
                yield around, node
            parts = [node.value] if isinstance(node, ast.AnnAssign) and node.value else ast.iter_child_nodes(node)
            yield from walk(parts, around, inside)


def change_syntax(path: str, room: str) -> Iterator[Fault]:
    source = (SOURCE / path).read_bytes()
    begins = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    counted: Any = collections.Counter()
    for function, node in walk(ast.parse(source).body):
        for kind, old, new in changes(node):
            if room == "check" and kind != "guard" and not (kind == "not-done" and "assert_" in ast.unparse(old)):
                continue  # of checks, those that never fail
            counted[function, kind] += 1
            start, end = begins[old.lineno - 1] + old.col_offset, begins[old.end_lineno - 1] + old.end_col_offset
            text = "pass" if isinstance(new, ast.Pass) else f"({ast.unparse(new)})"
            name = f"{path}:{function}:{kind}:{counted[function, kind]}"
            yield Fault(name, room, path, function, source[start:end].decode(), text, start, kind)


def read_written(row: str, room_of: Callable[[str], str]) -> Fault:
    """A fault that is written by hand: its head, and lines that are taken out and put in."""
    head, *lines = row.strip("\n").split("\n")
    path, says = head.split(": ", 1)
    old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in "-+")
    source = (SOURCE / path).read_bytes() if (SOURCE / path).exists() else b""
    start = source.index(old.encode()) if source.count(old.encode()) == 1 else -1
    line = source[: max(start, 0)].count(b"\n") + 1
    nodes = ((name, node) for name, node in walk(ast.parse(source).body) if hasattr(node, "lineno"))
    inside = (name for name, node in nodes if start >= 0 and node.lineno <= line <= node.end_lineno)
    function, digest = next(inside, ""), hashlib.sha256(f"{old}>{new}".encode()).hexdigest()[:6]
    return Fault(f"{path}:{function}:written:{digest}", room_of(path), path, function, old, new, start, says)


def list_faults() -> tuple[dict[str, Any], list[Fault], set[str]]:
    """The rooms, their faults (the written ones, and as many others as they lack), and the survivors that are known."""
    rows = WRITTEN.read_text(encoding="utf-8").split("\n\n")
    lines = [line.split(" ", 1) for row in rows for line in row.splitlines()]
    named = {kind: {line[1].split()[0] for line in lines if line[0] == kind} for kind in ("no-fault", "survivor")}
    rooms: dict[str, Any] = {}
    for name, number, *lists in (line[1].split(" | ") for line in lines if line[0] == "room"):
        rooms[name] = int(number), *(tuple(words.split()) for words in lists)

    def room_of(path: str) -> str:
        return next((room for room, (_, paths, _) in rooms.items() if path.startswith(paths)), "")

    faults: dict[str, list[Fault]] = collections.defaultdict(list)
    for fault in (read_written(row, room_of) for row in rows if "\n- " in row):
        faults[fault.room].append(fault)
    paths = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
    homes = {path: room_of(path) for path in paths if path not in ELSEWHERE}
    drawn = [fault for path, room in homes.items() if room for fault in change_syntax(path, room)]
    counted: Any = collections.Counter()
    for fault in sorted(drawn, key=order_of):
        if fault.name not in named["no-fault"] and len(faults[fault.room]) < rooms[fault.room][0]:
            counted[fault.path, fault.function] += 1
            faults[fault.room] += [fault] if counted[fault.path, fault.function] <= 2 else []
    return rooms, sorted(itertools.chain(*faults.values()), key=order_of), {shorten(name) for name in named["survivor"]}


def order_of(fault: Fault, seed: str = "") -> bytes:
    return hashlib.sha256(f"{seed}{fault.name}".encode()).digest()


class Worker:
    """A copy of the tree, in which one fault at a time is made."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.log, self.chosen, self.cache = (folder / name for name in ("tree", "log", "chosen", "cache"))
        self.source, self.made = self.tree / "src/thalweg", 0
        shutil.copytree(ROOT, self.tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        shutil.copy(ROOT / "tools/fault_watch.py", folder / "sitecustomize.py")
        paths = os.pathsep.join([str(folder), str(self.tree / "src"), os.environ.get("PYTHONPATH", "")])
        own = {"PYTHONPATH": paths, "THALWEG_CACHE": self.cache, "FAULTS_LOG": self.log, "FAULTS_CHOSEN": self.chosen}
        self.surroundings = {**os.environ, **LANE, "PYTHONDONTWRITEBYTECODE": "", **{k: str(v) for k, v in own.items()}}

    def run(self, tests: list[str], limit: float, *options: str, **more: str) -> tuple[str, list[list[str]]]:
        """Run tests, or files of them: how it ended, and what fault_watch.py has written."""
        self.log.write_text("")
        self.chosen.write_text("\n".join(tests))
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        process = subprocess.Popen(
            [sys.executable, *PYTEST, *options, *files],
            **dict(cwd=self.tree, env={**self.surroundings, **more}, start_new_session=True),
            **dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL),
        )
        try:
            ended = {0: "passed", 5: "passed", 1: "failed"}.get(process.wait(limit), "broken")
        except subprocess.TimeoutExpired:
            ended = "timeout"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return ended, [line.split("\t", 1) for line in self.log.read_text().splitlines()]

    def try_file(self, file: str) -> dict[str, Any]:
        """What each test of a file takes, and which tests reach each function; without those that fail."""
        start = time.perf_counter()
        ended, log = self.run([file], FILE_LIMIT, FAULTS_SOURCE=str(self.source))
        failed, tests, functions = {what for kind, what in log if kind == "failed"}, [], {}
        for kind, what in log:
            if kind == "test":
                tests.append([what, 0.0])
            elif tests and tests[-1][0] not in failed and kind == "took":
                tests[-1][1] += float(what)
            elif tests and tests[-1][0] not in failed and kind == "function":
                functions.setdefault(what, {})[len(tests) - 1] = None
        told = {"name": file, "status": ended, "seconds": time.perf_counter() - start, "tests": tests}
        return {**told, "functions": {name: [*places] for name, places in functions.items()}}

    def try_fault(self, fault: Fault, asked: list[tuple[float, list[str]]]) -> dict[str, Any]:
        """Make a fault, and see which test fails of those that reach its function."""
        start, status, by = time.perf_counter(), "survived" if fault.start >= 0 else "stale", ""
        path, original = self.source / fault.path, SOURCE / fault.path
        times = list(itertools.accumulate(cost for cost, _ in asked))
        cut, end = bisect(times, FIRST_RUN), max(1, bisect(times, 0.75 * FAULT_LIMIT))
        if status != "stale":
            code, self.made = original.read_bytes(), self.made + 1
            path.write_bytes(code[: fault.start] + fault.new.encode() + code[fault.start + len(fault.old.encode()) :])
            os.utime(path, (self.made, self.made))  # compiled Python is known by its time, in seconds
            if fault.path.startswith("kernels/"):
                shutil.rmtree(self.cache, ignore_errors=True)
            for rows in filter(None, (asked[:cut], asked[cut:end])):
                tests = [test for _, tests in rows for test in tests]
                ended, log = self.run(tests, FAULT_LIMIT - time.perf_counter() + start, "-x")
                if ended == "timeout":  # it hangs, unless so many tests just take long
                    status, by = ("killed" if 2 * times[end - 1] < FAULT_LIMIT else status), ended
                elif ended != "passed":
                    status, by = "killed", next((what for kind, what in log if kind == "failed"), ended)
                if by:
                    break
            shutil.copy2(original, path)
        told = {"name": fault.name, "room": fault.room, "says": fault.says, "status": status, "by": by}
        return {**told, "seconds": time.perf_counter() - start}


def choose_tests(fault: Fault, green: list[Any], first: tuple[str, ...]) -> list[tuple[float, list[str]]]:
    """The tests that reach a fault, by file, with what they take: files of its room first, then fast ones."""
    found, names = [], {f"{fault.path}:{fault.function}"}
    if not any(names & row["functions"].keys() for row in green):
        names = {name for row in green for name in row["functions"] if name.startswith(f"{fault.path}:")}
    for row in green:
        places = {place for name in names & row["functions"].keys() for place in row["functions"][name]}
        reaching = sorted((row["tests"][place][1], row["tests"][place][0]) for place in places)
        times = list(itertools.accumulate(took for took, _ in reaching))
        if reaching:
            within = bisect(times, MOST_OF_FILE) or 1
            cost = max(0.1, row["seconds"] - sum(took for _, took in row["tests"])) + times[within - 1]
            far = 1 if row["name"].startswith(first) else 4
            found.append((far * (cost + 1), cost, [test for _, test in reaching[:within]]))
    return [(cost, tests) for _, cost, tests in sorted(found)]


def work(tasks: Iterable[Any], do: Callable[[Worker, Any], dict[str, Any]], record: Path) -> None:
    """Do what is not recorded yet, in as many copies of the tree as there are cores."""
    record.parent.mkdir(parents=True, exist_ok=True)
    known, lock, workers = {row["name"] for row in read(record)}, threading.Lock(), queue.SimpleQueue[Worker]()
    cores = os.cpu_count() or 1

    def do_one(task: Any) -> None:
        worker = workers.get()
        row = do(worker, task)
        workers.put(worker)
        with lock, record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            print(f"{row['status']:9}{row['seconds']:7.1f} s  {row['name']}  {row.get('by', '')}", flush=True)

    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(cores) as executor:
        for number in range(cores):
            workers.put(Worker(Path(folder, str(number))))
        list(executor.map(do_one, [task for task in tasks if getattr(task, "name", task) not in known]))


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def shorten(name: str) -> str:
    """What a fault is known by in all records: one that is written may have come into a function of another name."""
    return name.rpartition(":")[2] if ":written:" in name else name


def compare(before: list[dict[str, Any]], after: list[dict[str, Any]], known: set[str]) -> bool:
    """Print by room what was killed, and what survives; whether all of that is known, and was not killed before."""
    killed, all_known = {shorten(row["name"]) for row in before if row["status"] == "killed"}, True
    print(f"{'room':<30}{'made':>7}{'killed before':>15}{'killed after':>14}{'stale':>7}")
    for room in [*sorted({row["room"] for row in after}), "all"]:
        rows = [row for row in after if room in ("all", row["room"])]
        counts = collections.Counter(row["status"] for row in rows)
        old = sum(shorten(row["name"]) in killed for row in rows)
        print(f"{room:<30}{len(rows):7}{old:15}{counts['killed']:14}{counts['stale']:7}")
    for row in sorted(after, key=lambda row: row["name"]):
        name, survived = shorten(row["name"]), row["status"] == "survived"
        is_lost = survived and (name in killed or name not in known)
        all_known = all_known and not is_lost
        if row["status"] != "killed":
            print(f"{row['status']:9}{'LOST ' * is_lost}{row['name']}: {row['says']}")
    return all_known


def main(*given: str) -> int:
    rooms, faults, known = list_faults()
    if given == ("list",):
        for fault in faults:
            print(f"{fault.name}\n    {fault.says}: {fault.old!r} -> {fault.new!r}{' STALE' * (fault.start < 0)}")
        return 0
    if given[:1] == ("compare",):
        return 0 if compare(read(Path(given[1])), read(Path(given[2])), known) else 1
    baseline, record, *sample = given
    if sample:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
        faults = sorted(faults, key=lambda fault: order_of(fault, commit))[: int(*sample)]
    found = sorted(ROOT.glob("tests/**/test_*.py"), key=lambda path: -path.stat().st_size)
    work([str(path.relative_to(ROOT)) for path in found if path.parent.name != "gpu"], Worker.try_file, Path(baseline))
    green = [row for row in read(Path(baseline)) if row["status"] in ("passed", "failed")]
    work(faults, lambda at, fault: at.try_fault(fault, choose_tests(fault, green, rooms[fault.room][2])), Path(record))
    return 0 if compare([], read(Path(record)), known) else 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]) if sys.argv[1:] else __doc__)
