"""Write all that is made from the fields of the rules: files for editors and type checkers, and tables of the docs.

    python tools/fields.py

writes the stubs of the modules that make types, classes and functions at run time, and the tables of options in
``docs/``. Tests compare them with what it would write.
"""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from thalweg.dtypes import Name as DType
from thalweg.dtypes import StateName as StateDType
from thalweg.given import Overrides
from thalweg.rules import AROUND, RULES, Rule
from thalweg.rules.options import Option, alternatives, hints_of, number_options, options_of
from thalweg.settings import Numerics
from thalweg.signatures import Pair, Schedulable, Triple

DOCS = Path(__file__).resolve().parents[1] / "docs"
PACKAGE = Path(__file__).resolve().parents[1] / "src" / "thalweg"
MADE = '"""Made by tools/fields.py from the fields of the rules: change those, and run it."""'
COMMON = [
    "from thalweg.dtypes import Name as DType",
    "from thalweg.dtypes import StateName as StateDType",
    "from thalweg.given import Overrides",
    "from thalweg.rules import Annealed, Rule, Spikes",
    "from thalweg.signatures import Pair, Schedulable, Triple",
]


def text_of(hint: Any) -> str:
    """A type, as it is written."""
    aliases = {"Overrides": Overrides, "StateDType | None": StateDType | None, "DType | None": DType | None}
    for name, alias in aliases.items():
        if hint == alias:
            return name
    kinds = list(alternatives(hint))
    for alias, name in ((Schedulable, "Schedulable"), (Pair, "Pair"), (Triple, "Triple")):
        if set(alternatives(alias)) <= set(kinds):
            rest = [kind for kind in kinds if kind not in alternatives(alias)]
            before = [text_of(kind) for kind in rest if kind is not NoneType]
            return " | ".join([*before, name, *(["None"] if NoneType in rest else [])])
    if len(kinds) > 1:
        return " | ".join(map(text_of, kinds))
    if typing.get_origin(hint) is Literal:
        return f"Literal[{', '.join(map(repr, typing.get_args(hint)))}]".replace("'", '"')
    if typing.get_origin(hint) is tuple:
        return f"tuple[{', '.join(map(text_of, typing.get_args(hint)))}]"
    return {NoneType: "None", Any: "Any", Ellipsis: "..."}.get(hint) or hint.__name__


def written(default: Any) -> str:
    """A default in a stub."""
    plain = isinstance(default, (bool, int, float, str, NoneType)) or default == ()
    return f" = {default!r}".replace("'", '"') if plain else " = ..."


def classes(front_end: str, *imports: str) -> str:
    """The stub of ``optimizers.py`` of a front end with classes."""
    optimizers = importlib.import_module(f"thalweg.{front_end}.optimizers")
    base = optimizers.Optimizer.__init__
    lines = [MADE, "", "from typing import Any, Literal", "", *COMMON, *imports, "", *listed(["optimizer", *RULES]), ""]
    lines += ["def optimizer(rule: type[Rule]) -> type[Optimizer]: ...", ""]
    for name in RULES:
        constructor = inspect.signature(getattr(optimizers, name).__init__)
        lines += [f"class {name}(Optimizer):", "    def __init__("]
        lines += [f"        {line}," for line in parameters(constructor, base.__annotations__)]
        lines += ["    ) -> None: ...", ""]
    return "\n".join(lines)


def functions() -> str:
    """The stub of ``thalweg.optax.functions``."""
    from thalweg.optax.functions import FUNCTIONS, function_of, transformation

    names = ["function_of", "transformation", *FUNCTIONS]
    lines = [MADE, "", "from collections.abc import Callable, Mapping", "from typing import Any, Literal", ""]
    lines += ["import optax", "", *COMMON, "from thalweg.optax.engines import Engine", ""]
    lines += [*listed(names), "", "BESIDE: Mapping[str, Any]", "ADDED: Mapping[str, Mapping[str, Any]]", ""]
    for function in (function_of, transformation):
        shown = str(inspect.signature(inspect.unwrap(function)))
        shown = re.sub(r"(: |-> )'([^']*)'", r"\1\2", shown)  # annotations are texts
        lines += [f"def {function.__name__}{shown}: ...", ""]
    for rule in RULES.values():
        also = [name for known in rule.ALSO_NAMED.values() for name in known]
        lines += [f"def {rule.__name__.lower()}("]
        lines += [f"    {line}," for line in parameters(inspect.signature(function_of(rule)), {})]
        lines += [*(f"    {name}: Any = None," for name in also), ") -> optax.GradientTransformationExtraArgs: ...", ""]
    return "\n".join(lines)


