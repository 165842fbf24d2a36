"""Native code is made from rules: own rules are compiled and kept, and nothing half-made is used."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from thalweg import rules
from thalweg.kernels.cpu import shipped
from thalweg.kernels.cpu.compiled import emit_kind, kind_of
from thalweg.kernels.cpu.library import is_here, load
from thalweg.rules import Rule

pytestmark = [
    pytest.mark.slow,  # C++ is compiled
    pytest.mark.skipif(not is_here(), reason="there is no native core here"),
]
#: Options of shapes: the table has one of each kind.
SHAPED = ("stacked_axes", "min_dim_size_to_factor")
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler here")


@pytest.mark.parametrize(
    "rule", [rule for rule in rules.RULES.values() if not rule.needs_whole], ids=lambda r: r.__name__
)
def test_the_package_has_the_code_of_every_option_of_its_rules(rule: type[Rule]) -> None:
    """Whatever options are chosen together, nothing has to be compiled."""
    candidates = pytest.importorskip("strategies", reason="there is no hypothesis here").candidates
    every = {f.name: [f.default, *candidates(rule, f.name, f.default)] for f in fields(rule) if f.name not in SHAPED}
    random = np.random.default_rng(0)
    drawn = ({name: values[random.integers(len(values))] for name, values in every.items()} for _ in range(200))
    variants = [variant for options in drawn if (variant := shipped.make_rule(rule, options)) is not None]
    assert len(variants) > 5
    for variant in variants[:6]:
        chosen = replace(variant, stacked_axes=int(random.integers(2)))
        for shape, (has_lr, exact, guarded) in itertools.product(
            [(4,), (5, 6), (3, 4, 5), (4, 5, 2, 3)], itertools.product((True, False), repeat=3)
        ):
            if not has_lr and not chosen.lr_optional:
                continue
            kind = kind_of(chosen, (2, *shape), has_lr=has_lr, exact=exact, guarded=guarded)
            for each in emit_kind(kind).functions:
                assert load().thalweg_find(each.name.encode()) >= 0, f"{chosen}, {shape}: {each.source}"


# ---- what is compiled is kept, and nothing half-made is used

#: A process that steps a rule of one's own, and prints its engine and what it was warned of.
SCRIPT = """
import sys, warnings
sys.path[:0] = sys.argv[1:]
import numpy as np
import thalweg.numpy
from own_rules import Remembering
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    optimizer = thalweg.numpy.optimizer(Remembering)(0.1)
    for shape in ((3,), (3, 4)):
        optimizer.update(str(shape), np.ones(shape), np.ones(shape))
print(optimizer.engine, *(warning.message for warning in told), sep="\\n")
"""


def begin(cache: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parents[1] / "support")]
    surroundings = {**os.environ, "THALWEG_CACHE": str(cache), **environment}
    return subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> list[str]:
    """Its engine, and what it was told."""
    told, failed = process.communicate(timeout=300)
    assert process.returncode == 0, failed
    return told.splitlines()


@needs_compiler
def test_a_second_process_finds_what_the_first_has_compiled(tmp_path: Path) -> None:
    """Unless it was changed, or others can write to it."""
    cache = tmp_path / "cache"
    assert end(begin(cache)) == ["fused"]
    (path,) = cache.iterdir()
    assert [each.stat().st_mode & 0o077 for each in (cache, path)] == [0, 0]
    made = path.stat()
    assert end(begin(cache)) == ["fused"]
    (path,) = cache.iterdir()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    with path.open("ab") as file:
        file.write(b"x")
    assert end(begin(cache)) == ["fused"]
    assert made.st_size in [each.stat().st_size for each in cache.iterdir()]
    cache.chmod(0o777)
    engine, warned = end(begin(cache))
    assert engine == "reference"
    assert "which others may write to: make it your own (chmod go-w), or set THALWEG_CACHE" in warned


def test_without_a_compiler_it_says_so_once(tmp_path: Path) -> None:
    engine, warned = end(begin(tmp_path / "cache", PATH=str(tmp_path), CXX=""))
    assert engine == "reference"
    assert "code for Remembering must be compiled, and no C++ compiler was found: install g++ or clang" in warned
    assert not (tmp_path / "cache").exists()


def test_what_does_not_compile_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho "no such type" >&2; exit 1\n')
    broken.chmod(0o700)
    engine, warned = end(begin(tmp_path / "cache", CXX=str(broken)))
    assert engine == "reference"
    assert "code for Remembering does not compile: no such type" in warned
    assert list((tmp_path / "cache").iterdir()) == []


@needs_compiler
def test_many_processes_may_begin_at_once(tmp_path: Path) -> None:
    begun = [begin(tmp_path / "cache") for _ in range(2)]
    assert [end(each) for each in begun] == [["fused"]] * 2
    assert all("building" not in path.name for path in (tmp_path / "cache").iterdir())
