"""How ranks share the work on whole tensors: whether replicas divide it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import OptionError
from thalweg.rules import Rule
from thalweg.rules.whole import WholeRule, is_worth_sending
from thalweg.spaces import torch as xp
from thalweg.storage import arithmetic
from thalweg.torch.sharding.shards import MeshGroup, is_distributed


@dataclass(frozen=True)
class Sharing:
    """The options of an optimizer for this."""

    #: The process group over which plain tensors are replicated, as under DDP.
    group: Any = None
    #: Whether replicas divide transforms; None: where that pays.
    divide_work: bool | None = None
    #: By device, the group as that of a mesh.
    meshes: dict[str, MeshGroup] = field(default_factory=dict, compare=False)

    def check(self, engine: str) -> None:
        if self.divide_work is not None and not isinstance(self.divide_work, bool):
            raise OptionError(f"divide_work must be True, False or None, got {self.divide_work!r}")
        if self.group is not None and not isinstance(self.group, torch.distributed.ProcessGroup):
            raise OptionError(
                f"replicas must be a process group, such as torch.distributed.group.WORLD, got {self.group!r}"
            )
        if self.divide_work and engine == "fused":
            raise OptionError("divide_work=True cannot be combined with engine='fused': leave one of them out")

    def groups_of(self, p: Tensor) -> tuple[MeshGroup, ...]:
        """The groups of ranks that hold the same as this one."""
        if not is_distributed(p):
            return self.of_plain(p.device.type)
        mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
        alike = [dimension for dimension, placement in enumerate(placements) if placement.is_replicate()]
        return tuple(MeshGroup(mesh, dimension) for dimension in alike if mesh.size(dimension) > 1)

    def of_plain(self, device: str) -> tuple[MeshGroup, ...]:
        if self.group is None or torch.distributed.get_world_size(self.group) == 1:
            return ()
        from torch.distributed.device_mesh import DeviceMesh

        if device not in self.meshes:
            self.meshes[device] = MeshGroup(DeviceMesh.from_group(self.group, device), 0)
        return (self.meshes[device],)

    def reason_against(self, p: Tensor, rule: Rule, engine: str) -> str:
        """Why each replica transforms a parameter by itself, "" if they divide the work."""
        if not isinstance(rule, WholeRule) or not p.ndim:
            return "its step needs no whole tensors"
        if self.divide_work is not None:
            return "" if self.divide_work else "divide_work=False"
        if engine == "fused":
            return "engine='fused'"
        if is_worth_sending(rule, tuple(p.shape), arithmetic(xp.dtype(p)), p.device.type):
            return ""
        return "messages would take longer"
