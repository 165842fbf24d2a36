"""How emitted kernels read and write memory: in a dtype, as codes with scales, rounded at random, beside a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from thalweg.boundary import state_streams
from thalweg.programs.trace import GRADIENT, PARAMETER, Program
from thalweg.storage import RECORD


class Stored(NamedTuple):
    """How p, g, an entry of the state or the record of what rounding has cost is stored."""

    key: str
    bytes: int
    #: Whether reading it back gives what was computed.
    exact: bool


def sizes_of(stored: Iterable[Stored]) -> dict[str, int]:
    """Bytes by key. A record is read and written with its parameter."""
    size = {entry.key: entry.bytes for entry in stored}
    size[PARAMETER] += size.pop(RECORD, 0)
    return size


@dataclass(frozen=True)
class Memory:
    """The memory of a program's parameter, gradient and state, as lines of Triton that read and write it."""

    program: Program
    stored: tuple[Stored, ...]
    #: Whether state as large as its parameter is rounded at random.
    random: bool

    def short(self, key: str) -> str:
        return key if key in (PARAMETER, GRADIENT) else f"s{self.program.entries.index(key)}"

    def is_coded(self, key: str) -> bool:
        """Whether it is kept in eight bits, beside scales."""
        return any(entry.key == key and entry.bytes == 1 for entry in self.stored)

    def is_random(self, key: str) -> bool:
        large = self.program.memory[key] == self.program.memory[PARAMETER]
        return self.random and large and any(entry.key == key and not entry.exact for entry in self.stored)

    @property
    def streams(self) -> dict[str, tuple[int, int]]:
        """By which random bits each entry is rounded: two share them."""
        return state_streams(self.program.entries)

    @property
    def has_codes(self) -> bool:
        return any(map(self.is_coded, self.program.memory))

    @property
    def operations(self) -> dict[str, str]:
        """Operations on elements that have another text where state has few digits and passes little to read."""
        narrow = any(entry.key in self.program.entries and not entry.exact for entry in self.stored)
        return {"div": "quotient({0}, {1})"} if narrow else {}

    @property
    def has_record(self) -> bool:
        return any(entry.key == RECORD for entry in self.stored)

    def dtype(self, key: str) -> str:
        return f"{self.short(key).upper()}_DTYPE"

    def which(self, key: str) -> int:
        """The place of an entry among the columns that a table has for the parameter and each entry."""
        return 0 if key == PARAMETER else 1 + self.program.entries.index(key)

    def base(self, key: str, aligned: str) -> str:
        """Where an array begins. aligned: whether that is known to be where the widest loads can be made."""
        if key == GRADIENT:
            return f"pointer(tl.load(gradients + row), G_DTYPE, {aligned})"
        column = "P" if key == PARAMETER else f"STATE + {self.which(key) - 1}"
        return f"address(rows, row, {column}, {self.dtype(key)}, {aligned})"

    def scales(self, key: str) -> str:
        """Where its scales begin."""
        return f"address(rows, row, SCALES + {self.which(key)}, tl.float32, False)"

    def record(self, aligned: str) -> str:
        """Where the record begins."""
        return f"address(rows, row, RECORD, tl.int8, {aligned})"

    def read_codes(self, key: str) -> str:
        """Load codes and their scales."""
        name = self.short(key)
        return f"{name}_codes, {name}_scale = read_codes({name}_place, {name}_scales, mask, groups_mask)"

    def read(self, key: str) -> str:
        """The numbers of an array that has no codes."""
        name = self.short(key)
        numbers = f"loaded({name}_place, mask)"
        if key == PARAMETER and self.has_record:
            return f"with_record({numbers}, record_place, mask, P_DTYPE)"
        return numbers

    def write(self, key: str, numbers: str) -> str:
        """Store new numbers of an entry."""
        name, random = self.short(key), self.is_random(key)
        chance = "half_of(draws_{}, {})".format(*self.streams[key]) if random else "0"
        if self.is_coded(key):
            return f"store_coded({name}_place, {name}_scales, {numbers}, {chance}, mask, groups_mask, GROUP, {random})"
        return f"tl.store({name}_place, as_stored({numbers}, {chance}, {self.dtype(key)}, {random}), mask)"

    def write_all(self, results: Mapping[str, str]) -> list[str]:
        drawn = {f"draws_{self.streams[key][0]}": self.which(key) for key in results if self.is_random(key)}
        draws = [f"{name} = draws_of(rows, row, {which}, start, index, now, SPREAD)" for name, which in drawn.items()]
        return draws + [self.write(key, numbers) for key, numbers in results.items()]

    def rounded(self, new: str) -> list[str]:
        """The parameter as it is to be stored."""
        if self.is_coded(PARAMETER):
            return [f"stored = {new}"]
        return [
            f"new = {new}",
            "stored = rounded(new, rows, row, start, index, now, P_DTYPE, STOCHASTIC, SPREAD)",
        ]

    def write_rounded(self) -> list[str]:
        if self.is_coded(PARAMETER):
            return [self.write(PARAMETER, "stored")]
        record = ["tl.store(record_place, record_of(new, stored), mask)"] if self.has_record else []
        return ["tl.store(p_place, stored, mask)", *record]
