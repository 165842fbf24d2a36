"""What replicas save by dividing the work on whole tensors: python benchmarks/replicas.py

Four gloo processes with one thread each step 16 matrices by Muon and by Kron, undivided and divided. The output tells,
of the rank that takes most, the CPU seconds of transforms and of a step, and the bytes that a rank sends.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import thalweg.torch
from thalweg.rules import RULES
from thalweg.torch.sharding import collectives

RANKS, STEPS, PORT = 4, 6, 29511
OPTIONS: dict[str, dict[str, Any]] = {"Muon": {"ns_dtype": "float32"}, "Kron": {"precond_update_probability": 1.0}}
SHAPES = [(256, 256 * (1 + i % 3)) for i in range(16)]


def measure(name: str, replicas: Any) -> list[float]:
    """The least CPU seconds of transforms and of a step on this rank, and the bytes that it sends."""
    rule, spent, sent = RULES[name], [0.0], [0]
    transform, send = rule.transform, collectives.all_to_all

    def timed(*given: Any, **named: Any) -> Any:
        begun = time.process_time()
        made = transform(*given, **named)
        spent[0] += time.process_time() - begun
        return made

    def counted(arrived: Any, message: Any, incoming: Any, outgoing: Any, group: Any) -> Any:
        sent[0] += (message.numel() - outgoing[dist.get_rank()]) * message.element_size()
        return send(arrived, message, incoming, outgoing, group)

    torch.manual_seed(0)
    params = [(f"p{i}", torch.nn.Parameter(torch.randn(shape))) for i, shape in enumerate(SHAPES)]
    optimizer = getattr(thalweg.torch, name)(params, lr=0.01, replicas=replicas, **OPTIONS[name])
    rule.transform, collectives.all_to_all = timed, counted
    found = []
    for _ in range(STEPS):
        for _, p in params:
            p.grad = torch.randn(p.shape)
        dist.barrier()
        spent[0], sent[0] = 0.0, 0
        begun = time.process_time()
        optimizer.step()
        found.append((spent[0], time.process_time() - begun))
    rule.transform, collectives.all_to_all = transform, send
    return [*map(min, zip(*found[2:], strict=True)), sent[0]]


def run(rank: int, answers: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for name in OPTIONS:
        for replicas in (None, dist.group.WORLD):
            answers.put((name, replicas is not None, measure(name, replicas)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=run, args=(rank, answers)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    told = [answers.get() for _ in range(2 * len(OPTIONS) * RANKS)]
    for each in ranks:
        each.join()
    for name in OPTIONS:
        for divided in (False, True):
            own = [found for who, how, found in told if (who, how) == (name, divided)]
            most = [max(column) for column in zip(*own, strict=True)]
            how = "divided" if divided else "undivided"
            line = f"{name} {how}: transforms {most[0]:.3f} s, step {most[1]:.3f} s, {most[2]:,} bytes sent"
            sys.stdout.write(f"{line}\n")
