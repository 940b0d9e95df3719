"""Defines the section of an optional training feature in a recipe. The rest of the library knows a feature only by this section.

    src/kapelle/features/mine/
      settings.py     its section, a subclass of `FeatureSettings`
      plan.py         its effects before a model is loaded, a subclass of `setup.feature.FeaturePlan`
      feature.py      its actions in the phases of a step, a subclass of `training.feature.Feature`
      metrics.py      its metrics

To add a feature, add its section as a field of `settings.schema.RunConfig`, or of one of its sections. To remove a
feature, delete its folder and that field. The core of the library finds features by their sections and does not refer
to any feature by name.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

from kapelle.settings.base import Settings, parts_of

S = TypeVar("S", bound=Settings)


class FeatureSettings(Settings):
    """Base class of the section of an optional training feature. A run uses a feature if the section of the feature is set."""

    plan: ClassVar[str] = ""
    """The `FeaturePlan` class of the feature, written as `module:Class`; empty if the feature needs no plan."""
    feature: ClassVar[str] = ""
    """The `Feature` class of the feature, written as `module:Class`; empty if the feature is not active in any phase of a step."""
    draws: ClassVar[str] = ""
    """The class that samples the tasks of each step, written as `module:Class`; empty to use `training.selection.EpochDraws`."""
    rewards_turns: ClassVar[bool] = False
    """Whether the feature adds turn rewards to the rewards of the environment."""
    bases: ClassVar[str] = ""
    """The function that creates base models for policies, written as `module:function`, with the signature of `setup.feature.bases_of`."""

    @property
    def rollouts(self) -> str:
        """The function that creates the `Rollouts` of a run, written as `module:function`; empty to use on-policy rollouts."""
        return ""

    @property
    def off_policy(self) -> bool:
        """Whether training steps also use samples from earlier weights."""
        return False


def sections_of(config: Settings) -> dict[str, FeatureSettings]:
    """Return the sections of the features that a run uses. The keys are dotted paths, in the order of the settings."""
    return {path: part for path, part in parts_of(config) if isinstance(part, FeatureSettings)}


def without_features(config: S) -> S:
    """Return the settings without optional training features, except the features that create the base model of a trained team."""
    optional = [name for name, field in type(config).model_fields.items() if field.default is None]
    sections = {name: getattr(config, name) for name in optional}
    own = {
        name: None
        for name, section in sections.items()
        if isinstance(section, FeatureSettings) and not section.bases
    }
    return config.model_copy(update=own)
