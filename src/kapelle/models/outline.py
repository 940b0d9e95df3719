"""Compute the outline of a model without loading its weights: shapes of parameters and adapters, and the fit of saved weights.

The outline of common architectures (Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3) is computed from `config.json`. For
other architectures, transformers builds the layers on torch's meta device, so that a model of any size takes seconds
and no memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kapelle.errors import ModelError, noting
from kapelle.models.adapters import (
    ADAPTER,
    Layers,
    adapter_shapes,
    named,
    read_lora,
    shapes_of,
)
from kapelle.models.embedded import EYES, SPECIAL, build_model, settings_of
from kapelle.models.paths import check_model_path, loading
from kapelle.models.pretrained import load_pretrained, located, read_config
from kapelle.models.vision import auto_class
from kapelle.settings.checks import Check, RunToCheck
from kapelle.settings.environments import showing_images
from kapelle.settings.schema import EmbeddedConfig, ModelConfig
from kapelle.team import Lora, Team

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from kapelle.models.language_model import LanguageModel

Shape: TypeAlias = tuple[int, ...]

OUTPUT_HEAD = "lm_head"
BANK = ".base."
"""The string that the adapter bank inserts into the names of parameters."""

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)
"""Settings that `config.json` must contain, because the defaults for missing settings differ by architecture."""

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""Mapping from `model_type` to the name of a class of transformers."""

BODY_MODULES = (
    "",
    "model",
    "model.embed_tokens",
    "model.layers",
    "model.norm",
    "model.rotary_emb",
    OUTPUT_HEAD,
)
"""The paths of the modules outside the blocks."""
BLOCK_MODULES = ("self_attn", "mlp", "mlp.act_fn")
"""The paths of the modules of a block other than its linear layers and norms."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The shapes and modules of a model, without its weights."""

    weights: Mapping[str, Shape]
    """Mapping from the name of a parameter to its shape. Tied weights are listed once."""
    spare: frozenset[str]
    """Additional names that a saved model may contain, such as tied weights and buffers."""
    layers: Layers
    """The modules of the model by path."""
    hidden: int
    """The size of a hidden state."""

    @property
    def parameters(self) -> int:
        """The number of parameters. Tied parameters are counted once."""
        return sum(map(prod, self.weights.values()))


def read_outline(path: str, embedded: EmbeddedConfig) -> Outline:
    """Return the outline of the model at a path. Raises ModelError if the settings of the model cannot be read."""
    if path == "embedded" and embedded.sees:
        import torch

        with torch.device("meta"):
            return outline_of(build_model(embedded, len(SPECIAL) + 256 + len(EYES), 1, 0))
    if path == "embedded":
        found = outline_of_settings(settings_of(embedded))
        assert found is not None, "the embedded model's architecture is a known one"
        return found
    check_model_path(path)
    found = outline_of_settings(read_settings(path))
    if found is not None:
        return found
    import torch

    made = read_architecture(path, embedded)
    with torch.device("meta"), loading(path, "read"):
        return outline_of(auto_class(made).from_config(made, trust_remote_code=False))


def read_architecture(path: str, embedded: EmbeddedConfig) -> PretrainedConfig:
    """Return the settings of a model as `transformers` reads them. Raises ModelError if the settings cannot be read."""
    import torch

    if path == "embedded":
        with torch.device("meta"):
            made: PretrainedConfig = build_model(embedded, len(SPECIAL) + 256 + len(EYES), 1, 0).config
            return made
    path = located(path)
    with loading(path, "read"):
        read: PretrainedConfig = read_config(path)
        return read


def read_outlines(
    team: Team, config: ModelConfig, given: Mapping[str, LanguageModel] | None = None
) -> dict[str, Outline]:
    """Return the outline of every base model of a team by base name. The mapping `given` contains models in memory by path."""
    made: dict[str, Outline] = {}
    for path in set(team.bases.values()):
        if path in (given or {}):
            made[path] = outline_of((given or {})[path].model)
        else:
            made[path] = read_outline(path, config.embedded)
    return {base: made[path] for base, path in team.bases.items()}


