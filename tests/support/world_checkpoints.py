"""Checkpoints of one small model over ranks: saved in one layout, resumed in another."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cases import EXACT
from tolerances import WORLD
from world_layouts import DTensor, gradient, mesh, ranks, torch, whole
from world_steps import LR, RULES, further_than

import thalweg.torch
from thalweg import Spikes

#: (steps before the save, steps in all)
SAVED, ENDED = 3, 6
#: A rule and its options, under a name.
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "LARS": ("LARS", dict(weight_decay=0.01)),
    "LARS, no momentum": ("LARS", dict(momentum=0.0)),
    "LARS, bfloat16 momentum": ("LARS", dict(momentum_dtype="bfloat16")),
    "LAMB": ("LAMB", dict(weight_decay=0.01)),
    "LAMB, overrides": (
        "LAMB",
        dict(
            weight_decay=0.01,
            overrides=[("*.bias", dict(weight_decay=0, trust=False)), ("wide.*", dict(lr_scale=0.5))],
        ),
    ),
    "LAMB, two groups": (
        "LAMB",
        dict(groups=[("wide", dict(lr=0.01)), ("", dict(weight_decay=0.1, betas=(0.5, 0.9)))]),
    ),
    "LAMB, rate in a tensor": ("LAMB", dict(lr=torch.tensor(0.05))),
    "LAMB, clipped and skipping": ("LAMB", dict(max_grad_norm=1.0, on_nonfinite="skip", capturable=True)),
    "LAMB, spikes": ("LAMB", dict(spikes=Spikes(window=2, z=0.1, action="clip"))),
    "Adafactor, factored": ("Adafactor", dict(min_dim_size_to_factor=2, momentum=0.9)),
    "Adafactor, unfactored": ("Adafactor", dict(lr=None)),
    "Adafactor, bfloat16 momentum": ("Adafactor", dict(momentum=0.9, momentum_dtype="bfloat16")),
    "Adafactor, some factored": (
        "Adafactor",
        dict(min_dim_size_to_factor=2, overrides=[("wide.*", dict(min_dim_size_to_factor=128, momentum=0.5))]),
    ),
    "MARS": ("MARS", dict(weight_decay=0.01)),
    "Muon": ("Muon", dict(EXACT, momentum_dtype="bfloat16")),
    "Kron": ("Kron", dict(weight_decay=0.01)),
    "SOAP": ("SOAP", dict(precondition_frequency=2)),
    "Kron, bfloat16 factors": ("Kron", dict(precond_dtype="bfloat16", max_size_dense=5)),
}
NAMES = [name for name, (rule, _) in CASES.items() if rule in RULES]


class Net(torch.nn.Module):
    """Sizes that divide by the number of ranks and such that do not, one of them shorter than there are ranks."""

    def __init__(self, seed: int, dtype: str, width: int) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(6, width)
        self.narrow = torch.nn.Linear(width, 5)
        self.short = torch.nn.Parameter(torch.empty(3))
        self.cube = torch.nn.Parameter(torch.empty(4, 3, 2))
        self.to(getattr(torch, dtype))
        for name, p in self.named_parameters():
            p.data.copy_(numbers(name, p.shape, seed))


def numbers(name: str, shape: Sequence[int], seed: int) -> Any:
    """They depend on the name and the seed alone."""
    generator = torch.Generator().manual_seed(seed * 1000 + sum(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def fully_sharded(net: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net, mesh=mesh(ranks()))


def replicated_and_sharded(net: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net, mesh=mesh(2, 2))


def tensor_parallel(net: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(net, mesh(ranks()), {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})


LAYOUTS: Mapping[str, Callable[[Any], Any]] = {
    "plain": lambda net: net,
    "DDP": lambda net: net,  # gradients are the same on every rank
    "FSDP2": fully_sharded,
    "HSDP": replicated_and_sharded,
    "TP": tensor_parallel,
}


def grouped(own: Mapping[str, Any], groups: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Groups of parameters; each parameter is in the first whose beginning of a name fits."""
    homes = {name: next(i for i, (begin, _) in enumerate(groups) if name.startswith(begin)) for name in own}
    return [
        {"params": [(name, p) for name, p in own.items() if homes[name] == i], **options}
        for i, (_, options) in enumerate(groups)
    ]


