"""The section of an optional feature of training in a recipe: the part of a feature that every layer knows.

    src/kapelle/features/mine/
      settings.py     its section, a class on `FeatureSettings`
      plan.py         what it means for a run before a model is loaded, a class on `setup.feature.FeaturePlan`
      feature.py      what it does at the phases of a step, a class on `training.feature.Feature`
      metrics.py      what it reports

To add one, add its section as a field of `settings.schema.RunConfig`, or of one of its sections. To remove one, delete its
folder and that field. The core finds features by their sections and names none of them.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

from kapelle.settings.base import Settings, parts_of

S = TypeVar("S", bound=Settings)


class FeatureSettings(Settings):
    """The section of a feature. A run has the feature if the section is set."""

    plan: ClassVar[str] = ""
    """`module:Class` of its `FeaturePlan`; empty if it needs no plan."""
    feature: ClassVar[str] = ""
    """`module:Class` of its `Feature`; empty if it does not act at any phase."""
    draws: ClassVar[str] = ""
    """`module:Class` that draws the tasks of steps in place of `training.selection.EpochDraws`; empty if it leaves this to it."""
    rewards_turns: ClassVar[bool] = False
    """Whether it adds rewards of turns to the environment's."""
    bases: ClassVar[str] = ""
    """`module:function` that makes bases on which policies are trained; arguments and result as in `setup.feature.bases_of`."""

    @property
    def rollouts(self) -> str:
        """`module:function` that makes the `Rollouts` of a run in place of the on-policy ones; empty for the on-policy ones."""
        return ""

    @property
    def off_policy(self) -> bool:
        """Whether steps also learn from samples of earlier weights."""
        return False


def sections_of(config: Settings) -> dict[str, FeatureSettings]:
    """Return the sections of the features that a run has, by their dotted path, in the order of its settings."""
    return {path: part for path, part in parts_of(config) if isinstance(part, FeatureSettings)}


def without_features(config: S) -> S:
    """Return the settings without the optional features of training, except for those that make the base of a trained team."""
    optional = [name for name, field in type(config).model_fields.items() if field.default is None]
    sections = {name: getattr(config, name) for name in optional}
    own = {
        name: None
        for name, section in sections.items()
        if isinstance(section, FeatureSettings) and not section.bases
    }
    return config.model_copy(update=own)
