"""The audit of one live step of an optimizer of torch, from any library."""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from thalweg.audit.page import Arrays, Precision, Step, copy, read
from thalweg.audit.report import AuditError, Report
from thalweg.dtypes import DTYPES
from thalweg.errors import OptimError
from thalweg.given import plain
from thalweg.rules import AdamW, Rule, ScheduleFree, around
from thalweg.rules.around import EVALUATED
from thalweg.rules.noise import tensor_id
from thalweg.rules.schedule_free import weight_of
from thalweg.settings import Numerics, ParameterOptions, combined
from thalweg.spaces import torch as xp
from thalweg.spaces.torch_sums import squares_of_each
from thalweg.storage import SPIKES, arithmetic
from thalweg.torch.base import Optimizer
from thalweg.torch.params.groups import homes_in
from thalweg.torch.params.parameter import Param
from thalweg.torch.peers import TABLE, Peer, names
from thalweg.torch.sharding.collectives import gather_objects
from thalweg.torch.sharding.shards import count_ranks, local, whole
from thalweg.torch.step.joint import decide

#: Keys of state, each with that of the page; None: they are ours.
Keys: TypeAlias = Mapping[str, str] | None
#: Bytes of copies on the host, if none are said.
MEMORY = 64 * 2**20
#: The rounding of TF32, in which GPUs multiply matrices where a rule lets them.
TF32 = 2.0**-10
#: How far a joint norm may be from 1 that was clipped to it, and how far apart rates that were scheduled alike.
CLIPPED, ALIKE = 1e-4, 1e-6
#: The table of those whose runs can be continued, and one whose steps can be audited alone.
KNOWN = (
    *TABLE,
    Peer(
        "schedulefree.AdamWScheduleFree",
        around(AdamW, ScheduleFree),  # type: ignore[type-abstract]
        names("eps weight_decay")
        | {
            "betas": lambda value, dtypes: {"betas": (0.0, value[1]), "schedule_free": value[0]},
            "warmup_steps": lambda value, dtypes: {"schedule_free_warmup": value or None},
        },
        names("z exp_avg_sq"),
        only={"r": 0.0, "weight_lr_power": 2.0},
    ),
)


