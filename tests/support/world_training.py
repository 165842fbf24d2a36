"""A small network, trained through torch's own wrappers, in the backward pass too, and in one process."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from world_layouts import mesh, ranks, torch, whole

import thalweg.torch
from thalweg.errors import ParameterError
from thalweg.torch import step_in_backward

nn = torch.nn
STEPS = 3


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 5)).double()


def batch(step: int) -> Any:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


# ---- wrappers: the model as it is trained, and over how many ranks its batch is divided


def replicated() -> tuple[Any, int, int]:
    return nn.parallel.DistributedDataParallel(model()), ranks(), torch.distributed.get_rank()


def sharded(*sizes: int, **policy: Any) -> tuple[Any, int, int]:
    from torch.distributed.fsdp import fully_shard

    net, over = model(), mesh(*(sizes or (ranks(),)))
    for layer in (net[0], net[3]):
        fully_shard(layer, mesh=over, **policy)
    return fully_shard(net, mesh=over, **policy), ranks(), torch.distributed.get_rank()


def offloaded() -> tuple[Any, int, int]:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))


WRAPPERS: Mapping[str, Callable[[], tuple[Any, int, int]]] = {
    "DDP": replicated,
    "FSDP2": sharded,
    "FSDP2, offloaded": offloaded,
    "HSDP": functools.partial(sharded, 2, 2),
}


def trained(net: Any, optimizer: Any, shares: int = 1, share: int = 0, pieces: int = 1) -> list[float]:
    """The losses of some steps on this rank's share of each batch, in some pieces whose gradients add up."""
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        own = batch(step).tensor_split(shares)[share]
        total = 0.0
        for index, piece in enumerate(own.tensor_split(pieces)):
            with communicating(net, index == pieces - 1):
                loss = net(piece).square().mean() / pieces
                loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
    return losses


@contextlib.contextmanager
def communicating(net: Any, last: bool) -> Iterator[None]:
    """Wrappers send gradients with the last piece alone."""
    if hasattr(net, "set_requires_gradient_sync"):
        net.set_requires_gradient_sync(last)
        yield
    elif hasattr(net, "no_sync") and not last:
        with net.no_sync():
            yield
    else:
        yield


def named(net: Any) -> list[tuple[str, Any]]:
    return [(name.removeprefix("module."), p) for name, p in net.named_parameters()]


def furthest(
    wrapper: str, rule: str, lr: float, options: Mapping[str, Any], *, pieces: int = 1, in_backward: bool = False
) -> tuple[float, float, str]:
    """How far losses and parameters are from those of one process: of the losses, and of how far parameters went.

    And the engine. in_backward: steps are taken in the backward pass, of one process after it.
    """
    make = getattr(thalweg.torch, rule)
    alone = model()
    wanted = trained(alone, make(named(alone), lr, engine="reference", **options))
    with quiet():
        net, shares, share = WRAPPERS[wrapper]()
        optimizer = make(named(net), lr, **options)
        with step_in_backward(net, optimizer) if in_backward else contextlib.nullcontext():
            losses = numbers(trained(net, optimizer, shares, share, pieces))
        assert {int(optimizer.state[p]["step"]) for p in net.parameters()} == {STEPS}, "not every pass stepped"
        return *compared(net, losses, alone, numbers(wanted)), optimizer.engine


def furthest_with_zero(rule: str, lr: float, options: Mapping[str, Any]) -> tuple[float, float]:
    """The same where each rank steps some of the parameters, and tells the others."""
    with quiet():
        from torch.distributed.optim import ZeroRedundancyOptimizer

    make = getattr(thalweg.torch, rule)
    alone = model()
    wanted = trained(alone, make(alone.parameters(), lr, engine="reference", **options))
    with quiet():
        net, shares, share = replicated()
        optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=make, lr=lr, **options)
        losses = numbers(trained(net, optimizer, shares, share))
        kept = sum(len(state) > 0 for state in optimizer.optim.state.values())
        assert 0 < kept < len(list(alone.parameters())), "every rank keeps all of the state"
        return compared(net, losses, alone, numbers(wanted))


