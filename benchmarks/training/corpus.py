"""Python sources of the machine itself as tokens, which pairs of bytes make.

The standard library and all installed packages are read, up to so many bytes. Files are taken in the order of their
digests, which mixes packages evenly, and each belongs wholly to training, validation or test.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WORDS = re.compile(rb"\n *| ?[A-Za-z_]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9_]+|\s")
#: The share of the text that the vocabulary is made from.
SAMPLE = 1 / 8
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
    counts = Counter(WORDS.findall(bytes(texts["train"][: int(SAMPLE * limit)])))
    merges = learn_merges(counts, vocabulary - 256)
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    encode_once = functools.cache(functools.partial(encode, ranks=ranks))

    def encode_all(text: bytearray) -> NDArray[np.uint16]:
        words = (match[0] for match in WORDS.finditer(bytes(text)))
        return np.fromiter(itertools.chain.from_iterable(map(encode_once, words)), np.uint16)

    return {part: encode_all(text) for part, text in texts.items()}


def load_tokens(vocabulary: int, limit: int, folder: Path) -> tuple[dict[str, NDArray[np.uint16]], str]:
    """The tokens of each part, and their digest. They are kept in the folder, and those that are there are taken."""
    kept = folder / f"tokens-{vocabulary}-{limit}.npz"
    if not kept.is_file():
        np.savez_compressed(kept, **make_tokens(vocabulary, limit))
    with np.load(kept) as arrays:
        tokens = {part: arrays[part] for part in PARTS}
    return tokens, hashlib.sha256(b"".join(tokens[part].tobytes() for part in PARTS)).hexdigest()[:12]