def read_settings(path: str) -> Mapping[str, Any]:
    """Return the content of a model's `config.json`, or an empty mapping if there is no such file.

    Raises ModelError if the file cannot be read.
    """
    file = Path(located(path)).expanduser() / "config.json"
    if not file.is_file():
        return {}
    with loading(path, "read"):
        settings = json.loads(file.read_text("utf-8"))
        return settings if isinstance(settings, dict) else {}


def outline_of_settings(settings: Mapping[str, Any]) -> Outline | None:
    """Return the outline that a model's settings describe, or None for architectures that only transformers supports."""
    family = settings.get("model_type")
    if family not in FAMILIES or any(settings.get(key) is None for key in SIZES):
        return None
    if family not in ("llama", "mistral", "qwen2") and settings.get("head_dim") is None:
        return None
    hidden, vocabulary = settings["hidden_size"], settings["vocab_size"]
    weights: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    linear: dict[str, tuple[int, int]] = {}
    modules = set(BODY_MODULES)
    for k in range(settings["num_hidden_layers"]):
        block = f"model.layers.{k}"
        modules |= {block, *(f"{block}.{name}" for name in BLOCK_MODULES)}
        for name, (wide, out, bias) in _linear_layers(settings).items():
            linear[f"{block}.{name}"] = wide, out
            weights[f"{block}.{name}.weight"] = out, wide
            if bias:
                weights[f"{block}.{name}.bias"] = (out,)
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if family in ("gemma2", "gemma3_text"):
            norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
        if family in ("qwen3", "gemma3_text"):
            norms |= {"self_attn.q_norm": settings["head_dim"], "self_attn.k_norm": settings["head_dim"]}
        for name, width in norms.items():
            modules.add(f"{block}.{name}")
            weights[f"{block}.{name}.weight"] = (width,)
    weights["model.norm.weight"] = (hidden,)
    linear[OUTPUT_HEAD] = hidden, vocabulary
    if not settings["tie_word_embeddings"]:
        weights[f"{OUTPUT_HEAD}.weight"] = vocabulary, hidden
    layers = Layers(FAMILIES[family], frozenset({*modules, *linear}), linear, OUTPUT_HEAD)
    return Outline(weights, frozenset({*weights, f"{OUTPUT_HEAD}.weight"}), layers, hidden)


def _linear_layers(settings: Mapping[str, Any]) -> dict[str, tuple[int, int, bool]]:
    """Return the linear layers of a block as tuples of input features, output features, and whether the layer has a bias."""
    hidden, wide, family = settings["hidden_size"], settings["intermediate_size"], settings["model_type"]
    head = settings.get("head_dim") or hidden // settings["num_attention_heads"]
    queries, keys = head * settings["num_attention_heads"], head * settings["num_key_value_heads"]
    biased = family not in {"mistral", "qwen2"} and bool(settings.get("attention_bias", False))
    read = biased or family == "qwen2"
    up = family == "llama" and bool(settings.get("mlp_bias", False))
    return {
        "self_attn.q_proj": (hidden, queries, read),
        "self_attn.k_proj": (hidden, keys, read),
        "self_attn.v_proj": (hidden, keys, read),
        "self_attn.o_proj": (queries, hidden, biased),
        "mlp.gate_proj": (hidden, wide, up),
        "mlp.up_proj": (hidden, wide, up),
        "mlp.down_proj": (wide, hidden, up),
    }


def outline_of(model: PreTrainedModel) -> Outline:
    """Return the outline of a model in memory, without its adapters."""
    import torch

    from kapelle.models.lora_bank import layers_of

    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    return Outline(
        {
            name.replace(BANK, "."): tuple(tensor.shape)
            for name, tensor in model.named_parameters()
            if ".adapters." not in name
        },
        frozenset(name.replace(BANK, ".") for name in model.state_dict()),
        layers_of(model),
        int(embedding.shape[1]),
    )


def adapter_parameters(model: Outline, lora: Lora) -> int:
    """Return the number of parameters of an adapter. Raises ModelError if a target names no linear layer."""
    return sum(map(prod, adapter_shapes(model.layers, lora).values()))


