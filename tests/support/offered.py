"""Which checks an optimizer of ours does not offer. Any other that it does not offer is a regression, and is red."""

from __future__ import annotations

from collections.abc import Collection

from thalweg.check import Report

#: What is offered where there is a GPU.
ON_GPU = {"gpu-steps-as-cpu", "state-moves-to-another-device", "cuda-graphs"}
#: What none of ours offers: complex parameters are refused.
BY_NONE = {"complex-parameters"}
NO_BETAS, NO_MOMENTUM, NO_EPS = "betas-out-of-range", "momentum-out-of-range", "eps-out-of-range"

NOT_OFFERED: dict[str, set[str]] = {
    "SGD": {NO_BETAS, NO_EPS},
    "AdamW": {NO_MOMENTUM},
    "LARS": {NO_BETAS},
    "LAMB": {NO_MOMENTUM},
    "Adafactor": {NO_BETAS, NO_MOMENTUM},
    "Muon": {NO_BETAS, "channels-last", "scalars"},  # it takes matrices alone
    "Kron": {NO_BETAS},
    "SOAP": {NO_MOMENTUM},
    "AdEMAMix": {NO_MOMENTUM},
    "Lion": {NO_MOMENTUM, NO_EPS, "bfloat16-follows-float32"},  # its steps are smaller than bfloat16 can show
    "MARS": {NO_MOMENTUM},
    "adamw_and_adafactor": {NO_MOMENTUM},
    "muon_and_adamw": {NO_BETAS},
    "Layerwise": {NO_BETAS, NO_MOMENTUM, NO_EPS},
}
#: Of those for optax.
NOT_OFFERED_BY_OPTAX: dict[str, set[str]] = {"muon": {"scalars-and-empty"}}
#: Over ranks, with lr alone: this SGD keeps no state.
NOT_OFFERED_BY_RANKS: dict[str, set[str]] = {"thalweg.torch.SGD": {"spread-from-one-process"}}


def assert_keeps(report: Report, not_offered: Collection[str]) -> None:
    """Fail where a check does, and where others are not offered than these."""
    assert not report.failed, report.failed
    changed = {each.check for each in report.verdicts if each.outcome == "not offered"} ^ set(not_offered)
    assert not changed, f"{', '.join(sorted(changed))}: not offered and not listed, or listed and offered"
