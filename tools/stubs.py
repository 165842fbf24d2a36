"""Write what editors and type checkers read of the optimizers, from the fields of the rules.

    python tools/stubs.py

writes ``thalweg/options.py``, the options of each optimizer as a ``TypedDict``, and the stubs of the modules that make
classes and functions at run time. A test compares them with what this would write.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from thalweg.dtypes import Name as DType
from thalweg.dtypes import StateName as StateDType
from thalweg.given import Overrides
from thalweg.rules import RULES, Rule
from thalweg.rules.options import alternatives
from thalweg.settings import Handling
from thalweg.signatures import BESIDE, Pair, Schedulable, defaults, types_of

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "thalweg"
MADE = '"""Made by tools/stubs.py from the fields of the rules: change those, and run it."""'
IMPORTS = """from __future__ import annotations

from typing import Any, Literal, TypedDict

from thalweg.dtypes import Name as DType
from thalweg.dtypes import StateName as StateDType
from thalweg.given import Overrides as Overrides
from thalweg.rules import Annealed
from thalweg.signatures import Pair as Pair
from thalweg.signatures import Schedulable as Schedulable
"""


def text_of(hint: Any) -> str:
    """A type, as it is written."""
    aliases = {"Overrides": Overrides, "StateDType | None": StateDType | None, "DType | None": DType | None}
    for name, alias in aliases.items():
        if hint == alias:
            return name
    kinds = list(alternatives(hint))
    for alias, name in ((Schedulable, "Schedulable"), (Pair, "Pair")):
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
    """``thalweg/options.py``."""
    shared = {**BESIDE, "stacked_axes": int, **{name: types_of(Rule)[name] for name in vars(Handling())}}
    lines = [MADE, "", IMPORTS, "", "class CommonOptions(TypedDict, total=False):"]
    lines += [f"    {name}: {text_of(hint)}" for name, hint in shared.items()]
    for name, rule in RULES.items():
        lines += ["", "", f"class {name}Options(CommonOptions, total=False):"]
        lines += [f"    {option}: {text_of(hint)}" for option, hint in types_of(rule).items() if option not in shared]
    return "\n".join(lines) + "\n"


def written(default: Any) -> str:
    """A default in a stub."""
    plain = isinstance(default, (bool, int, float, str, NoneType)) or default == ()
    return f" = {default!r}".replace("'", '"') if plain else " = ..."


def classes(front_end: str, imports: list[str]) -> str:
    """The stub of ``optimizers.py`` of a front end with classes."""
    base = __import__(f"thalweg.{front_end}.base", fromlist=["Optimizer"]).Optimizer
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
    yield "*"
    for option, default in defaults(rule).items():
        yield f"{option}: {text_of(types[option])}{written(default)}"
    for p in arguments:
        if p.kind is p.KEYWORD_ONLY:
            yield f"{p.name}: {p.annotation}{written(p.default)}"


def functions() -> str:
    """The stub of ``thalweg.optax.functions``."""
    from thalweg.optax.functions import ADDED, BESIDE, FUNCTIONS, Added, function_of, transformation

    names = ["function_of", "transformation", *FUNCTIONS]
    lines = [MADE, "", "from collections.abc import Callable, Mapping", "from typing import Any, Literal", ""]
    lines += ["import optax", "", "from thalweg.given import Overrides", "from thalweg.rules import Annealed, Rule", ""]
    lines += [*listed(names), "", "BESIDE: Mapping[str, Any]", "ADDED: Mapping[str, Mapping[str, Any]]", ""]
    assert all(isinstance(each, Added) for added in ADDED.values() for each in added.values())
    assert set(BESIDE) == {"overrides", "stacked_axes", "specs"}
    for function in (function_of, transformation):
        shown = inspect.signature(inspect.unwrap(function))
        lines += [f"def {function.__name__}{str(shown).replace(chr(39), '')}: ...", ""]
    for rule in RULES.values():
        lines += list(function_stub(rule))
    return "\n".join(lines)


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


COMMON = [
    "from thalweg.dtypes import Name as DType",
    "from thalweg.dtypes import StateName as StateDType",
    "from thalweg.given import Overrides",
    "from thalweg.rules import Annealed, Rule",
]
SCHEDULES = ["from thalweg.signatures import Pair, Schedulable"]
#: The files, by how each is made.
FILES: dict[str, Callable[[], str]] = {
    "options.py": typed_dicts,
    "numpy/optimizers.pyi": lambda: classes(
        "numpy",
        [
            *COMMON[:3],
            "from thalweg.numpy.base import Optimizer",
            "from thalweg.numpy.checks import Rate",
            "from thalweg.numpy.stepping import Engine",
            *COMMON[3:],
            *SCHEDULES,
        ],
    ),
    "torch/optimizers.pyi": lambda: classes(
        "torch",
        [
            *COMMON,
            *SCHEDULES,
            "from thalweg.torch.base import Optimizer",
            "from thalweg.torch.params.grouped import Params",
            "from thalweg.torch.params.groups import EngineName",
            "from thalweg.torch.params.rates import Rate",
        ],
    ),
    "optax/functions.pyi": functions,
}


def main() -> None:
    for file, make in FILES.items():
        (PACKAGE / file).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
