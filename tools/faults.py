"""A bank of faults, each of which some test has to find: made one at a time, in a copy of the source.

python tools/faults.py list                       the faults, each with a name
python tools/faults.py green.jsonl bank.jsonl     make them; a second call goes on
python tools/faults.py green.jsonl bank.jsonl 40  only forty of them, drawn by the commit's hash

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
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE, WRITTEN, WATCH = ROOT / "src/thalweg", ROOT / "tools/faults.txt", ROOT / "tools/watch"
#: What only people read, what only costs time, and what only a build or a GPU runs: no test can say that it is wrong.
FOR_PEOPLE = ("__repr__", "__str__", "explain", "warn", "refuse", "tell", "reason", "in_words", "cost", "count_prod")
FOR_SPEED = ("warn", "cache_clear", "flush", "fsync", "mkdir", "unlink", "simplefilter")
ELSEWHERE = ("kernels/cpu/shipped.py", "kernels/triton/launching.py", "check/command.py", "check/devices.py")
UNREAD = (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments, ast.While, ast.ExceptHandler)
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "sitecustomize", "-m", "not gpu"]
PYTEST += ["--hypothesis-profile=few", "--hypothesis-seed=0"]
#: Seconds: of a whole file, unbroken, and of a fault.
FILE_LIMIT, FAULT_LIMIT = 300.0, 90.0


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


OPPOSITE = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)


def changes(node: Any) -> Iterator[tuple[str, Any, Any]]:
    """What may be done to a node: the kind of fault, what is taken out, and what comes in its place."""
    match node:
        case ast.BinOp(left=x, op=op, right=y) if not (is_text(x) or is_text(y)):
            if type(op) in OPPOSITE:
                yield "operator", node, ast.BinOp(x, OPPOSITE[type(op)](), y)
                yield "dropped", node, x
            if isinstance(op, ORDERED):
                yield "swapped", node, ast.BinOp(y, op, x)
        case ast.UnaryOp(op=ast.USub(), operand=x) if not isinstance(x, ast.Constant):
            yield "sign", node, x
        case ast.If(test=test, body=[ast.Raise(), *_]):
            yield "guard", test, ast.Constant(False)
        case ast.If(test=test) | ast.IfExp(test=test):
            yield "negated", test, ast.UnaryOp(ast.Not(), test)
        case ast.BoolOp(op=op, values=values):
            yield "and-or", node, ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.comprehension(ifs=[first, *_]):
            yield "all-taken", first, ast.Constant(True)
        case ast.Expr(value=ast.Call(func=called)):
            if getattr(called, "attr", getattr(called, "id", "")) not in FOR_SPEED:
                yield "not-done", node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "not-stored", node, ast.Pass()
        case ast.Subscript() | ast.Compare():
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
    return Fault(f"{path}:written:{digest}", room_of(path), path, function, old, new, start, says)


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
    return rooms, sorted(itertools.chain(*faults.values()), key=order_of), named["survivor"]


def order_of(fault: Fault, seed: str = "") -> bytes:
    return hashlib.sha256(f"{seed}{fault.name}".encode()).digest()


def run(tests: list[str], limit: float, *options: str, fault: Fault | None = None) -> tuple[str, list[list[str]]]:
    """Run tests, or files of them, with a fault, or watched: how it ended, and what the watch has written."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        log, source = Path(folder, "log"), SOURCE.parent
        if fault is not None:
            source = shutil.copytree(source, Path(folder, "src"))
            path = source / SOURCE.name / fault.path
            text = path.read_bytes()
            path.write_bytes(text[: fault.start] + fault.new.encode() + text[fault.start + len(fault.old.encode()) :])
        watch = {"log": str(log), "chosen": tests, "source": str(SOURCE) if fault is None else ""}
        surroundings = {**os.environ, "THALWEG_CACHE": f"{folder}/cache", "FAULTS_WATCH": json.dumps(watch)}
        surroundings["PYTHONPATH"] = f"{source}{os.pathsep}{WATCH}"
        command = [*PYTEST, *options, *dict.fromkeys(test.partition("::")[0] for test in tests)]
        quiet = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
        process = subprocess.Popen(command, cwd=ROOT, env=surroundings, start_new_session=True, **quiet)
        try:
            ended = {0: "passed", 5: "passed", 1: "failed"}.get(process.wait(limit), "broken")
        except subprocess.TimeoutExpired:
            ended = "timeout"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return ended, [line.split("\t", 1) for line in log.read_text().splitlines()] if log.exists() else []


