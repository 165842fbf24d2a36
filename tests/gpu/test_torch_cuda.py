"""The torch front end on a GPU: the same numbers, no waiting for the device, CUDA graphs, models that move."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from on_device import no_waiting, on_another_stream
from tolerances import FLOAT32

import thalweg.torch
from thalweg import Spikes
from thalweg.errors import OptionError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(48, 32), (32, 32), (40,), (8, 4, 3, 3), ()]
CLASSES = pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LARS", dict(lr=1.0, weight_decay=0.01)),
        ("LAMB", dict(lr=0.01, weight_decay=0.01)),
        ("Adafactor", dict(min_dim_size_to_factor=8)),
        ("Adafactor", dict(lr=0.01, momentum=0.9)),
        ("Kron", dict(lr=0.01)),
        ("Kron", dict(lr=0.01, max_skew=None, geometry="eq")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
ENGINES = pytest.mark.parametrize("engine", ["reference", "foreach", "auto"])


def problem(device: str, dtype: Any = None, steps: int = 6) -> tuple[list, list]:
    generator = torch.Generator().manual_seed(0)
    draw = [[torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES] for _ in range(steps + 1)]
    params = [torch.nn.Parameter(p.to(device, dtype or torch.float64)) for p in draw[0]]
    return params, [[g.to(device, dtype or torch.float64) for g in step] for step in draw[1:]]


def make(name: str, params: list, **options: Any) -> Any:
    return getattr(thalweg.torch, name)([(f"p{i}", p) for i, p in enumerate(params)], **options)


def run(optimizer: Any, params: list, grads: list) -> None:
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g
        optimizer.step()


def assert_near(plain: list, replayed: list) -> None:
    for one, other in zip(plain, replayed, strict=True):
        assert (one - other).abs().max() <= FLOAT32 * one.abs().max()


@CLASSES
@ENGINES
@pytest.mark.parametrize(
    "beside", [{}, dict(capturable=True), dict(on_nonfinite="skip"), dict(max_grad_norm=1.0)], ids=str
)
def test_no_step_waits_for_the_device(name: str, options: dict, engine: str, beside: dict) -> None:
    params, grads = problem("cuda", torch.float32)
    optimizer = make(name, params, engine=engine, **options, **beside)
    run(optimizer, params, grads[:2])  # the first steps make state and load kernels
    with no_waiting():
        run(optimizer, params, grads[2:])
    assert all(torch.isfinite(p).all() for p in params)


@ENGINES
def test_a_skipped_step_changes_nothing_and_is_counted(engine: str) -> None:
    params, grads = problem("cuda", torch.float32)
    optimizer = make("LAMB", params, engine=engine, lr=0.01, on_nonfinite="skip")
    run(optimizer, params, grads[:2])
    before = [p.clone() for p in params], [{k: v.clone() for k, v in optimizer.state[p].items()} for p in params]
    bad = [g.clone() for g in grads[2]]
    bad[1][0, 0] = float("nan")
    with no_waiting():
        run(optimizer, params, [bad])
    assert all(torch.equal(a, b) for a, b in zip(params, before[0], strict=True))
    for p, state in zip(params, before[1], strict=True):
        assert all(torch.equal(optimizer.state[p][key], value) for key, value in state.items())
    assert optimizer.skipped == 1
    assert optimizer.nonfinite() == ["p1"]
    with no_waiting():
        run(optimizer, params, grads * 4)  # replayed too
    assert optimizer.nonfinite() == ["p1"], "of the last step that was skipped"
    bad[1][0, 0], bad[2][0] = 1.0, float("inf")
    with no_waiting():
        run(optimizer, params, [bad, *grads])
    assert (optimizer.skipped, optimizer.nonfinite()) == (2, ["p2"])


@ENGINES
def test_clipping_before_the_guard_is_told_where_statistics_are_read(engine: str) -> None:
    params, grads = problem("cuda", torch.float32, steps=1)
    optimizer = make("AdamW", params, engine=engine, lr=1e-3, spikes=Spikes(window=16))
    with no_waiting():
        run(optimizer, params, grads * 40)
    with pytest.warns(UserWarning, match="of the last 16 norms of the gradient none was above"):
        optimizer.stats()
    optimizer.stats()  # once


@CLASSES
def test_a_list_is_stepped_in_no_more_memory_than_explained(name: str, options: dict) -> None:
    """64 tensors of 2 Mi elements: a list of them all would take a gigabyte for each temporary."""
    params = [torch.nn.Parameter(torch.randn(1024, 2048, device="cuda")) for _ in range(64)]
    optimizer = make(name, params, engine="foreach", **options)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    extra, told = torch.cuda.max_memory_allocated() - before, optimizer.explain().temporary_bytes
    assert extra <= told, f"{extra / 2**20:.0f} MiB, {told / 2**20:.0f} told"


@pytest.mark.parametrize(
    ("name", "options", "changed"),
    [
        ("AdamW", {}, dict(eps=1e-3)),
        ("LAMB", {}, dict(eps=1e-3)),
        ("Adafactor", {}, dict(clip_threshold=0.5)),
        ("Kron", dict(precond_update_probability=0.5), dict(precond_lr=0.1)),
        ("Kron", dict(precond_update_probability=0.5, block_size=16), dict(precond_lr=0.1)),
        ("Kron", dict(precond_update_probability=0.5, damping_mode="expected"), dict(precond_lr=0.1)),
        ("Muon", {}, dict(eps=0.1)),
        ("Muon", dict(normalize="rows"), dict(normalize_beta=0.5)),
        ("AdamW", dict(max_grad_norm=0.5), dict(max_grad_norm=0.1)),
        ("LAMB", dict(spikes=Spikes(window=4, z=1.0), on_nonfinite="skip"), dict(eps=1e-3)),
        ("Kron", dict(max_grad_norm=0.5, spikes=Spikes(window=4, z=1.0, action="clip")), dict(precond_lr=0.1)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_replayed_steps_between_others(
    name: str, options: dict, changed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profiler sees every launch, gradients that are not aligned have kernels of their own, and options change."""
    found = []
    for replays in ("0", "1"):
        monkeypatch.setenv("THALWEG_REPLAY", replays)
        params, grads = problem("cuda", torch.float32, steps=24)
        params, grads = params[:2], [step[:2] for step in grads]
        optimizer = make(name, params, lr=0.01, **options)
        run(optimizer, params, grads[:8])
        optimizer.param_groups[0].update(changed)
        with torch.profiler.profile():
            run(optimizer, params, grads[8:10])
        run(optimizer, params, grads[10:12])
        shifted = [[torch.cat([g.new_zeros(1), g.flatten()])[1:].view(g.shape) for g in step] for step in grads[12:18]]
        assert shifted[0][0].data_ptr() % 16
        run(optimizer, params, shifted)
        run(optimizer, params, grads[18:])
        assert optimizer.engine == "fused"
        found.append([p.detach().clone() for p in params])
    assert_near(*found)


@pytest.mark.parametrize("name", ["Kron", "Muon"])
def test_replayed_steps_of_many_shapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph frees on its way is given out again: no table of it may lie there."""
    found = []
    for replays in ("0", "1"):
        monkeypatch.setenv("THALWEG_REPLAY", replays)
        generator = torch.Generator("cuda").manual_seed(0)
        shapes = [(64, 48), (32, 64), (64, 48), (128, 64), (16, 16), (8, 200)]
        draw = [[torch.randn(s, generator=generator, device="cuda") for s in shapes] for _ in range(17)]
        params = [torch.nn.Parameter(p) for p in draw[0]]
        optimizer = make(name, params, lr=0.01)
        run(optimizer, params, draw[1:])
        assert optimizer.engine == "fused"
        found.append([p.detach().clone() for p in params])
    assert_near(*found)


# ---- models that move after a step, parameters that leave, and steps captured in a graph of the user's

RULES = ["SGD", "AdamW", "LARS", "LAMB", "Adafactor", "Lion", "AdEMAMix", "MARS", "Muon", "Kron", "SOAP"]


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


@ENGINES
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


@ENGINES
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

    with on_another_stream():
        for at in range(3):
            put(captured, at)
            optimizer.step()
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


@ENGINES
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
