"""From the word MODEL to a torch module without memory. Nothing is downloaded, and no code of a checkpoint is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from thalweg.arrays import Shape
from thalweg.errors import CommandError
from thalweg.show.arguments import check_file, suggest
from thalweg.show.extras import extra
from thalweg.show.modules import describe_error, import_attribute

if TYPE_CHECKING:
    from torch import Tensor, nn

Named: TypeAlias = Iterator[tuple[str, Shape]]


def with_bias(name: str, *shape: int) -> Named:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[-1:]


def gpt2(hidden: int, vocabulary: int, positions: int) -> Named:
    """Its projections are stored the other way around: inputs x outputs."""
    yield "transformer.wte.weight", (vocabulary, hidden)
    yield "transformer.wpe.weight", (positions, hidden)
    for layer in range(12):
        inside = f"transformer.h.{layer}"
        yield from with_bias(f"{inside}.ln_1", hidden)
        yield from with_bias(f"{inside}.attn.c_attn", hidden, 3 * hidden)
        yield from with_bias(f"{inside}.attn.c_proj", hidden, hidden)
        yield from with_bias(f"{inside}.ln_2", hidden)
        yield from with_bias(f"{inside}.mlp.c_fc", hidden, 4 * hidden)
        yield from with_bias(f"{inside}.mlp.c_proj", 4 * hidden, hidden)
    yield from with_bias("transformer.ln_f", hidden)


def llama(hidden: int, inner: int, layers: int, keys: int, *, has_head: bool) -> Named:
    vocabulary = 128256
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(layers):
        inside = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            yield f"{inside}.self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{inside}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{inside}.mlp.up_proj.weight", (inner, hidden)
        yield f"{inside}.mlp.down_proj.weight", (hidden, inner)
        yield f"{inside}.input_layernorm.weight", (hidden,)
        yield f"{inside}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if has_head:
        yield "lm_head.weight", (vocabulary, hidden)


def resnet50() -> Named:
    """Blocks of three convolutions, each with a norm."""
    yield "conv1.weight", (64, 3, 7, 7)
    yield from with_bias("bn1", 64)
    before = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            inside, after = f"layer{stage}.{block}", 4 * width
            for place, shape in enumerate(((width, before, 1, 1), (width, width, 3, 3), (after, width, 1, 1)), 1):
                yield f"{inside}.conv{place}.weight", shape
                yield from with_bias(f"{inside}.bn{place}", shape[0])
            if before != after:
                yield f"{inside}.downsample.0.weight", (after, before, 1, 1)
                yield from with_bias(f"{inside}.downsample.1", after)
            before = after
    yield "fc.weight", (1000, before)
    yield "fc.bias", (1000,)


#: The shape of each parameter, in the order of the model.
BUILT_IN: Mapping[str, Callable[[], Named]] = {
    "gpt2": lambda: gpt2(768, vocabulary=50257, positions=1024),
    "resnet50": resnet50,
    "llama-1b": lambda: llama(2048, 8192, layers=16, keys=512, has_head=False),
    "llama-8b": lambda: llama(4096, 14336, layers=32, keys=1024, has_head=True),
    "small": lambda: gpt2(64, vocabulary=4096, positions=512),
}


# ---- modules


def load_model(text: str) -> nn.Module:
    """The model of this name, configuration, function or file."""
    import torch

    path = Path(text)
    if text in BUILT_IN:
        return hold({name: torch.empty(shape, device="meta") for name, shape in BUILT_IN[text]()})
    if ":" in text:
        factory, _ = import_attribute(text, "factory function", "mymodel:build", callable)
        return build(text, factory)
    if path.suffix == ".safetensors":
        return load_safetensors([path])
    if files := sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors")):
        return load_safetensors(files)
    if path.is_dir() and not (path / "config.json").is_file():
        raise CommandError(f"{path} has neither .safetensors files nor a config.json")
    if path.is_dir() or path.suffix == ".json":
        return build(text, partial(build_configured, path / "config.json" if path.is_dir() else path))
    raise CommandError(
        f"there is no model {text!r}, and plan downloads none: {suggest(text, BUILT_IN)}. MODEL may also be "
        "module:factory, a folder of .safetensors files, or a config.json of transformers"
    )


def build(text: str, factory: Callable[[], Any]) -> nn.Module:
    """The module that a function returns, called where tensors take no memory."""
    import torch

    try:
        with torch.device("meta"):
            module = factory()
    except CommandError:
        raise
    except Exception as error:
        raise CommandError(f"{text} could not be built: {describe_error(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise CommandError(f"{text} returned a {type(module).__name__}: it must return a torch.nn.Module")
    return module


def build_configured(file: Path) -> Any:
    """The model of a configuration, of the class that it names, or else the one without a head."""
    check_file(file)
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(str(file), trust_remote_code=False)
    config.use_pretrained_backbone = False  # it would be downloaded
    named: Any = getattr(transformers, (config.architectures or [""])[0], None)
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    module = named(config) if is_model else transformers.AutoModel.from_config(config)
    return module.to(getattr(config, "dtype", None) or torch.float32)


def load_safetensors(files: Iterable[Path]) -> nn.Module:
    """All floating-point tensors of files as parameters. They are mapped to memory, and none of them is read."""
    with extra("cli"):
        import safetensors

    tensors: dict[str, Tensor] = {}
    for file in files:
        check_file(file)
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                mapped = {key: opened.get_tensor(key).to("meta") for key in opened.offset_keys()}
        except (safetensors.SafetensorError, OSError, RuntimeError) as error:
            raise CommandError(f"{file} is damaged, or not a safetensors file: {error}") from None
        tensors |= {key: tensor for key, tensor in mapped.items() if tensor.is_floating_point()}
    return hold(tensors)


def hold(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A plain module that holds parameters by their names, dots included."""
    from torch import nn

    module = nn.Module()
    module._parameters.update({name: nn.Parameter(tensor) for name, tensor in tensors.items()})
    return module


def hidden_by_name(module: nn.Module) -> list[str]:
    """The names of hidden matrices by their names alone: convolutions, and matrices in numbered blocks."""
    shapes = [(name.split("."), p.ndim) for name, p in module.named_parameters(recurse=False)]
    return [".".join(parts) for parts, axes in shapes if axes > 2 or (axes == 2 and any(map(str.isdecimal, parts)))]
