"""The section of an optional training feature in a recipe: the part of a feature that every layer knows.

    src/kapelle/features/mine/
      settings.py     its section, a subclass of `FeatureSettings`
      plan.py         its effects before a model is loaded, a subclass of `setup.feature.FeaturePlan`
      feature.py      its actions in the phases of a step, a subclass of `training.feature.Feature`
      metrics.py      its metrics

To add a feature, add its section as a field of `settings.schema.RunConfig`, or of one of its sections. To remove a
feature, delete its folder and that field. The core finds features by their sections and does not name any of them.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

from kapelle.settings.base import Settings, parts_of

S = TypeVar("S", bound=Settings)


class FeatureSettings(Settings):
    """The section of a feature. A run uses the feature if the section is set."""

    plan: ClassVar[str] = ""
    """`module:Class` of the feature's `FeaturePlan`; empty if it needs no plan."""
    feature: ClassVar[str] = ""
    """`module:Class` of the feature's `Feature`; empty if it does not act in any phase."""
    draws: ClassVar[str] = ""
    """`module:Class` that draws the tasks of steps instead of `training.selection.EpochDraws`; empty to use the latter."""
    rewards_turns: ClassVar[bool] = False
    """Whether the feature adds turn rewards to those of the environment."""
    bases: ClassVar[str] = ""
    """`module:function` that creates base models for policies; its arguments and result are those of `setup.feature.bases_of`."""

    @property
    def rollouts(self) -> str:
        """`module:function` that creates the `Rollouts` of a run instead of the on-policy ones; empty to use the on-policy ones."""
        return ""

    @property
    def off_policy(self) -> bool:
        """Whether steps also learn from samples of earlier weights."""
        return False


def sections_of(config: Settings) -> dict[str, FeatureSettings]:
    """Return the sections of the features that a run uses, by dotted path, in the order of its settings."""
    return {path: part for path, part in parts_of(config) if isinstance(part, FeatureSettings)}


def without_features(config: S) -> S:
    """Return the settings without optional training features, except those that create the base model of a trained team."""
    optional = [name for name, field in type(config).model_fields.items() if field.default is None]
    sections = {name: getattr(config, name) for name in optional}
    own = {
        name: None
        for name, section in sections.items()
        if isinstance(section, FeatureSettings) and not section.bases
    }
    return config.model_copy(update=own)
