"""ResNet-50 (He et al. 2015, arXiv:1512.03385), with the names that torchvision gives its parameters."""

from __future__ import annotations

from thalweg.plan.families.configuration import Named, linear, norm

#: Bottleneck blocks in each of the four stages, and the width within them.
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
EXPANSION = 4


def resnet50() -> Named:
    yield "conv1.weight", (64, 3, 7, 7)
    yield from norm("bn1", 64)
    inputs = 64
    for stage, (blocks, width) in enumerate(STAGES, start=1):
        for block in range(blocks):
            yield from bottleneck(f"layer{stage}.{block}", inputs, width)
            inputs = EXPANSION * width
    yield from linear("fc", 1000, inputs, bias=True)


def bottleneck(name: str, inputs: int, width: int) -> Named:
    outputs = EXPANSION * width
    for place, (before, after, window) in enumerate(((inputs, width, 1), (width, width, 3), (width, outputs, 1)), 1):
        yield f"{name}.conv{place}.weight", (after, before, window, window)
        yield from norm(f"{name}.bn{place}", after)
    if inputs != outputs:
        yield f"{name}.downsample.0.weight", (outputs, inputs, 1, 1)
        yield from norm(f"{name}.downsample.1", outputs)
