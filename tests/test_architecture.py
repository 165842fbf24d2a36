"""The house as it was meant: rules are formulas, and every file is used."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_rules_are_pure_formulas() -> None:
    """No rule asks for a framework, a dtype, a device or a generator, or changes anything in place."""
    assert (ROOT / "src/thalweg/py.typed").exists()
    words = ("import numpy", "import torch", "import jax", ".device", "random.", " += ", " -= ", " *= ", " /= ")
    for path in (ROOT / "src/thalweg/rules").glob("*.py"):
        assert [word for word in words if word in path.read_text()] == [], path.name


def test_every_file_of_the_package_is_used() -> None:
    """A module is imported, or named where others are imported by name; another file is named where it is read.

    Users import those that the docs import. The registry of rules imports its whole folder.
    """
    package = ROOT / "src" / "thalweg"
    endings = {".py", ".pyi", ".h", ".cpp", ".html", ".css", ".js", ".md", ".npz"}
    files = [path for path in package.rglob("*.*") if path.suffix in endings]
    pages = [ROOT / "README.md", ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", *(ROOT / "docs").rglob("*.md")]
    texts = {path: path.read_text(encoding="utf-8") for path in [*files, *pages] if path.suffix not in (".npz", ".pyi")}
    imported = set(re.findall(r"\bthalweg(?:\.\w+)+", "\n".join(texts.values())))
    for text in texts.values():
        for module, names in re.findall(r"^ *(?:>>> )?from (thalweg[\w.]*) import (\([^)]*\)|.*)", text, re.MULTILINE):
            imported |= {f"{module}.{name}" for name in re.findall(r"\w+", names)}
    for path in files:
        others = [text for other, text in texts.items() if other != path]
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        if path.suffix == ".pyi":
            used = path.with_suffix(".py") in files
        elif path.suffix == ".py":
            is_known = path.stem == "__init__" or path.parent.name == "rules" or name in imported
            used = is_known or any(re.search(rf"[\"}}.]{path.stem}\"", text) for text in others)
        else:
            word = path.stem if path.suffix == ".cpp" else path.name  # CMake has the names of these in a list
            used = any(word in text for text in others)
        assert used, f"nothing uses {path}"
