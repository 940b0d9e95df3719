"""Split the matrix products of blocks over several processes (arXiv:1909.08053) with torch's `parallelize_module`.

For many architectures, `transformers` defines which linear layers are split by their outputs (`colwise`), which are
split by their inputs (`rowwise`), and which norms every process applies only to its own heads. Other architectures
raise ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from kapelle.errors import ConfigError
from kapelle.models.adapters import Layers
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import layers_of

STYLES: Mapping[str, Any] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
OF_OWN_HEADS = "replicated_with_grad_allreduce"
"""The style of weights that every process holds in full and applies only to its own heads. The gradients of these
weights are summed over the processes."""


def check_split(name: str, config: Any, layers: Layers, split: int, parts: int = 1) -> None:
    """Raise ConfigError if a model cannot be split over `split` processes and then sharded in `parts` parts.

    The check needs no weights. The argument `config` contains the model's `transformers` settings.
    """
    styles = _styles(config, _below_the_decoder(layers.modules))
    where = f"`train_engine.tensor_parallel: {split}` cannot split '{name}'"
    if not styles or not {*styles.values()} <= {*STYLES, OF_OWN_HEADS}:
        raise ConfigError(
            f"{where}: `transformers` has no plan for models of type {config.model_type} that consists of split linear layers. Set "
            "`train_engine.tensor_parallel: 1`."
        )
    settings = config.get_text_config()
    heads = {
        key: int(count)
        for key in ("num_attention_heads", "num_key_value_heads")
        if (count := getattr(settings, key, None)) is not None
    }
    for key, count in heads.items():
        if count % split:
            raise ConfigError(
                f"{where}: its {count} heads (`{key}`) are not divisible by {split}. Set a number that divides them."
            )
    features = _below_the_decoder(layers.linear)
    for path, style in styles.items():
        if style not in STYLES or path not in features:
            continue
        features_in, features_out = layers.linear[features[path]]
        own, rest = (features_out, features_in) if style == "colwise" else (features_in, features_out)
        if own % split or (style == "colwise" and rest % parts):
            raise ConfigError(
                f"{where}: layer '{path}' has {features_in} features in and {features_out} out, which {split} × {parts} "
                "processes do not divide. Use a different number of processes."
            )


def split_layers(model: LanguageModel, mesh: DeviceMesh, parts: int) -> None:
    """Split the blocks of a model over the processes of a mesh, before the weights are sharded in `parts` parts.

    After the split, the model uses the forward passes of `transformers`. Raises ConfigError, before anything is split,
    if the model cannot be split.
    """
    check_split(model.name, model.model.config, layers_of(model.model), mesh.size(), parts)
    styles = _styles(model.model.config, dict(model.body.named_modules()))
    model.flat = None  # the flat pass reads weights directly, but modules are split
    parallelize_module(
        model.body, mesh, {path: STYLES[style]() for path, style in styles.items() if style in STYLES}
    )


def weights_of_own_heads(model: LanguageModel) -> list[nn.Parameter]:
    """Return the weights whose gradients must be summed over the processes that split a model."""
    styles = _styles(model.model.config, dict(model.body.named_modules()))
    paths = [path for path, style in styles.items() if style == OF_OWN_HEADS]
    return [parameter for path in paths for parameter in model.body.get_submodule(path).parameters()]


def beside_split(parameter: Tensor) -> Shard | None:
    """Return the dimension along which to shard a weight: the second dimension for a matrix that is split by its outputs, else None."""
    by_outputs = isinstance(parameter, DTensor) and parameter.ndim > 1 and parameter.placements == (Shard(0),)
    return Shard(1) if by_outputs else None


def _below_the_decoder(paths: Iterable[str]) -> dict[str, str]:
    """Return a mapping from module paths relative to the decoder to full module paths."""
    return {path.partition(".")[2]: path for path in paths}


def _styles(config: Any, paths: Iterable[str]) -> dict[str, str]:
    """Return the style in which `transformers` splits each module below the decoder, by path."""
    patterns: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    found: dict[str, str] = {}
    for path in paths:
        pattern = ".".join("*" if word.isdigit() else word for word in path.split("."))
        if pattern in patterns:
            found[path] = patterns[pattern]
    return found
