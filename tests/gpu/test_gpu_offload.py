"""State in the host's memory, of parameters on a GPU: the bits of the same run without, in less of the GPU's memory."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from on_device import no_waiting
from tolerances import FUSED

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg import OptionError  # noqa: E402
from thalweg.torch.step.turns import Turns  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20
#: Of one shape and of others, larger than a chunk of these tests, with memory in another order, and small. All matrices
#: are 512 wide, so that passes over tiles cut them alike in any company.
SHAPES = [(512, 512), (512, 512), (512, 512), (1536, 512), (256, 128, 3, 3), (1000,), (7, 5), ()]
RULES = {
    "SGD": dict(lr=0.1, momentum=0.9),
    "AdamW": dict(lr=0.01, weight_decay=0.1),
    "Lion": dict(lr=0.001),
    "LARS": dict(lr=1.0, weight_decay=0.01),
    "LAMB": dict(lr=0.01, weight_decay=0.01),
    "Adafactor": dict(lr=0.01, momentum=0.9),
    "Muon": dict(lr=0.02, vectors="row"),
    "Kron": dict(lr=0.01),
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("float32", {}),
    "clipped": ("float32", dict(max_grad_norm=1.0)),
    "bfloat16": ("bfloat16", dict(rounding="stochastic")),
    "codes": ("bfloat16", dict(state_dtype="int8", rounding="compensated")),
    "stochastic": ("float32", dict(state_dtype="bfloat16", state_rounding="stochastic")),
    "skip": ("float32", dict(on_nonfinite="skip")),
    "raise": ("float32", dict(on_nonfinite="raise")),
    "foreach": ("float32", dict(engine="foreach")),
    "capturable": ("float32", dict(capturable=True)),
}


@pytest.fixture(autouse=True)
def all_is_done() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


def in_small_chunks(optimizer: Any) -> Any:
    optimizer._turns = Turns(3 * MIB)
    return optimizer


def drawn(seed: int, dtype: str = "float32", shapes: Any = tuple(SHAPES)) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator).to("cuda", getattr(torch, dtype)) for shape in shapes]
    return [x.to(memory_format=torch.channels_last) if x.ndim == 4 else x for x in found]


def model(dtype: str = "float32") -> list[tuple[str, Any]]:
    return [(f"p{i}", torch.nn.Parameter(x)) for i, x in enumerate(drawn(0, dtype))]


def train(optimizer: Any, named: list[tuple[str, Any]], steps: range, *, idle: str = "") -> None:
    for step in steps:
        for (name, p), g in zip(named, drawn(100 + step, str(named[0][1].dtype)[6:]), strict=True):
            p.grad = None if name == idle else g
        optimizer.step()


def assert_same(first: tuple[Any, list], second: tuple[Any, list]) -> None:
    """To the bit, all parameters and all state."""
    for (name, p), (_, q) in zip(first[1], second[1], strict=True):
        assert torch.equal(p, q), name
        mine, theirs = first[0].state[p], second[0].state[q]
        assert list(mine) == list(theirs)
        for key in mine:
            assert mine[key].dtype == theirs[key].dtype, (name, key)
            assert mine[key].stride() == theirs[key].stride(), (name, key)
            assert torch.equal(mine[key].cpu(), theirs[key].cpu()), (name, key)


def large(optimizer: Any, named: list[tuple[str, Any]]) -> Iterator[Any]:
    """Entries that are as large as their parameters. A square factor is not meant."""
    for _, p in named:
        yield from (
            e for key, e in optimizer.state[p].items() if e.shape == p.shape and p.ndim and not key.startswith("Q_")
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", RULES)
def test_the_same_bits(rule: str, way: str) -> None:
    dtype, beside = WAYS[way]
    runs = []
    for offload_state in (False, True):
        named = model(dtype)
        made = getattr(thalweg.torch, rule)(named, **RULES[rule], **beside, offload_state=offload_state)
        optimizer = in_small_chunks(made)
        train(optimizer, named, range(3))
        train(optimizer, named, range(3, 4), idle="p1")
        train(optimizer, named, range(4, 7))
        runs.append((optimizer, named))
    assert_same(*runs)
    (plain, _), (moved, named) = runs
    assert moved.engine == plain.engine
    entries = list(large(moved, named))
    assert entries
    assert all(e.device.type == "cpu" and e.is_pinned() for e in entries)
    assert len(moved._turns.chunks) > 1
    figures, expected = moved.stats(), plain.stats()
    assert figures.keys() == expected.keys()
    for name in figures:
        assert figures[name].keys() == expected[name].keys()


def test_tiles_of_another_width_are_equal_to_rounding() -> None:
    """Beside narrower tensors a wide one is cut into narrower tiles than alone: its sums go in another order."""
    shapes = [(512, 512), (512, 512), (512, 512), (768, 1024)]
    runs = []
    for offload_state in (False, True):
        params = [torch.nn.Parameter(x) for x in drawn(0, shapes=shapes)]
        made = thalweg.torch.Adafactor(params, **RULES["Adafactor"], offload_state=offload_state)
        optimizer = in_small_chunks(made)
        for step in range(5):
            for p, g in zip(params, drawn(100 + step, shapes=shapes), strict=True):
                p.grad = g
            optimizer.step()
        runs.append((optimizer, params))
    (plain, ours), (moved, theirs) = runs
    assert len(moved._turns.chunks) > 1
    for p, q in zip(ours, theirs, strict=True):
        pairs = [(p, q), *((plain.state[p][key], moved.state[q][key]) for key in plain.state[p])]
        for mine, other in pairs:
            expected, found = mine.detach().cpu(), other.detach().cpu()
            assert (found - expected).abs().max() <= FUSED["float32"] * expected.abs().max()


def loop(offload_state: bool, use: Callable[[Any, list], None], **options: Any) -> tuple[Any, list]:
    named = model()
    made = thalweg.torch.LAMB(named, **{"lr": 0.01, **options}, offload_state=offload_state)
    optimizer = in_small_chunks(made)
    use(optimizer, named)
    return optimizer, named


def with_a_scheduler_and_groups(optimizer: Any, named: list) -> None:
    added = torch.nn.Parameter(torch.ones(600, 600, device="cuda"))
    train(optimizer, named, range(2))
    optimizer.add_param_group({"params": [("added", added)], "lr": 0.5, "weight_decay": 0.1})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
    for step in range(3):
        added.grad = torch.full_like(added, 0.1 * step)
        train(optimizer, named, range(10 + step, 11 + step))
        scheduler.step()
    named.append(("added", added))


def with_a_scaler(optimizer: Any, named: list) -> None:
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        for (_, p), g in zip(named, drawn(100 + step), strict=True):
            p.grad = g * scaler.get_scale() if step else torch.full_like(g, float("inf"))
        scaler.scale(torch.zeros((), device="cuda"))
        scaler.step(optimizer)
        scaler.update()


def with_edits(optimizer: Any, named: list) -> None:
    train(optimizer, named, range(2))
    for _, p in named:
        optimizer.state[p]["exp_avg"].mul_(0.5)
    moment = optimizer.state[named[0][1]]["exp_avg_sq"]
    optimizer.state[named[0][1]]["exp_avg_sq"] = torch.full_like(moment, 0.25)
    train(optimizer, named, range(2, 5))


def with_other_options(optimizer: Any, named: list) -> None:
    train(optimizer, named, range(2))
    optimizer.param_groups[0]["state_dtype"] = "int8"
    with pytest.warns(thalweg.ResumeWarning):
        train(optimizer, named, range(2, 4))


def on_a_stream(optimizer: Any, named: list) -> None:
    train(optimizer, named, range(2))
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        train(optimizer, named, range(2, 4))
    torch.cuda.current_stream().wait_stream(beside)
    train(optimizer, named, range(4, 6))


def one_by_one(optimizer: Any, named: list) -> None:
    for step in range(3):
        for (_, p), g in zip(named, drawn(100 + step), strict=True):
            p.grad = g
            optimizer.step_parameter(p)
            p.grad = None
    train(optimizer, named, range(3, 5))


@pytest.mark.parametrize(
    "use",
    [
        with_a_scheduler_and_groups,
        with_a_scaler,
        with_edits,
        with_other_options,
        on_a_stream,
        one_by_one,
    ],
)
def test_the_same_bits_in_training_loops(use: Callable[[Any, list], None]) -> None:
    assert_same(loop(False, use), loop(True, use))


def test_overrides_and_rules_of_a_mixture() -> None:
    runs = []
    for offload_state in (False, True):
        named = model()
        entries = [
            (lambda _, p: p.ndim == 2 and p.shape == (512, 512), thalweg.torch.Muon.options(lr=0.02)),
            ("*", thalweg.torch.AdamW.options(lr=0.01)),
        ]
        overrides = [("p3", dict(state_dtype="int8")), ("p5", dict(lr_scale=0.5))]
        made = thalweg.torch.Mixture(named, entries, overrides=overrides, offload_state=offload_state)
        optimizer = in_small_chunks(made)
        train(optimizer, named, range(4))
        runs.append((optimizer, named))
    assert_same(*runs)


def test_checkpoints_go_both_ways() -> None:
    """Saved with and without, loaded with and without: the same bits, and state where the optimizer keeps it."""
    straight = loop(False, lambda optimizer, named: train(optimizer, named, range(6)))
    for saved_from in (False, True):
        optimizer, named = loop(saved_from, lambda optimizer, named: train(optimizer, named, range(3)))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        weights = [p.detach().clone() for _, p in named]
        for loaded_into in (False, True):
            file.seek(0)
            fresh, again = loop(loaded_into, lambda *_: None)
            with torch.no_grad():
                for (_, p), x in zip(again, weights, strict=True):
                    p.copy_(x)
            fresh.load_state_dict(torch.load(file, weights_only=True))
            places = {e.device.type for e in large(fresh, again)}
            assert places == {"cpu" if loaded_into else "cuda"}
            train(fresh, again, range(3, 6))
            assert_same((fresh, again), straight)
            assert all(e.is_pinned() == loaded_into for e in large(fresh, again))


def test_a_copy_goes_on_by_itself() -> None:
    straight = loop(True, lambda optimizer, named: train(optimizer, named, range(6)))
    optimizer, named = loop(True, lambda optimizer, named: train(optimizer, named, range(3)))
    twin, twins = copy.deepcopy((optimizer, named))
    train(optimizer, named, range(3, 5))
    train(twin, twins, range(3, 6))
    assert_same((twin, twins), straight)
    assert all(e.is_pinned() for e in large(twin, twins))
    assert not {e.data_ptr() for e in large(twin, twins)} & {e.data_ptr() for e in large(optimizer, named)}


def test_the_gpu_has_weights_gradients_and_a_few_chunks() -> None:
    """From the first step on: state never lies on the GPU as a whole."""
    shapes = [(1024, 1024)] * 48
    weights = 48 * 4 * MIB
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    params = [torch.nn.Parameter(x) for x in drawn(0, shapes=shapes)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = in_small_chunks(thalweg.torch.AdamW(params, lr=0.01, offload_state=True))
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        optimizer.step()
    # three slots of one tensor's moments, and the moments of one that are being made
    assert torch.cuda.max_memory_allocated() - before < 2 * weights + 4 * 8 * MIB + 8 * MIB
    host = sum(e.nbytes for p in params for key, e in optimizer.state[p].items() if key != "step")
    assert host == optimizer.explain().host_bytes == 2 * weights


def test_a_step_waits_for_nothing() -> None:
    optimizer, named = loop(True, lambda optimizer, named: train(optimizer, named, range(3)))
    grads = drawn(200)
    for (_, p), g in zip(named, grads, strict=True):
        p.grad = g
    with no_waiting():
        optimizer.step()


def test_the_host_is_free_while_state_is_on_its_way() -> None:
    """step() returns while the GPU is busy with something else, and what is then read is the new state."""
    optimizer, named = loop(True, lambda optimizer, named: train(optimizer, named, range(3)))
    (_, p), before = named[0], optimizer.state[named[0][1]]["exp_avg"].clone()
    for (_, q), g in zip(named, drawn(200), strict=True):
        q.grad = g
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # about half a second
    done = torch.cuda.Event()
    optimizer.step()
    done.record()
    assert not done.query()
    stale = optimizer.__dict__["state"][p]["exp_avg"]
    assert torch.equal(stale, before)
    assert not torch.equal(optimizer.state[p]["exp_avg"], before)
    assert done.query()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # as it is when the step is refused
def test_a_captured_step_is_refused() -> None:
    optimizer, named = loop(True, lambda optimizer, named: train(optimizer, named, range(3)), capturable=True)
    for (_, p), g in zip(named, drawn(200), strict=True):
        p.grad = g
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(OptionError, match="offload_state=True cannot be captured"), torch.cuda.graph(graph):
        optimizer.step()
    train(optimizer, named, range(3, 4))


def test_memory_of_the_host_is_given_back() -> None:
    """Also while the last copies are under way."""
    for _ in range(3):
        optimizer, named = loop(True, lambda optimizer, named: train(optimizer, named, range(2)))
        kept = optimizer.state_dict()["state"][0]["exp_avg"]
        del optimizer, named
    assert kept.is_pinned()
    assert torch.isfinite(kept).all()


def test_dtensors_of_a_world_of_one() -> None:
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda:0"))
    try:
        runs = []
        for offload_state in (False, True):
            torch.manual_seed(0)
            net = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(4))).cuda()
            for layer in net:
                fully_shard(layer)
            fully_shard(net)
            made = thalweg.torch.LAMB(net.named_parameters(), lr=0.01, offload_state=offload_state)
            optimizer = in_small_chunks(made)
            for step in range(4):
                torch.manual_seed(step)
                net(torch.randn(8, 600, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    optimizer.load_state_dict(optimizer.state_dict())
            runs.append((optimizer, list(net.named_parameters())))
        (plain, ours), (moved, theirs) = runs
        for (name, p), (_, q) in zip(ours, theirs, strict=True):
            assert torch.equal(p.to_local(), q.to_local()), name
            for key in ("exp_avg", "exp_avg_sq"):
                mine, other = plain.state[p][key], moved.state[q][key]
                assert type(other) is type(mine)
                assert other.to_local().is_pinned()
                assert torch.equal(mine.to_local().cpu(), other.to_local()), (name, key)
    finally:
        torch.distributed.destroy_process_group()
