"""What an optimizer will cost on a model: memory, traffic and time, before anything is allocated."""

from __future__ import annotations

from thalweg.plan.planning import Cost, Plan, plan

__all__ = ["Cost", "Plan", "plan"]
