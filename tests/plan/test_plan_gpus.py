"""Kernels for GPUs in plans: which of them run, and what they keep, against real ones that Triton interprets."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from lanes import by_turns, one_in
from measured_peaks import allocator_kept, allocator_peak, torch_optimizer

from thalweg.errors import CommandError
from thalweg.plan import memory, plan
from thalweg.plan.items import item_of
from thalweg.plan.models import Model, Tensor
from thalweg.plan.optimizers import setting_of
from thalweg.show.arguments import Given

HAS_KERNELS = all(importlib.util.find_spec(name) is not None for name in ("torch", "triton"))
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="there are no kernels here")

SMALL = [(130, 140), (70, 40), (130,), (7,), (), (0, 4), (3, 6, 5)]
TINY = [(5, 7), (5, 7), (0, 4), (), (2, 3, 4)]
#: Of several chunks and tiles each.
LARGE = [(5000, 768), (768, 3072), (768,), (64, 3, 7, 7), (3, 300, 400), (512, 256, 3, 3), (1023, 1025)]
#: Where libraries multiply, and their temporaries have a bound.
IN_PART: dict[str, Any] = {"block_size": 64, "damping_mode": "expected"}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("LARS", {}),
    ("LARS", {"momentum": 0.0, "rounding": "stochastic"}),
    ("LAMB", {}),
    ("LAMB", {"trust": False, "state_dtype": "bfloat16"}),
    ("LAMB", {"on_nonfinite": "raise"}),
    ("Adafactor", {}),
    ("Adafactor", {"momentum": 0.9, "min_dim_size_to_factor": 2}),
    ("Adafactor", {"factored": False}),
    ("Kron", {}),
    ("Kron", {"max_size_dense": 64, "precond_dtype": "bfloat16"}),
    ("Kron", {"block_size": 10}),
    ("Kron", IN_PART),
]
#: What kernels for GPUs do not step.
UNSERVED: list[tuple[str, dict[str, Any], str]] = [
    ("LAMB", {"state_dtype": "float64"}, "there is no fused kernel for state of float64 on GPUs"),
    ("Kron", {"geometry": "eq", "whiten": "gradient"}, "there is no fused kernel for geometry='eq'"),
    ("Kron", {"normalize_grads": True}, "there is no fused kernel for normalize_grads=True"),
    ("Kron", {"on_nonfinite": "raise"}, "there is no fused kernel of Kron for on_nonfinite='raise'"),
    ("Kron", {"precond_dtype": "float16"}, "there is no fused kernel for factors stored in float16"),
    ("Kron", {"merge": None, "whiten": "gradient"}, "there is no fused kernel for 3 factors"),
]


@pytest.fixture
def kernels_serve_the_cpu() -> Iterator[None]:
    from interpreter import serving

    with serving():
        yield


def model_of(shapes: list[tuple[int, ...]], dtype: str = "float32") -> Model:
    return Model("some", "", tuple(Tensor(f"p{i}", shape, dtype) for i, shape in enumerate(shapes)))


def planned(
    rule: str,
    options: dict[str, Any],
    shapes: list[tuple[int, ...]],
    dtype: str = "float32",
    engine: str = "auto",
    **where: Any,
) -> Any:
    given = [Given(rule, name, value) for name, value in options.items()]
    return plan(model_of(shapes, dtype), optimizers=[rule], options=given, engine=engine, **where).costs[0].share


# ---- what runs


@pytest.mark.slow
@by_turns()
@needs_kernels
@pytest.mark.usefixtures("kernels_serve_the_cpu")
@pytest.mark.parametrize(
    ("rule", "options"), one_in(3, [*OPTIONS, *((rule, options) for rule, options, _ in UNSERVED)])
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_engine_is_the_one_that_runs(rule: str, options: dict[str, Any], dtype: str) -> None:
    optimizer, step = torch_optimizer(rule, TINY, dtype, "auto", options)
    step()
    assert planned(rule, options, TINY, dtype).engine == optimizer.engine


@pytest.mark.parametrize(("rule", "options", "reason"), UNSERVED)
def test_an_engine_that_cannot_run_is_told(rule: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(CommandError, match=f"engine 'fused' cannot run {rule} for 'p0': {reason}"):
        planned(rule, options, [(6, 5, 4)], engine="fused", device="cuda")
    assert planned(rule, options, [(6, 5, 4)] * 2, device="cuda").engine == "foreach"


def test_lists_and_kernels_may_share_a_model() -> None:
    mixed = Model("mixed", "", (Tensor("a", (8, 8)), Tensor("b", (8, 8), "float64"), Tensor("c", (9,), "float64")))
    found = plan(mixed, optimizers=["LARS"], device="cuda").costs[0].share
    assert found.engine == "foreach + fused"
    with pytest.raises(CommandError, match="cannot run LARS for 'b': there is no fused kernel for float64 on GPUs"):
        plan(mixed, optimizers=["LARS"], device="cuda", engine="fused")


def test_the_native_core_is_not_asked_for_what_gpus_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from thalweg.plan import planning

    for module in (memory, planning):
        monkeypatch.setattr(module, "reason_missing", lambda: "there is no compiler")
    assert planned("LAMB", {}, TINY, device="cuda", engine="fused").engine == "fused"
    assert planned("LAMB", {}, TINY, device="cuda").engine == "fused"
    assert planned("LARS", {}, TINY, device="cpu").engine == "foreach"


# ---- what they keep


@by_turns("rule", "dtype")
@pytest.mark.nightly
@needs_kernels
@pytest.mark.usefixtures("kernels_serve_the_cpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rule", "options"), [case for case in OPTIONS if case[0] != "Kron"])
def test_kernels_keep_what_is_planned_to_the_block(rule: str, options: dict[str, Any], dtype: str) -> None:
    optimizer, step = torch_optimizer(rule, SMALL, dtype, "fused", options)
    kept = allocator_kept(optimizer, step)
    assert kept > 4096
    assert planned(rule, options, SMALL, dtype, "fused").peak_bytes == kept
    assert allocator_peak(step, warm_up=0) < 1024  # nothing but that


@pytest.mark.slow
@needs_kernels
@pytest.mark.usefixtures("kernels_serve_the_cpu")
@pytest.mark.parametrize(("rule", "options"), one_in(6, [case for case in OPTIONS if case[0] != "Kron"]))
def test_tables_of_larger_tensors(rule: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are laid out, and not run."""
    from thalweg.torch.engines.triton import TritonRun

    monkeypatch.setattr(TritonRun, "write", lambda self: {})
    monkeypatch.setattr(TritonRun, "measure", lambda self, _: [])
    monkeypatch.setattr(TritonRun, "nonfinite", lambda self: [])
    optimizer, step = torch_optimizer(rule, LARGE, "float32", "fused", options)
    kept = allocator_kept(optimizer, step)
    assert kept > 2**15
    assert planned(rule, options, LARGE, engine="fused").peak_bytes == kept


