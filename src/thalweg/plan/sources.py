"""What the word MODEL may mean: a built-in name, files, a configuration, a list of shapes, or a factory.

Files are read by their own libraries: safetensors reads headers and no tensor, transformers builds a configuration's
model without memory. Of transformers its own code alone is run, and nothing is fetched: what a configuration says of
code, kernels and weights from elsewhere is left out before transformers sees it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from thalweg.dtypes import DTYPES, spelt_dtype
from thalweg.errors import CommandError
from thalweg.plan.models import BUILTIN, Model, Tensor, builtin, spell_builtin
from thalweg.show.arguments import check_file, list_dtypes, parse_dtype, suggest
from thalweg.show.modules import describe_error, import_attribute
from thalweg.show.units import count_words

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
#: A model's name on a hub: its owner's name and its own.
ON_A_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def resolve(model: str | Model, dtype: str | None = None, frozen: Sequence[str] = ()) -> Model:
    """The model that is meant. ``dtype``: that of its parameters, whatever the source says.

    frozen: patterns of the names of parameters that are not trained, such as ``*.embed*``; all others have a dtype that
    can be trained in.

    >>> resolve("llama-1b").parameters
    1235814400
    """
    model = (read_model(model) if isinstance(model, str) else model).freeze(frozen)
    if dtype is not None:
        return model.stored_as(parse_dtype(dtype))
    for tensor in model.tensors:
        if tensor.dtype not in DTYPES:
            raise CommandError(
                f"{model.name}: the tensor {tensor.name!r} has dtype {tensor.dtype}, which cannot be trained: set "
                "another with --dtype, or mark the tensor as not trained with --frozen"
            )
    return model


def read_model(text: str) -> Model:
    if spell_builtin(text) in BUILTIN:
        return builtin(text)
    path = Path(text)
    if path.is_dir():
        return in_folder(path)
    if path.is_file():
        return in_file(path)
    if ":" in text and not text.endswith((".safetensors", ".json")):
        return build_model(text)
    if is_on_a_hub(text):
        raise CommandError(explain_hubs(text))
    if path.suffix or len(path.parts) > 1:
        raise CommandError(f"there is no file or folder {text}")
    hint = suggest(text, BUILTIN)
    raise CommandError(
        f"there is no model {text!r}: {hint}{'' if hint.endswith('?') else '.'} MODEL may also be a .safetensors file, "
        "a folder of them, a config.json, a JSON of shapes, or module:factory"
    )


def is_on_a_hub(text: str) -> bool:
    """Whether it looks like a model's name on a hub, and not like a path that is misspelt."""
    path = Path(text)
    known = (*PICKLES, ".safetensors", ".json")
    return ON_A_HUB.fullmatch(text) is not None and path.suffix not in known and not path.parent.is_dir()


def explain_hubs(text: str) -> str:
    """What to give instead of a name on a hub, as commands to type."""
    name = text.partition("/")[2]
    ways = f"`hf download {text} config.json --local-dir {name}`, then `thalweg plan {name}`"
    if spell_builtin(name) in BUILTIN:
        ways = f"it is built in, `thalweg plan {spell_builtin(name)}`; or {ways}"
    return (
        f"there is no file or folder {text}, and plan downloads nothing. If it is a model on a hub: {ways}. Other "
        "models: `thalweg plan config.json`, `thalweg plan model.safetensors`, `thalweg plan "
        "model.safetensors.index.json`, `thalweg plan mymodel:build` (a function that returns it), or one of "
        f"{', '.join(BUILTIN)}"
    )


