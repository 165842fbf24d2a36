"""The Triton that steps parameters, for people to read."""

from __future__ import annotations

from collections.abc import Mapping

from thalweg.arrays import Shape
from thalweg.codecs import bytes_of
from thalweg.errors import refusal
from thalweg.kernels.triton.admission import admit
from thalweg.kernels.triton.loading import kernels_for
from thalweg.kernels.triton.memory import Stored
from thalweg.programs.parts import first_part, last_part, own_key, shown_keys
from thalweg.programs.trace import GRADIENT, PARAMETER, example_of
from thalweg.rules import Rule, WholeRule
from thalweg.rules.around import keys_around
from thalweg.rules.rule import stand_in
from thalweg.settings import ParameterOptions
from thalweg.storage import RECORD, describe_state


def source_of(setting: ParameterOptions, shape: Shape, dtype: str, *, has_lr: bool = True) -> str:
    """The Triton that steps parameters of this kind, or why there is none that was made from the rule."""
    rule, numerics = setting.rule_at(1), setting.numerics
    state = describe_state(rule, numerics, shape, dtype)
    if refused := refusal(admit, setting, shape, dtype, state):
        return f"# {refused}\n"
    dtypes = {PARAMETER: dtype, GRADIENT: dtype}
    dtypes |= {key: state[key][1] for key in (*rule.entries(shape), RECORD) if key in state}
    if isinstance(rule, WholeRule):
        return source_of_parts(rule, shape, dtypes)
    stored = stored_in(dtypes)
    example, guarded = example_of(rule, shape), numerics.on_nonfinite != "propagate"
    random = numerics.state_rounding == "stochastic"
    return kernels_for(stand_in(rule), example, stored, guarded, False, has_lr, random)[0].source


def stored_in(dtypes: Mapping[str, str]) -> tuple[Stored, ...]:
    return tuple(Stored(key, bytes_of(dtype), dtype == "float32") for key, dtype in dtypes.items())


def source_of_parts(rule: WholeRule, shape: Shape, dtypes: Mapping[str, str]) -> str:
    """The Triton of the first and the last part of a rule that needs whole tensors."""
    key, dtype = own_key(rule, shape), rule.whole_dtype("float32")
    shown = dict.fromkeys(shown_keys(rule), dtype)
    beside = {PARAMETER, RECORD, *keys_around(rule, shape)}
    parts: list[tuple[Rule, dict[str, str]]] = [
        (first_part(rule), {PARAMETER: dtypes[key], GRADIENT: dtypes[GRADIENT], **shown}),
        (last_part(rule), {**{name: dtypes[name] for name in dtypes if name in beside}, GRADIENT: dtype}),
    ]
    sources = [
        kernels_for(stand_in(part), example_of(part, shape), stored_in(stored), False, False, True)[0].source
        for part, stored in parts
    ]
    between = "# between them: matrix products by library calls\n"
    return between.join(sources)
