"""Outlines of the models that paths name, without a weight being read.

Common architectures are known by the settings in their `config.json`; the layers of others are made by transformers on
torch's meta device, so that a model of any size takes seconds and no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kapelle.models.architectures import known, read_settings
from kapelle.models.embedded import settings_of
from kapelle.models.outline import Outline
from kapelle.models.paths import check_model_path
from kapelle.settings.schema import EmbeddedConfig, ModelConfig
from kapelle.team import Team

if TYPE_CHECKING:
    from kapelle.models.language_model import LanguageModel


def outline(path: str, embedded: EmbeddedConfig) -> Outline:
    """Return the shape of the model at a path; ModelError when its settings cannot be read."""
    if path == "embedded":
        found = known(settings_of(embedded))
        assert found is not None, "the embedded model's architecture is a known one"
        return found
    check_model_path(path)
    found = known(read_settings(path))
    if found is None:
        from kapelle.models.module_outline import made_by_transformers

        found = made_by_transformers(path)
    return found


def outlines(
    team: Team, config: ModelConfig, given: Mapping[str, LanguageModel] | None = None
) -> dict[str, Outline]:
    """Return the outline of every base of a team by base name; `given` are models in memory, by path."""
    made: dict[str, Outline] = {}
    for path in set(team.bases.values()):
        if path in (given or {}):
            from kapelle.models.module_outline import outline_of

            made[path] = outline_of((given or {})[path].model)
        else:
            made[path] = outline(path, config.embedded)
    return {base: made[path] for base, path in team.bases.items()}