def numbers(losses: list[float]) -> Any:
    return torch.tensor(losses, dtype=torch.float64)


def compared(net: Any, losses: Any, alone: Any, wanted: Any) -> tuple[float, float]:
    torch.distributed.all_reduce(losses)
    start = dict(named(model()))
    by_loss = ((losses / ranks() - wanted).abs() / wanted).max().item()
    by_name = dict(named(alone))
    moved = {
        name: (whole(p.detach()) - by_name[name]).abs().max() / (by_name[name] - start[name]).abs().max()
        for name, p in named(net)
    }
    return by_loss, max(moved.values()).item()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What torch says of its own wrappers is not ours to judge."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\b.*")
        yield


# ---- steps in the backward pass: whose gradients are reduced before, and whose are not


def backward(net: Any) -> None:
    """A backward pass whose gradient differs between ranks."""
    torch.manual_seed(torch.distributed.get_rank())
    net(torch.randn(2, 3)).square().sum().backward()


def linear() -> Any:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def optimizer_of(net: Any) -> Any:
    return thalweg.torch.LAMB(net.parameters(), 0.1)


def refusal(given: str) -> tuple[str, bool]:
    """What is said of a model under DistributedDataParallel, and whether its parameters are as they were."""
    inner = linear()
    before = [p.detach().clone() for p in inner.parameters()]
    said = ""
    try:
        with quiet():
            if given == "wrapped afterwards":
                step_in_backward(inner, optimizer_of(inner))
                backward(nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=True))
            else:
                wrapper = nn.parallel.DistributedDataParallel(inner)
                seen = {"wrapper": wrapper, "module": inner, "around": nn.Sequential(wrapper)}[given]
                step_in_backward(seen, optimizer_of(inner))
                backward(wrapper)
    except ParameterError as error:
        said = str(error)
    return said, all(torch.equal(p, old) for p, old in zip(inner.parameters(), before, strict=True))


def beside_other_wrappers() -> int:
    """Steps of a model beside wrappers of another model, of one rank alone, and of the past."""
    net, other = linear(), linear()
    with quiet():
        alone = torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)
        kept = [
            nn.parallel.DistributedDataParallel(other),
            nn.parallel.DistributedDataParallel(net, process_group=alone),
        ]
        past = nn.parallel.DistributedDataParallel(net)
        past.itself = [past]  # such that the collector alone ends it
        del past
    optimizer = optimizer_of(net)
    with step_in_backward(net, optimizer):
        backward(net)
    assert len(kept) == 2
    return int(optimizer.state[net.weight]["step"])


def evaluated_apart(wrapper: str, *, given: bool) -> dict[str, float]:
    """How far outputs within averaged(), and after it, and the next steps are from those of one process.

    given: whether averaged() is told the model.
    """

    def run(net: Any, shares: int, share: int) -> dict[str, Any]:
        optimizer = thalweg.torch.AdamW(named(net), lr=0.1, averaged=0.5)
        trained(net, optimizer, shares, share)
        outputs = {}
        with torch.no_grad():
            outputs["before"] = net(batch(9)).clone()  # which leaves the root gathered
            with optimizer.averaged(net) if given else optimizer.averaged():
                outputs["averages"] = net(batch(9)).clone()
            outputs["after"] = net(batch(9)).clone()
        with optimizer.averaged(net) if given else optimizer.averaged(), torch.no_grad():
            net(batch(9))
        trained(net, optimizer, shares, share)  # whose first forward must not see averages
        with torch.no_grad():
            outputs["trained"] = net(batch(9)).clone()
        return outputs

    wanted = run(model(), 1, 0)
    with quiet():
        found = run(*WRAPPERS[wrapper]())
    assert not torch.allclose(wanted["averages"], wanted["before"], rtol=1e-3), "or nothing is tried"
    return {what: (found[what] - wanted[what]).abs().max().item() for what in wanted}