@by_turns()
@pytest.mark.nightly
@needs_kernels
@pytest.mark.usefixtures("kernels_serve_the_cpu")
@pytest.mark.parametrize(("rule", "options"), [case for case in OPTIONS if case[0] == "Kron" and case[1] != IN_PART])
@pytest.mark.parametrize("shapes", [[(20, 24)] * 3, [(20, 24), (24,), (6, 5, 4), (40, 30)]])
def test_kron_keeps_what_is_planned(rule: str, options: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
    optimizer, step = torch_optimizer(rule, shapes, "float32", "fused", options)
    kept = allocator_kept(optimizer, step)
    assert kept > 2**15
    assert planned(rule, options, shapes, engine="fused").peak_bytes == kept


@needs_kernels
def test_large_models_are_laid_out_in_pieces() -> None:
    """Which changes next to nothing in what they are found to keep."""
    shapes = [(4096, 2048)] * 80

    def portions(rule: str, *sizes: tuple[int, ...]) -> list[int]:
        return [len(some) for some in memory.portions([item_of(Tensor("w", s), setting_of(rule)) for s in sizes])]

    assert portions("LAMB", *[(4096, 2048)] * 100) == [50, 50]
    assert portions("Kron", *[(4096, 2048)] * 100) == [100]
    assert portions("LAMB", (4096, 2048), (0, 4)) == [2]
    assert portions("LAMB", (0, 4), (0, 4)) == [2]
    for rule in ("LARS", "LAMB", "Adafactor"):
        bucket = [item_of(Tensor("w", shape), setting_of(rule)) for shape in shapes]
        found, whole = memory.gpu_scratch([bucket]), memory.gpu_scratch([bucket], at_once=2**60)
        assert found != whole
        assert found == pytest.approx(whole, rel=0.01)


def test_without_torch_or_triton_it_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    lamb = planned("LAMB", {}, [(200, 100)] * 3)
    assert (lamb.engine, lamb.peak_bytes) == ("fused", 4 * 60_000 // 200)
    # 2.5 times parameter and factors, one dense and one diagonal; small ones of one shape together
    kron = {"max_size_dense": 100}
    assert planned("Kron", kron, [(200, 100)] * 3 + [(200,)]).peak_bytes == 3 * 10 * (20_000 + 200 + 10_000)
    large = 10 * (20_000 * 1500 + 20_000 + 1500)
    assert planned("Kron", kron, [(20_000, 1500)] * 3 + [(200,)]).peak_bytes == large


@needs_kernels
@pytest.mark.parametrize("model", ["gpt2", pytest.param("llama-1b", marks=pytest.mark.nightly)])
def test_estimates_are_of_the_right_size(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["LAMB", "Adafactor", "Kron"]
    told = [cost.share.peak_bytes or 0 for cost in plan(model, optimizers=names).costs]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    estimated = [cost.share.peak_bytes or 0 for cost in plan(model, optimizers=names).costs]
    assert all(0.5 < guess / real < 3 for guess, real in zip(estimated, told, strict=True))


@needs_kernels
@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"on_nonfinite": "skip"}])
def test_the_joint_norm_of_gradients_needs_room(options: dict[str, Any]) -> None:
    """For every 8,192 elements a number and two that say whose it is; and four for each tensor, in blocks of 512."""
    shapes = [(1000, 1000), (300,), (20, 30)]
    alone, more = planned("LARS", {}, shapes).peak_bytes, planned("LARS", options, shapes).peak_bytes
    assert more - alone == 512 + 1024 + 3 * 512
    alone, more = (planned("LAMB", o, [(4096, 4096)] * 5).peak_bytes for o in ({}, options))
    assert more - alone == 5 * 2048 * (4 + 8) + 3 * 512


