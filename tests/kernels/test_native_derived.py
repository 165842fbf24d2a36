"""Native code is made from rules: own rules are compiled and kept, and nothing half-made is used."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from own_rules import Signed

from thalweg import rules
from thalweg.errors import FallbackWarning
from thalweg.kernels.cpu import compiled as compilation
from thalweg.kernels.cpu import compiler, shipped
from thalweg.kernels.cpu.compiled import emit_kind, kind_of, reason_uncompiled, warn_slow
from thalweg.kernels.cpu.library import load, reason_missing
from thalweg.rules import Rule

pytestmark = [
    pytest.mark.slow,  # C++ is compiled
    pytest.mark.skipif(reason_missing() is not None, reason="there is no native core here"),
]
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler here")


@pytest.mark.parametrize(
    "rule", [rule for rule in rules.RULES.values() if not rule.needs_whole], ids=lambda r: r.__name__
)
def test_the_package_has_the_code_of_every_option_of_its_rules(rule: type[Rule]) -> None:
    """Whatever options are chosen together, nothing has to be compiled."""
    every = shipped.choices(rule)
    random = np.random.default_rng(0)
    tried = 0
    for _ in range(8):
        chosen = shipped.make_rule(rule, {name: values[random.integers(len(values))] for name, values in every.items()})
        if chosen is None:
            continue
        chosen = replace(chosen, stacked_axes=int(random.integers(2)))
        tried += 1
        for shape, (has_lr, exact, guarded) in itertools.product(
            [(4,), (5, 6), (3, 4, 5), (4, 5, 2, 3)], itertools.product((True, False), repeat=3)
        ):
            if not has_lr and not chosen.lr_optional:
                continue
            kind = kind_of(chosen, (2, *shape), has_lr=has_lr, exact=exact, guarded=guarded)
            for each in emit_kind(kind).functions:
                assert load().thalweg_find(each.name.encode()) >= 0, f"{chosen}, {shape}: {each.source}"
    assert tried > 2


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is compiled yet, what will be is kept in a folder of this test, and no compiler is remembered."""
    monkeypatch.setenv("THALWEG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_loaded", {})
    for forget in (forget_code, compiler.compiler.cache_clear, warn_slow.cache_clear):
        forget()
    yield
    for forget in (forget_code, compiler.compiler.cache_clear, warn_slow.cache_clear):
        forget()


def forget_code() -> None:
    compilation.compile_kind.cache_clear()
    compilation.reason_against_kind.cache_clear()


@pytest.mark.usefixtures("_fresh")
class TestWhatIsKept:
    def files(self, tmp_path: Path) -> list[Path]:
        return sorted((tmp_path / "cache").iterdir())

    @needs_compiler
    def test_a_second_use_finds_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Unless it was changed, or others can write to it."""
        assert reason_uncompiled(Signed(), (3,)) == ""
        (path,) = self.files(tmp_path)
        assert path.stat().st_mode & 0o077 == 0
        assert path.parent.stat().st_mode & 0o077 == 0
        forget_code()
        with monkeypatch.context() as patch:
            patch.setattr(compiler, "build", None)  # nothing may be built any more
            assert reason_uncompiled(Signed(), (3,)) == ""
        key = path.stem.split("-")[0]
        assert compiler.find_kept(key) == path
        path.parent.chmod(0o777)
        assert compiler.find_kept(key) is None
        forget_code()
        with pytest.warns(FallbackWarning, match="others may write to: make it your own"):
            assert "THALWEG_CACHE" in reason_uncompiled(Signed(), (3,))
        path.parent.chmod(0o700)
        changed = tmp_path / "changed"
        shutil.copy2(path, changed)
        with changed.open("ab") as file:
            file.write(b"x")
        changed.replace(path)  # not written over: this process has it in memory
        assert compiler.find_kept(key) is None

    def test_without_a_compiler_it_says_so_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        with pytest.warns(FallbackWarning, match="code for Signed must be compiled, and no C"):
            assert "install g++ or clang" in reason_uncompiled(Signed(), (3,))
        assert reason_uncompiled(Signed(), (3, 4)) != ""
        assert not (tmp_path / "cache").exists()

    def test_what_does_not_compile_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        broken = tmp_path / "broken"
        broken.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho "no such type" >&2; exit 1\n'
        )
        broken.chmod(0o700)
        monkeypatch.setenv("CXX", str(broken))
        with pytest.warns(FallbackWarning, match="code for Signed does not compile: no such type"):
            assert reason_uncompiled(Signed(), (3,)) != ""
        assert self.files(tmp_path) == []

    @needs_compiler
    def test_many_processes_may_begin_at_once(self, tmp_path: Path) -> None:
        script = (
            "import sys; sys.path[:0] = sys.argv[1:]\n"
            "from own_rules import Signed\n"
            "from thalweg.kernels.cpu.compiled import reason_uncompiled\n"
            "assert reason_uncompiled(Signed(), (3,)) == '', reason_uncompiled(Signed(), (3,))\n"
        )
        here = Path(__file__).parent
        paths = [str(here), str(here.parent / "support")]
        begun = [
            subprocess.Popen(
                [sys.executable, "-c", script, *paths], env={**os.environ}, stderr=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        for each in begun:
            _, said = each.communicate(timeout=300)
            assert each.returncode == 0, said
        assert all("building" not in path.name for path in self.files(tmp_path))
