"""The faults of tools/faults.py: those of faults.txt, and changes of syntax drawn by their names."""

from __future__ import annotations

import ast
import collections
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE, WRITTEN = ROOT / "src/thalweg", ROOT / "tools/faults.txt"
#: What only people read, what only costs time, and what only a build or a GPU runs: no test can say that it is wrong.
FOR_PEOPLE = ("__repr__", "__str__", "explain", "warn", "refuse", "tell", "reason", "in_words", "cost", "count_prod")
FOR_SPEED = ("warn", "cache_clear", "flush", "fsync", "mkdir", "unlink", "simplefilter")
ELSEWHERE = ("kernels/cpu/shipped.py", "kernels/triton/launching.py", "check/command.py", "check/devices.py")
UNREAD = (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments, ast.While, ast.ExceptHandler)


class Fault(NamedTuple):
    name: str
    room: str
    path: str
    function: str
    old: str
    new: str
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
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and called(node.value) not in FOR_SPEED:
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


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


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


def list_faults() -> tuple[dict[str, Any], list[Fault]]:
    """The rooms, and all faults: of each room those written, and as many others as it lacks, two of a function."""
    rooms: dict[str, Any] = {}
    faults: dict[str, list[Fault]] = collections.defaultdict(list)
    no_faults = set()
    for row in WRITTEN.read_text(encoding="utf-8").split("\n"):
        if row.startswith("room "):
            name, number, *lists = row[5:].split(" | ")
            rooms[name] = int(number), *(tuple(words.split()) for words in lists)
        elif row.startswith("no-fault "):
            no_faults.add(row.split()[1])
    paths = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
    homes = {path: next((room for room, own in rooms.items() if path.startswith(own[1])), None) for path in paths}
    for row in WRITTEN.read_text(encoding="utf-8").split("\n\n"):
        head, *lines = row.strip("\n").split("\n")
        if not lines or lines[0][0] not in "-+":
            continue
        path, says = head.split(": ", 1)
        old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in "-+")
        source = (SOURCE / path).read_bytes()
        if source.count(old.encode()) != 1:
            raise SystemExit(f"{WRITTEN.name}, {head!r}: what is taken out stands {source.count(old.encode())} times")
        start, digest = source.index(old.encode()), hashlib.sha256(f"{old}>{new}".encode()).hexdigest()[:6]
        line = source[:start].count(b"\n") + 1
        nodes = ((name, node) for name, node in walk(ast.parse(source).body) if hasattr(node, "lineno"))
        inside = (name for name, node in nodes if node.lineno <= line <= node.end_lineno)
        function = next(inside, "")
        room = str(homes[path])
        faults[room].append(Fault(f"{path}:{function}:written:{digest}", room, path, function, old, new, start, says))
    drawn = [
        fault for path, room in homes.items() if room and path not in ELSEWHERE for fault in change_syntax(path, room)
    ]
    counted: Any = collections.Counter()
    for fault in sorted(drawn, key=order_of):
        if fault.name not in no_faults and len(faults[fault.room]) < rooms[fault.room][0]:
            counted[fault.path, fault.function] += 1
            faults[fault.room] += [fault] if counted[fault.path, fault.function] <= 2 else []
    return rooms, sorted(itertools.chain(*faults.values()), key=order_of)


def order_of(fault: Fault, seed: str = "") -> bytes:
    return hashlib.sha256(f"{seed}{fault.name}".encode()).digest()
