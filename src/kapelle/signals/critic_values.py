"""Critics' values of every turn that they judge, and of what would have followed an episode cut short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kapelle.algorithm import CriticSpec
from kapelle.rows import Learners, Sample, Sampled, TurnKey, turns_of
from kapelle.runtime.on_demand import Tensor
from kapelle.signals.questions import Readers, critic_sample, judged_sample
from kapelle.team import Team
from kapelle.types import Group


@dataclass(frozen=True, slots=True)
class CriticValues:
    """Gives `Signals.values` and `Signals.bootstrap`; the same critics are trained in the update."""

    critic: CriticSpec

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, Tensor]]:
        """Return the values before each turn's tokens, or before the turn, and those after turns cut short."""
        before, after = value_samples(step.groups, step.team, self.critic, engine.renderer)
        scored = engine.score([*before.values(), *after.values()])
        values = dict(zip(before, scored, strict=False))
        bootstrap = {key: value[0] for key, value in zip(after, scored[len(before) :], strict=True)}
        return {"values": values, "bootstrap": bootstrap}


def value_samples(
    groups: Sequence[Group], team: Team, need: CriticSpec, readers: Readers | None = None
) -> tuple[dict[TurnKey, Sample], dict[TurnKey, Sample]]:
    """Return the critics' samples: for every turn they judge, and for the value after turns cut short.

    `readers` are needed for the view `answer`, which has no value after a turn.
    """
    values: dict[TurnKey, Sample] = {}
    after: dict[TurnKey, Sample] = {}
    for key, turn in turns_of(groups, trained_only=not need.everyone):
        episode = groups[key.group].episodes[key.episode]
        values[key] = judged_sample(episode, turn, team, need, {}, readers)
        last = turn is episode.by(turn.agent)[-1]
        if need.view != "answer" and last and episode.truncated:
            after[key] = critic_sample(episode, turn, team, need, {}, after=True)
    return values, after
