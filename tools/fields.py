"""Write all that is made from the fields of the rules: files for editors and type checkers, and tables of the docs.

    python tools/fields.py

writes the stubs of the modules that make types, classes and functions at run time, and the tables of options in
``docs/``. Tests compare them with what it would write.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from thalweg.dtypes import Name as DType
from thalweg.dtypes import StateName as StateDType
from thalweg.given import Overrides
from thalweg.rules import AROUND, RULES, Around, Rule
from thalweg.rules.options import Option, alternatives, hints_of, number_options, options_of
from thalweg.settings import Handling, around_options
from thalweg.signatures import BESIDE, Pair, Schedulable, Triple, defaults, types_of

DOCS = Path(__file__).resolve().parents[1] / "docs"
PACKAGE = Path(__file__).resolve().parents[1] / "src" / "thalweg"
MADE = '"""Made by tools/fields.py from the fields of the rules: change those, and run it."""'
IMPORTS = """from typing import Literal, TypedDict

from thalweg.dtypes import Name as DType
from thalweg.dtypes import StateName as StateDType
from thalweg.given import Overrides
from thalweg.rules import Annealed, Rule, Spikes
from thalweg.signatures import Pair, Schedulable, Triple
"""


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


def typed_dicts() -> str:
    """The stub of ``thalweg.options``."""
    shared = {**BESIDE, "stacked_axes": int}
    shared |= {name: types_of(Rule)[name] for name in (*around_options(), *vars(Handling()))}
    names = ["CommonOptions", "DType", "Pair", "Schedulable", "StateDType", "Triple"]
    names += [f"{name}Options" for name in RULES]
    lines = [MADE, "", IMPORTS, *listed(names), "", "class CommonOptions(TypedDict, total=False):"]
    lines += [f"    {name}: {text_of(hint)}" for name, hint in shared.items()]
    for name, rule in RULES.items():
        lines += ["", "", f"class {name}Options(CommonOptions, total=False):"]
        lines += [f"    {option}: {text_of(hint)}" for option, hint in types_of(rule).items() if option not in shared]
    return "\n".join(lines) + "\n"


def written(default: Any) -> str:
    """A default in a stub."""
    plain = isinstance(default, (bool, int, float, str, NoneType)) or default == ()
    return f" = {default!r}".replace("'", '"') if plain else " = ..."


def classes(module: str, imports: list[str]) -> str:
    """The stub of ``optimizers.py`` of a front end with classes. module: where their base stands."""
    base = __import__(module, fromlist=["Optimizer"]).Optimizer
    arguments = list(inspect.signature(base.__init__).parameters.values())[1:]
    lines = [MADE, "", "from typing import Any, Literal", "", *imports, "", *listed(["optimizer", *RULES]), ""]
    lines += ["def optimizer(rule: type[Rule]) -> type[Optimizer]: ...", ""]
    for name, rule in RULES.items():
        lines += [f"class {name}(Optimizer):", "    def __init__(", "        self,"]
        lines += [f"        {line}," for line in constructor(rule, arguments)]
        lines += ["    ) -> None: ...", ""]
    return "\n".join(lines)


def constructor(rule: type[Rule], arguments: list[inspect.Parameter]) -> Iterator[str]:
    types, has_default = types_of(rule), rule.default_lr is not None or rule.lr_optional
    for p in arguments:
        if p.kind is p.POSITIONAL_OR_KEYWORD:
            default = written(rule.default_lr) if p.name == "lr" and has_default else ""
            yield f"{p.name}: {p.annotation}{default}"
    values = defaults(rule)
    by_position = rule.TORCH if any(p.kind is p.VAR_POSITIONAL for p in arguments) else ()
    for option in (*by_position, "*", *(name for name in values if name not in by_position)):
        yield option if option == "*" else f"{option}: {text_of(types[option])}{written(values[option])}"
    for p in arguments:
        if p.kind is p.KEYWORD_ONLY:
            yield f"{p.name}: {p.annotation}{written(p.default)}"


def functions() -> str:
    """The stub of ``thalweg.optax.functions``."""
    from thalweg.optax.functions import BESIDE, FUNCTIONS, function_of, transformation

    names = ["function_of", "transformation", *FUNCTIONS]
    lines = [MADE, "", "from collections.abc import Callable, Mapping", "from typing import Any, Literal", ""]
    lines += ["import optax", "", "from thalweg.given import Overrides", "from thalweg.optax.engines import Engine"]
    lines += ["from thalweg.rules import Annealed, Rule, Spikes", ""]
    lines += [*listed(names), "", "BESIDE: Mapping[str, Any]", "ADDED: Mapping[str, Mapping[str, Any]]", ""]
    assert set(BESIDE) == {"overrides", "stacked_axes", "specs", "engine"}
    for function in (function_of, transformation):
        shown = inspect.signature(inspect.unwrap(function))
        lines += [f"def {function.__name__}{bare(str(shown))}: ...", ""]
    for rule in RULES.values():
        lines += list(function_stub(rule))
    return "\n".join(lines)


def bare(signature: str) -> str:
    """A signature whose annotations are not texts."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)


