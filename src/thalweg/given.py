"""What users write: names of options, values, and the patterns that choose parameters for overrides and mixtures."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias

from thalweg.errors import OptionError, ParameterError, UnusedOverrideWarning, warn
from thalweg.rules import Annealed, Rule
from thalweg.rules.checks import is_known, require
from thalweg.rules.exempt import EXEMPT
from thalweg.rules.options import elsewhere_of

#: How many names of parameters an error tells.
MOST_TOLD = 20
#: What other libraries call options that every optimizer has.
ELSEWHERE = {
    **{"mu_dtype": "momentum_dtype", "dtype_momentum": "momentum_dtype", "accumulator_dtype": "momentum_dtype"},
    **{"clip_grad_norm": "max_grad_norm", "max_norm": "max_grad_norm"},
    **{"ema_decay": "averaged", "use_ema": "averaged"},
}

#: Options that earlier versions had, each with what to use instead.
GONE = {
    "accumulate": "divide the loss by n and call step() every n batches, or use optax.MultiSteps",
    "message_dtype": "messages have the dtype of what they carry; keep matrices in bfloat16 for smaller ones",
    "offload_state": "use FSDP2's CPUOffloadPolicy, or state_dtype='int8', which takes a quarter of the memory",
    "tensor_spikes": "spikes=True guards the norm of all gradients",
}

# ---- names and values


def check_known(owner: type[Rule] | str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse options that are not known. owner: whose they are, as a rule or by another name."""
    for name in given:
        if name not in known:
            hint = hint_for(owner, name, known, cutoff=0.6) or f"it has {', '.join(sorted(known))}"
            raise OptionError(f"{getattr(owner, '__name__', owner)} has no option {name!r}: {hint}")


def hint_for(owner: type[Rule] | str, name: str, known: Sequence[str], *, cutoff: float) -> str:
    """What to write instead of a name that is no option: as other libraries call it, or a likely misspelling."""
    elsewhere = {} if isinstance(owner, str) else {**ELSEWHERE, **owner.ELSEWHERE, **elsewhere_of(owner)}
    if name in elsewhere:
        return f"here it is {elsewhere[name]}"
    if name in GONE:
        return f"it is gone since 0.3: {GONE[name]}"
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}?" if close else ""


def differ(first: Any, second: Any) -> bool:
    """Whether two values of an option differ; what is traced or on a device differs from all else."""
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        return any(map(differ, first, second))
    if first is second:
        return False
    try:
        return not (is_known(first) and is_known(second)) or bool(first != second)
    except ValueError:  # an array, which no option is
        return True


def plain(value: Any) -> Any:
    """Numbers of array libraries as Python's own, which never widen what they multiply."""
    if type(value) in (float, int, bool) or isinstance(value, Annealed):
        return value
    if is_list(value):
        return tuple(map(plain, value))
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