def in_folder(folder: Path) -> Model:
    """The safetensors files that its index names, or all there are; or else its configuration."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if files := list(files_in_index(indexes[0])) if indexes else sorted(folder.glob("*.safetensors")):
        return read_safetensors(files, str(folder))
    if (folder / "config.json").is_file():
        return in_file(folder / "config.json")
    raise CommandError(f"there are no .safetensors files and no config.json in {folder}")


def in_file(path: Path) -> Model:
    if path.suffix == ".safetensors":
        return read_safetensors([path], str(path))
    if path.suffix in PICKLES:
        raise CommandError(f"{path} may be a pickle, which plan does not open: save the model as safetensors")
    if path.suffix != ".json":
        raise CommandError(f"{path} must be a .safetensors or a .json file")
    if path.name.endswith(".safetensors.index.json"):
        return read_safetensors(list(files_in_index(path)), str(path.parent))
    content = read_json(path)
    if isinstance(content, dict) and ("model_type" in content or "architectures" in content):
        return from_configuration(str(path), content)
    return from_shapes(path, content)


def read_json(path: Path) -> Any:
    check_file(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path} is not valid JSON: {error}") from None


# ---- a JSON of shapes

#: Shapes as a file has them, at most.
MOST_AXES, MOST_ELEMENTS = 64, 2**63


def from_shapes(path: Path, content: Any) -> Model:
    """A JSON of shapes: a list of them, or by name, each a list or a mapping with a shape and a dtype."""
    if isinstance(content, list):
        content = {f"tensor.{index}": shape for index, shape in enumerate(content)}
    if not isinstance(content, dict) or not content:
        raise CommandError(f'{path} must hold shapes, such as {{"weight": [768, 768]}} or [[768, 768], [768]]')
    tensors = tuple(from_entry(path, name, entry) for name, entry in content.items())
    return Model(str(path), "shapes", tensors)


def from_entry(path: Path, name: str, entry: Any) -> Tensor:
    shape, dtype = entry, "float32"
    if isinstance(entry, dict):
        shape, dtype = entry.get("shape"), spelt_dtype(str(entry.get("dtype", "float32")))
    if not is_shape(shape):
        raise CommandError(f"{path}: {name!r} must have a shape, a list of whole numbers >= 0, got {shape!r:.60}")
    if dtype not in DTYPES:
        raise CommandError(f"{path}: {name!r} has dtype {dtype!r}: {list_dtypes()}")
    return Tensor(name, tuple(shape), dtype)


def is_shape(shape: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of sizes that a tensor can have."""
    if not isinstance(shape, list) or len(shape) > MOST_AXES:
        return False
    are_sizes = all(type(n) is int and 0 <= n < MOST_ELEMENTS for n in shape)  # True is no size
    return are_sizes and math.prod(shape) < MOST_ELEMENTS


# ---- safetensors

#: Whole numbers and truth values: nothing that is trained.
COUNTS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")
#: Floating point that models carry along and do not train.
BUFFERS = re.compile(r"(^|\.)(running_mean|running_var|inv_freq|masked_bias|position_ids)$|(^|\.)h\.\d+\.attn\.bias$")


def files_in_index(index: Path) -> Iterator[Path]:
    """The files that an index names, which lie beside it."""
    try:
        names = sorted({str(name) for name in read_json(index)["weight_map"].values()})
    except (KeyError, AttributeError, TypeError):
        raise CommandError(f"{index} is not an index of safetensors files: it has no weight_map") from None
    for name in names:
        file = index.parent / Path(name).name
        if not os.path.isfile(file):  # pathlib raises where a name is too long
            raise CommandError(f"{index} names a file that is not there: {file}")
        yield file


def read_safetensors(files: list[Path], name: str) -> Model:
    """One model from all of its files. Dtypes that cannot be trained keep the format's names."""
    found: dict[str, Tensor] = {}
    left_out = 0
    for file in files:
        for key, shape, kind in header_of(file):
            if key in found:
                raise CommandError(f"{file}: the tensor {key!r} is in another file of this model as well")
            if kind in COUNTS or is_buffer(key, shape):
                left_out += 1
                continue
            found[key] = Tensor(key, shape, spelt_dtype(kind))
    if not found:
        raise CommandError(f"{name}: it has no floating-point tensor")
    about = count_words(len(files), "safetensors file")
    if left_out:
        about += f", {count_words(left_out, 'tensor that is', 'tensors that are')} no parameter left out"
    return Model(name, about, tuple(found.values()))


