"""One look at parameters, gradients and states tells whether a step still holds: natively, and without native code."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from thalweg.kernels.cpu.look import Look  # noqa: E402
from thalweg.torch.step.look import PlainLook, has_strides_and_memory, interpreter, look_at  # noqa: E402

KINDS = ("native", "plain")


class World:
    """Three parameters, of which the second has no gradient."""

    def __init__(self) -> None:
        self.params = [nn.Parameter(torch.ones(size)) for size in ((4, 3), (5,), ())]
        for p in (self.params[0], self.params[2]):
            p.grad = torch.full_like(p, 2.0)
        self.states: dict[Tensor, dict[str, Any]] = {
            p: {"step": torch.tensor(1.0), "momentum_buffer": torch.zeros_like(p)} for p in self.params
        }

    @property
    def grads(self) -> list[Any]:
        return [p.grad for p in self.params]

    @property
    def given(self) -> list[list[Tensor]]:
        """As two groups have them."""
        return [self.params[:1], self.params[1:]]

    def look(self, kind: str) -> Any:
        given = self.given, [2, 0], self.states
        if kind == "plain":
            return PlainLook(*given)
        if interpreter() is None:
            pytest.skip("this torch or this machine has no native look")
        look = look_at(*given)
        assert isinstance(look, Look)
        return look

    def find(self, look: Any) -> Any:
        return look.find_gradients(self.given, self.states)


def renew_entry(world: World) -> None:
    world.states[world.params[1]]["momentum_buffer"] = torch.zeros(5)


def renew_state(world: World) -> None:
    world.states[world.params[1]] = dict(world.states[world.params[1]])


def drop_state(world: World) -> None:
    del world.states[world.params[1]]


def add_entry(world: World) -> None:
    world.states[world.params[1]]["more"] = torch.zeros(5)


def move_entry(world: World) -> None:
    world.states[world.params[1]]["momentum_buffer"].data = torch.zeros(5)


def move_parameter(world: World) -> None:
    world.params[0].data = torch.ones(4, 3)


def swap_parameter(world: World) -> None:
    other = nn.Parameter(torch.ones(4, 3))
    other.grad = torch.ones(4, 3)
    torch.utils.swap_tensors(world.params[0], other)


def turn_entry(world: World) -> None:
    world.states[world.params[0]]["momentum_buffer"].t_()


def cast_parameter(world: World) -> None:
    world.params[0].data = world.params[0].data.double()


def negate_parameter(world: World) -> None:
    world.params[0].data = torch._neg_view(world.params[0].data)


def exchange_parameter(world: World) -> None:
    world.params[1] = nn.Parameter(torch.ones(5))


def swap_parameters(world: World) -> None:
    world.params[0], world.params[2] = world.params[2], world.params[0]


def put_a_number(world: World) -> None:
    world.params[0] = 0.5  # type: ignore[call-overload]


def give_gradient(world: World) -> None:
    world.params[1].grad = torch.ones(5)


def take_gradient(world: World) -> None:
    world.params[2].grad = None


#: What makes a step no longer hold.
CHANGES = {each.__name__: each for each in (renew_entry, renew_state, drop_state, add_entry, move_entry)}
CHANGES |= {each.__name__: each for each in (move_parameter, swap_parameter, turn_entry, cast_parameter)}
CHANGES |= {each.__name__: each for each in (negate_parameter, exchange_parameter, swap_parameters)}
CHANGES |= {each.__name__: each for each in (give_gradient, take_gradient, put_a_number)}
#: Other gradients for which it does not.
GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "another dtype": lambda g: g.double(),
    "another shape": lambda g: g.reshape(3, 4),
    "other strides": lambda g: g.t().contiguous().t(),
    "sparse": lambda g: g.to_sparse(),
    "another type": lambda g: nn.Parameter(g, requires_grad=False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_found_where_they_are_now(kind: str) -> None:
    world = World()
    look = world.look(kind)
    for _ in range(2):
        grads = world.grads
        found, *others = world.find(look)
        assert all(map(operator.is_, found, grads))
        assert others == [array("Q", [grads[2].data_ptr(), grads[0].data_ptr()]), False]
        for p in (world.params[0], world.params[2]):
            p.grad = torch.full_like(p, 3.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHANGES)
def test_what_stays_must_be_where_it_was(name: str, kind: str) -> None:
    world = World()
    look = world.look(kind)
    CHANGES[name](world)
    assert world.find(look) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_must_be_stored_alike(name: str, kind: str) -> None:
    world = World()
    look, g = world.look(kind), world.grads[0]
    try:
        world.params[0].grad = GRADIENTS[name](g)
    except RuntimeError:  # which torch does not let be a gradient, but become one
        g.data = GRADIENTS[name](g)
    assert world.find(look) is None


@pytest.mark.parametrize("kind", KINDS)
def test_groups_must_have_as_many_parameters(kind: str) -> None:
    world = World()
    look = world.look(kind)
    for given in ([world.params], [*world.given, []], [world.params[:1], world.params[1:2]], [[], *world.given]):
        assert look.find_gradients(given, world.states) is None
    longer = [world.params[:1], [*world.params[1:], world.params[0]]]
    assert look.find_gradients(longer, world.states) is None


@pytest.mark.parametrize("kind", KINDS)
def test_negative_views_are_told(kind: str) -> None:
    """They may be where others were, and are something else."""
    world = World()
    look = world.look(kind)
    world.params[0].grad = torch._neg_view(world.params[0].grad)
    assert world.find(look)[2]
    world.params[0].grad = torch.ones(4, 3)
    assert not world.find(look)[2]


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
