"""Shards: DTensors over meshes step as whole tensors in one process do, whatever part a rank has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from thalweg.check import contract, expect, non_finite, numbers
from thalweg.check.problem import TorchSubject, give, train, weights
from thalweg.check.sharded import (
    MATRICES,
    assert_equals_one_process,
    assert_trains_as_one_process,
    by_rows,
    grid,
    halves,
    line,
    model_for,
    require_rows,
    split,
    spread,
    tolerance_for,
)

#: More rows than ranks, and a number of them that no usual world divides.
UNEVEN = [(13, 4), (11, 3)]


def in_parallel(model: nn.Module, columns: DeviceMesh) -> nn.Module:
    plan: dict[str, ParallelStyle] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, columns, plan)


def test_fsdp2(s: TorchSubject) -> None:
    """A model under fully_shard trains as in one process."""
    model = model_for(s)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=line())
    assert_trains_as_one_process(s, model, "under FSDP2")


def test_tensor_parallel(s: TorchSubject) -> None:
    """A model whose layers are sharded by columns and by rows, as tensor parallelism does, trains as in one process."""
    require_rows(s)
    assert_trains_as_one_process(s, in_parallel(model_for(s), line()), "under tensor parallelism")


def test_fsdp2_and_tensor_parallel(s: TorchSubject) -> None:
    """A model under both, on a mesh of two dimensions, trains as in one process."""
    require_rows(s)
    model = in_parallel(model_for(s), grid()["columns"])
    fully_shard(model, mesh=grid()["rows"])
    assert_trains_as_one_process(s, model, "under FSDP2 and tensor parallelism")


def test_shards_of_rows(s: TorchSubject) -> None:
    """Parameters sharded by rows, as FSDP2 does, step as in one process: norms and factors are of whole tensors."""
    reached = replace(s, place=by_rows).run_steps(steps=3)
    expect.usual(s, reached, 3, "sharded and in one process", tolerance_for(s))


def test_shards_with_different_seeds(s: TorchSubject) -> None:
    """Shards step the same whatever the global seed of each rank is: trainers set it by rank."""
    numbers.test_independent_of_the_global_seed(spread(s))


def test_shards_of_columns(s: TorchSubject) -> None:
    """Matrices sharded by columns, as tensor parallelism does, step as in one process."""
    assert_equals_one_process(s, lambda p, _: split(p, line(), Shard(1)), MATRICES)


def test_uneven_shards(s: TorchSubject) -> None:
    """Rows that the ranks cannot share evenly step as in one process."""
    assert_equals_one_process(s, by_rows, UNEVEN)


def test_empty_shards(s: TorchSubject) -> None:
    """Fewer rows than ranks, so that some ranks have none, step as in one process, and no rank waits for another."""
    assert_equals_one_process(s, by_rows, [(1, 6), (6, 4)])


def test_replicated_dtensors(s: TorchSubject) -> None:
    """DTensors that every rank has as a whole step as in one process: nothing is summed twice."""
    assert_equals_one_process(s, lambda p, _: split(p, line(), Replicate()), where="replicated")


def test_replicated_shards(s: TorchSubject) -> None:
    """Shards with replicas of each, as hybrid FSDP has them, step as in one process."""
    assert_equals_one_process(s, lambda p, _: split(p, grid(), Replicate(), Shard(0)), where="sharded and replicated")


def test_shards_of_rows_and_columns(s: TorchSubject) -> None:
    """Matrices sharded both ways, on a mesh of two dimensions, step as in one process."""
    assert_equals_one_process(s, lambda p, _: split(p, grid(), Shard(0), Shard(1)), MATRICES)


def test_shards_of_shards(s: TorchSubject) -> None:
    """Rows sharded over both dimensions of a mesh step as in one process."""
    assert_equals_one_process(s, lambda p, _: split(p, grid(), Shard(0), Shard(0)), [*MATRICES, *UNEVEN])


def test_stages(s: TorchSubject) -> None:
    """Ranks with different parameters, as stages of a pipeline have, step each as in one process."""
    stage = int(dist.get_rank() >= dist.get_world_size() // 2)
    shapes = [MATRICES, [(6, 4)]][stage]  # one stage has more of them: what is sent must not depend on it
    mesh = halves()[stage]
    assert_equals_one_process(s, lambda p, _: split(p, mesh, Shard(0)), shapes, "in stages")


def test_plain_tensors_among_shards(s: TorchSubject) -> None:
    """Plain tensors beside sharded ones step as in one process: some layers are left whole."""
    assert_equals_one_process(s, lambda p, place: by_rows(p) if place else p, MATRICES)


def test_different_placements(s: TorchSubject) -> None:
    """Parameters by rows, by columns and replicated step together as in one process."""
    ways = [Shard(0), Shard(1), Replicate()]
    assert_equals_one_process(s, lambda p, place: split(p, line(), ways[place % 3]), MATRICES)


def test_shards_without_gradients(s: TorchSubject) -> None:
    """A sharded parameter without a gradient stays as it is, and the others step as without it."""
    contract.test_no_gradient_no_step(spread(s))


def compare_runs(s: TorchSubject, run: Callable[[TorchSubject], list[Tensor]], where: str) -> list[Tensor]:
    """What a run makes of shards of rows; fail unless it makes the same of whole parameters."""
    sharded, whole = run(spread(s)), run(s)
    expect.close(sharded, whole, weights(MATRICES), f"{where}, sharded and in one process", tolerance_for(s))
    return sharded


def test_groups_of_shards(s: TorchSubject) -> None:
    """Each group's lr holds for its shards alone, as in one process."""

    def train_groups(s: TorchSubject) -> list[Tensor]:
        params = s.weights(shapes=MATRICES)
        optimizer = s.make([{"params": params[:1]}, {"params": params[1:]}])
        optimizer.param_groups[0]["lr"] = 8 * (optimizer.param_groups[0]["lr"] or 1e-2)
        return train(optimizer, params, 3)

    reached, rtol = compare_runs(s, train_groups, "in two groups"), tolerance_for(s)
    if not s.facts.couples_parameters:
        plain, start = s.run_steps(MATRICES, 3), weights(MATRICES)
        expect.close(reached[1:], plain[1:], start[1:], "sharded, the lr of another group was changed", rtol)


