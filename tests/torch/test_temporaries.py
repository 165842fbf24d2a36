"""What a step needs in memory beside parameters, gradients and state: never more than ``explain()`` tells."""

from __future__ import annotations

import tracemalloc
from itertools import cycle
from typing import Any

import pytest
import torch
from agree import draw
from day import BY_DAY
from measured_peaks import allocator_peak
from own_rules import Centred
from side_by_side import needs_core

import thalweg.numpy
import thalweg.torch
from thalweg.check.problem import give, weights
from thalweg.kernels.chunks import STACK
from thalweg.rules import RULES, Direction

Shapes = list[tuple[int, ...]]
SHAPES: Shapes = [(66, 70), (34, 200), (130,), (7,), (), (0, 4), (3, 30, 25), (66, 70)]
#: Several chunks of lists, and one tensor that is larger than a chunk.
LARGE: Shapes = [(100, 10_000)] * 4 + [(200, 20_000)]
CASES: list[tuple[str, dict[str, Any]]] = [
    *((rule, options) for rule in RULES for options in ({}, dict(on_nonfinite="skip"))),
    *(("AdamW", dict(on_nonfinite="raise")), ("Kron", dict(on_nonfinite="raise"))),
    ("Kron", dict(whiten="gradient", geometry="eq", weight_decay=0.1, weight_decay_mode="gradient")),
    ("Kron", {"max_skew": None}),
    ("Kron", {"precond_precision": "float32"}),
    ("AdamW", {"state_dtype": "int8", "averaged": 0.99}),
]


#: Each case by one of the two in turn, each rule by both. Parameters of 16 bits need most, for they are made wide.
BY_ENGINE = [(*case, engine) for case, engine in zip(CASES, cycle(("reference", "foreach", "foreach", "reference")))]


class Greedy(Centred):  # type: ignore[misc]
    """A rule that has forty tensors alive at a time, and says so."""

    def count_temporaries(self) -> int:
        return 44

    def transform(self, xp: Any, tensors: Any, s: Any, **rest: Any) -> Direction:
        many = [tensors[0] * factor for factor in range(40)]
        return super().transform(xp, (sum(many) / sum(range(40)),), s, **rest)


def make(rule: Any, shapes: Shapes, dtype: str, engine: str, options: dict[str, Any]) -> Any:
    rule = RULES.get(rule, rule)
    params = weights([shape for shape in shapes if len(shape) > 1 or rule is not RULES["Muon"]], getattr(torch, dtype))
    give(params, 0)
    rate = {} if rule.lr_optional else {"lr": 1e-3}
    optimizer = thalweg.torch.optimizer(rule)(params, engine=engine, **rate, **options)
    optimizer.make_state()
    return optimizer


@pytest.mark.parametrize(("rule", "options", "engine"), BY_ENGINE)
def test_lists(rule: str, options: dict[str, Any], engine: str) -> None:
    optimizer = make(rule, SHAPES, "bfloat16", engine, options)
    assert allocator_peak(optimizer.step, warm_up=0) <= optimizer.explain().temporary_bytes


@needs_core
@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if not rule.needs_whole])
def test_native_code_takes_next_to_nothing(rule: str) -> None:
    options = {"min_dim_size_to_factor": 2} if rule == "Adafactor" else {}
    optimizer = make(rule, [*SHAPES, (600, 64, 3, 3)], "float32", "fused", options)
    optimizer.step()
    assert allocator_peak(optimizer.step, warm_up=0) < 2**16


#: Twenty-two numbers of float32 for each element of a stack, and Python's own.
OF_STACKS = 22.1 * 4 * STACK
#: Models of many small tensors, with which what Kron needs does not grow: whose dense factors count, and of vectors.
MANY: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "dense": ([(4, 512)] * 12, {"max_skew": None}),
    "vectors": ([(16384,)] * 150, {}),
}


@pytest.mark.slow
@needs_core
@pytest.mark.parametrize("many", MANY)
def test_stacks_of_kron_are_bounded(many: str) -> None:
    shapes, options = MANY[many]
    optimizer = make("Kron", shapes, "float32", "auto", options)
    measured = allocator_peak(optimizer.step, warm_up=1)
    assert optimizer.engine == "fused"
    assert measured < OF_STACKS
    assert measured <= optimizer.explain().temporary_bytes


@pytest.mark.slow
@needs_core
def test_numpy_steps_one_tensor_at_a_time() -> None:
    shapes, options = MANY["dense"]
    params, grads = (draw({str(i): shape for i, shape in enumerate(shapes)}, "float32", seed) for seed in range(2))
    optimizer = thalweg.numpy.Kron(lr=1e-3, **options)
    optimizer.step(params, grads)
    tracemalloc.start()
    optimizer.step(params, grads)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert optimizer.engine == "fused"
    assert most < OF_STACKS


CHUNKED: list[tuple[Any, dict[str, Any]]] = [("AdamW", dict(rounding="stochastic")), (Greedy, {})]
CHUNKED += [("Kron", dict(max_size_dense=500)), ("MARS", {}), ("Muon", dict(rounding="stochastic"))]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "options"), CHUNKED[:2] if BY_DAY else CHUNKED)
def test_chunks_of_lists(rule: Any, options: dict[str, Any]) -> None:
    """What is told of a model of several chunks is a few of them, and not much more than it needs."""
    optimizer = make(rule, LARGE, "bfloat16", "foreach", options)
    measured = allocator_peak(optimizer.step, warm_up=0)
    assert measured <= optimizer.explain().temporary_bytes <= 3 * measured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "shapes"),
    [
        *((rule, SHAPES) for rule in (("Adafactor", "Muon", "Kron") if BY_DAY else RULES)),
        *(("LAMB", [(7, 9)]), ("LAMB", [(640, 640)])),
    ],
    ids=str,
)
def test_kernels_for_gpus(rule: str, shapes: Shapes) -> None:
    """Interpreted on a CPU: what tables take, and stacks."""
    pytest.importorskip("triton")
    from interpreter import serving

    options = {"max_grad_norm": 1.0, **({"min_dim_size_to_factor": 2} if rule == "Adafactor" else {})}
    with serving():
        optimizer = make(rule, shapes, "float32", "auto", options)
        assert allocator_peak(optimizer.step, warm_up=0) <= optimizer.explain().temporary_bytes


def test_a_model_without_memory_is_taken_for_one_on_a_gpu() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(1000, 1000)
    lists, fused = (
        thalweg.torch.LAMB(model.named_parameters(), lr=1e-3, engine=engine).explain() for engine in ("foreach", "auto")
    )
    assert fused.temporary_bytes < 4 * 1_001_000 / 20 < lists.temporary_bytes
    assert f"temporaries at most: {fused.temporary_bytes:,} bytes" in str(fused)
