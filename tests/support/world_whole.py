"""Rules that need whole tensors, over ranks: what is sent to owners, and kept of figures."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from world_layouts import layout as laid_out  # noqa: E402
from world_steps import Run, stepped  # noqa: E402

from thalweg.torch.sharding import collectives  # noqa: E402


def dtypes_sent(run: Run, layout: str) -> list[str]:
    """Of all messages to owners and from them, on this rank."""
    sent, send = [], collectives.Exchange

    def watched(*pieces: Any, dtype: Any, **rest: Any) -> Any:
        sent.append(str(dtype))
        return send(*pieces, dtype=dtype, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "Exchange", watched)
        stepped(run, laid_out(layout))
    return sent


def norms(run: Run, layout: str) -> dict[str, list[float]]:
    found = stepped(run, laid_out(layout)).optimizer.stats()
    return {name: own["norm"].reshape(-1).tolist() for name, own in found.items()}