def parameters(signature: inspect.Signature, texts: Mapping[str, str]) -> Iterator[str]:
    """The parameters of a signature as a stub has them. texts: annotations that are already texts."""
    keyword = False
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not keyword:
            keyword = True
            yield "*"
        default = "" if p.default is p.empty else written(p.default)
        yield p.name if p.name == "self" else f"{p.name}: {texts.get(p.name) or text_of(p.annotation)}{default}"


def listed(names: list[str]) -> list[str]:
    return ["__all__: list[str] = [", *(f'    "{name}",' for name in names), "]"]


#: The files, by how each is made.
FILES: dict[str, Callable[[], str]] = {
    "numpy/optimizers.pyi": lambda: classes(
        "numpy",
        "from thalweg.numpy.arrays import Rate",
        "from thalweg.numpy.engines import Engine",
        "from thalweg.numpy.optimizer import Optimizer",
    ),
    "torch/optimizers.pyi": lambda: classes(
        "torch",
        "from thalweg.torch.base import Optimizer",
        "from thalweg.torch.params.groups import EngineName, Params, Rate",
    ),
    "optax/functions.pyi": functions,
}


# ---- tables of the docs

#: The table under "## Options" of a page.
TABLE = re.compile(r"(?<=\n## Options\n)(.*?)^\| option \|.*?\n(?!\|)", re.MULTILINE | re.DOTALL)
#: The pages, each with what it documents.
PAGES: dict[str, tuple[type[Any], ...]] = {
    "options.md": (Numerics, Rule),
    "compose.md": AROUND,
    **{f"{name.lower()}.md": (rule,) for name, rule in RULES.items()},
}


def table(kinds: tuple[type[Any], ...]) -> str:
    """A row for each option: its default, what it means, its range, what it needs, whether it may be a schedule."""
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *chain.from_iterable(map(rows, kinds))]) + "\n"


def rows(kind: type[Any]) -> Iterator[str]:
    known, numbers = options_of(kind), number_options(kind) if issubclass(kind, Rule) else ()
    shared = {f.name for f in fields(Rule)}
    for name, default in sorted(((f.name, f.default) for f in fields(kind)), key=lambda each: each[0] in shared):
        if name not in shared or kind is Rule:
            meaning = " ".join([*sentences(kind, name, known[name]), *(["(s)"] if name in numbers else [])])
            yield f"| `{name}` | `{default!r}` | {meaning} |".replace("||", "‖")


def sentences(kind: type[Any], name: str, option: Option) -> Iterator[str]:
    yield option.doc
    if option.range:
        tuples = [each for each in alternatives(hints_of(kind)[name]) if typing.get_origin(each) is tuple]
        which = {2: "Both ", 3: "All "}[len(typing.get_args(tuples[0]))] if tuples else ""
        yield f"{which + option.range if which else option.range.capitalize()}."
    if option.need is not None:
        needed = option.need.describe(kind)
        yield f"Needs {f'`{needed}`' if '=' in needed else needed}."
    for value, (need, _) in option.requires.items():
        yield f"`{value!r}` needs `{need.describe(kind)}`."


def page(name: str) -> str:
    """A page of the docs with its table as the fields have it; for a new rule, the beginning of a page."""
    file, kinds = DOCS / name, PAGES[name]
    kind = kinds[0]
    text = f"# {kind.__name__}\n\n{inspect.getdoc(kind)}\n\n## Options\n\n| option |\n"
    text = file.read_text(encoding="utf-8") if file.exists() else text
    made, count = TABLE.subn(lambda found: found[1] + table(kinds), text, count=1)
    assert count == 1, f"{name} has no table under its Options"
    return made


if __name__ == "__main__":
    for file, make in FILES.items():
        (PACKAGE / file).write_text(make(), encoding="utf-8")
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
