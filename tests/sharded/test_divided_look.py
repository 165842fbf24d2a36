"""One native look at what this rank has of DTensors tells whether a step still holds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from thalweg.torch.step.look import DividedLook, PlainLook, interpreter, look_at  # noqa: E402


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Two ranks, of which only this one is there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


class World:
    """A matrix of which this rank has half, another one without a gradient, and a plain vector."""

    def __init__(self, mesh: Any, kind: str = "native") -> None:
        self.mesh = mesh
        self.params: list[Any] = [*(nn.Parameter(self.half()) for _ in range(2)), nn.Parameter(torch.ones(5))]
        self.give_gradients()
        self.states: dict[Any, dict[str, Any]] = {
            p: {"step": torch.tensor(1.0), "momentum_buffer": torch.zeros_like(p)} for p in self.params
        }
        if kind == "native" and interpreter() is None:
            pytest.skip("this torch or this machine has no native look")
        given = [self.params], [2, 0], self.states
        self.look = look_at(*given) if kind == "native" else PlainLook(*given)
        assert isinstance(self.look, DividedLook if kind == "native" else PlainLook)

    def half(self, placement: Any = None, dtype: Any = None) -> Any:
        from torch.distributed.tensor import DTensor, Shard

        held = torch.ones(2, 3, dtype=dtype)
        return DTensor.from_local(held, self.mesh, [placement or Shard(0)], run_check=False)

    def give_gradients(self) -> None:
        self.params[0].grad, self.params[2].grad = self.half(), torch.ones(5)

    def find(self) -> Any:
        return self.look.find_gradients([self.params], self.states)


@pytest.mark.parametrize("kind", ["native", "plain"])
def test_what_this_rank_has_of_gradients_is_found_where_it_is_now(mesh: Any, kind: str) -> None:
    world = World(mesh, kind)
    for _ in range(2):
        held = [world.params[0].grad.to_local(), None, world.params[2].grad]
        found, addresses, is_negative = world.find()
        assert list(map(operator.is_, found[1:], held[1:])) == [True, True]
        assert [found[0].data_ptr(), found[2].data_ptr()] == [held[0].data_ptr(), held[2].data_ptr()]
        assert list(addresses) == [held[2].data_ptr(), held[0].data_ptr()]
        assert not is_negative
        world.give_gradients()


def exchange_shard(world: World) -> None:
    world.params[0]._local_tensor = world.params[0]._local_tensor.clone()


def move_shard(world: World) -> None:
    world.params[0]._local_tensor.data = torch.ones(2, 3)


def move_shard_of_state(world: World) -> None:
    world.states[world.params[0]]["momentum_buffer"]._local_tensor.data = torch.ones(2, 3)


def renew_entry(world: World) -> None:
    world.states[world.params[0]]["momentum_buffer"] = world.half()


def renew_state(world: World) -> None:
    world.states[world.params[0]] = dict(world.states[world.params[0]])


def take_gradient(world: World) -> None:
    world.params[0].grad = None


def give_gradient(world: World) -> None:
    world.params[1].grad = world.half()


def place_gradient_otherwise(world: World) -> None:
    from torch.distributed.tensor import Replicate

    world.params[0].grad._spec = world.half(Replicate())._spec


def turn_gradient(world: World) -> None:
    world.params[0].grad._local_tensor = torch.ones(3, 2).t()


def widen_gradient(world: World) -> None:
    world.params[0].grad._local_tensor = torch.ones(2, 3, dtype=torch.float64)


def exchange_parameter(world: World) -> None:
    world.params[0] = nn.Parameter(world.half())


CHANGES: tuple[Callable[[World], None], ...] = (
    *(exchange_shard, move_shard, move_shard_of_state, renew_entry, renew_state, take_gradient, give_gradient),
    *(place_gradient_otherwise, turn_gradient, widen_gradient, exchange_parameter),
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_ends_what_was_seen(mesh: Any, change: Callable[[World], None]) -> None:
    world = World(mesh)
    assert world.find() is not None
    change(world)
    assert world.find() is None
