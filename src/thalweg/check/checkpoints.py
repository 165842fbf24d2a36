"""Checkpoints of sharded runs: by name and through files, at the same number of ranks and at others."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn import Parameter

from thalweg.check import expect
from thalweg.check.problem import Place, Shapes, TorchSubject, copy_state, module_of, tensors_of, train
from thalweg.check.sharded import (
    MATRICES,
    by_rows,
    grid,
    halves,
    line,
    require_rows,
    split,
    spread,
    tolerance_for,
)
from thalweg.check.state import restore
from thalweg.show.modules import describe_error


def begin_shards(
    s: TorchSubject, place: Place = by_rows, shapes: Shapes | None = None
) -> tuple[list[Parameter], Any, Any]:
    """Sharded parameters, their optimizer in the middle of a run, and the whole parameters."""
    params, optimizer = spread(s, place).make_fresh(shapes=shapes)
    return params, optimizer, train(optimizer, params, 3)


def continues(s: TorchSubject, params: Any, optimizer: Any, shapes: Shapes, where: str) -> None:
    """Fail unless two more steps end where five of one process do."""
    reached = train(optimizer, params, 2, first=3)
    expect.usual(s, reached, 5, f"two steps after {where}", tolerance_for(s), shapes=shapes)


def together(action: Callable[[], Any] | None) -> Any:
    """What the action of the first rank returns. All ranks fail where one does; those without an action wait."""
    result, wrong = None, None
    try:
        result = action() if action else None
    except CheckpointException as error:
        wrong = describe_error(next(iter(error.failures.values()))[0])
    except pytest.fail.Exception as what:
        wrong = str(what)
    except Exception as error:
        wrong = describe_error(error)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (result if dist.get_rank() == 0 else None, wrong))
    for _, words in every:
        if words is not None:
            pytest.fail(words)
    return every[0][0]


def save(s: TorchSubject, shapes: Shapes, mesh: DeviceMesh, files: str) -> Any:
    """Three steps, then files; the whole parameters."""
    params, optimizer, reached = begin_shards(s, lambda p, _: split(p, mesh, Shard(0)), shapes)
    state = get_optimizer_state_dict(module_of(params), optimizer)
    state_dict_saver.save({"optimizer": state}, checkpoint_id=files, process_group=group_of(mesh))
    return reached


def load(params: Any, optimizer: Any, mesh: DeviceMesh, files: str) -> None:
    """As users do it: a state dict of the new layout, filled from the files, then set."""
    module = module_of(params)
    state = {"optimizer": get_optimizer_state_dict(module, optimizer)}
    state_dict_loader.load(state, checkpoint_id=files, process_group=group_of(mesh))
    set_optimizer_state_dict(module, optimizer, state["optimizer"])


def group_of(mesh: DeviceMesh) -> Any:
    """The ranks of a mesh; None, which means all, for one of two dimensions."""
    return mesh.get_group() if mesh.ndim == 1 else None


def through_files(
    s: TorchSubject, before: DeviceMesh, after: DeviceMesh, shapes: Shapes, where: str, *placements: Shard
) -> None:
    """Fail unless a run that is saved by the ranks of one mesh continues on another. Others wait meanwhile."""

    def resume() -> None:
        others, other = spread(s, lambda p, _: split(p, after, *(placements or (Shard(0),)))).make_again(reached)
        load(others, other, after, files)
        continues(s, others, other, shapes, where)

    require_rows(s)
    with tempfile.TemporaryDirectory() as folder:
        files = together(lambda: folder)
        reached = together(partial(save, s, shapes, before, files) if within(before) else None)
        together(resume if within(after) else None)


def within(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is not None


def test_files_at_the_same_size(s: TorchSubject) -> None:
    """torch.distributed.checkpoint's files continue a sharded run by as many ranks."""
    through_files(s, line(), line(), s.shapes, "loading files")


def test_files_at_fewer_ranks(s: TorchSubject) -> None:
    """Files of all ranks continue the run by half of them."""
    through_files(s, line(), halves()[0], s.shapes, "loading files by half of the ranks")


def test_files_at_more_ranks(s: TorchSubject) -> None:
    """Files of half of the ranks continue the run by all."""
    through_files(s, halves()[0], line(), s.shapes, "loading files of half of the ranks")


def test_files_on_another_mesh(s: TorchSubject) -> None:
    """Files of parameters sharded by rows continue the run by rows and columns."""
    through_files(s, line(), grid(), MATRICES, "loading files onto a mesh of two dimensions", Shard(0), Shard(1))


def test_files_of_uneven_shards(s: TorchSubject) -> None:
    """Files of uneven and empty shards continue the run by half of the ranks."""
    through_files(s, line(), halves()[0], [(5, 4), (1, 6)], "loading files of uneven shards")


def test_gathered_by_one_process(s: TorchSubject) -> None:
    """A whole state, gathered from all ranks, continues the run in one process as if it had never been sharded."""
    params, optimizer, reached = begin_shards(s)
    saved = get_optimizer_state_dict(module_of(params), optimizer, options=StateDictOptions(full_state_dict=True))
    others, other = s.make_again(reached)
    set_optimizer_state_dict(module_of(others), other, copy.deepcopy(saved), options=StateDictOptions())
    continues(s, others, other, s.shapes, "loading in one process")


def test_spread_from_one_process(s: TorchSubject) -> None:
    """The state of one process, which the first rank has, continues the run by shards of all ranks."""
    require_rows(s)
    whole = s.weights()
    single = s.make(whole)
    reached = train(single, whole, 3)
    if all(leaf.dim() == 0 for leaf in tensors_of(single).values()):
        pytest.skip("no tensor of the state has a shape")
    saved = copy.deepcopy(get_optimizer_state_dict(module_of(whole), single))
    others, other = spread(s).make_again(reached)
    how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(module_of(others), other, saved if dist.get_rank() == 0 else {}, options=how)
    continues(s, others, other, s.shapes, "loading the state of one process")


def test_state_dict_of_each_rank(s: TorchSubject) -> None:
    """state_dict() and load_state_dict() of every rank continue a sharded run."""
    sharded = spread(s)
    params, optimizer = sharded.begin()
    others, other = restore(sharded, params, copy_state(optimizer))
    continues(s, others, other, s.shapes, "load_state_dict on every rank")


def test_flattened_state(s: TorchSubject) -> None:
    """A state with one key an entry, as other parallel programs exchange it, continues a sharded run."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    params, optimizer, reached = begin_shards(s)
    saved = copy.deepcopy(get_optimizer_state_dict(module_of(params), optimizer, options=flat))
    others, other = spread(s).make_again(reached)
    set_optimizer_state_dict(module_of(others), other, saved, options=flat)
    continues(s, others, other, s.shapes, "loading a flattened state")


def test_options_of_sharded_groups_come_back(s: TorchSubject) -> None:
    """Options of groups come back with the state of a sharded run: schedules continue where they were."""
    params, optimizer, reached = begin_shards(s)
    optimizer.param_groups[0]["lr"] = 0.123
    saved = copy.deepcopy(get_optimizer_state_dict(module_of(params), optimizer))
    others, other = spread(s).make_again(reached)
    set_optimizer_state_dict(module_of(others), other, saved)
    if float(other.param_groups[0]["lr"]) != 0.123:
        pytest.fail(f"lr 0.123 came back as {other.param_groups[0]['lr']}")
