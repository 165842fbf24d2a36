"""Finished runs in a file: one JSON object a line, each with a checksum, appended as soon as it is there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from thalweg.race.run import Layers, Record, Result
from thalweg.race.task import Run
from thalweg.show.arguments import check_file, freeze

P = TypeVar("P", Run, Result)


@dataclass(frozen=True)
class Damage:
    """A line that cannot be trusted."""

    line: int
    why: str


class Book:
    """The records of a file, or without one in memory. Damaged lines are reported and skipped; their runs run again."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.records: dict[Run, Record] = {}
        self.damaged: list[Damage] = []
        if path is not None and path.exists():
            check_file(path)
            self._read(path.read_bytes())

    def _read(self, content: bytes) -> None:
        lines = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = read_record(line.decode("utf-8"))
                if number == len(lines):
                    raise ValueError("the line is cut off")
            except ValueError as error:  # of JSON and of UTF-8 too
                self.damaged.append(Damage(number, str(error)))
            else:
                self.records[record.run] = record

    @contextmanager
    def room(self) -> Iterator[None]:
        """Make the folder, and take it away again if an error comes before anything is in it.

        If nothing can be written there, that is found out now, not when a run is finished.
        """
        if self.path is None:
            yield
            return
        folder = self.path.parent
        made = [each for each in (folder, *folder.parents) if not each.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
            yield
        except BaseException:
            with suppress(OSError):  # a folder with something in it cannot be taken away
                for each in made:
                    each.rmdir()
            raise

    def mend(self) -> None:
        """Write the file anew without its damaged lines, so that what follows stands on a line of its own."""
        if self.path is not None and self.damaged:
            now = Book(self.path)  # another race may have added to it since it was read
            whole = "".join(write_record(record) for record in now.records.values())
            new = self.path.with_suffix(".new")
            new.write_text(whole, encoding="utf-8")
            os.replace(new, self.path)
            self.damaged.clear()

    def add(self, record: Record) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(write_record(record))
        self.records[record.run] = record


def write_record(record: Record) -> str:
    content = {"run": asdict(record.run), "result": asdict(record.result), "where": dict(record.where)}
    return json.dumps({**content, "checksum": compute_checksum(content)}) + "\n"


def read_record(line: str) -> Record:
    """The record in a line; a ValueError says what is wrong with it."""
    try:
        content = json.loads(line)
        is_its = isinstance(content, dict) and content.pop("checksum", None) == compute_checksum(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict) or content.keys() != {"run", "result", "where"}:
        raise ValueError("it is not a record of a run")
    if not is_its:
        raise ValueError("its checksum does not match its content")
    try:
        result = content["result"]
        layers = None if result["layers"] is None else Layers(**read_fields(Layers, result["layers"]))
        found = Result(**{**read_fields(Result, result), "layers": layers})
        return Record(check_types(Run(**content["run"])), check_types(found), content["where"])
    except (TypeError, KeyError, AttributeError) as error:  # whole, and of another version
        raise ValueError(f"it is a record of another version: {error}") from None


def check_types(part: P) -> P:
    """The part of a record, if its fields have the types that they should have."""
    for name, hint in get_type_hints(type(part)).items():
        kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        kinds = tuple(get_origin(kind) or kind for kind in kinds)
        if not isinstance(getattr(part, name), kinds):
            raise TypeError(f"its {name} is {getattr(part, name)!r:.40}")
    return part


def compute_checksum(content: Mapping[str, Any]) -> str:
    """Of the content, however it is laid out: key order and spaces do not count."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def read_fields(kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass with tuples where JSON has lists."""
    return {f.name: freeze(content[f.name]) for f in fields(kind)}