def is_list(value: Any) -> bool:
    """Whether a value is a list of any kind: Python's, or that of a configuration library."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


# ---- patterns

#: Chooses parameters: a glob, a compiled regular expression (searched), or a predicate.
Pattern: TypeAlias = str | re.Pattern[str] | Callable[[str, Any], bool]
#: A pattern, and what holds for the parameters that it is the first to match. None: it matches none.
PatternEntry: TypeAlias = tuple[Pattern | None, Any]
#: Ordered: where several entries match, all apply and later ones win.
OverrideList: TypeAlias = Sequence[tuple[Pattern, Mapping[str, Any]]]
#: The same as users write it: "standard" stands for an entry, or for a list of this entry alone.
Overrides: TypeAlias = Literal["standard"] | Sequence[Literal["standard"] | tuple[Pattern, Mapping[str, Any]]]

#: The name of a module that normalises, in torch or flax: norm1, input_layernorm, LayerNorm_0, ln_2, bn3.
NORM = re.compile(r"norm|^(ln|bn)(_|\d|$)", re.IGNORECASE)
#: Parts of the name of a module, or of a parameter, that is a table to look up.
TABLE = re.compile(r"embed|token|^wte$|^wpe$", re.IGNORECASE)
#: Names of modules that are output layers wherever they are, but for lists of layers; and those that are at the top.
HEADS = re.compile(
    r"(?!.*(multi|attention)_?heads?$)(\w+_)?heads?|classifier|score|predictions?|output_projection|fc_out|(to_)?logits|qa_outputs|"
    r"policy|(policy|action|value)_net"
)
TOP_HEADS = re.compile(r"out|outputs?|output_layer|readout|unembed")
#: Names of layers that make queries, keys and values, or keys and values, at once; and of modules of attention.
QKV = re.compile(r"qkv|^c_attn$|^query_key_value$", re.IGNORECASE)
KV = re.compile(r"kv|to_kv|kv_proj|key_value")
ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


@dataclass(frozen=True)
class Standard:
    """The pattern of ``overrides="standard"``: tensors of one axis, and norms and biases of more."""

    def __call__(self, name: str, parameter: Any) -> bool:
        module, _, last_name = name.rpartition(".")
        return parameter.ndim < 2 or "bias" in last_name or NORM.search(module.rpartition(".")[2]) is not None

    def __repr__(self) -> str:
        return "'standard'"


STANDARD = Standard()


def check_entries(entries: Any, kind: type[Any], wanted: str, *, least: int = 1) -> Sequence[tuple[Pattern, Any]]:
    """Refuse what is no list of (pattern, something of a kind). wanted: what to write. least: how many are needed."""
    require(is_list(entries) and len(entries) >= least, f"{wanted}, got {entries!r}")
    for entry in entries:
        pair = is_list(entry) and len(entry) == 2 and isinstance(entry[1], kind)
        require(pair, f"{wanted}, got the entry {entry!r}")
        check_pattern(entry[0])
    return tuple(entries)


def check_overrides(overrides: Any) -> OverrideList:
    """The entries of overrides, that of "standard" written out."""
    wanted = "overrides must be a list of (pattern, options), such as [('*.bias', dict(weight_decay=0))], or 'standard'"
    overrides = ["standard"] if overrides == "standard" else overrides
    if is_list(overrides):
        overrides = [(STANDARD, EXEMPT) if entry == "standard" else entry for entry in overrides]
    return check_entries(overrides, Mapping, wanted, least=0)


def as_written(overrides: OverrideList) -> list[Any]:
    """Entries as a user would write them."""
    return ["standard" if isinstance(p, Standard) else (p, dict(options)) for p, options in overrides]


def check_pattern(pattern: Any) -> None:
    """Refuse what chooses no parameters, such as a function that cannot be called with a name and a parameter."""
    if isinstance(pattern, (str, re.Pattern)):
        return
    require(
        callable(pattern), f"a pattern must be a glob, a compiled regular expression or a function, got {pattern!r}"
    )
    try:
        signature = inspect.signature(pattern)
    except (TypeError, ValueError):  # one that does not tell
        return
    try:
        signature.bind("name", None)
    except TypeError:
        raise OptionError(
            f"a pattern that is a function takes (name, parameter) and answers True or False, got one of {signature}"
        ) from None


def check_patterns(patterns: Any, argument: str) -> tuple[Pattern, ...]:
    """Refuse what is no list of patterns. argument: what it was given for."""
    require(is_list(patterns), f"{argument} must be a list of patterns, such as ['*.experts.*'], got {patterns!r}")
    for pattern in patterns:
        check_pattern(pattern)
    return tuple(patterns)


def unused_patterns(patterns: Iterable[Pattern], named: Iterable[tuple[Any, Any]]) -> list[Pattern]:
    """The patterns that match no parameter, most likely typing mistakes. "standard" may match none."""
    pairs = [(str(name), parameter) for name, parameter in named]
    asked = (pattern for pattern in patterns if not isinstance(pattern, Standard))
    return [pattern for pattern in asked if not any(matches(pattern, *pair) for pair in pairs)]


def warn_of_unused(what: str, patterns: Sequence[Pattern]) -> None:
    """Warn of patterns that match no parameter, if there are any. what: what they were given for."""
    if patterns:
        warn(f"{what} that match no parameter: {', '.join(map(repr, patterns))}", UnusedOverrideWarning)


def matches(pattern: Pattern, name: str, parameter: Any) -> bool:
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(name, pattern)
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    return bool(pattern(name, parameter))


def places_of(entries: Sequence[PatternEntry], named: Sequence[tuple[Any, Any]]) -> list[int]:
    """For each parameter the place of the first entry that matches it; raise if there are some without."""
    places = [first_match(entries, str(name), parameter) for name, parameter in named]
    if missing := [name for (name, _), place in zip(named, places, strict=True) if place is None]:
        listed = ", ".join(map(repr, missing[:MOST_TOLD]))
        more = f" and {len(missing) - MOST_TOLD} more" if len(missing) > MOST_TOLD else ""
        raise ParameterError(
            f"no entry of this mixture matches {listed}{more}: add a last entry for all others, such as "
            "('*', AdamW.options(lr=1e-3))"
        )
    return [place for place in places if place is not None]


def first_match(entries: Sequence[PatternEntry], name: str, parameter: Any) -> int | None:
    for place, (pattern, _) in enumerate(entries):
        if pattern is not None and matches(pattern, name, parameter):
            return place
    return None
