"""Parameters of one shape that Kron steps together: tables that are kept between steps, and launches over them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor

from thalweg.boundary import ROUNDING_STREAM
from thalweg.codecs import scale_key
from thalweg.kernels.triton.kron_layout import FIGURES, OWN_FIGURES, PANELS, G, Layout, Panel, Q
from thalweg.kernels.triton.kron_served import MOST_MATRICES
from thalweg.kernels.triton.products import Device, ceiling, device_of
from thalweg.kernels.triton.tables import ALIGNMENT, are_aligned
from thalweg.kernels.triton.uploads import Uploads
from thalweg.rules import Kron
from thalweg.rules.noise import NORMAL_STREAMS, stream_key, tensor_id

#: Scratch memory, at most, unless a single parameter needs more: this part of the device's memory, 256 MiB or more.
SCRATCH = 1 / 128

M_SCALE = scale_key("momentum_buffer")
States = Sequence[Mapping[str, Tensor]]


class Batch:
    """Some parameters of one shape, dtype and setting."""

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[Tensor],
        states: States,
        g_dtype: torch.dtype,
        rule: Kron,
        seed: int,
        device: Device | None = None,
    ) -> None:
        p, state = params[0], states[0]
        self.device, self.shape, self.size = p.device, tuple(p.shape), p.numel()
        self.grid, slices = rule.grid(self.shape), math.prod(self.shape[: rule.stacked_axes])
        #: Where each matrix of a parameter begins: blocks of its first slice, of the second, ...
        self.starts = [i * (self.size // slices) + start for i in range(slices) for start in self.grid.starts()]
        self.pieces, self.blocks = len(self.starts), self.grid.blocks
        self.names, self.count = names, len(names) * self.pieces
        self.p_dtype, self.g_dtype, self.q_dtype = p.dtype, g_dtype, state["Q_0"].dtype
        self.has_momentum = "momentum_buffer" in state
        self.m_dtype = state["momentum_buffer"].dtype if self.has_momentum else torch.float32
        #: Elements of the momentum that share a scale; 0: it has none.
        self.group = self.size // state[M_SCALE].numel() if M_SCALE in state else 0

        dense = not all(rule.diagonals(self.grid.sizes))
        #: What products take. Without any, nothing is gained by fewer digits.
        self.operand = torch.bfloat16 if dense and self.q_dtype == torch.bfloat16 else torch.float32
        device = device or device_of(self.device)
        self.cuts = device.cuts and dense
        width = self.operand.itemsize
        share = Layout(rule, self.grid, device, width, self.count).scratch.size * self.pieces
        limit = max(device.least_scratch, int(SCRATCH * device.memory))
        chunks = ceiling(len(names), max(1, min(limit // share, MOST_MATRICES // self.pieces)))
        #: Matrices that share scratch memory at a time, of whole parameters.
        self.chunk = ceiling(len(names), chunks) * self.pieces
        self.layout = Layout(rule, self.grid, device, width, self.chunk)
        self.scratch_size = self.layout.scratch.size * self.chunk

        self.uploads, self.gradient_uploads = Uploads(self.device), Uploads(self.device)
        addresses = [
            row
            for index, (name, p, s) in enumerate(zip(names, params, states, strict=True))
            for row in self.rows_of(index, name, p, s, seed)
        ]
        columns = PANELS + len(self.layout.scratch.regions)
        table = torch.zeros((columns, self.count), dtype=torch.int64)
        table[:PANELS] = torch.tensor(addresses, dtype=torch.int64).T
        self.aligned = self.layout.columns % ALIGNMENT == self.layout.stride % ALIGNMENT == 0 and all(
            address % ALIGNMENT == 0 for row in addresses for address in (row[0], row[2])
        )
        self.factors_aligned = all(
            row[column] % ALIGNMENT == 0 for row in addresses for column in (Q.value, Q.value + 1)
        )
        self.places = self.uploads.table(table)
        #: Bytes from the beginning of a gradient to each of its matrices.
        self.gradient_offsets = self.uploads.table(torch.tensor(self.starts) * g_dtype.itemsize)
        self.figures = torch.zeros((FIGURES + OWN_FIGURES, self.count), dtype=torch.float32, device=self.device)
        self.due_flags = torch.zeros(self.count, dtype=torch.int64, device=self.device)
        self.finite = torch.ones(len(names), dtype=torch.bool, device=self.device)
        self.due: list[bool] = [False] * len(names)
        #: The host's counts of refreshes and of steps, in the memory of the state.
        self.counts: list[list[c_float]] = []
        self.grad_places = array("Q")
        self.grads_aligned = True
        self.scratch_place = 0
        #: Launches that were made for this batch, by what they depend on.
        self.begins: dict[Any, Any] = {}
        self.formulas: dict[Any, Any] = {}
        self.prepared: dict[Any, Any] = {}
        self.programs: dict[Any, Any] = {}

    def rows_of(self, index: int, name: str, p: Tensor, s: Mapping[str, Tensor], seed: int) -> list[list[int]]:
        """The columns of the table for the matrices of one parameter."""
        keys = [stream_key(seed, tensor_id(name), stream) for stream in (*NORMAL_STREAMS, ROUNDING_STREAM)]

        def address(tensor: Tensor | None, start: int) -> int:
            return 0 if tensor is None else tensor.data_ptr() + start * tensor.element_size()

        momentum, scales = s.get("momentum_buffer"), s.get(M_SCALE)
        counts = [s[key].data_ptr() if s[key].device == p.device else 0 for key in ("step", "refresh")]
        # a vector has only the second factor, that of columns
        absent = [0] * (2 - len(self.layout.factors))
        extents, rows = self.grid.extents(), []
        for piece, start in enumerate(self.starts):
            slice_, block = divmod(piece, self.blocks)
            own = [address(p, start), 0, address(momentum, start), address(scales, start // max(1, self.group))]
            own += [*counts, start, *keys, index, *(1, *extents[block])[-2:]]
            assert len(own) == Q.value
            own += absent
            for key, factor in enumerate(self.layout.factors):
                q = s[f"Q_{key}"]
                own.append(address(q, slice_ * (q.numel() * self.blocks // self.pieces) + factor.starts[block]))
            rows.append([*own, *absent, *(address(s[f"L_{key}"], piece) for key in range(len(self.layout.factors)))])
            assert len(rows[-1]) == PANELS
        return rows

    # ---- what moves

    def follow_gradients(self, grads: Sequence[Tensor], moving: Any = None, places: array[int] | None = None) -> None:
        """Note where gradients are now. moving: what copies their addresses to the device with those of others.

        places: their addresses, if they are known.
        """
        places = array("Q", map(Tensor.data_ptr, grads)) if places is None else places
        # a graph carries its own copy along, which its replays leave in the table
        copies = self.gradient_uploads
        # several remembered steps may share a batch, and each has a table of its own to keep up to date
        if moving is None and places == self.grad_places and not copies.captured and not copies.is_capturing():
            return
        self.grad_places = places
        self.grads_aligned = are_aligned(places)
        if moving is not None:
            moving.note(self, places)
        else:
            copies.refill(self.places[G.value], self.spread(places, self.g_dtype))

    def spread(self, places: Sequence[int], dtype: torch.dtype) -> list[int]:
        """The addresses of all matrices, from those of some tensors that they are pieces of."""
        offsets = [start * dtype.itemsize for start in self.starts]
        return [place + offset for place in places for offset in offsets]

    def take_gradients(self, places: Tensor) -> None:
        """On the device: note where gradients are."""
        torch.add(places[:, None], self.gradient_offsets, out=self.places[G.value].view(-1, self.pieces))

    def look_at_refreshes(self, count: Callable[[float], tuple[bool, float]], states: States) -> bool:
        """Whether factors are due, by the host's counts. count: from one before whether they are, and the one after."""
        if not self.counts:
            self.counts = [[c_float.from_address(s[key].data_ptr()) for s in states] for key in ("refresh", "step")]
        before = [refresh.value for refresh in self.counts[0]]
        found = {value: count(value) for value in set(before)}  # most have the same count
        self.after = [found[value][1] for value in before]
        self.follow_due([found[value][0] for value in before])
        return any(is_due for is_due, _ in found.values())

    def count_step(self) -> None:
        """A step more, by the host's counts."""
        for refresh, step, after in zip(*self.counts, self.after, strict=True):
            refresh.value = after
            step.value += 1

    def follow_scratch(self, scratch: Tensor) -> None:
        place = scratch.data_ptr()
        if place == self.scratch_place:
            return
        self.scratch_place = place
        share = self.layout.scratch.size
        offsets = torch.tensor(self.layout.scratch.offsets(), dtype=torch.int64)
        shares = torch.arange(self.count, dtype=torch.int64) % self.chunk * share
        addresses = place + offsets[:, None] + shares[None, :]
        self.uploads.refill(self.places[PANELS:].reshape(-1), addresses.flatten().tolist())

    def follow_due(self, due: list[bool]) -> None:
        if due != self.due:
            self.due = due
            self.uploads.refill(self.due_flags, [int(one) for one in due for _ in range(self.pieces)])

    def by_slice(self, figure: Any) -> Tensor:
        """A figure of every parameter and slice, whose blocks have the same."""
        return self.figures[figure.value].view(len(self.names), self.pieces)[:, :: self.blocks]

    # ---- what kernels take

    def common(self, first: int) -> dict[str, Any]:
        """What every kernel takes."""
        return dict(places=self.places, figures=self.figures, count=self.count, first=first)

    def matrices(self, first: int) -> int:
        """Of the chunk that begins with this one."""
        return min(self.chunk, self.count - first)

    def gradient_as_it_lies(self) -> Panel:
        layout = self.layout
        return Panel(G.value, layout.rows, layout.columns, layout.columns, 4)


def memory_of(params: Sequence[Tensor], states: States) -> list[tuple[Any, ...]]:
    """Where everything is that stays from step to step, and what it looks like."""
    return [
        (p.data_ptr(), p.dtype, p.shape, *((key, entry.data_ptr(), entry.dtype) for key, entry in s.items()))
        for p, s in zip(params, states, strict=True)
    ]