class Training:
    """A model and its optimizer in one of the layouts."""

    def __init__(
        self,
        case: str,
        layout: str,
        *,
        seed: int = 0,
        dtype: str = "float64",
        width: int = 10,
        frozen: Sequence[str] = (),
        **other: Any,
    ) -> None:
        rule, options = CASES[case]
        net = Net(seed, dtype, width)
        for name in frozen:
            net.get_parameter(name).requires_grad_(False)
        self.model = LAYOUTS[layout](net)
        self.own = dict(net.named_parameters())
        given = copy.deepcopy({"lr": LR[rule], **options, **other})
        if layout == "DDP":
            given["replicas"] = torch.distributed.group.WORLD
        self.optimizer = getattr(thalweg.torch, rule)(grouped(self.own, given.pop("groups", [("", {})])), **given)

    def steps(self, first: int, last: int, absent: Sequence[str] = ()) -> None:
        for step in range(first, last):
            for name, p in self.own.items():
                if p.requires_grad and name not in absent:
                    p.grad = gradient("alike", numbers(name, p.shape, step + 1).to(p.dtype), p)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def snapshot(self) -> dict[str, Any]:
        """All there is, whole."""
        own = self.own.items()
        state = {name: {key: whole(x).clone() for key, x in self.optimizer.state.get(p, {}).items()} for name, p in own}
        groups = [{key: v for key, v in g.items() if key != "params"} for g in self.optimizer.param_groups]
        return {"params": {name: whole(p.detach()).clone() for name, p in own}, "state": state, "groups": groups}


def differing(first: Any, second: Any, where: str = "") -> Iterator[str]:
    """Where two nested structures are not equal to the last bit, dtypes included."""
    if isinstance(first, torch.Tensor):
        if not isinstance(second, torch.Tensor) or first.dtype != second.dtype or not torch.equal(first, second):
            yield f"{where}: {first} and {second}"
    elif isinstance(first, dict):
        if first.keys() != second.keys():
            yield f"{where}: {list(first)} and {list(second)}"
        else:
            for key in first:
                yield from differing(first[key], second[key], f"{where}/{key}")
    elif isinstance(first, list):
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from differing(one, other, f"{where}/{index}")
    elif first != second:
        yield f"{where}: {first} and {second}"


def apart(wanted: Mapping[str, Any], got: Mapping[str, Any]) -> Iterator[str]:
    """Where two snapshots are further apart than rounding."""
    for name, p in wanted["params"].items():
        yield from further_than(WORLD["float64"], name, got["params"][name], p, torch.zeros_like(p))
        for key, entry in wanted["state"][name].items():
            x = got["state"][name][key]
            yield from further_than(WORLD["float64"], f"{name}.{key}", x, entry, torch.zeros_like(entry))


def options_of(way: str) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return {
        "nested": StateDictOptions(),
        "flat": StateDictOptions(flatten_optimizer_state_dict=True),
        "offloaded": StateDictOptions(cpu_offload=True),
        "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
        "full, flat": StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True),
    }[way]


def write(training: Training, folder: Path, way: str) -> None:
    """A checkpoint by torch's own means: of all ranks together, or a whole one by the first."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    options = options_of(way)
    model, optim = get_state_dict(training.model, training.optimizer, options=options)
    if not options.full_state_dict:
        dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
    elif torch.distributed.get_rank() == 0:
        folder.mkdir()
        torch.save({"model": model, "optim": optim}, folder / "whole.pt")


def read(training: Training, folder: Path, way: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_optimizer_state_dict

    options = options_of(way)
    if not options.full_state_dict:
        model, optim = get_state_dict(training.model, training.optimizer, options=options)
        found = {"model": model, "optim": optim}
        dcp.load(found, checkpoint_id=folder)
    else:
        found = torch.load(folder / "whole.pt", weights_only=True)
    set_model_state_dict(training.model, found["model"], options=options)
    if way == "full, flat":  # which torch cannot unflatten and divide at once: we divide
        options = options_of("flat")
    set_optimizer_state_dict(training.model, training.optimizer, found["optim"], options=options)


def save(folder: Path, case: str, layout: str, way: str = "nested", **made: Any) -> None:
    """Train for some steps and save; beside it, what there is, for comparison."""
    training = Training(case, layout, **made)
    training.steps(0, SAVED)
    write(training, folder / "checkpoint", way)
    seen = training.snapshot()
    if torch.distributed.get_rank() == 0:
        torch.save(seen, folder / "seen.pt")


def resume(folder: Path, case: str, layout: str, way: str = "nested", **made: Any) -> list[str]:
    """What of a checkpoint is not as it was saved, or goes on otherwise than without an interruption."""
    training = Training(case, layout, seed=7, **made)  # nothing is right before it is loaded
    read(training, folder / "checkpoint", way)
    found = list(differing(torch.load(folder / "seen.pt", weights_only=True), training.snapshot()))
    training.steps(SAVED, ENDED)
    alone = Training(case, "plain", **made)
    alone.steps(0, ENDED)
    return found + list(apart(alone.snapshot(), training.snapshot()))


def resumed_at_once(folder: Path, case: str, before: str, after: str, way: str = "nested", **made: Any) -> list[str]:
    """The same where as many ranks resume as have saved."""
    save(folder, case, before, way, **made)
    torch.distributed.barrier()
    return resume(folder, case, after, way, **made)


# ---- by moment, and what does not fit


def layout_of(training: Training) -> dict[str, Any]:
    """Keys of all state, with shapes, dtypes and how they lie over ranks."""
    return {
        f"{name}.{key}": (tuple(x.shape), x.dtype, str(x.placements) if isinstance(x, DTensor) else "plain")
        for name, p in training.own.items()
        for key, x in training.optimizer.state.get(p, {}).items()
    }


def state_by_a_step(folder: Path, case: str, layout: str = "FSDP2") -> list[str]:
    """The step that a checkpoint loader makes, which counts: what it moves, and what is missing after it."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    training, other = Training(case, layout), Training(case, layout)
    before = training.snapshot()
    get_optimizer_state_dict(training.model, training.optimizer)
    after = training.snapshot()
    found = list(differing(before["params"], after["params"])) + list(differing(before["groups"], after["groups"]))
    other.steps(0, SAVED)
    return found + list(differing(layout_of(other), layout_of(training)))


