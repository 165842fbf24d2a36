"""Several Python threads, several processes: each gets what it would have got alone."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from agree import draw, draw_gradients
from raw_arrays import bits, copies
from side_by_side import made, needs_core

from thalweg.kernels.threads import set_num_threads

# jax, if another test has loaded it into this process, warns of every fork; the children here do without it
pytestmark = [
    needs_core,
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

SHAPES = {"small": (1000,), "large": (150_000,), "matrix": (300, 250)}
OPTIONS: dict[str, Any] = dict(weight_decay=0.1)
STEPS = 4


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    set_num_threads(3)
    yield
    set_num_threads(None)


def trained(rule: str, seed: int = 0, steps: int = STEPS) -> Any:
    params, optimizer = draw(SHAPES, "float32", seed), made(rule, "fused", **OPTIONS)
    for step in draw_gradients(SHAPES, "float32", steps, seed=seed + 10):
        optimizer.step(params, step)
    return bits(params), bits(optimizer.state)


def run_in_threads(work: Any, count: int) -> None:
    """All begin together."""
    together = threading.Barrier(count)

    def begin(index: int) -> None:
        together.wait()
        work(index)

    threads = [threading.Thread(target=begin, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)


def test_optimizers_in_several_python_threads_at_once() -> None:
    rules = ["LARS", "LAMB", "Adafactor"] * 2
    expected = [trained(rule, seed) for seed, rule in enumerate(rules)]
    found: list[Any] = [None] * len(rules)

    def work(index: int) -> None:
        found[index] = trained(rules[index], index)

    run_in_threads(work, len(rules))
    assert found == expected


def test_threads_that_step_parameters_of_one_optimizer() -> None:
    """Each steps its own arrays, as often as it says."""
    optimizer = made("LARS", "fused", lr=0.5, trust=False, momentum=0.0)
    arrays = [np.zeros(3000 + i, np.float32) for i in range(4)]

    def work(index: int) -> None:
        for _ in range(200):
            optimizer.update(index, arrays[index], np.ones_like(arrays[index]))

    run_in_threads(work, len(arrays))
    assert all(np.array_equal(x, np.full_like(x, -100)) for x in arrays)


def test_native_code_lets_python_run_meanwhile() -> None:
    """Another thread gets its turn while a step takes place."""
    shapes = {"w": (3_000_000,)}
    params, (step,) = draw(shapes, "float64"), draw_gradients(shapes, "float64", 1)
    optimizer, turns, done = made("LAMB", "fused"), [0], threading.Event()
    set_num_threads(1)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nobody is interrupted: turns are given away, or never
    try:
        optimizer.step(params, step)
        counted = threading.Event()

        def count() -> None:
            counted.set()
            while not done.is_set():
                turns[0] += 1
                done.wait(0.0005)

        thread = threading.Thread(target=count)
        thread.start()
        counted.wait()
        start = turns[0]
        for _ in range(3):
            optimizer.step(params, step)
        taken = turns[0] - start
        done.set()
        thread.join()
    finally:
        done.set()
        sys.setswitchinterval(before)
    assert taken > 0


forked = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork here")


def result_of_child(work: Callable[[], Any]) -> Any:
    """What a forked child computes with threads of its own; a child that hangs is ended."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def answer() -> None:
        set_num_threads(3)
        sender.send(work())

    child = context.Process(target=answer)
    child.start()
    try:
        assert receiver.poll(20), "the child did not answer"
        return receiver.recv()
    finally:
        child.kill()
        child.join()


@forked
def test_a_forked_child_steps_with_threads_of_its_own_and_so_does_its_parent() -> None:
    """Also where another thread steps meanwhile."""
    expected, stop = trained("LAMB"), threading.Event()
    assert result_of_child(lambda: trained("LAMB")) == expected
    assert trained("LAMB") == expected

    def work() -> None:
        while not stop.is_set():
            trained("LAMB", steps=1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(2):
            assert result_of_child(lambda: trained("LAMB")) == expected
    finally:
        stop.set()
        thread.join()


@forked
def test_an_optimizer_goes_on_in_a_child_as_it_would_have_in_the_parent() -> None:
    params, grads = draw(SHAPES, "float32"), draw_gradients(SHAPES, "float32", 4)
    optimizer = made("LAMB", "fused", **OPTIONS)
    for step in grads[:2]:
        optimizer.step(params, step)

    def go_on() -> Any:
        here = copies(params)
        for step in grads[2:]:
            optimizer.step(here, step)
        return bits(here)

    there = result_of_child(go_on)
    assert there == go_on() != bits(params)