class Audit(Report):
    """A context manager around one step, and afterwards a report on whether it was the step of its page.

    optimizer: of torch or of any library, several in a list, or a wrapper with ``.optimizer`` or ``.optimizers``.
    model: to look for parameters that no group has, or two. memory: bytes of copies on the host: of what does not fit,
    the smallest and the largest tensors of each kind come first. rule: the page of an optimizer that no table has: a
    rule such as ``thalweg.rules.Muon(momentum=0.95)``, or a function of a parameter's name and the parameter.
    """

    def __init__(
        self, optimizer: Any, model: nn.Module | None = None, *, memory: int = MEMORY, rule: Any = None
    ) -> None:
        super().__init__("an audit", faults=["it has seen no step yet: ask it after the with block"])
        self.optimizers, self.model, self.memory, self.rule = list(unwrap(optimizer)), model, memory, rule

    def __str__(self) -> str:
        is_shown = count_ranks() == 1 or not torch.distributed.get_rank()
        return super().__str__() if is_shown else "the report is on rank 0"

    def __enter__(self) -> Audit:
        self._depth, self._stepped, self._problem, self._joint = 0, 0, "", 0.0
        #: How often each optimizer was given gradients; and steps that have begun, with what reads their arrays.
        self._given, self._begun = Counter[Any](), list[tuple[Step, Callable[[], Any]]]()
        before = [optimizer.register_step_pre_hook(self._begin) for optimizer in self.optimizers]
        self._hooks = [*before, *(optimizer.register_step_post_hook(self._end) for optimizer in self.optimizers)]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        try:
            if kind is None:
                self._compare()
        finally:
            self._begun = []

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, named: Any) -> Any:
        """Read what the step is given: after its closure, if that makes gradients."""
        self._depth += 1
        closure = named.get("closure", args[1] if args[1:] else None)
        if self._depth > 1:  # a step may call that of the class that it derives from
            return None
        if closure is None:
            self._read(optimizer)
            return None

        def closure_then_read() -> Any:
            loss = closure()
            self._read(optimizer)
            return loss

        return args[:1], {**named, "closure": closure_then_read}

    def _end(self, *_: Any) -> None:
        self._depth -= 1

    @torch.no_grad()
    def _read(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy what a step is given. What is wrong is said after it, and does not keep it from being taken."""
        self._given[optimizer] += 1
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._problem = "a CUDA graph is being captured, where nothing can be read: audit a step before that"
        if self._problem or self._given[optimizer] > 1:
            return
        try:
            self._begun += self._steps(optimizer)
        except (OptimError, RuntimeError) as error:
            self._problem = str(error)

    def _steps(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Step, Callable[[], Any]]]:
        """The step of each tensor of the sample, as if nothing had moved, and what reads it again."""
        treated = [(one, keys) for one, keys in list_treatments(optimizer, self.rule) if one.p.grad is not None]
        if not treated:
            return
        params = [one for one, _ in treated]
        scale, joint = scale_all(optimizer, params)
        self._joint, self._stepped = math.hypot(self._joint, joint), self._stepped + len(treated)
        sample = {id(p) for p in choose(optimizer, params, self.memory // len(self.optimizers))}
        names = {} if self.model is None else {id(p): name for name, p in self.model.named_parameters()}
        for (name, p, group, setting, lr, factor, *_), keys in treated:
            if id(p) not in sample:
                continue
            t = count_steps(optimizer, p, group) + 1
            setting = replace(setting, rule=setting.rule_at(t), lr_scale=float(factor) * setting.lr_scale)
            read_again = partial(hold, optimizer, p, setting.rule, keys, t)
            arrays, dtypes = read_again()
            step = Step(
                names.get(id(p), name),
                setting,
                t,
                None if lr is None else float(lr),
                scale,
                copy(xp, gradient_of(p).cpu()),
                arrays,
                arrays,
                dtypes,
                find_precision(setting.rule, dtypes, p, is_ours=keys is None),
                tensor_id(name),
                type(optimizer).__name__,
                group,
            )
            yield step, read_again

    @torch.no_grad()
    def _compare(self) -> None:
        """Read what the step has made of its tensors, and tell of them."""
        counts = [self._given[optimizer] for optimizer in self.optimizers]
        if not self._problem and set(counts) != {1}:
            self._problem = (
                f"{sum(counts) or 'no'} steps were taken within, counted by calls of closures where they have them, "
                "and an audit is of one of each optimizer: call step() once in the with block. A GradScaler that found "
                "infinities, a replayed graph and step_parameter() take none"
            )
        elif not self._problem and not self._stepped:
            self._problem = "no parameter had a gradient: call backward() before step()"
        if problem := next(filter(None, gather(self._problem)), ""):
            raise AuditError(problem)
        steps = [replace(step, **dict(zip(("after", "dtypes"), read(), strict=True))) for step, read in self._begun]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        size, kinds = sum(len(group["params"]) for group in groups), [type(one).__name__ for one in self.optimizers]
        self.title = (
            f"audit of {', '.join(kinds)}: {len(steps)} of {size} tensors, joint norm of gradients {self._joint:.4g}"
        )
        self.tell(steps, groups, {**find_faults(groups, self.model), **find_apart(steps)})
        if abs(self._joint - 1) < CLIPPED:
            clipped = "the joint norm of gradients is 1.000: they were clipped to it before the step"
            self.remarks = [*self.remarks, clipped]


#: Around one step: copy a sample of tensors, replay the step by its page in float64, and say where it differs.
audit = Audit


def unwrap(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers of torch that are given, or within a wrapper."""
    inner = getattr(optimizer, "optimizers", None) or getattr(optimizer, "optimizer", None)
    if isinstance(optimizer, (list, tuple)):
        yield from (single for one in optimizer for single in unwrap(one))
    elif inner is not None:
        yield from unwrap(inner)
    elif isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
    else:
        kind = type(optimizer).__name__
        raise AuditError(f"{kind} is no optimizer of torch, and has none as .optimizer: give the one that is stepped")


# ---- what a step is given


def list_treatments(optimizer: torch.optim.Optimizer, rule: Any) -> Iterator[tuple[Param, Keys]]:
    """What holds for each parameter, and the keys of its state with those of its page.

    rule: the page of all, or a function of name and parameter; None: that of the optimizer.
    """
    if isinstance(optimizer, Optimizer) and rule is None:
        yield from ((treatment, None) for treatment in optimizer._treatments())
        return
    for name, p, index in homes_in(optimizer.param_groups):
        if not p.requires_grad:
            continue
        group = optimizer.param_groups[index]
        if rule is None:
            peer = find_peer(optimizer, group)
            options = peer.convert(group, group["params"][:1])  # whose eps is torch's for all
            setting = combined(ParameterOptions(peer.rule(), Numerics()), {key: plain(x) for key, x in options.items()})
            keys = peer.keys
        else:
            setting, keys = ParameterOptions(rule if isinstance(rule, Rule) else rule(name, p), Numerics()), {}
            check_state(optimizer, name, p, setting.rule)
        lr = None if group.get("relative_step") else float(group["lr"])
        yield Param(name, p, index, setting.for_shape(tuple(p.shape)), lr), keys


def find_peer(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Peer:
    """The row of the table for the class, or for one that it derives from, and for the options of a group."""
    called = [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(optimizer).__mro__]
    rows = [peer for name in called for peer in KNOWN if peer.name == name]
    # Adam with decoupled_weight_decay=True is AdamW
    alike = [peer for row in rows for peer in (row, *KNOWN) if peer.keys == row.keys and peer.is_like(group)]
    if not rows:
        raise AuditError(
            f"{called[0]} is in no table: say its page, such as rule=thalweg.rules.AdamW(weight_decay=0.1)"
        )
    if not alike:
        raise AuditError(f"the page of {rows[0]} is known, and a group has other options")
    return alike[0]


def check_state(optimizer: torch.optim.Optimizer, name: str, p: Tensor, rule: Rule) -> None:
    """Refuse a state that has not all that a page keeps."""
    state = optimizer.state.get(p, {})
    missing = sorted(rule.entries(tuple(p.shape)).keys() - state.keys())
    if state and missing:
        raise AuditError(
            f"the page of {name!r}, {type(rule).__name__}, keeps {', '.join(missing)}, which the state of "
            f"{type(optimizer).__name__} has not: audit its first step, before which there is no state, or say another "
            "page, rule="
        )


def choose(optimizer: torch.optim.Optimizer, treatments: Sequence[Param], memory: int) -> Iterator[Tensor]:
    """Parameters of which copies fit into so many bytes: of each kind the smallest, the largest, then what is left."""
    kinds: dict[Any, list[tuple[int, Tensor]]] = defaultdict(list)
    for one in treatments:
        state = sum(x.numel() for x in optimizer.state.get(one.p, {}).values() if isinstance(x, Tensor))
        numbers = 3 * one.p.numel() + 2 * (state or 2 * one.p.numel())
        kinds[one.group, one.p.ndim, one.p.dtype].append((numbers * (8 if one.p.dtype is torch.float64 else 4), one.p))
    rows = [sorted(kind, key=lambda pair: pair[0]) for kind in kinds.values()]
    for size, p in filter(None, chain(*zip_longest(*([*row[:1], *reversed(row[1:])] for row in rows)))):
        if 0 < size <= memory:
            memory -= size
            yield p


def scale_all(optimizer: torch.optim.Optimizer, treatments: Sequence[Param]) -> tuple[float, float]:
    """What multiplies all gradients in a step, by a GradScaler, clipping and spikes; and their joint norm."""
    numerics, gradients = treatments[0].setting.numerics, [gradient_of(one.p) for one in treatments]
    wide = [squares_of_each([g], torch.promote_types(g.dtype, torch.float32)).double().cpu() for g in gradients]
    scaler, infinite = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    unscale = None if scaler is None else 1 / scaler.double().cpu()
    allowed = None if infinite is None else (infinite == 0).cpu()
    norms = torch.zeros(numerics.guard.kept_shape, dtype=torch.float64) if numerics.guard else None
    norms = optimizer.state.get(treatments[0].p, {}).get(SPIKES, norms)
    squares = torch.cat(wide)
    outcome = decide(numerics, squares, unscale, allowed, norms if norms is None else norms.cpu())
    joint = math.sqrt(float(squares.sum())) * (1.0 if unscale is None else float(unscale))
    is_skipped = outcome.allowed is not None and not bool(outcome.allowed)
    return 0.0 if is_skipped else 1.0 if outcome.scale is None else float(outcome.scale), joint


def gradient_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    return whole(p.grad.detach())


def count_steps(optimizer: torch.optim.Optimizer, p: Tensor, group: int) -> int:
    """How many steps a parameter has taken: it counts them, its group does, or it has a state since its first."""
    state, options = optimizer.state.get(p, {}), optimizer.param_groups[group]
    return int(state.get("step", options.get("step", options.get("k", len(state) > 0))))


def hold(optimizer: torch.optim.Optimizer, p: Tensor, rule: Rule, keys: Keys, t: int) -> tuple[Arrays, Any]:
    """A parameter, at "", and its state as the page before step t sees them; and the dtypes in which they are kept."""
    shape, x, entries = tuple(p.shape), whole(p.detach()).cpu(), dict[str, Tensor]()
    sizes = {key: entry.shape(shape, rule.stacked_axes) for key, entry in rule.entries(shape).items()}
    for name, entry in optimizer.state.get(p, {}).items():
        key = name if keys is None else keys.get(name, name)
        if isinstance(entry, Tensor) and (keys is None or key in sizes) and key not in ("step", SPIKES):
            entries[key] = whole(entry.detach()).cpu()
            if keys is not None:  # ours keep an axis that was averaged, with size 1
                entries[key] = entries[key].reshape(sizes[key])
    arrays, dtypes = read(xp, rule, x, entries)
    if not (keys and entries and isinstance(rule, ScheduleFree)):
        return arrays, dtypes
    # x of before, of y = (1 - beta) z + beta x
    beta, z = float(rule.schedule_free), whole(optimizer.state[p]["z"].detach()).double().cpu()
    weight = float(weight_of(xp, torch.tensor(t - 1.0, dtype=torch.float64), rule.schedule_free_warmup))
    averaged = (x.double() - (1 - beta) * z) / beta
    before = (averaged - weight * z) / (1 - weight) if weight < 1 else x
    return {**arrays, EVALUATED: copy(xp, before), "exp_avg": copy(xp, torch.zeros_like(z))}, dtypes


def find_precision(rule: Rule, dtypes: Mapping[str, str], p: Tensor, *, is_ours: bool) -> Precision:
    """How exactly a parameter is stepped. Others compute in the narrowest dtype that they have."""
    usual = arithmetic(dtypes[""])
    if not is_ours:
        narrowest = min(dtypes.values() & DTYPES.keys(), key=lambda name: DTYPES[name].digits)
        return Precision(narrowest, sums=usual)
    is_cut = p.is_cuda and usual == "float32" and getattr(rule, "precond_precision", "") == "tf32"
    return Precision(usual, products=TF32 if is_cut else 0.0)


# ---- what is wrong beside steps


def find_faults(groups: Sequence[Mapping[str, Any]], model: nn.Module | None) -> dict[str, list[str]]:
    """What groups lack, or have twice, and rates that do not follow: in words, each with the names of what has it."""
    named: dict[Tensor, str] = {}
    if model is not None:
        named = {p: name for name, p in model.named_parameters() if p.requires_grad}
    stepped, homes = {p for group in groups for p in group["params"]}, defaultdict[Any, list[str]](list)
    for _, p, index in homes_in(groups):
        homes[local(p.detach()).data_ptr() or id(p)].append(f"{named.get(p, 'a tensor')} of group {index}")
    shares = [float(g["lr"]) / float(g.get("initial_lr") or g["lr"]) if g["lr"] else 1.0 for g in groups]
    usual = Counter(shares).most_common(1)[0][0]
    return {
        "in no group, and never stepped": [name for p, name in named.items() if p not in stepped],
        "requires a gradient and has none": [name for p, name in named.items() if p in stepped and p.grad is None],
        "one tensor, or tied ones, stepped more than once": [" and ".join(of) for of in homes.values() if len(of) > 1],
        f"of its first lr, and others are at {usual:.4g}: it does not follow their scheduler": [
            f"group {i} is at {share:.4g}" for i, share in enumerate(shares) if abs(share - usual) > ALIKE
        ],
    }


def find_apart(steps: Sequence[Step]) -> dict[str, list[str]]:
    """Tensors that were equal before the step, as replicas and tied ones with equal gradients, and are not after it."""
    alike: dict[Any, dict[str, int]] = defaultdict(dict)
    sums = {s.name: [zlib.crc32(x.tobytes()) for x in (s.before[""], s.gradient, s.after[""])] for s in steps}
    for rank, of_rank in enumerate(gather(sums)):
        for name, (before, gradient, after) in of_rank.items():
            for key in ((name, before), (before, gradient)):
                alike[key][f"{name} on rank {rank}"] = after
    apart = {}
    for afters in alike.values():
        usual = Counter(afters.values()).most_common(1)[0][0]
        like = next(name for name, after in afters.items() if after == usual)
        apart[f"was equal to {like}, and the step has set them apart"] = [n for n, a in afters.items() if a != usual]
    return apart


def gather(words: Any) -> list[Any]:
    """What each rank has to say."""
    return gather_objects(words, None) if count_ranks() > 1 else [words]
