"""Python sources of the machine itself as tokens, which pairs of bytes make.

The standard library and all installed packages are read. Files are taken in the order of their digests, which mixes
packages evenly, and each belongs wholly to training, validation or test.
"""

from __future__ import annotations

import hashlib
import heapq
import re
import sysconfig
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WORDS = re.compile(rb"\n *| ?[A-Za-z_]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9_]+|\s")
#: Bytes of text in all, and bytes that the vocabulary is made from.
TEXT_BYTES, SAMPLE_BYTES = 32_000_000, 4_000_000
#: Files of 500 to 200,000 bytes: the rest is empty, or tables.
SIZES = range(500, 200_000)
PARTS = ("train", "validation", "test")
Pair = tuple[int, int]


def list_files() -> list[Path]:
    folders = {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib")}
    return [path for folder in folders for path in folder.rglob("*.py") if path.is_file()]


def read_sources(limit: int) -> Iterator[tuple[str, bytes]]:
    """(part, content) of different files, in the order of their digests, until there are enough bytes."""
    found = {}
    for path in list_files():
        if path.stat().st_size in SIZES:
            content = path.read_bytes()
            found[hashlib.sha256(content).digest()] = content
    total = 0
    for digest, content in sorted(found.items()):
        share = digest[-1] % 32  # one file in 32 for validation, one for test
        yield PARTS[share + 1] if share < 2 else PARTS[0], content
        total += len(content)
        if total > limit:
            break


def learn_merges(counts: Counter[bytes], merges: int) -> list[Pair]:
    """The pairs of tokens to merge, most frequent first; what comes of the n-th is token 256 + n."""
    words = [list(word) for word in counts]
    weights = list(counts.values())
    totals: Counter[Pair] = Counter()
    places: dict[Pair, set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        for pair in pairwise(word):
            totals[pair] += weights[index]
            places[pair].add(index)
    queue = [(-count, pair) for pair, count in totals.items()]
    heapq.heapify(queue)
    learned: list[Pair] = []
    while queue and len(learned) < merges:
        count, pair = heapq.heappop(queue)
        if -count != totals[pair]:  # counted anew since it was queued
            if totals[pair] > 0:
                heapq.heappush(queue, (-totals[pair], pair))
            continue
        new = 256 + len(learned)
        learned.append(pair)
        changed: set[Pair] = set()
        for index in places.pop(pair):
            word = words[index]
            for old in pairwise(word):
                totals[old] -= weights[index]
            words[index] = word = merge(word, pair, new)
            for fresh in pairwise(word):
                totals[fresh] += weights[index]
                places[fresh].add(index)
                if new in fresh:
                    changed.add(fresh)
        del totals[pair]
        for fresh in changed:
            heapq.heappush(queue, (-totals[fresh], fresh))
    return learned


def merge(word: list[int], pair: Pair, new: int) -> list[int]:
    out, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def encode(word: bytes, ranks: dict[Pair, int]) -> list[int]:
    """A word as tokens, by the merges in the order they were learned."""
    tokens = list(word)
    while len(tokens) > 1:
        rank, pair = min((ranks.get(pair, len(ranks)), pair) for pair in pairwise(tokens))
        if rank == len(ranks):
            break
        tokens = merge(tokens, pair, 256 + rank)
    return tokens


def make_tokens(vocabulary: int, limit: int) -> dict[str, NDArray[np.uint16]]:
    texts = {part: bytearray() for part in PARTS}
    for part, content in read_sources(limit):
        texts[part] += content + b"\n"
    counts = Counter(WORDS.findall(bytes(texts["train"][:SAMPLE_BYTES])))
    merges = learn_merges(counts, vocabulary - 256)
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    known: dict[bytes, NDArray[np.uint16]] = {}
    tokens = {}
    for part, text in texts.items():
        words = WORDS.findall(bytes(text))
        for word in set(words) - known.keys():
            known[word] = np.array(encode(word, ranks), np.uint16)
        tokens[part] = np.concatenate([known[word] for word in words])
    return tokens


def load_tokens(vocabulary: int, limit: int = TEXT_BYTES) -> tuple[dict[str, NDArray[np.uint16]], str]:
    """The tokens of each part, and a digest that other sources would change. Kept for the next time."""
    listed = hashlib.sha256(repr((vocabulary, limit, sorted(map(str, list_files())))).encode()).hexdigest()[:12]
    kept = Path(tempfile.gettempdir()) / f"thalweg-corpus-{listed}.npz"
    if kept.is_file():
        with np.load(kept) as arrays:
            found = {part: arrays[part] for part in PARTS}
    else:
        found = make_tokens(vocabulary, limit)
        np.savez(kept, **found)
    return found, hashlib.sha256(b"".join(found[part].tobytes() for part in PARTS)).hexdigest()[:12]