def header_of(file: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of each tensor of a file, in their order; safetensors checks the header."""
    check_file(file)
    with open(file, "rb") as stream:
        start = stream.read(8)
    if start[:1] == b"\x80" or start[:2] == b"PK":
        raise CommandError(f"{file} is a pickle, which plan does not open: save the model as safetensors")
    try:
        safetensors = importlib.import_module("safetensors")
    except ImportError:
        raise CommandError(f"{file}: install safetensors to plan it: pip install safetensors") from None
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            slices = {key: opened.get_slice(key) for key in opened.offset_keys()}
            entries = [(key, own.get_shape(), own.get_dtype()) for key, own in slices.items()]
    except (safetensors.SafetensorError, OSError) as error:
        raise CommandError(f"{file} is damaged, or not a safetensors file: {error}") from None
    for key, shape, kind in entries:
        if not is_shape(shape):
            raise CommandError(f"{file} is damaged: the tensor {key!r} has shape {shape!r:.60}, which no tensor has")
        yield key, tuple(shape), kind


def is_buffer(key: str, shape: tuple[int, ...]) -> bool:
    """Whether it is one of the well-known tensors that models store and do not train."""
    return BUFFERS.search(key) is not None and (not key.endswith(".attn.bias") or len(shape) == 4)


# ---- configurations of Hugging Face

#: Entries that count modules, by their names; how many there may be, and how large any other number may be.
COUNTED = re.compile(r"layer|depth|block|stage|repeat|expert")
MOST_LAYERS, MOST_WIDE = 10_000, 2**31
#: Entries that change no shape, and for which transformers may load code, kernels or packages from elsewhere.
LEFT_OUT = (
    *("auto_map", "quantization_config", "attn_implementation", "_attn_implementation"),
    *("_attn_implementation_internal", "experts_implementation", "_experts_implementation"),
    "_experts_implementation_internal",
)
#: Entries that would fetch the weights of a part.
PRETRAINED = "use_pretrained_backbone"


def from_configuration(name: str, content: Mapping[str, Any]) -> Model:
    """The model of a configuration, in the dtype that it says, as transformers builds it without memory."""
    kind = content.get("model_type")
    if kind is None:
        raise CommandError(f"{name}: this configuration has no model_type: it is not the config.json of a model")
    if not isinstance(kind, str):
        raise CommandError(f"{name}: the configuration's model_type must be a name such as 'llama', got {kind!r:.60}")
    check_sizes(name, content)
    dtype = dtype_in(content)
    served = dtype in DTYPES
    module, version = build_module(name, kind, content, dtype if served else None)
    model = of_torch(module, name, f"{type(module).__name__}, shapes from {version}")
    # the check of dtypes reports one that is not supported
    return model if served or dtype is None else model.stored_as(dtype)


def build_module(name: str, kind: str, content: Mapping[str, Any], dtype: str | None) -> tuple[Any, str]:
    """A module without memory, and who built it. kind: the configuration's model type."""
    instead = "give its .safetensors, or module:factory"
    try:
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise CommandError(
            f"{name}: install {error.name} to plan {kind}: pip install torch transformers; or {instead}, or one of "
            f"{', '.join(BUILTIN)}"
        ) from None
    version = f"transformers {transformers.__version__}"
    if kind not in transformers.CONFIG_MAPPING:
        raise CommandError(f"{name}: {version} does not know the model type {kind!r}; {instead}")
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(without_elsewhere(content))
        with torch.device("meta"):
            module = from_config(transformers, config, content, None if dtype is None else getattr(torch, dtype))
    except Exception as error:
        raise CommandError(f"{name}: {version} could not build it: {describe_error(error)}; {instead}") from error
    return module, version


def check_sizes(name: str, content: Any, key: str = "") -> None:
    """Refuse numbers that no model has, before transformers makes so many layers."""
    if isinstance(content, Mapping):
        for inner, value in content.items():
            check_sizes(name, value, str(inner))
    elif isinstance(content, list):
        for value in content:
            check_sizes(name, value, key)
    elif isinstance(content, int) and abs(content) > (most := MOST_LAYERS if COUNTED.search(key) else MOST_WIDE):
        raise CommandError(f"{name}: the configuration's {key} is {content!r:.30}, and may be {most:,} at most")


def dtype_in(content: Mapping[str, Any]) -> Any:
    """What the configuration says of dtypes, or else that of its language model; None if neither does."""
    inner = content.get("text_config")
    for own in (content, inner if isinstance(inner, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            if own.get(key) is not None:
                return spelt_dtype(str(own[key]))
    return None


def from_config(transformers: Any, config: Any, content: Mapping[str, Any], dtype: Any) -> Any:
    """A module of the class that the configuration names, or else one that predicts words, or one without a head."""
    asked = content.get("architectures")
    for architecture in asked if isinstance(asked, list) else ():
        found: Any = getattr(transformers, architecture, None) if isinstance(architecture, str) else None
        is_model = inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)
        if not is_model:
            continue
        own = config if isinstance(config, found.config_class) else config.get_text_config()
        if isinstance(own, found.config_class):
            return found._from_config(own, dtype=dtype, attn_implementation="eager")
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    return auto.from_config(config, dtype=dtype, attn_implementation="eager", trust_remote_code=False)


def without_elsewhere(content: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, and those within it, without what may lead out of this machine."""
    return {
        key: False if key == PRETRAINED else without_elsewhere(value) if isinstance(value, Mapping) else value
        for key, value in content.items()
        if key not in LEFT_OUT
    }


# ---- factories: models built without memory, on torch's meta device or as JAX's shapes


def build_model(text: str) -> Model:
    """The parameters of what a factory returns; ``module:factory`` names it."""
    factory, _ = import_attribute(text, "factory function", "mymodel:build", callable)
    if not callable(factory):
        raise CommandError(f"{text} cannot be called: it is a {type(factory).__name__}; name a class or a function")
    try:
        model = call_without_memory(factory)
    except CommandError:
        raise
    except Exception as error:
        raise CommandError(f"{text} could not be built: {describe_error(error)}") from error
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return of_torch(model, text, f"{type(model).__name__} of torch")
    if leaves := tuple(of_jax(model)) if "jax" in sys.modules else ():
        return Model(text, f"{type(model).__name__} of JAX", leaves)
    raise CommandError(
        f"{text} returned a {type(model).__name__}: it must return a torch.nn.Module, an nnx.Module or a tree of JAX "
        "arrays"
    )


def call_without_memory(factory: Callable[..., Any]) -> Any:
    """What a factory returns, with nothing allocated for it, in the framework that its module has loaded or in both."""
    has_torch, has_jax = ("torch" in sys.modules or importlib.util.find_spec("torch") is not None), "jax" in sys.modules
    if not has_torch and not has_jax and importlib.util.find_spec("jax") is None:
        raise CommandError('a factory needs torch or JAX: pip install "thalweg[torch]" or "thalweg[jax]"')
    with contextlib.ExitStack() as around:
        if "torch" in sys.modules or (has_torch and not has_jax):
            import torch

            around.enter_context(torch.device("meta"))
        return factory() if has_torch and not has_jax else trace_shapes(factory)


def trace_shapes(factory: Callable[..., Any]) -> Any:
    """By flax where it is, else by jax; what is no model of JAX, a torch module for one, is let through as it is."""
    other: list[Any] = []

    def build() -> Any:
        result = factory(**random_arguments(factory))
        if is_tree_of_arrays(result):
            return result
        other.append(result)
        return ()

    if importlib.util.find_spec("flax") is not None:
        from flax import nnx

        shapes = nnx.eval_shape(build)
    else:
        import jax

        shapes = jax.eval_shape(build)
    return other[0] if other else shapes


def random_arguments(factory: Callable[..., Any]) -> dict[str, Any]:
    """What a factory asks for to draw its first numbers from."""
    import jax

    # flax's classes have a signature of their own
    called: Any = factory.__init__ if inspect.isclass(factory) else factory
    needed = [name for name, p in inspect.signature(called).parameters.items() if p.default is p.empty]
    given: dict[str, Any] = {name: jax.random.key(0) for name in ("key", "rng") if name in needed}
    if "rngs" in needed:
        from flax import nnx

        given["rngs"] = nnx.Rngs(0)
    return given


def is_tree_of_arrays(result: Any) -> bool:
    import jax

    leaves = jax.tree.leaves(result)
    return is_flax_module(result) or all(hasattr(leaf, "dtype") or isinstance(leaf, (int, float)) for leaf in leaves)


def is_flax_module(model: Any) -> bool:
    flax = sys.modules.get("flax.nnx")
    return flax is not None and isinstance(model, flax.Module)


def of_torch(model: Any, name: str, about: str) -> Model:
    """The parameters of an ``nn.Module``; those that require no gradient are frozen. What is tied counts once."""
    trained: list[Tensor] = []
    frozen: list[Tensor] = []
    for path, p in model.named_parameters():
        tensor = Tensor(path, tuple(p.shape), str(p.dtype).removeprefix("torch."))
        (trained if p.requires_grad else frozen).append(tensor)
    if not trained:
        raise CommandError(f"{name} has no floating-point parameters" + (" that require a gradient" * bool(frozen)))
    return Model(name, about, tuple(trained), frozen=tuple(frozen), module=model)


def of_jax(model: Any) -> Iterator[Tensor]:
    """Leaves of floating point: of an nnx.Module those that are parameters, of any other tree all."""
    import jax

    if is_flax_module(model):
        from flax import nnx

        model = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    for path, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
        if isinstance(leaf, jax.ShapeDtypeStruct) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            name = jax.tree_util.keystr(path, simple=True, separator=".") or "params"
            yield Tensor(name, tuple(leaf.shape), leaf.dtype.name)