# ---- owners of whole tensors

MATRIX = 4 * 1000 * 1000
#: Small things: norms of factors, means of squares, counts, in blocks of memory.
BESIDE = 40 * 512


def share(shape: tuple[int, ...] = (1000, 1000), many: int = 12, dtype: str = "float32", **how: Any) -> Any:
    """Of one of two ranks, unless told otherwise."""
    model = Model("many", "", tuple(Tensor(f"w{i}", shape, dtype) for i in range(many)))
    where = {"world": 2, "layout": "fsdp2", "device": "cuda", **{k: how.pop(k) for k in list(how) if k in WHERE}}
    options = [Given("Kron", name, value) for name, value in {"variant": "polyak", **how}.items()]
    return plan(model, optimizers=["Kron"], options=options, **where).costs[0].share


WHERE = ("world", "layout", "device", "engine")


def test_owners_have_kernels_wherever_one_device_has_them() -> None:
    assert share().engine == "fused"
    assert share(engine="fused", stacked_axes=1, shape=(4, 30, 20)).engine == "fused"
    assert share(engine="foreach").engine == "foreach"
    assert share(device="cpu").engine == "foreach"
    assert share(geometry="eq").engine == "foreach"
    mixed = Model("mixed", "", (Tensor("a", (8, 8)), Tensor("b", (8, 8), "float64")))
    found = plan(mixed, optimizers=["Kron"], world=2, layout="fsdp2", device="cuda").costs[0].share
    assert found.engine == "foreach + fused"
    with pytest.raises(CommandError, match="engine 'fused' cannot run Kron for 'w0': there is no fused kernel for geo"):
        share(engine="fused", geometry="eq")


