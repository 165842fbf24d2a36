"""Train in several runs, each on any number of ranks: a run resumes from the last complete checkpoint.

Usage: torchrun --nproc-per-node 2 examples/resume_elsewhere.py --out run --stop 50
       torchrun --nproc-per-node 4 examples/resume_elsewhere.py --out run
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp2 import batch, begin, loss_of, parsed, sharded, tell, text
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import thalweg.torch


def newest(folder: Path) -> tuple[int, Path] | None:
    """Find the last complete checkpoint: rank 0 writes .metadata last, when all ranks are done."""
    whole = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(((int(path.name.removeprefix("step-")), path) for path in whole), default=None)


def main() -> None:
    given = parsed(
        __doc__,
        out=dict(type=Path, default="run", help="a folder for checkpoints (default: %(default)s)"),
        every=dict(type=int, default=25, help="steps between checkpoints (default: %(default)s)"),
        stop=dict(type=int, help="end early, after so many steps"),
    )
    device, letters = begin(), text()
    model = sharded(device)
    optimizer = getattr(thalweg.torch, given.optimizer)(model.named_parameters(), given.lr)

    begun, found = 0, newest(given.out)
    if found:
        begun, folder = found
        weights, state = get_state_dict(model, optimizer)  # sharded for these ranks; dcp.load fills them
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

    messages = dist.new_group(backend="gloo")  # for saving while training continues
    saving: Any = None
    last = min(given.stop or given.steps, given.steps)
    for step in range(begun, last):
        optimizer.lr = given.lr * (1 - step / given.steps)
        loss = loss_of(model, batch(letters, step, dist.get_rank(), dist.get_world_size()).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tell(step + 1, loss.detach())
        if (step + 1) % given.every == 0 or step + 1 == last:
            if saving:
                saving.result()  # only one save at a time
            weights, state = get_state_dict(model, optimizer)
            states = {"model": weights, "optimizer": state}
            saving = dcp.async_save(states, checkpoint_id=given.out / f"step-{step + 1}", process_group=messages)
    if saving:
        saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