def function_stub(rule: type[Rule]) -> Iterator[str]:
    from thalweg.optax.functions import function_of

    keyword = False
    yield f"def {rule.__name__.lower()}("
    parameters = list(inspect.signature(function_of(rule)).parameters.values())
    also = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Any)
        for known in rule.ALSO_NAMED.values()
        for name in known
    ]
    for p in (*parameters, *also):
        if p.kind is p.KEYWORD_ONLY and not keyword:
            keyword = True
            yield "    *,"
        default = "" if p.default is p.empty else written(p.default)
        yield f"    {p.name}: {text_of(p.annotation)}{default},"
    yield ") -> optax.GradientTransformationExtraArgs: ..."
    yield ""


def listed(names: list[str]) -> list[str]:
    return ["__all__: list[str] = [", *(f'    "{name}",' for name in names), "]"]


#: Classes that ``thalweg.integrations.keras`` makes at run time, as type checkers read them there.
KERAS = re.compile(r"(?<=^if TYPE_CHECKING:\n\n)(    class \w+\(Optimizer\): \.\.\.\n\n)+", re.MULTILINE)


def keras_classes() -> str:
    """The adapter for Keras, with a class for every rule."""
    text = (PACKAGE / "integrations" / "keras.py").read_text(encoding="utf-8")
    made, count = KERAS.subn("".join(f"    class {name}(Optimizer): ...\n\n" for name in RULES), text)
    assert count == 1, "integrations/keras.py has no classes for type checkers"
    return made


COMMON = [
    "from thalweg.dtypes import Name as DType",
    "from thalweg.dtypes import StateName as StateDType",
    "from thalweg.given import Overrides",
    "from thalweg.rules import Annealed, Rule, Spikes",
]
SCHEDULES = ["from thalweg.signatures import Pair, Schedulable, Triple"]
#: The files, by how each is made.
FILES: dict[str, Callable[[], str]] = {
    "options.pyi": typed_dicts,
    "numpy/optimizers.pyi": lambda: classes(
        "thalweg.numpy.optimizer",
        [
            *COMMON[:3],
            "from thalweg.numpy.arrays import Rate",
            "from thalweg.numpy.engines import Engine",
            "from thalweg.numpy.optimizer import Optimizer",
            *COMMON[3:],
            *SCHEDULES,
        ],
    ),
    "torch/optimizers.pyi": lambda: classes(
        "thalweg.torch.base",
        [
            *COMMON,
            *SCHEDULES,
            "from thalweg.torch.base import Optimizer",
            "from thalweg.torch.params.groups import EngineName, Params, Rate",
        ],
    ),
    "optax/functions.pyi": functions,
    "integrations/keras.py": keras_classes,
}


# ---- tables of the docs

#: The table under "## Options" of a page.
TABLE = re.compile(r"(?<=\n## Options\n)(.*?)^\| option \|.*?\n(?!\|)", re.MULTILINE | re.DOTALL)
#: The pages, each with what it documents.
PAGES: dict[str, tuple[type[Any], ...]] = {
    "options.md": (Handling,),
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
        if name not in shared or not issubclass(kind, Around):
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


def main() -> None:
    for file, make in FILES.items():
        (PACKAGE / file).write_text(make(), encoding="utf-8")
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