def test_added_group_of_shards(s: TorchSubject) -> None:
    """Shards that add_param_group brings are stepped as in one process from then on."""

    def add_group(s: TorchSubject) -> list[Tensor]:
        params = s.weights(shapes=MATRICES)
        optimizer = s.make(params[:1])
        train(optimizer, params[:1], 2)
        optimizer.add_param_group({"params": params[1:]})
        return train(optimizer, params, 2, first=2)

    expect.moved(compare_runs(s, add_group, "after add_param_group"), weights(MATRICES), "after add_param_group")


def test_lr_zero_for_shards(s: TorchSubject) -> None:
    """A learning rate of 0 moves no shard: loading sharded state takes such a step."""
    numbers.test_lr_zero(spread(s))


def test_gradients_of_shards_untouched(s: TorchSubject) -> None:
    """Sharded gradients are read, never written."""
    contract.test_gradients_untouched(spread(s))


def test_nan_in_one_shard(s: TorchSubject) -> None:
    """NaN in the shard of one rank does not reach other parameters, and all ranks go on alike."""
    non_finite.test_nan_stays_local(spread(s))


def test_shards_stay_in_place(s: TorchSubject) -> None:
    """Sharded parameters keep their placements and their memory: FSDP2 gathers them from there."""
    params, optimizer = spread(s).make_fresh(shapes=MATRICES)
    before = [(p.placements, p.to_local().data_ptr()) for p in params if isinstance(p, DTensor)]
    train(optimizer, params, 2)
    if [(p.placements, p.to_local().data_ptr()) for p in params if isinstance(p, DTensor)] != before:
        pytest.fail("a parameter is placed otherwise or lies elsewhere after a step")


def test_state_is_sharded(s: TorchSubject) -> None:
    """State as large as its parameter is sharded as it is: no rank has memory for that of the whole model."""
    params, optimizer = spread(s).make_fresh(shapes=MATRICES)
    train(optimizer, params, 2)
    for place, p in enumerate(params):
        for key, leaf in optimizer.state[p].items():
            local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            if isinstance(leaf, Tensor) and local.numel() == leaf.numel() >= p.numel():
                pytest.fail(f"{key} of parameter {place} has {local.numel()} elements on each rank")


def test_messages_do_not_grow(s: TorchSubject) -> None:
    """A step sends no more messages later in a run than in its beginning."""
    params, optimizer = spread(s).make_fresh(shapes=MATRICES)
    numbers = []
    for t in range(12):
        give(params, t)
        with CommDebugMode() as seen:
            optimizer.step()
        numbers.append(seen.get_total_counts())
    if max(numbers[6:]) > max(numbers[:6]):
        pytest.fail(f"up to {max(numbers[:6])} collectives in a step at first, then {max(numbers[6:])}")


def test_collectives(s: TorchSubject) -> None:
    """Declared: a step of many shards takes at most so many collectives, however many parameters there are."""
    if s.facts.collectives is None:
        pytest.skip("not declared")
    params, optimizer = spread(s).make_fresh(shapes=[(8, 4)] * 8)
    train(optimizer, params, 2)
    give(params, 2)
    with CommDebugMode() as seen:
        optimizer.step()
    if seen.get_total_counts() > s.facts.collectives:
        pytest.fail(f"{seen.get_total_counts()} collectives for 8 parameters, above {s.facts.collectives}")
