"""Names, shapes and dtypes from the headers of ``.safetensors`` files; the tensors themselves are not read."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from thalweg.errors import CommandError
from thalweg.plan.models import Model, Tensor
from thalweg.show.dtypes import spelt_dtype
from thalweg.show.files import check_file

#: No header is longer: the format's own limit.
LONGEST = 100_000_000
#: Whole numbers and truth values: nothing that is trained.
COUNTS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")
#: Floating point that models carry along and do not train.
BUFFERS = re.compile(r"(^|\.)(running_mean|running_var|inv_freq|masked_bias|position_ids)$|(^|\.)h\.\d+\.attn\.bias$")
#: Shapes as a file's own text has them, at most.
MOST_AXES, MOST_ELEMENTS = 64, 2**63
#: Bits of the format's dtypes, as far as they are known here.
BITS = {"BF16": 16, **{f"{kind}{bits}": bits for kind in "FIU" for bits in (8, 16, 32, 64)}, "BOOL": 8}


def read_safetensors(files: list[Path], name: str) -> Model:
    """One model from all of its files. Dtypes that cannot be trained keep the format's names."""
    found: dict[str, Tensor] = {}
    left_out = 0
    for file in files:
        for key, entry in header_of(file).items():
            if key in found:
                raise CommandError(f"{file}: the tensor {key!r} is in another file of this model as well")
            kind, shape = checked_entry(file, key, entry)
            if kind in COUNTS or is_buffer(key, shape):
                left_out += 1
                continue
            found[key] = Tensor(key, shape, spelt_dtype(kind))
    if not found:
        raise CommandError(f"{name}: it has no floating-point tensor")
    about = f"{len(files)} safetensors file{'s' * (len(files) > 1)}"
    if left_out:
        about += (
            f", {left_out} tensor{'s' * (left_out > 1)} that {'are' if left_out > 1 else 'is'} no parameter left out"
        )
    return Model(name, about, tuple(found.values()), says_dtype=True)


def header_of(file: Path) -> dict[str, Any]:
    """The entries of a file's header, without its metadata; the file must be as long as they say."""
    check_file(file)
    with open(file, "rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            raise CommandError(f"{file} is not a safetensors file: it has {len(start)} bytes, too few for a header")
        length = int.from_bytes(start, "little")
        if start[:1] == b"\x80" or start[:2] == b"PK":
            raise CommandError(f"{file} is a pickle, which plan does not open: save the model as safetensors")
        if not 2 <= length <= LONGEST:
            raise CommandError(f"{file} is not a safetensors file: its header would have {length:,} bytes")
        size = file.stat().st_size
        if size < 8 + length:
            raise CommandError(
                f"{file} is cut off: its header should have {length:,} bytes, and {size - 8:,} are there"
            )
        text = stream.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise CommandError(f"{file} is damaged, or not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise CommandError(f"{file} is damaged, or not a safetensors file: its header is not a mapping of names")
    header.pop("__metadata__", None)
    for key, entry in header.items():
        check_bytes(file, key, entry)
    end = 8 + length + max((last_byte(file, key, entry) for key, entry in header.items()), default=0)
    if size < end:
        raise CommandError(f"{file} is cut off: it should have {end:,} bytes, and has {size:,}")
    return header


def last_byte(file: Path, key: str, entry: Any) -> int:
    offsets = entry.get("data_offsets") if isinstance(entry, Mapping) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)):
        raise CommandError(f"{file} is damaged: the tensor {key!r} has no data_offsets")
    end: int = offsets[1]
    return end


def check_bytes(file: Path, key: str, entry: Any) -> None:
    """Say if a tensor has not the bytes that its dtype and shape ask for."""
    end = last_byte(file, key, entry)
    kind, shape = checked_entry(file, key, entry)
    bits = BITS.get(kind.partition("_")[0])
    if bits is not None and math.prod(shape) * bits != 8 * (end - entry["data_offsets"][0]):
        raise CommandError(f"{file} is damaged: the tensor {key!r} does not have the bytes of its shape {shape}")


def checked_entry(file: Path, key: str, entry: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    kind, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(kind, str) or not is_shape(shape):
        raise CommandError(f"{file} is damaged: the tensor {key!r} has no dtype and shape")
    return kind, tuple(shape)


def is_shape(shape: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of sizes that a tensor can have."""
    is_list = isinstance(shape, list) and len(shape) <= MOST_AXES and all(map(is_size, shape))
    return is_list and math.prod(shape) < MOST_ELEMENTS


def is_size(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < MOST_ELEMENTS


def is_buffer(key: str, shape: tuple[int, ...]) -> bool:
    """Whether it is one of the well-known tensors that models store and do not train."""
    return BUFFERS.search(key) is not None and (not key.endswith(".attn.bias") or len(shape) == 4)


def files_in(folder: Path) -> list[Path]:
    """The safetensors files of a model in a folder: those its index names, or all there are."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    return list(indexed(indexes[0])) if indexes else sorted(folder.glob("*.safetensors"))


def indexed(index: Path) -> Iterator[Path]:
    """The files that an index names."""
    check_file(index)
    try:
        mapping = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in mapping.values()})
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise CommandError(f"{index} is not an index of safetensors files: it has no weight_map") from None
    for name in names:
        file = index.parent / Path(name).name
        if not os.path.isfile(file):  # pathlib raises where a name is too long
            raise CommandError(f"{index} names a file that is not there: {file}")
        yield file
