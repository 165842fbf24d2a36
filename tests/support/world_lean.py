"""State in eight bits over ranks, beside the same in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402
from world_layouts import mesh, placed, whole  # noqa: E402

import thalweg.torch  # noqa: E402

#: Rows that no number of ranks divides, and one that has no codes.
SHAPES = {"matrix": (66, 256), "filter": (70, 128, 3, 3), "bias": (66,)}


def drawn(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def over(layout: str, x: Any) -> Any:
    """rows, columns: axes that are sharded; both: over two dimensions of a mesh; whole: as in one process."""
    if layout == "whole":
        return x
    ranks = torch.distributed.get_world_size()
    axes = [0] if layout == "rows" or x.ndim == 1 else [1] if layout == "columns" else [0, 1]
    sizes = (ranks,) if len(axes) == 1 else (2, ranks // 2)
    return placed(x, mesh(*sizes), [Shard(axis) for axis in axes])


def made(rule: str, layout: str, options: Mapping[str, Any], names: Sequence[str] = tuple(SHAPES)) -> Any:
    params = {name: torch.nn.Parameter(over(layout, x)) for name, x in drawn(0).items() if name in names}
    return params, getattr(thalweg.torch, rule)(list(params.items()), lr=0.01, **options)


def stepped(params: Any, optimizer: Any, layout: str, first: int, last: int) -> None:
    for t in range(first, last):
        grads = drawn(100 + t)
        for name, p in params.items():
            p.grad = over(layout, grads[name])
        optimizer.step()


def state_apart(
    rule: str, layout: str, options: Mapping[str, Any], names: Sequence[str] = tuple(SHAPES), steps: int = 3
) -> list[str]:
    """Entries of the state that differ in any bit from those of one process."""
    (params, optimizer), (alone, single) = (made(rule, each, options, names) for each in (layout, "whole"))
    stepped(params, optimizer, layout, 0, steps)
    stepped(alone, single, "whole", 0, steps)
    return entries_apart(params, optimizer, alone, single)


def entries_apart(params: Any, optimizer: Any, alone: Any, single: Any, *, beside: bool = False) -> list[str]:
    """beside: parameters are compared too."""
    first, second = named_state(params, optimizer), named_state(alone, single)
    return [
        f"{name}: {key}"
        for name, entries in first.items()
        for key, entry in entries.items()
        if (beside or key != "p") and not torch.equal(whole(entry), second[name][key])
    ]


def kernel_state_apart(rule: str, layout: str, options: Mapping[str, Any]) -> list[str]:
    """The same where kernels for GPUs are interpreted."""
    from interpreter import serving

    with serving():
        return state_apart(rule, layout, dict(options, engine="fused"), ("matrix",), 2)


def refused(layout: str, shape: Sequence[int]) -> str:
    """What is said of a parameter of this shape, on each rank."""
    p = torch.nn.Parameter(over(layout, torch.ones(*shape)))
    p.grad = over(layout, torch.ones(*shape))
    optimizer = thalweg.torch.LAMB([("w", p)], lr=0.01, state_dtype="int8")
    try:
        optimizer.step()
    except thalweg.errors.ParameterError as error:
        return str(error)
    return ""


def saved(folder: Path, layout: str, options: Mapping[str, Any]) -> None:
    params, optimizer = made("AdamW", layout, options)
    stepped(params, optimizer, layout, 0, 2)
    save(named_state(params, optimizer), storage_writer=FileSystemWriter(folder))


def resumed(folder: Path, layout: str, options: Mapping[str, Any]) -> list[str]:
    """What differs from a run that was never interrupted, after a checkpoint of another layout and two more steps."""
    params, optimizer = made("AdamW", layout, options)
    optimizer.make_state()
    load(named_state(params, optimizer), storage_reader=FileSystemReader(folder))
    stepped(params, optimizer, layout, 2, 4)
    alone, single = made("AdamW", "whole", options)
    stepped(alone, single, "whole", 0, 4)
    return entries_apart(params, optimizer, alone, single, beside=True)


def named_state(params: Any, optimizer: Any) -> dict[str, Any]:
    """Parameters and state, as a checkpoint writes them and reads into them."""
    return {name: {"p": p.detach(), **optimizer.state[p]} for name, p in params.items()}