def state_when_asked(folder: Path, case: str, layout: str = "FSDP2") -> list[str]:
    """State made before the first step: it is that of other steps, and changes none of them."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    training, other = Training(case, layout), Training(case, layout)
    training.optimizer.make_state()
    made = layout_of(training)
    found = [f"{name}: {s['step']}" for name, s in training.snapshot()["state"].items() if s["step"] != 0]
    get_optimizer_state_dict(training.model, training.optimizer)  # finds it, and takes no step
    training.steps(0, SAVED)
    other.steps(0, SAVED)
    return found + list(differing(made, layout_of(other))) + list(differing(other.snapshot(), training.snapshot()))


def from_the_beginning(folder: Path, case: str) -> list[str]:
    """What differs, to the last bit, if a run begins with a checkpoint that was saved before the first step."""
    first, training, other = Training(case, "TP"), Training(case, "FSDP2", seed=7), Training(case, "FSDP2")
    first.optimizer.make_state()
    write(first, folder, "nested")
    read(training, folder, "nested")
    training.steps(0, SAVED)
    other.steps(0, SAVED)
    return list(differing(other.snapshot(), training.snapshot()))


def same_bits(folder: Path, case: str, dtype: str = "float32", **options: Any) -> list[str]:
    """What differs, to the last bit, between a run that is interrupted and one that is not, on the same ranks."""
    first, again = (Training(case, "FSDP2", dtype=dtype, seed=seed, **options) for seed in (0, 7))
    first.steps(0, SAVED)
    write(first, folder, "nested")
    first.steps(SAVED, ENDED)
    again.steps(0, 2)  # what it has learned by itself is forgotten
    read(again, folder, "nested")
    again.steps(SAVED, ENDED)
    return list(differing(first.snapshot(), again.snapshot()))


def saved_while_training(folder: Path, case: str, layout: str = "FSDP2") -> list[str]:
    """A checkpoint that is written while further steps are taken has what there was when it was asked for."""
    from torch.distributed.checkpoint import async_save
    from torch.distributed.checkpoint.state_dict import get_state_dict

    training = Training(case, layout)
    training.steps(0, SAVED)
    wanted = training.snapshot()
    model, optim = get_state_dict(training.model, training.optimizer)
    own_group = torch.distributed.new_group(backend="gloo")  # its messages must not meet those of the steps
    future: Any = async_save({"model": model, "optim": optim}, checkpoint_id=folder, process_group=own_group)
    training.steps(SAVED, ENDED)
    future.result()
    again = Training(case, layout, seed=7)
    read(again, folder, "nested")
    found = list(differing(wanted, again.snapshot()))
    again.steps(SAVED, ENDED)
    return found + list(differing(training.snapshot(), again.snapshot()))


def told(action: Callable[[], Any]) -> str:
    try:
        action()
    except BaseException as error:  # what the engine wraps the errors of ranks in is none of Exception
        return f"{type(error).__name__}: {error}"
    return ""


def stepped_late(folder: Path, case: str, way: str = "nested", layout: str = "FSDP2") -> list[str]:
    """What differs where one parameter has had no gradient yet when the checkpoint is saved."""
    first, again = Training(case, layout), Training(case, layout, seed=7)
    first.steps(0, SAVED, absent=["wide.weight"])
    first.optimizer.make_state()
    write(first, folder, way)
    first.steps(SAVED, ENDED)
    read(again, folder, way)
    again.steps(SAVED, ENDED)
    return list(differing(first.snapshot(), again.snapshot()))


def misfit(folder: Path, saved: str, case: str, way: str, **made: Any) -> str:
    """What is said of a checkpoint that does not fit."""
    save(folder, saved, "FSDP2", way)
    training = Training(case, "FSDP2", **made)
    torch.distributed.barrier()
    return told(lambda: read(training, folder / "checkpoint", way))


def misfit_directly(saved: str, case: str, layout: str) -> tuple[str, list[str]]:
    """What is said, and changed, where ``load_state_dict`` does not find what it needs."""
    first, training = Training(saved, layout), Training(case, layout, seed=7)
    first.steps(0, SAVED)
    training.steps(0, 1)
    before = training.snapshot()
    said = told(lambda: training.optimizer.load_state_dict(first.optimizer.state_dict()))
    found = list(differing(before, training.snapshot()))
    training.steps(1, 2)
    return said, found


def loaded_directly(case: str, before: str, after: str) -> list[str]:
    """By ``load_state_dict`` alone, from a state that lies otherwise."""
    first, again = Training(case, before), Training(case, after)
    first.steps(0, SAVED)
    again.steps(0, 1)
    expected = layout_of(again)
    wanted = first.snapshot()["state"]
    again.optimizer.load_state_dict(first.optimizer.state_dict())
    found = list(differing(wanted, again.snapshot()["state"]))
    return found + list(differing(expected, layout_of(again)))


#: Steps from checkpoint to checkpoint of a long run.
EVERY = 20


def soak(folder: Path, case: str, layout: str, last: int, dies_at: int | None = None, **made: Any) -> list[str]:
    """Train from the newest checkpoint up to a step, and tell what differs from a run without interruption.

    dies_at: the step before which the last rank is killed.
    """
    training = Training(case, layout, **made)
    known = sorted(int(each.name) for each in folder.iterdir() if (each / ".metadata").exists())
    first = known[-1] if known else 0
    if first:
        read(training, folder / str(first), "nested")
    for step in range(first, last):
        if step == dies_at and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        training.steps(step, step + 1)
        if (step + 1) % EVERY == 0:
            write(training, folder / str(step + 1), "nested")
    alone = Training(case, "plain", **made)
    alone.steps(0, last)
    return [f"from step {first}: {line}" for line in apart(alone.snapshot(), training.snapshot())]


# ---- runs of torch's own optimizers


#: torch's optimizer, our rule, what is said to both, and what more to ours.
PEERS: Mapping[str, tuple[str, str, Mapping[str, Any], Mapping[str, Any]]] = {
    "AdamW": ("AdamW", "AdamW", dict(lr=0.01, weight_decay=0.1), {}),
    "Adafactor": ("Adafactor", "Adafactor", dict(lr=0.01, eps=(2.0**-23, 1e-3)), dict(variant="torch")),
}


def steps(net: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        for name, p in net.named_parameters():
            p.grad = gradient("alike", numbers(name, p.shape, step + 1), p)
        optimizer.step()


def continued(case: str, before: str, after: str) -> list[str]:
    """Where a run that torch began in one layout and we continue in another is not the run that torch ends alone."""
    there, rule, options, more = PEERS[case]
    alone, begun, net = (Net(0, "float64", 10) for _ in range(3))
    optimizer = getattr(torch.optim, there)(alone.parameters(), **options)
    steps(alone, optimizer, 0, ENDED)
    LAYOUTS[before](begun)
    theirs = getattr(torch.optim, there)(begun.named_parameters(), **options)
    steps(begun, theirs, 0, SAVED)
    for p, value in zip(net.parameters(), begun.parameters(), strict=True):
        p.data.copy_(whole(value.detach()))
    LAYOUTS[after](net)
    mine = getattr(thalweg.torch, rule)(net.named_parameters(), **options, **more)
    thalweg.torch.import_peer(mine, copy.deepcopy(theirs.state_dict()))
    steps(net, mine, SAVED, ENDED)
    pairs = zip(alone.named_parameters(), net.parameters(), strict=True)
    return [
        words
        for (name, p), q in pairs
        for words in further_than(WORLD["float64"], name, whole(q.detach()), p.detach(), torch.zeros_like(p))
    ]
