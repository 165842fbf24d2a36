"""C++ of values: their names, the numbers that they need, and the statements that compute them, each once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.kernels.text import ARITHMETIC, functions_in
from thalweg.programs import lower
from thalweg.programs.extents import Kinds
from thalweg.programs.graph import Value

#: Operations of elements, as C++ has them.
TEXTS = {
    **ARITHMETIC,
    "gt": "is_greater<X>({0}, {1})",
    "ge": "is_at_least<X>({0}, {1})",
    "lt": "is_greater<X>({1}, {0})",
    "le": "is_at_least<X>({1}, {0})",
    "eq": "is_equal<X>({0}, {1})",
    "ne": "is_other<X>({0}, {1})",
    "and": "{0} & {1}",
    "abs": "magnitude({0})",
    "sqrt": "root({0})",
    "exp": "exponential({0})",
    "log": "logarithm({0})",
    "expm1": "exponential_less_1({0})",
    "cos": "cosine({0})",
    "floor": "rounded_down({0})",
    "pow": "power<X>({0}, {1})",
    "isfinite": "is_finite<X>({0})",
    "maximum": "larger<X>({0}, {1})",
    "minimum": "smaller<X>({0}, {1})",
    "where": "chosen_of<X>({0}, {1}, {2})",
}


@dataclass(frozen=True)
class Function:
    """One emitted function: its name says what it computes."""

    name: str
    source: str


class Names:
    """Names of values in one function: tokens while it is written, names that can be read at its end."""

    TOKEN = re.compile(r"«(\d+)»")

    def __init__(self) -> None:
        self.values: list[tuple[Any, str]] = []

    def new(self, value: Any, hint: str = "") -> str:
        self.values.append((value, hint))
        return f"«{len(self.values) - 1}»"

    def name_values(self, text: str) -> str:
        """The text with the names that the rule has for values in place of tokens."""
        used: set[str] = set()
        names = []
        for index, (value, hint) in enumerate(self.values):
            base = hint or (value.graph.names.get(value, "") if isinstance(value, Value) else "")
            base = re.sub(r"\W+", "_", base).strip("_") or f"x{index}"
            name, count = base, 1
            while name in used or name in RESERVED:
                name, count = f"{base}_{count}", count + 1
            used.add(name)
            names.append(name)
        return self.TOKEN.sub(lambda token: names[int(token.group(1))], text)

    def bare(self, text: str) -> str:
        """The text with numbered names: equal for functions that compute the same."""
        order: dict[str, int] = {}
        return self.TOKEN.sub(lambda token: f"v{order.setdefault(token.group(1), len(order))}", text)


#: Names that functions have for other things.
OTHERS = (
    "tile matrix given n i k r c at after lane X T kept terms has_terms numbers row column int double float "
    "load over store widened"
)
#: Words of C++ that a rule may call a value.
WORDS = (
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl const constexpr continue "
    "decltype default delete do double else enum explicit export extern false float for friend goto if inline "
    "int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register "
    "return short signed sizeof static struct switch template this throw true try typedef typeid typename union "
    "unsigned using virtual void volatile wchar_t while xor xor_eq"
)
RESERVED = frozenset((*OTHERS.split(), *WORDS.split(), *functions_in(TEXTS.values())))


class Lines(lower.Lines):
    """Statements of elements, rows, columns or matrices as C++, and how they find what they do not compute."""

    def __init__(self, kinds: Kinds, names: Names, leaf: Callable[[Any], str | None]) -> None:
        super().__init__(kinds)
        self.names, self.leaf = names, leaf

    def name(self, value: Value) -> str:
        return self.names.new(value)

    def read(self, operand: Any) -> str | None:
        return self.leaf(operand)

    def number(self, operand: Any) -> str:
        text = self.write(operand)
        return f"chosen_of<X>({text}, T(1), T(0))" if text in self.truths else str(text)

    def truth(self, operand: Any) -> str:
        text = self.write(operand)
        return str(text) if text in self.truths else f"is_other<X>({text}, T(0))"

    @property
    def lines(self) -> list[str]:
        """What computes all that was asked for."""
        computed = (x for x in self.statements if x.op in TEXTS and x.source is not None)
        return [f"[[maybe_unused]] const auto {x.name} = {TEXTS[x.op].format(*x.args)};" for x in computed]


class Numbers:
    """The numbers of one function. Each place that needs one has its own, whether an option, a constant or a result of
    sums stands there: so functions do not differ by that."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.values: list[Any] = []
        self.named: list[str] = []

    def add(self, operand: Any) -> str:
        if isinstance(operand, str) and (known := [i for i, value in enumerate(self.values) if value is operand]):
            return self.named[known[0]]
        hint = operand if isinstance(operand, str) else "" if isinstance(operand, Value) else "constant"
        self.values.append(operand)
        self.named.append(self.names.new(operand, hint))
        return self.named[-1]

    def fetch(self, source: str) -> list[str]:
        """Statements that make them constants of a function."""
        return [f"const T {name} = {source}.numbers[{index}];" for index, name in enumerate(self.named)]


def function(kind: str, text: str, names: Names, comment: str) -> Function:
    digest = hashlib.sha256(names.bare(text).encode()).hexdigest()[:16]
    name = f"{kind}_{digest}"
    source = f"// {comment}\ntemplate <class T>\nvoid {name}(const void* given) {{\n{names.name_values(text)}\n}}\n"
    return Function(name, source)


def index_of(values: Sequence[Any], wanted: Any) -> int:
    """The index of a value, by identity: ``==`` of values makes a new value."""
    return next(index for index, value in enumerate(values) if value is wanted)
