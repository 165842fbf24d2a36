"""What is beside gradients that arrive in torch's wrappers: steps in the backward pass, ZeRO, averages in a forward."""

from __future__ import annotations

from tolerances import WORLD
from world_layouts import quiet, torch
from world_steps import Model, Run, Training, further_than, in_one_process, stepped

import thalweg.torch
from thalweg.errors import ParameterError
from thalweg.torch import step_in_backward

DDP = torch.nn.parallel.DistributedDataParallel


def differences_with_zero(run: Run) -> list[str]:
    """Where parameters are not those of one process if each rank steps some of them, and tells the others."""
    with quiet():
        from torch.distributed.optim import ZeroRedundancyOptimizer

        training, make = Training(run, "DDP"), getattr(thalweg.torch, run.rule)
        training.optimizer = ZeroRedundancyOptimizer(
            list(training.own.values()), optimizer_class=make, lr=run.lr(0), **run.given()
        )
        training.steps(0, len(run.rates))
    kept = sum(len(state) > 0 for state in training.optimizer.optim.state.values())
    assert 0 < kept < len(run.names), "every rank keeps all of the state"
    wanted = in_one_process(run).params
    return [
        line
        for name, p in training.params.items()
        for line in further_than(WORLD[run.dtype], name, p, wanted[name], torch.zeros_like(p))
    ]


def evaluated(run: Run, layout: str, *, given: bool) -> list[float]:
    """Outputs before, within and after averaged(), and after further steps. given: whether it is told the model."""
    training = stepped(run, layout)
    numbers = {name: run.numbers(name, 9) for name in run.names}
    models, outputs = [training.net] if given else [], []

    def forward() -> None:
        with torch.no_grad():
            outputs.append(training.net(numbers).item())

    forward()  # which leaves the root gathered
    with training.optimizer.averaged(*models):
        forward()
    forward()
    with training.optimizer.averaged(*models):
        forward()
    training.steps(0, 2)  # whose first forward must not see averages
    forward()
    return outputs


# ---- steps in the backward pass: whose gradients are reduced before, and whose are not


def model() -> Model:
    return Model({"matrix": torch.nn.Parameter(torch.ones(3, 2))})


def backward(net: torch.nn.Module) -> None:
    """A backward pass whose gradient differs between ranks."""
    net({"matrix": torch.full((3, 2), 1.0 + torch.distributed.get_rank())}).backward()


def optimizer_of(net: torch.nn.Module) -> thalweg.torch.LAMB:
    return thalweg.torch.LAMB(net.parameters(), 0.1)


def refusal(given: str) -> tuple[str, bool]:
    """What is said of a model under DistributedDataParallel, and whether its parameters are as they were."""
    inner, said = model(), ""
    try:
        with quiet():
            if given == "wrapped afterwards":
                step_in_backward(inner, optimizer_of(inner))
                backward(DDP(inner, gradient_as_bucket_view=True))
            else:
                wrapper = DDP(inner)
                seen = {"wrapper": wrapper, "module": inner, "around": torch.nn.Sequential(wrapper)}[given]
                step_in_backward(seen, optimizer_of(inner))
                backward(wrapper)
    except ParameterError as error:
        said = str(error)
    return said, bool((inner.matrix == 1.0).all())


def beside_other_wrappers() -> int:
    """Steps of a model beside wrappers of another model, of one rank alone, and of the past."""
    net, other = model(), model()
    with quiet():
        alone = torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)
        kept = [DDP(other), DDP(net, process_group=alone)]
        past = DDP(net)
        past.itself = [past]  # such that the collector alone ends it
        del past
    optimizer = optimizer_of(net)
    with step_in_backward(net, optimizer):
        backward(net)
    assert len(kept) == 2
    return int(optimizer.state[net.matrix]["step"])
