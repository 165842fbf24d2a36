"""What is kept for each parameter between steps, laid out over ranks like the parameter.

How it is before the first step, whether it fits the options, and how it is converted when they change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.codecs import CODECS
from thalweg.errors import ResumeWarning, StateError, warn
from thalweg.rules import Rule
from thalweg.rules.around import is_kept_around, keys_around
from thalweg.rules.entries import Count
from thalweg.settings import Numerics, ParameterOptions, RuleOptions
from thalweg.spaces import torch as xp
from thalweg.spaces.foreach import TensorList
from thalweg.spaces.sharded import Sharded
from thalweg.storage import (
    RECORD,
    SPIKES,
    check_fits,
    check_norms,
    coded_keys,
    converted,
    describe_conversion,
    describe_state,
    first_state,
    keys_like_parameter,
    read_count,
)
from thalweg.torch.sharding.layouts import check_groups, make_owned_state, place_state
from thalweg.torch.sharding.shards import is_distributed, local, meta_like, part_of
from thalweg.trial import check_update


class States:
    """Keeps the state of each parameter as its options need it."""

    def __init__(self, is_launched: Callable[[type[Rule], Tensor], bool]) -> None:
        """is_launched: whether kernels on a GPU step a parameter by a rule, and count its steps."""
        self.is_launched = is_launched
        #: What holds for a parameter, as it was found of these options for this shape and for state in this form.
        self.resolved: dict[Tensor, tuple[RuleOptions, ParameterOptions, Any]] = {}
        #: Whether a user was told that a state was converted.
        self.is_told = False

    def make_ready(
        self, states: dict[Tensor, Any], name: str, p: Tensor, options: RuleOptions, *, capturable: bool
    ) -> tuple[ParameterOptions, dict[str, Tensor]]:
        """What holds for a parameter, and its state: made if there is none, converted if options ask for it.

        states: of all parameters. options: of its group.
        """
        setting = self.resolve(states, name, p, options)
        state: dict[str, Tensor] = states[p]
        if not state:
            state.update(make_state(name, p, setting, self.place_of_counts(p, setting, capturable=capturable)))
        elif any(entry.device != p.device for entry in state.values()):
            place = self.place_of_counts(p, setting, capturable=capturable)
            follow_parameter(name, p, setting.rule, state, place)
        return setting, state

    def resolve(self, states: Mapping[Tensor, Any], name: str, p: Tensor, options: RuleOptions) -> ParameterOptions:
        """What holds for a parameter. Its state is converted if that asks for it, and refused if it does not fit."""
        known, state = self.resolved.get(p), states.get(p, {})
        form = p.shape, form_of(state)
        if known is None or known[0] is not options or known[2] != form:
            setting, _ = options.choose(name, p)
            # schedulers that cycle momentum change numbers at every step
            if known is None or known[1].kind != setting.kind or known[2] != form:
                setting.rule.check_shape(name, tuple(p.shape))
                changed = fit_state(name, p, setting, state) if state else ""
                if changed and not self.is_told:
                    self.is_told = True
                    warn(changed, ResumeWarning)
                form = p.shape, form_of(state)
            self.resolved[p] = known = options, setting, form
        return known[1]

    def place_of_counts(self, p: Tensor, setting: ParameterOptions, *, capturable: bool) -> torch.device:
        """Where counts live: with the host, unless the device alone may know them."""
        on_device = capturable or setting.numerics.may_skip or self.is_launched(type(setting.rule), p)
        return p.device if on_device else torch.device("cpu")

    def convert_counts(
        self,
        states: Mapping[Tensor, Any],
        places: Mapping[Tensor, tuple[str, int]],
        settings: Mapping[int, RuleOptions],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Make tensors of counts of steps that users have written into state as plain numbers.

        places: the name and group of each parameter. settings: the options of groups, by index.
        """
        for p, (name, index) in places.items():
            state = states.get(p)
            if state and not is_count_tensor(step := state.get("step")):
                place = self.place_of_counts(p, settings[index].base, capturable=groups[index]["capturable"])
                state["step"] = convert_count(name, step).to(place)


# ---- before the first step


def make_state(name: str, p: Tensor, setting: ParameterOptions, place_of_counts: torch.device) -> dict[str, Tensor]:
    """All that is kept for a parameter. place_of_counts: where counts are, that of steps among them."""
    state = {"step": torch.zeros((), dtype=torch.float32, device=place_of_counts), **first_entries(p, setting, name)}
    if p.device.type != "meta":  # counts are beside the step, so that the host can tell without a wait
        state.update({key: state[key].to(place_of_counts) for key in setting.rule.keys(tuple(p.shape), Count)})
    return state


def first_entries(p: Tensor, setting: ParameterOptions, name: str) -> dict[str, Tensor]:
    """The first state of a parameter, without the count of its steps."""
    rule, numerics = setting.rule_at(1), setting.numerics
    check_update(rule, tuple(p.shape))
    beside = entries_beside(p, numerics)
    if not is_distributed(p):
        return {**first_state(xp, rule, numerics, p.detach()), **beside}
    check_groups(name, p, rule, numerics)
    part, held = part_of(name, p), local(p.detach())
    if rule.needs_whole:
        return {**make_owned_state(p, held, part, rule, numerics), **beside}
    state = first_state(Sharded([part]), rule, numerics, TensorList([held]))
    return {**place_state(state, p, rule), **beside}


def entries_beside(p: Tensor, numerics: Numerics) -> dict[str, Tensor]:
    """What the optimizer keeps with the state of a parameter, for itself."""
    if numerics.guard is None:
        return {}
    return {SPIKES: torch.zeros(numerics.guard.kept_shape, dtype=torch.float64, device=p.device)}


