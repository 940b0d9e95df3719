"""A model's shape without its weights: how many parameters it and its adapters have.

Layers are created on torch's meta device, so that a model of any size takes seconds and no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from kapelle.errors import ModelError
from kapelle.models.banked_linear import features_of
from kapelle.models.paths import check_model_path, loading
from kapelle.models.targets import adapted_layers, linear_layers, named
from kapelle.models.weights import ADAPTER, read_lora, shapes_of
from kapelle.settings.schema import EmbeddedConfig, ModelConfig
from kapelle.team import Lora, Team

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kapelle.models.language_model import LanguageModel


def outline(path: str, embedded: EmbeddedConfig) -> PreTrainedModel:
    """Return the model at a path with layers but no weights; ModelError when its settings cannot be read."""
    from kapelle.models.embedded import build_model, build_tokenizer

    with torch.device("meta"):
        if path == "embedded":
            return build_model(embedded, len(build_tokenizer(embedded.context)), 0, 0)
        check_model_path(path)
        from transformers import AutoConfig, AutoModelForCausalLM

        with loading(path, "read"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        return model


def outlines(
    team: Team, config: ModelConfig, given: Mapping[str, LanguageModel] | None = None
) -> dict[str, PreTrainedModel]:
    """Return the outline of every base of a team by base name; `given` are models in memory, by path."""
    memory = {path: found.model for path, found in (given or {}).items()}
    made = {path: memory.get(path) or outline(path, config.embedded) for path in set(team.bases.values())}
    return {base: made[path] for base, path in team.bases.items()}


def parameters(model: nn.Module) -> int:
    """Return the number of a model's parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def adapter_parameters(model: nn.Module, lora: Lora) -> int:
    """Return the number of an adapter's parameters; ModelError when a target names no linear layer."""
    layers = linear_layers(model)
    return sum(lora.rank * sum(features_of(layers[path])) for path in adapted_layers(model, lora.targets))


def check_adapters(team: Team, models: Mapping[str, PreTrainedModel]) -> None:
    """Raise ModelError when an adapter of the team, or one loaded from a folder, does not fit its base."""
    adapters = [(policy.base, policy.lora) for policy in team.every.values() if policy.lora is not None]
    adapters += [(critic.base, critic.lora) for critic in team.critics.values()]
    for base, lora in adapters:
        adapter_parameters(models[base], lora)
    for policy in team.every.values():
        if policy.past is not None:
            check_saved(f"Agent '{policy.name}'", Path(policy.past), policy.lora, models[policy.base])


def check_saved(who: str, folder: Path, lora: Lora | None, model: PreTrainedModel) -> None:
    """Raise ModelError unless a folder holds exactly the weights that `lora`, or all of `model`, has.

    `who` names the agent in errors. An adapter must also compute the same as before: same rank, alpha and layers.
    """
    if lora is not None:
        check_same(who, folder, named(model, read_lora(folder)), named(model, lora))
        expected, spare = _adapter_shapes(model, lora), set()
        found = shapes_of(folder, ADAPTER)
    else:
        expected = {_bare(name): tuple(tensor.shape) for name, tensor in model.named_parameters()}
        spare = {_bare(name) for name in model.state_dict()}  # tied weights have several names
        found = shapes_of(folder)
    expected = {name: shape for name, shape in expected.items() if ".adapters." not in name}
    wrong = {name for name, shape in expected.items() if found.get(name) != shape}
    odd = sorted(wrong | (found.keys() - expected.keys() - spare))
    if odd:
        here, there = expected.get(odd[0], "not there"), found.get(odd[0], "not there")
        raise ModelError(
            f"{who} cannot start from '{folder}': '{odd[0]}' is {there} in the folder and {here} in this team, missing "
            "or of another shape. Use the same model and `lora` as when it was trained."
        )


def _bare(name: str) -> str:
    """Return a parameter's name without the part that the adapter bank inserts."""
    return name.replace(".base.", ".")


def check_same(who: str, folder: Path, saved: Lora, wanted: Lora) -> None:
    """Raise ModelError when a folder's adapter (`saved`) computes something else than `wanted` would."""
    differences = [
        f"{key} {there} in the folder and {here} here"
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
            f"{who} cannot start from '{folder}', which would compute something else: {'; '.join(differences)}. Set "
            f"`team.lora: {{{settings}}}`, or the agent's own `lora`."
        )


def _adapter_shapes(model: nn.Module, lora: Lora) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    layers = linear_layers(model)
    for path in adapted_layers(model, lora.targets):
        features_in, features_out = features_of(layers[path])
        shapes[f"base_model.model.{path}.lora_A.weight"] = (lora.rank, features_in)
        shapes[f"base_model.model.{path}.lora_B.weight"] = (features_out, lora.rank)
    return shapes
