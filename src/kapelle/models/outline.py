"""A model's shape without its weights: how many parameters it and its adapters have, and which saved weights fit it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias

from kapelle.errors import ModelError
from kapelle.models.saved_shapes import ADAPTER, read_lora, shapes_of
from kapelle.models.targets import Layers, adapted_layers, linear_layers, named
from kapelle.team import Lora, Team

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outline:
    """A model without its weights."""

    weights: Mapping[str, Shape]
    """Parameter → shape; one that has several names (tied weights) stands here once."""
    spare: frozenset[str]
    """Names under which a saved model may hold more than `weights`: other names of the same, and buffers."""
    layers: Layers
    """Its modules by path."""
    hidden: int
    """Width of a hidden state."""

    @property
    def parameters(self) -> int:
        """The number of parameters, tied ones once."""
        return sum(map(prod, self.weights.values()))


def adapter_parameters(model: Outline, lora: Lora) -> int:
    """Return the number of an adapter's parameters; ModelError when a target names no linear layer."""
    features = linear_layers(model.layers)
    return sum(lora.rank * sum(features[path]) for path in adapted_layers(model.layers, lora.targets))


def check_adapters(team: Team, models: Mapping[str, Outline]) -> None:
    """Raise ModelError when an adapter of the team, or one loaded from a folder, does not fit its base."""
    adapters = [(policy.base, policy.lora) for policy in team.every.values() if policy.lora is not None]
    adapters += [(critic.base, critic.lora) for critic in team.critics.values()]
    for base, lora in adapters:
        adapter_parameters(models[base], lora)
    for policy in team.every.values():
        if policy.past is not None:
            check_saved(f"Agent '{policy.name}'", Path(policy.past), policy.lora, models[policy.base])


def check_saved(who: str, folder: Path, lora: Lora | None, model: Outline) -> None:
    """Raise ModelError unless a folder holds exactly the weights that `lora`, or all of `model`, has.

    `who` names the agent in errors. An adapter must also compute the same as before: same rank, alpha and layers.
    """
    if lora is not None:
        check_same(who, folder, model.layers, read_lora(folder), lora)
        expected, spare = _adapter_shapes(model, lora), frozenset[str]()
        found = shapes_of(folder, ADAPTER)
    else:
        expected, spare = model.weights, model.spare
        found = shapes_of(folder)
    wrong = {name for name, shape in expected.items() if found.get(name) != shape}
    odd = sorted(wrong | (found.keys() - expected.keys() - spare))
    if odd:
        here, there = expected.get(odd[0], "not there"), found.get(odd[0], "not there")
        raise ModelError(
            f"{who} cannot start from '{folder}': '{odd[0]}' is {there} in the folder and {here} in this team, missing "
            "or of another shape. Use the same model and `lora` as when it was trained."
        )


def check_same(who: str, folder: Path, layers: Layers, saved: Lora, wanted: Lora) -> None:
    """Raise ModelError when a folder's adapter (`saved`) computes something else on a model than `wanted` would."""
    wanted = named(layers, wanted)
    with suppress(ModelError):  # its names stay as they are where they fit no layer, and differ
        saved = named(layers, saved)
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


def _adapter_shapes(model: Outline, lora: Lora) -> Mapping[str, Shape]:
    shapes: dict[str, Shape] = {}
    features = linear_layers(model.layers)
    for path in adapted_layers(model.layers, lora.targets):
        features_in, features_out = features[path]
        shapes[f"base_model.model.{path}.lora_A.weight"] = (lora.rank, features_in)
        shapes[f"base_model.model.{path}.lora_B.weight"] = (features_out, lora.rank)
    return shapes