def test_kernels_have_factors_as_they_are_stored() -> None:
    by_lists, by_kernels = (share(precond_dtype="bfloat16", engine=engine) for engine in ("foreach", "auto"))
    # two factors of each of six tensors, and their norms
    assert by_lists.state_bytes - by_kernels.state_bytes == 12 * MATRIX - (12 * MATRIX // 2 + 12 * 4)
    assert share().state_bytes - share(engine="foreach").state_bytes == 12 * 4


def test_kernels_keep_their_factors_where_steps_are_guarded() -> None:
    """So that they are where tables say; all else lets go of factors that everyone sends at every step."""
    guarded, free = share(on_nonfinite="skip"), share()
    assert guarded.state_bytes == free.state_bytes
    lists = share(on_nonfinite="skip", engine="foreach")
    assert guarded.state_bytes - lists.state_bytes == 12 * MATRIX + 12 * 4


def test_peak_of_lists() -> None:
    """While answers are sent: what six tensors became, twice that with factors, and what comes from the other rank."""
    wanted = 6 * MATRIX + 2 * (6 + 12) * MATRIX + (6 + 12) * MATRIX
    assert share(engine="foreach").peak_bytes == pytest.approx(wanted, abs=BESIDE)
    # refreshed factors that nobody keeps, or that are kept rounded
    for options in (dict(on_nonfinite="skip"), dict(precond_dtype="bfloat16")):
        assert share(engine="foreach", **options).peak_bytes >= wanted + 12 * MATRIX


@needs_kernels
def test_peak_of_kernels() -> None:
    """The same, and what kernels keep for six tensors on one device."""
    scratch = share(many=6, world=1, layout="ddp", momentum=0.0).peak_bytes
    assert scratch > 20 * MATRIX
    wanted = 6 * MATRIX + 2 * (6 + 12) * MATRIX + (6 + 12) * MATRIX
    assert share().peak_bytes == pytest.approx(wanted + scratch, abs=BESIDE)
    # without dense factors: all at once, as it came and as it became, is less than what is sent
    vectors = dict(shape=(1000 * 1000,), many=12)
    scratch = share(**{**vectors, "many": 6}, world=1, layout="ddp", momentum=0.0).peak_bytes
    wanted = 6 * MATRIX + 2 * (6 + 6) * MATRIX + (6 + 6) * MATRIX
    assert share(**vectors).peak_bytes == pytest.approx(wanted + scratch, abs=BESIDE)


# ---- on a GPU itself


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rule", "options"), [*OPTIONS, ("LAMB", {"max_grad_norm": 1.0}), ("LARS", {"on_nonfinite": "skip"})]
)
def test_peaks_on_a_gpu(rule: str, options: dict[str, Any], dtype: str) -> None:
    """Promised are 5 %, or 1 MiB where there is next to nothing."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    shapes = [*LARGE, (4096, 2048), (4096, 2048)]
    gc.collect()  # what earlier tests have left behind must not go away in between
    optimizer, step = torch_optimizer(rule, shapes, dtype, "auto", options, device="cuda")
    before = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    assert optimizer.engine == "fused"
    entries = [entry for state in optimizer.state.values() for entry in state.values() if entry.is_cuda]
    state = sum(entry.nbytes for entry in entries)
    # as requested: how large the blocks are that it comes in depends on what earlier tests have left
    measured = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - state
    assert planned(rule, options, shapes, dtype).peak_bytes == pytest.approx(measured, rel=0.05, abs=2**20)
