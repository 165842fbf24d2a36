"""Stepping CPU tensors by native code."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thalweg.codecs import scale_key
from thalweg.errors import StateError
from thalweg.kernels.cpu.library import borrow_openmp, reason_missing
from thalweg.kernels.cpu.tables import END, MEASURE, REHEARSE, WRITE, Figures, Operand, Options, Tables
from thalweg.kernels.cpu.tables import sums_of_squares as native_sums
from thalweg.kernels.threads import num_threads
from thalweg.storage import RECORD
from thalweg.torch.engines.choice import is_dense, reason_against
from thalweg.torch.engines.protocol import Bucket, CheckState, Statistics
from thalweg.torch.params.checks import NAMES
from thalweg.torch.sharding.collectives import Computation, Question, summed


class Native:
    """The native engine of one optimizer, with tables that are kept between steps."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.buckets: Sequence[Bucket] = ()
        self.copies: list[Tensor] = []
        #: How native code was shown each parameter the last time, by name.
        self.known: dict[str, tuple[Any, Any, Operand]] = {}
        #: For each parameter whether all of its step is finite and allowed; None if nobody asked.
        self.finite: list[bool] | None = None

    @torch.compiler.disable
    def prepare(self, buckets: Sequence[Bucket], check_state: CheckState) -> None:
        """Lay out a step of these buckets; nothing is written yet. State that is new is checked."""
        borrow_torch_threads()
        self.buckets, self.copies, self.finite = buckets, [], None
        operands: list[Operand] = []
        options: list[Options] = []
        for group, bucket in enumerate(buckets):
            assert bucket.t is not None
            scale = None if bucket.grad_scale is None else float(bucket.grad_scale)
            lr = None if bucket.lr is None else float(bucket.lr)
            setting = bucket.setting
            rule = setting.rule_at(bucket.t)
            options.append(Options(rule, setting.handling, bucket.t, lr, bucket.lr_scale, scale, setting.rule))
            keys = list(setting.rule.entries(bucket.shape))
            shards: list[Any] = [(part.position, part.shape) for part in bucket.parts]
            for name, p, g, s, shard in zip(
                *(bucket.names, bucket.params, bucket.grads, bucket.states),
                shards or [(0, None)] * len(bucket.names),
                strict=True,
            ):
                if g.stride() != p.stride() or g.is_neg():
                    g = torch.empty_like(p, dtype=g.dtype).copy_(g)
                    self.copies.append(g)
                # what is missing is told below
                entries = [s.get(key) for key in (*keys, *map(scale_key, keys), RECORD)]
                state = p.shape, p.dtype, [(e.data_ptr(), e.dtype) if e is not None else (0, None) for e in entries]
                places = p.data_ptr(), g.data_ptr(), g.dtype, group
                known = self.known.get(name)
                if known is None or known[0] != state:
                    check_state(name, p, setting)
                    if reason := reason_against(setting, p, s):  # it was fine before a caller replaced the state
                        raise StateError(
                            f"the state of {name!r} was replaced by tensors that native code cannot step: {reason}; "
                            "assign contiguous tensors"
                        )
                if known is None or known[0] != state or known[1] != places:
                    dtypes = NAMES[p.dtype], NAMES[g.dtype], *[str(dtype)[6:] for _, dtype in state[2][: len(keys)]]
                    addresses = [address for address, _ in state[2]]
                    *scales, record = addresses[len(keys) :]
                    own = tuple(addresses[: len(keys)])
                    position, whole = shard
                    operand = Operand(
                        *(name, tuple(p.shape), p.data_ptr(), g.data_ptr(), own, dtypes, group),
                        *(position, whole, tuple(scales), record),
                    )
                    known = self.known[name] = state, places, operand
                operands.append(known[2])
        self.tables.prepare(operands, options, num_threads(torch.get_num_threads))

    def measure(self, on_nonfinite: str) -> Iterator[Computation]:
        if any(bucket.parts for bucket in self.buckets):
            yield self.measured_shards()
        elif on_nonfinite != "propagate":
            self.tables.run(MEASURE, WRITE)
            allowed = [b.allowed is None or bool(b.allowed) for b in self.buckets for _ in b.params]
            self.finite = [fine and free for fine, free in zip(self.tables.finite(), allowed, strict=True)]

    def measured_shards(self) -> Computation:
        for number in range(self.tables.rounds):
            self.tables.run(number, number + 1)
            yield from self.completed(number)

    def completed(self, number: int) -> Computation:
        """Make the local sums of a pass those of whole parameters."""
        asked, places, index = [], [], 0
        for bucket in self.buckets:
            if bucket.parts:
                places.append(range(index, index + len(bucket.params)))
                wide = torch.float64 if bucket.params[0].dtype == torch.float64 else torch.float32
                local = torch.tensor([self.tables.sums(i, number) for i in places[-1]], dtype=wide)
                asked.append((local, bucket.parts[0].across(None)))
            index += len(bucket.params)
        whole = [sums.tolist() for sums in (yield Question(summed, asked))]
        found: dict[int, list[float]] = {}
        for members, rows in zip(places, whole, strict=True):
            found.update(zip(members, rows, strict=True))
        self.tables.decide(found, number)

    def nonfinite(self) -> list[str]:
        names = [name for bucket in self.buckets for name in bucket.names]
        return [name for name, fine in zip(names, self.finite or [True] * len(names), strict=True) if not fine]

    @torch.compiler.disable
    def write(self) -> Statistics:
        if any(bucket.parts for bucket in self.buckets):
            self.tables.run(REHEARSE, END)
        elif self.finite is None:
            self.tables.run(MEASURE, END)
        else:
            self.tables.skip([not fine for fine in self.finite])
            self.tables.run(WRITE, END)
        # what was saved for a backward pass is no longer what it was
        torch.autograd.graph.increment_version([p for bucket in self.buckets for p in bucket.params])
        steps = [s["step"] for bucket in self.buckets for s in bucket.states]
        if self.finite is not None:
            steps = [step for step, fine in zip(steps, self.finite, strict=True) if fine]
        if steps:
            torch._foreach_add_(steps, 1)
        figures = self.tables.figures()
        named = [(name, rate) for bucket in self.buckets for rate in (bucket.rate,) for name in bucket.names]
        return {name: functools.partial(with_figures, rate, figures, i) for i, (name, rate) in enumerate(named)}

    def release(self, *, taken: bool) -> None:
        """Let go of gradients and of copies that were made for a step."""
        self.buckets, self.copies = (), []


def with_figures(rate: Mapping[str, Any], figures: Figures, index: int) -> dict[str, Any]:
    return {**rate, **figures.of(index, lambda values, shape: torch.tensor(values, dtype=torch.float64).reshape(shape))}


def borrow_torch_threads() -> None:
    home = Path(torch.__file__).parent
    borrow_openmp((str(home), str(home.with_name("torch.libs"))))


def sums_of_squares(gradients: Sequence[Tensor]) -> Tensor | None:
    """The sum of squares of each gradient, in double precision; None if native code cannot tell."""
    served = all(g.device.type == "cpu" and type(g) is Tensor and is_dense(g) and not g.is_neg() for g in gradients)
    if not served or reason_missing() is not None:
        return None
    borrow_torch_threads()
    arrays = [(g.data_ptr(), NAMES[g.dtype], g.numel()) for g in gradients]
    return torch.tensor(native_sums(arrays, num_threads(torch.get_num_threads)), dtype=torch.float64)
