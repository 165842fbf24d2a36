"""On a GPU: models that move after a step, parameters that leave, and steps captured in a graph of the user's."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg.errors import OptionError  # noqa: E402

pytestmark = pytest.mark.gpu
RULES = ["SGD", "AdamW", "LARS", "LAMB", "Adafactor", "Lion", "AdEMAMix", "MARS", "Muon", "Kron", "SOAP"]
ENGINES = ["auto", "foreach", "reference"]


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32, bias=False), torch.nn.Linear(32, 8, bias=False))


def train(net: Any, optimizer: Any, seeds: range) -> None:
    for seed in seeds:
        for i, p in enumerate(net.parameters()):
            drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * seed + i))
            p.grad = drawn.to(p.device, p.dtype)
        optimizer.step()


def same(first: Any, second: Any) -> bool:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.allclose(p.cpu(), q.cpu(), rtol=2e-3, atol=2e-4) for p, q in pairs)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", ["SGD", "AdamW", "LAMB", "Adafactor", "Muon", "Kron"])
@pytest.mark.parametrize(("before", "after"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_state_follows_a_model_that_moves(rule: str, engine: str, before: str, after: str) -> None:
    stays, moves = model().to(before), model().to(before)
    made = [getattr(thalweg.torch, rule)(net.parameters(), lr=0.01, engine=engine) for net in (stays, moves)]
    for net, optimizer in zip((stays, moves), made, strict=True):
        train(net, optimizer, range(3))
    moves.to(after)
    for net, optimizer in zip((stays, moves), made, strict=True):
        train(net, optimizer, range(3, 6))
    assert same(stays, moves)
    moves.to(before)
    train(moves, made[1], range(6, 8))
    train(stays, made[0], range(6, 8))
    assert same(stays, moves)


def test_state_that_was_made_or_loaded_elsewhere_follows() -> None:
    first, second = model(), model()
    made, loaded = (thalweg.torch.AdamW(net.parameters(), lr=0.01) for net in (first, second))
    made.make_state()
    loaded.load_state_dict(copy.deepcopy(made.state_dict()))
    first.cuda()
    second.cuda()
    train(first, made, range(3))
    train(second, loaded, range(3))
    assert same(first, second)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", ["AdamW", "LAMB", "Muon", "Kron", "SOAP"])
def test_parameters_that_leave_free_their_memory(rule: str, engine: str) -> None:
    stays, leaves = model().cuda(), torch.nn.Linear(1024, 1024, bias=False).cuda()
    groups = [{"params": list(stays.parameters())}, {"params": list(leaves.parameters())}]
    optimizer = getattr(thalweg.torch, rule)(groups, lr=0.01, engine=engine)
    both = torch.nn.ModuleList([stays, leaves])
    train(both, optimizer, range(5))
    full = torch.cuda.memory_allocated()
    del optimizer.state[leaves.weight], optimizer.param_groups[1], groups, both, leaves
    train(stays, optimizer, range(5, 7))
    gc.collect()
    # the parameter, its gradient and all of its state: at least three times 4 MiB
    assert full - torch.cuda.memory_allocated() >= (8 if rule == "SGD" else 12) * 2**20


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # where the step is refused
def test_a_captured_step_goes_on_or_is_refused(rule: str, engine: str, dtype: Any) -> None:
    eager, captured = model().to("cuda", dtype), model().to("cuda", dtype)
    make = getattr(thalweg.torch, rule)
    options: dict[str, Any] = dict(lr=0.01, engine=engine)
    twin, optimizer = make(eager.parameters(), **options), make(captured.parameters(), **options)
    grads = [[torch.randn_like(p) for p in eager.parameters()] for _ in range(13)]
    for p in captured.parameters():
        p.grad = torch.zeros_like(p)

    def put(net: Any, at: int) -> None:
        for p, g in zip(net.parameters(), grads[at], strict=True):
            if p.grad is None:
                p.grad = g.clone()
            else:
                p.grad.copy_(g)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for at in range(3):
            put(captured, at)
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph, before = torch.cuda.CUDAGraph(), [p.detach().clone() for p in captured.parameters()]
    put(captured, 3)
    refused = ""
    try:
        with torch.cuda.graph(graph):
            optimizer.step()
    except OptionError as error:
        refused = str(error)
    if refused:
        assert "capturable=True" in refused
        torch.cuda.synchronize()
        assert all(torch.equal(p, q) for p, q in zip(captured.parameters(), before, strict=True))
        return
    for at in range(3, 13):
        put(captured, at)
        graph.replay()
    for at in range(13):
        put(eager, at)
        twin.step()
    assert same(eager, captured)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", ["AdamW", "LAMB", "Muon", "Kron"])
@pytest.mark.parametrize("how", ["strides", "dtype", "device"])
def test_replaced_state_is_read_as_what_it_is(rule: str, engine: str, how: str) -> None:
    stays, changes = model().cuda(), model().cuda()
    made = [getattr(thalweg.torch, rule)(net.parameters(), lr=0.01, engine=engine) for net in (stays, changes)]
    for net, optimizer in zip((stays, changes), made, strict=True):
        train(net, optimizer, range(4))  # the last of which are replayed
    for p, state in made[1].state.items():
        key = next(key for key, entry in state.items() if entry.shape == p.shape)
        if how == "strides":
            state[key] = state[key].t().contiguous().t()
        else:
            state[key] = state[key].double() if how == "dtype" else state[key].cpu()
    for net, optimizer in zip((stays, changes), made, strict=True):
        train(net, optimizer, range(4, 7))
    assert same(stays, changes)
