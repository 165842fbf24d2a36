"""What MkDocs asks of this project beside docs/*.md and mkdocs.yml: pages made from the sources, and formulas.

``make docs`` runs it; the site is built without the internet, and opens without it.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe
import latex2mathml.converter
from mkdocs.structure.files import File, Files

from thalweg.rules import RULES

ROOT = Path(__file__).resolve().parents[1]
#: Files outside docs/ that are in the site too, since docs link to them.
OUTSIDE = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/results/*.md",
    "benchmarks/results/*.json",
    "benchmarks/training/README.md",
    "benchmarks/training/results/*.md",
    "examples/*.py",
]
#: Public modules and what a reader finds there.
MODULES = {
    "thalweg": "Parts of a rule, errors and warnings",
    "thalweg.torch": "Optimizers for PyTorch",
    "thalweg.optax": "Gradient transformations for JAX",
    "thalweg.numpy": "Optimizers for numpy arrays",
    "thalweg.plan": "What a step will cost",
    "thalweg.race": "Optimizers side by side on a task",
    "thalweg.check": "Whether an optimizer keeps its promises",
}
#: Lines of a console example up to the next empty one, or to the end.
EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\s*\Z)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(#[^)\s]*)?(?=\))")


class Examples(griffe.Extension):
    """Show what docstrings have as examples for doctest as code; mkdocstrings loads it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub("```python\n\\g<0>\n```", obj.docstring.value)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    made = {uri: shown(ROOT / source) for source, uri in outside().items()}
    for uri, text in {**made, **references()}.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links between files of the repository to the pages made of them."""
    here = page.file.src_uri
    sources = {uri: source for source, uri in outside().items()}
    folder = os.path.dirname(sources.get(here, f"docs/{here}"))

    def led(found: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, found[1]))
        uri = outside().get(target, target.removeprefix("docs/"))
        return os.path.relpath(uri, os.path.dirname(here) or ".") + (found[2] or "")

    return LINK.sub(led, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Drop the roles of reStructuredText, which docstrings have for editors."""
    return re.sub(r":(?:class|meth|func|mod):(?=<code>)", "", html)


def formula(source: str, *_: Any, **__: Any) -> str:
    """A fence of LaTeX as MathML, which browsers draw by themselves."""
    return latex2mathml.converter.convert(source, display="block")


@cache
def outside() -> dict[str, str]:
    """The addresses in the site of files outside docs/, by their paths: programs become pages, records stay files."""
    found = (path.relative_to(ROOT).as_posix() for pattern in OUTSIDE for path in sorted(ROOT.glob(pattern)))
    return {path: f"{path}.md" if path.endswith(".py") else path for path in found}


def shown(path: Path) -> str:
    """A file as a page: a program under its name."""
    text = path.read_text(encoding="utf-8")
    return f"# {path.name}\n\n```python\n{text}```\n" if path.suffix == ".py" else text


def references() -> dict[str, str]:
    """The reference: a page for each public module. Options are on the pages of the rules."""
    made = {}
    for module, about in MODULES.items():
        source = ROOT / "src" / module.replace(".", "/") / "__init__.py"
        names = "\n\n".join(f"::: {path}" for path in public(source))
        made[f"api/{module}.md"] = f"# {module}\n\n{about}.\n\n{names}\n"
    return made


def public(source: Path) -> Iterator[str]:
    """Where the public names of a module are defined, in alphabetical order; rules have a page of their own.

    The source is read and not imported: the frameworks need not be installed.
    """
    text = source.read_text(encoding="utf-8")
    listed = text.partition("__all__ = [")[2].partition("]")[0]
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("thalweg.")
        for alias in node.names
    }
    rules = {rule.lower() for rule in RULES}
    for name in sorted(imported, key=str.lower):
        if (not listed or f'"{name}"' in listed) and name.lower() not in rules:
            yield imported[name]
