"""What an optimizer will cost on a model: memory, and the least that a step must move, before anything is allocated."""

from __future__ import annotations

from thalweg.plan.cost import Cost, Plan, plan

__all__ = ["Cost", "Plan", "plan"]