def expected_entries(setting: ParameterOptions, p: Tensor, name: str) -> dict[str, Tensor]:
    """A parameter's state as tensors without memory, which tell its shapes, dtypes and layout."""
    return first_entries(meta_like(p), setting, name)


# ---- does it fit its options?


def fit_state(name: str, p: Tensor, setting: ParameterOptions, state: dict[str, Tensor]) -> str:
    """Make a state what its options need now; what was changed, in words. One that does not fit stays and is refused.

    What is new around a rule is made, what is no longer there is dropped, and eight bits are made or undone.
    """
    rule, shape, said = setting.rule_at(1), tuple(p.shape), []
    beside = entries_beside(meta_like(p), setting.numerics)
    needed = {*rule.entries(shape), *beside}
    dropped = [key for key in state if (is_kept_around(key) or key == SPIKES) and key not in needed]
    fitted = {key: entry for key, entry in state.items() if key not in dropped}
    if dropped:
        said.append(f"{', '.join(map(repr, dropped))} of {name!r} is dropped, which nothing needs any longer")
    if new := sorted((keys_around(rule, shape) | beside.keys()) - state.keys()):
        first = first_entries(p, setting, name)
        fitted |= {key: first[key] for key in new}
        said.append(f"{', '.join(map(repr, new))} of {name!r} is new and begins with this step")
    check_state(name, p, setting, fitted)
    if is_kept_otherwise(p, setting, fitted):
        before, fitted = fitted, convert_entries(setting, p, name, fitted)
        said.append(describe_conversion(name, before, fitted))
    if not said:
        return ""
    state.clear()
    state.update(fitted)
    return f"{'; '.join(said)}; and so for all others alike"


def check_state(name: str, p: Tensor, setting: ParameterOptions, state: Mapping[str, Tensor]) -> None:
    """Refuse state that is not what the options need, in whatever dtypes it is kept. It has an entry at least."""
    entries = {key: entry for key, entry in state.items() if key not in ("step", SPIKES)}
    check_fits(xp, name, setting.rule_at(1), tuple(p.shape), entries)
    if (guard := setting.numerics.guard) is not None:
        check_norms(guard, tuple(state[SPIKES].shape))
    for key, entry in state.items():
        places = zip(entry.shape, entry.stride(), strict=True)
        if entry.numel() and any(size > 1 and stride == 0 for size, stride in places):
            raise StateError(
                f"the state {key!r} of {name!r} has one number in memory for several elements, as expand() makes them, "
                "and a step writes it in place: assign a clone() of it"
            )


def form_of(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """How the entries of a state are kept: all that a kernel relies on but their addresses."""
    return tuple(
        (key, entry.dtype, entry.shape, entry.device, entry.layout is torch.strided and entry.stride())
        for key, entry in state.items()
        if isinstance(entry, Tensor)
    )


def follow_parameter(name: str, p: Tensor, rule: Rule, state: dict[str, Tensor], place_of_counts: torch.device) -> None:
    """Move entries of state to the device that their parameter has been moved to. Counts may be with the host."""
    counts = {"step", *rule.keys(tuple(p.shape), Count)}
    moved: dict[str, Tensor] = {}
    for key, entry in state.items():
        if entry.device == p.device or (key in counts and entry.is_cpu):
            continue
        if is_distributed(entry) or entry.is_meta:
            kind = "a DTensor" if is_distributed(entry) else "without memory"
            raise StateError(
                f"parameter {name!r} is on {p.device}, and its state {key!r} on {entry.device}, {kind}: move or "
                "materialize the model before the state is made, or call load_state_dict again after it"
            )
        moved[key] = entry.to(place_of_counts if key in counts else p.device)
    state.update(moved)


def is_kept_otherwise(p: Tensor, setting: ParameterOptions, state: Mapping[str, Tensor]) -> bool:
    """Whether state is in codes, or has a record of rounding errors, where the options ask for none, or conversely."""
    described = describe_state(setting.rule_at(1), setting.numerics, tuple(p.shape), xp.dtype(p))
    coded = {key for key, (_, dtype) in described.items() if dtype in CODECS} - {RECORD}
    entries = {key: entry for key, entry in state.items() if key != "step"}
    return coded != set(coded_keys(xp, entries)) or (RECORD in described) != (RECORD in entries)


# ---- converted


def convert_entries(setting: ParameterOptions, p: Tensor, name: str, s: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State as its options keep it now: in eight bits or not, with a record or not. It fits its parameter."""
    rule, space = setting.rule_at(1), Sharded([part_of(name, p)])
    concerned = keys_like_parameter(rule, tuple(p.shape), s)
    before = {key: TensorList([local(s[key])]) for key in concerned}
    after = converted(space, rule, setting.numerics, TensorList([local(p.detach())]), before)
    new = {key: entry for key, entry in after.items() if entry is not before.get(key)}
    made = place_state(new, p, rule) if is_distributed(p) else {key: entry.tensors[0] for key, entry in new.items()}
    return {**{key: entry for key, entry in s.items() if key not in concerned or key in after}, **made}


def convert_count(name: str, step: Any) -> Tensor:
    """A count of steps, which may be a plain number or another tensor of one number, as engines read it."""
    number = step.reshape(()) if isinstance(step, Tensor) and step.numel() == 1 else step
    return torch.tensor(float(read_count(f"state['step'] of {name!r}", number)))


def is_count_tensor(step: Any) -> bool:
    """Whether this is a count of steps as engines read it."""
    return isinstance(step, Tensor) and step.dtype is torch.float32 and step.ndim == 0
