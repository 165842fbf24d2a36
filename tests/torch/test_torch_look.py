"""One look at parameters, gradients and states tells whether a step still holds.

Natively and without native code, at plain tensors and at what this rank has of DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from thalweg.kernels.cpu.look import Look  # noqa: E402
from thalweg.torch.step.look import DividedLook, PlainLook, has_strides_and_memory, interpreter, look_at  # noqa: E402


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Two ranks, of which only this one is there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


class World:
    """Three parameters, of which the second has no gradient; of the first this rank may have half."""

    def __init__(self, kind: str, mesh: Any) -> None:
        self.mesh = mesh if "divided" in kind else None
        self.params: list[Any] = [nn.Parameter(each) for each in (self.part(), torch.ones(5), torch.ones(()))]
        self.params[0].grad, self.params[2].grad = self.part(), torch.ones(())
        self.states: dict[Tensor, dict[str, Any]] = {
            p: {"step": torch.tensor(1.0), "momentum_buffer": torch.zeros_like(p)} for p in self.params
        }
        if "native" in kind and interpreter() is None:
            pytest.skip("this torch or this machine has no native look")
        wanted = PlainLook if "plain" in kind else DividedLook if self.mesh else Look
        given = self.given, [2, 0], self.states
        self.look: Any = PlainLook(*given) if "plain" in kind else look_at(*given)
        assert isinstance(self.look, wanted)

    def part(self, placement: Any = None) -> Any:
        from torch.distributed.tensor import DTensor, Shard

        held = torch.full((4, 3), 2.0)
        return DTensor.from_local(held, self.mesh, [placement or Shard(0)], run_check=False) if self.mesh else held

    @property
    def given(self) -> list[list[Tensor]]:
        """As two groups have them."""
        return [self.params[:1], self.params[1:]]

    @property
    def state(self) -> dict[str, Any]:
        return self.states[self.params[0]]

    def find(self) -> Any:
        return self.look.find_gradients(self.given, self.states)


def local(x: Any) -> Any:
    return x._local_tensor if hasattr(x, "_local_tensor") else x


def renew_entry(world: World) -> None:
    world.state["momentum_buffer"] = world.part()


def renew_state(world: World) -> None:
    world.states[world.params[0]] = dict(world.state)


def drop_state(world: World) -> None:
    del world.states[world.params[1]]


def add_entry(world: World) -> None:
    world.state["more"] = torch.zeros(5)


def move_entry(world: World) -> None:
    local(world.state["momentum_buffer"]).data = torch.zeros(4, 3)


def move_parameter(world: World) -> None:
    local(world.params[0]).data = torch.ones(4, 3)


def exchange_parameter(world: World) -> None:
    world.params[0] = nn.Parameter(world.part())


def swap_parameters(world: World) -> None:
    world.params[0], world.params[2] = world.params[2], world.params[0]


def put_a_number(world: World) -> None:
    world.params[0] = 0.5


def give_gradient(world: World) -> None:
    world.params[1].grad = torch.ones(5)


def take_gradient(world: World) -> None:
    world.params[0].grad = None


def swap_tensors(world: World) -> None:
    other = nn.Parameter(torch.ones(4, 3))
    other.grad = torch.ones(4, 3)
    torch.utils.swap_tensors(world.params[0], other)


def turn_entry(world: World) -> None:
    world.state["momentum_buffer"].t_()


def cast_parameter(world: World) -> None:
    world.params[0].data = world.params[0].data.double()


def negate_parameter(world: World) -> None:
    world.params[0].data = torch._neg_view(world.params[0].data)


def exchange_shard(world: World) -> None:
    world.params[0]._local_tensor = world.params[0]._local_tensor.clone()


def place_gradient_otherwise(world: World) -> None:
    from torch.distributed.tensor import Replicate

    world.params[0].grad._spec = world.part(Replicate())._spec


def turn_gradient(world: World) -> None:
    world.params[0].grad._local_tensor = torch.ones(3, 4).t()


def widen_gradient(world: World) -> None:
    world.params[0].grad._local_tensor = torch.ones(4, 3, dtype=torch.float64)


def of_gradient(how: Callable[[Tensor], Tensor]) -> Callable[[World], None]:
    def change(world: World) -> None:
        g = world.params[0].grad
        try:
            world.params[0].grad = how(g)
        except RuntimeError:  # which torch does not let be a gradient, but become one
            g.data = how(g)

    return change


Change = Callable[[World], None]
#: What makes a step no longer hold: of any tensor, of a plain one, of what is divided.
CHANGES: dict[str, Change] = {
    each.__name__: each
    for each in (
        *(renew_entry, renew_state, drop_state, add_entry, move_entry, move_parameter, exchange_parameter),
        *(swap_parameters, put_a_number, give_gradient, take_gradient),
    )
}
OF_PLAIN: dict[str, Change] = {
    **{each.__name__: each for each in (swap_tensors, turn_entry, cast_parameter, negate_parameter)},
    "a gradient of another dtype": of_gradient(lambda g: g.double()),
    "a gradient of another shape": of_gradient(lambda g: g.reshape(3, 4)),
    "a gradient of other strides": of_gradient(lambda g: g.t().contiguous().t()),
    "a sparse gradient": of_gradient(lambda g: g.to_sparse()),
    "a gradient of another type": of_gradient(lambda g: nn.Parameter(g, requires_grad=False)),
}
OF_DIVIDED: dict[str, Change] = {
    each.__name__: each for each in (exchange_shard, place_gradient_otherwise, turn_gradient, widen_gradient)
}
KINDS = {
    "native": CHANGES | OF_PLAIN,
    "plain": CHANGES | OF_PLAIN,
    "native, divided": CHANGES | OF_DIVIDED,
}


@pytest.mark.parametrize("kind", [*KINDS, "plain, divided"])
def test_gradients_are_found_where_they_are_now(kind: str, mesh: Any) -> None:
    world = World(kind, mesh)
    for _ in range(2):
        held = [local(p.grad) for p in world.params]
        found, addresses, is_negative = world.find()
        assert [None if g is None else g.data_ptr() for g in found] == [held[0].data_ptr(), None, held[2].data_ptr()]
        assert list(addresses) == [held[2].data_ptr(), held[0].data_ptr()]
        assert not is_negative
        world.params[0].grad, world.params[2].grad = world.part(), torch.ones(())


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, changes in KINDS.items() for name in changes])
def test_a_change_ends_what_was_seen(kind: str, name: str, mesh: Any) -> None:
    world = World(kind, mesh)
    assert world.find() is not None
    KINDS[kind][name](world)
    assert world.find() is None


@pytest.mark.parametrize("kind", ["native", "plain"])
def test_groups_must_have_as_many_parameters(kind: str, mesh: Any) -> None:
    world = World(kind, mesh)
    for given in ([world.params], [*world.given, []], [world.params[:1], world.params[1:2]], [[], *world.given]):
        assert world.look.find_gradients(given, world.states) is None
    longer = [world.params[:1], [*world.params[1:], world.params[0]]]
    assert world.look.find_gradients(longer, world.states) is None


@pytest.mark.parametrize("kind", ["native", "plain"])
def test_negative_views_are_told(kind: str, mesh: Any) -> None:
    """They may be where others were, and are something else."""
    world = World(kind, mesh)
    world.params[0].grad = torch._neg_view(world.params[0].grad)
    assert world.find()[2]
    world.params[0].grad = torch.ones(4, 3)
    assert not world.find()[2]


class Answering(Tensor):
    """A tensor that answers for itself, and may have no memory."""

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **named: Any) -> Any:
        raise AssertionError("not asked")


@pytest.mark.parametrize("x", [0.5, None, torch.zeros(3).to_sparse(), torch.zeros(3).as_subclass(Answering)])
def test_native_code_is_told_of_tensors_with_memory_alone(x: Any) -> None:
    assert has_strides_and_memory(torch.zeros(3))
    assert has_strides_and_memory(nn.Parameter(torch.zeros(3)))
    assert not has_strides_and_memory(x)