def try_file(file: str) -> dict[str, Any]:
    """What each test of a file takes, and which functions it reaches; without those that fail."""
    start, tests, seen = time.perf_counter(), dict[str, Any](), [0.0, list[str]()]
    for kind, what in run([file], FILE_LIMIT)[1]:
        if kind == "test":
            seen = tests.setdefault(what, [0.0, []])
        elif kind == "took":
            seen[0] += float(what)
        elif kind == "function":
            seen[1].append(what)
        else:
            tests.pop(what, None)
    return {"name": file, "status": f"{len(tests)} fine", "seconds": time.perf_counter() - start, "tests": tests}


def try_fault(fault: Fault, green: list[Any], first: tuple[str, ...]) -> dict[str, Any]:
    """Make a fault, and see which test fails of those that reach its function: file by file, its room's before others.

    If none is known to reach the function, those are asked that reach another one of its file.
    """
    start, by, asked = time.perf_counter(), "", list[Any]()
    functions = {name for row in green for _, names in row["tests"].values() for name in names}
    reached = {f"{fault.path}:{fault.function}"} & functions
    reached = reached or {name for name in functions if name.startswith(f"{fault.path}:")}
    for row in green:
        if tests := {test: took for test, (took, names) in row["tests"].items() if not reached.isdisjoint(names)}:
            took = sum(tests.values())
            asked.append(((1 if row["name"].startswith(first) else 4) * (took + 1), took, list(tests)))
    for _, took, tests in sorted(asked) if fault.start >= 0 else ():
        if not by and time.perf_counter() - start < FAULT_LIMIT:
            ended, log = run(tests, 5 * took + 60, "-x", fault=fault)  # what takes longer hangs
            if ended != "passed":
                by = next((what for kind, what in log if kind == "failed"), ended)
    status = "stale" if fault.start < 0 else "killed" if by else "survived"
    told = {"name": fault.name, "room": fault.room, "says": fault.says, "status": status, "by": by}
    return {**told, "seconds": time.perf_counter() - start}


def work(tasks: Iterable[Any], do: Callable[[Any], dict[str, Any]], record: Path) -> list[dict[str, Any]]:
    """Do what is not recorded yet, as many at a time as there are cores; all that is recorded then."""
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a+", encoding="utf-8") as file, ThreadPoolExecutor(os.cpu_count()) as executor:
        file.seek(0)
        rows = [json.loads(line) for line in file]
        known = {row["name"] for row in rows}
        begun = [executor.submit(do, task) for task in tasks if getattr(task, "name", task) not in known]
        for each in as_completed(begun):
            rows.append(row := each.result())
            print(json.dumps(row), file=file, flush=True)
            print(f"{row['status']:9}{row['seconds']:7.1f} s  {row['name']}  {row.get('by', '')}", flush=True)
    return rows


def main(*given: str) -> int:
    rooms, faults, known = list_faults()
    if given == ("list",):
        for fault in faults:
            print(f"{fault.name}\n    {fault.says}: {fault.old!r} -> {fault.new!r}{' STALE' * (fault.start < 0)}")
        return 0
    baseline, record, *sample = given
    if sample:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
        faults = sorted(faults, key=lambda fault: order_of(fault, commit))[: int(*sample)]
    found = sorted(ROOT.glob("tests/**/test_*.py"), key=lambda path: -path.stat().st_size)
    files = [str(path.relative_to(ROOT)) for path in found if path.parent.name != "gpu"]
    green = work(files, try_file, Path(baseline))
    rows = work(faults, lambda fault: try_fault(fault, green, rooms[fault.room][2]), Path(record))
    left = sorted((row for row in rows if row["status"] != "killed"), key=lambda row: row["name"])
    for room, counts in collections.Counter((row["room"], row["status"]) for row in rows).items():
        print(*room, counts)
    unknown = [row for row in left if row["status"] == "survived" and row["name"] not in known]
    for row in left:
        print(f"{row['status']:9}{'UNKNOWN ' * (row in unknown)}{row['name']}: {row['says']}")
    return 1 if unknown else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]) if sys.argv[1:] else __doc__)
