"""Runs that go on in part, in a mixture, and moments that another library keeps in eight bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg.errors import ResumeWarning, StateError  # noqa: E402

LR = 1e-3


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))


def train(net: Any, optimizer: Any, first: int, last: int) -> None:
    for t in range(first, last):
        generator = torch.Generator().manual_seed(t)
        optimizer.zero_grad()
        net(torch.randn(5, 4, generator=generator)).square().sum().backward()
        optimizer.step()


def mixture(net: Any) -> Any:
    entries = [
        (lambda name, p: p.ndim > 1, thalweg.torch.Muon.options(lr=0.02)),
        ("*", thalweg.torch.AdamW.options(lr=0.5)),
    ]
    return thalweg.torch.Mixture(net.named_parameters(), entries)


@pytest.mark.parametrize("named", [True, False])
def test_what_fits_a_mixture_goes_on_and_the_rest_begins_anew(named: bool) -> None:
    net = model()
    theirs = torch.optim.AdamW(net.named_parameters() if named else net.parameters(), lr=LR)
    train(net, theirs, 0, 3)
    twin = copy.deepcopy(net)
    mine = mixture(twin)
    names = None if named else [name for name, _ in net.named_parameters()]
    with pytest.warns(
        ResumeWarning, match=r"goes on with 2 of 4 parameters; '0.weight', '2.weight' begin anew, by Muon"
    ):
        report = thalweg.torch.import_peer(mine, theirs.state_dict(), names=names)
    assert (report.source, report.rule, report.parameters, report.steps) == ("torch.AdamW", "AdamW", 2, 3)
    assert report.begun == {"0.weight": "Muon", "2.weight": "Muon"}
    assert "begun anew, by Muon: 2 parameters ('0.weight', '2.weight')" in str(report)
    assert [mine.state[layer.bias]["step"] for layer in (twin[0], twin[2])] == [3, 3]
    assert twin[0].weight not in mine.state
    assert {group["rule"]: group["lr"] for group in mine.param_groups} == {"Muon": 0.02, "AdamW": LR}
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    theirs.step()
    mine.step()
    torch.testing.assert_close([twin[0].bias, twin[2].bias], [net[0].bias, net[2].bias])


# ---- eight bits, as the sources of bitsandbytes and of torchao describe them

TABLE = torch.linspace(-1, 1, 256)


def coded(size: int, block: int) -> tuple[Any, Any, Any]:
    """Codes, a scale for each block, and the numbers that they are."""
    codes = (torch.arange(size) * 7 % 256).to(torch.uint8)
    scales = torch.arange(1.0, -(-size // block) + 1)
    numbers = torch.tensor([float(TABLE[int(code)]) * float(scales[i // block]) for i, code in enumerate(codes)])
    return codes, scales, numbers


@pytest.mark.parametrize("block", [256, 2048])
@pytest.mark.parametrize("hidden", [True, False])
def test_moments_of_bitsandbytes_are_decoded(block: int, hidden: bool) -> None:
    p = torch.nn.Parameter(torch.ones(50, 100))
    codes, scales, numbers = coded(p.numel(), block)
    state = {"state1": codes.view(50, 100), "state2": codes.view(50, 100)}
    state |= {"qmap1": TABLE, "qmap2": TABLE.abs(), "absmax1": scales, "absmax2": scales}
    group = dict(lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, alpha=0.0, t_alpha=None, t_beta3=None)
    held: Any = {"step": 3, "__bnb_optimizer_quant_state__": state} if hidden else {"step": 3, **state}
    mine = thalweg.torch.AdamW([p], LR)
    report = thalweg.torch.import_peer(mine, {"state": {0: held}, "param_groups": [{**group, "params": [0]}]})
    assert (report.source, report.steps) == ("bitsandbytes.AdamW", 3)
    assert report.taken == {"state1": "exp_avg", "state2": "exp_avg_sq"}
    torch.testing.assert_close(mine.state[p]["exp_avg"].flatten(), numbers)
    torch.testing.assert_close(mine.state[p]["exp_avg_sq"].flatten(), numbers.abs())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(unorm_vec=torch.zeros(1)), "it was run with max_unorm"),
        (dict(absmax1=torch.ones(7)), "is damaged: 7 scales for 5000 codes"),
    ],
    ids=["another rule", "damaged"],
)
def test_states_of_bitsandbytes_that_are_refused(change: dict[str, Any], words: str) -> None:
    codes, scales, _ = coded(5000, 256)
    state = {"step": 3, "state1": codes, "state2": codes, "qmap1": TABLE, "qmap2": TABLE, "absmax1": scales}
    group = dict(lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, alpha=0.0, t_alpha=None, t_beta3=None)
    saved = {"state": {0: {**state, "absmax2": scales, **change}}, "param_groups": [{**group, "params": [0]}]}
    with pytest.raises(StateError, match=words):
        thalweg.torch.import_peer(thalweg.torch.AdamW([torch.nn.Parameter(torch.ones(5000))], LR), saved)


class Coded(torch.Tensor):
    """A tensor that decodes itself, as torchao's do."""

    codes = True

    def dequantize(self) -> Any:
        return 2 * self.as_subclass(torch.Tensor)


def test_moments_of_torchao_decode_themselves() -> None:
    p = torch.nn.Parameter(torch.ones(64, 64))
    moments = {"exp_avg": torch.ones(64, 64).as_subclass(Coded), "exp_avg_sq": torch.ones(64, 64).as_subclass(Coded)}
    group = dict(lr=torch.tensor(LR), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, amsgrad=False)
    saved = {"state": {0: {"step": torch.tensor(3.0), **moments}}, "param_groups": [{**group, "params": [0]}]}
    mine = thalweg.torch.AdamW([p], LR)
    with pytest.raises(StateError, match=r"pass source='torchao.Adam8bit' or source='torchao.AdamW8bit'"):
        thalweg.torch.import_peer(mine, saved)
    thalweg.torch.import_peer(mine, saved, source="torchao.AdamW8bit")
    assert (mine.state[p]["exp_avg"] == 2).all()
    assert type(mine.state[p]["exp_avg"]) is torch.Tensor
    assert mine.state[p]["step"] == 3
