"""DeepSpeed: rules that look at no shapes train under every stage of ZeRO, and others under stage 0 or are refused."""

from __future__ import annotations

import deepspeed  # noqa: F401
import pytest
import torch
from tolerances import FUSED
from world import world
from world_deepspeed import trained

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("rule", "options"), [("AdamW", {}), ("LAMB", {"trust": False})])
def test_elementwise_rules_are_the_same_in_every_stage(rule: str, options: dict) -> None:
    (plain,), *others = (world(1).run(trained, rule, stage, **options) for stage in (0, 1, 2, 3))
    for (found,) in others:
        for one, other in zip(plain, found, strict=True):
            torch.testing.assert_close(one, other, rtol=FUSED["float32"], atol=FUSED["float32"])


@pytest.mark.parametrize("rule", ["LAMB", "Adafactor", "Kron"])
def test_rules_that_look_at_shapes_say_why_they_cannot_be_flattened(rule: str) -> None:
    assert isinstance(world(1).run(trained, rule, 0)[0], list)
    for stage in (1, 2, 3):
        (told,) = world(1).run(trained, rule, stage)
        assert "Stages 1 to 3 of DeepSpeed's ZeRO do this: they flatten parameters" in told
        assert "use ZeRO stage 0, or torch.distributed.fsdp.fully_shard (FSDP2)" in told