def check_adapters(team: Team, models: Mapping[str, Outline]) -> None:
    """Raise ModelError if an adapter of the team or an adapter loaded from a folder does not fit its base model."""
    adapters = [(policy.base, policy.lora) for policy in team.every.values() if policy.lora is not None]
    adapters += [(critic.base, critic.lora) for critic in team.critics.values() if critic.lora is not None]
    for base, lora in adapters:
        adapter_parameters(models[base], lora)
    for policy in team.every.values():
        if policy.past is not None:
            check_saved(f"Agent '{policy.name}'", Path(policy.past), policy.lora, models[policy.base])


def check_saved(who: str, folder: Path, lora: Lora | None, model: Outline) -> None:
    """Raise ModelError unless a folder contains exactly the weights of `lora` or, without `lora`, the weights of `model`.

    The argument `who` names the agent in error messages. A saved adapter must also have the same rank, alpha and
    layers.
    """
    if lora is not None:
        check_same(who, folder, model.layers, read_lora(folder), lora)
        expected, spare = dict[str, Shape](adapter_shapes(model.layers, lora)), frozenset[str]()
        found = shapes_of(folder, ADAPTER)
    else:
        expected, spare = dict(model.weights), model.spare
        found = shapes_of(folder)
        if found.keys() - expected.keys() - spare:
            found = converted_shapes(folder) or found
    wrong = {name for name, shape in expected.items() if found.get(name) != shape}
    odd = sorted(wrong | (found.keys() - expected.keys() - spare))
    if odd:
        here, there = expected.get(odd[0], "missing"), found.get(odd[0], "missing")
        raise ModelError(
            f"{who} cannot start from '{folder}': '{odd[0]}' is {there} in the folder and {here} in this team. Use the "
            "model and the `lora` with which it was trained."
        )


def converted_shapes(folder: Path) -> dict[str, Shape] | None:
    """Return the shapes of a saved model by the names that `transformers` gives its weights, or None if a weight is missing.

    `transformers` saves the experts of a mixture one by one, but keeps them in memory as one tensor.
    """
    if find_spec("accelerate") is None:  # it reads only the headers of files
        return None
    try:
        model = load_pretrained(auto_class(read_config(str(folder))), str(folder), device_map="meta")
    except Exception:  # noqa: BLE001 - damaged files raise anything; the caller reports what is wrong
        return None
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def check_same(who: str, folder: Path, layers: Layers, saved: Lora, wanted: Lora) -> None:
    """Raise ModelError unless the adapter in a folder (`saved`) has the rank, alpha and layers of `wanted`."""
    wanted = named(layers, wanted)
    with suppress(ModelError):  # names that fit no layer are compared as they are
        saved = named(layers, saved)
    differences = [
        f"{key} is {there} in the folder, but {here} in this team"
        for key, there, here in (
            ("rank", saved.rank, wanted.rank),
            ("alpha", saved.alpha, wanted.alpha),
            ("targets", sorted(saved.targets), sorted(wanted.targets)),
        )
        if there != here
    ]
    if differences:
        settings = f"rank: {saved.rank}, alpha: {saved.alpha}, targets: [{', '.join(saved.targets)}]"
        raise ModelError(
            f"{who} cannot start from '{folder}': {'; '.join(differences)}. Set `team.lora: {{{settings}}}`, or the agent's "
            "own `lora`."
        )


# -------- Checks of a run's models


def check_paths(run: RunToCheck) -> None:
    """Raise ModelError if a base model is neither the folder of a model nor the name of a model on a hub."""
    for path in run.team.bases.values():
        if path not in run.given:
            with noting(run.absent):
                check_model_path(path)


def check_images(run: RunToCheck) -> Iterator[str]:
    """Yield an error message for each model that does not support the images of an environment.

    Models that have not been downloaded yet are skipped.
    """
    shown = showing_images(run.config)
    for base, path in run.team.bases.items() if shown else ():
        if path in run.given:
            continue
        settings = read_settings(path) if path != "embedded" else {}
        sees = run.config.model.embedded.sees if path == "embedded" else "vision_config" in settings
        if not sees and (settings or path == "embedded"):
            yield (
                f"Environment '{shown[0][2]}' shows images, but the model '{path}' ({base}) reads only text. Use a "
                "vision-language model, or set `model.embedded.sees: true`."
            )


CHECKS: tuple[Check, ...] = (check_images, check_paths)
