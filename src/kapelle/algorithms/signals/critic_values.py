"""Compute the values that critics estimate for turns and for the unknown future of truncated episodes.

The value after the last token of a turn estimates everything after the turn: rewards for moves of other agents, and later
turns of the agent. In every step with a truncated episode, critics learn this value from turns that were followed by other
turns (`Credit.after`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kapelle.algorithm import CriticSpec
from kapelle.algorithms.signals.samples import Readers, critic_sample
from kapelle.rows import Learners, Sample, Sampled, TurnKey, turns_of
from kapelle.runtime.on_demand import Tensor
from kapelle.team import Team
from kapelle.types import Group


@dataclass(frozen=True, slots=True)
class CriticValues:
    """A signal that computes `Signals.values`, and also `Signals.after` and `Signals.bootstrap` if an episode was truncated."""

    critic: CriticSpec

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, Tensor]]:
        """Return the values before each token or turn (according to `CriticSpec.unit`), and the values after turns."""
        samples, cut = value_samples(step.groups, step.team, self.critic, engine.renderer)
        values = dict(zip(samples, engine.score(list(samples.values())), strict=True))
        if not cut:
            return {"values": values}
        after = {key: value_T[-1] for key, value_T in values.items()}
        return {
            "values": {key: value_T[:-1] for key, value_T in values.items()},
            "after": after,
            "bootstrap": {key: after[key] for key in cut},
        }


def value_samples(
    groups: Sequence[Group], team: Team, need: CriticSpec, readers: Readers | None = None
) -> tuple[dict[TurnKey, Sample], list[TurnKey]]:
    """Return the critic's sample for every turn that critics evaluate, and the keys of the last turn of each agent in truncated episodes.

    If an episode was truncated, the last target of each sample is the value after the turn. The view `answer` has no such
    value, and requires `readers`.
    """
    turns = turns_of(groups, trained_only=not need.everyone)
    cut: list[TurnKey] = []
    if need.bootstraps and need.view != "answer":
        for key, turn in turns:
            episode = groups[key.group].episodes[key.episode]
            if episode.truncated and turn is episode.by(turn.agent)[-1]:
                cut.append(key)
    samples = {
        key: critic_sample(
            groups[key.group].episodes[key.episode], turn, team, need, {}, readers, after=bool(cut)
        )
        for key, turn in turns
    }
    return samples, cut
