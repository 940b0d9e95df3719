"""What each turn is worth to a critic, and what it would be worth if its agent had answered as in another episode of the group.

Q(s, a) is the critic's value after a turn (`CriticSpec.unit: after`), which reads all that was read and said until then, the
answers of others at the same moment included. Alternatives a_i^k are the answers of the same agent to the same prompt in the task's
other episodes. Each takes the turn's place, and everything else stays: Q(s, (a_−i, a_i^k)). Nothing is played again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kapelle.algorithm import CriticSpec
from kapelle.algorithms.signals.samples import critic_sample
from kapelle.rows import Learners, Sample, Sampled, TurnKey, turns_of
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.types import Image, Turn

COUNTERFACTUAL = "counterfactual"
"""Names the values `_K` of a turn's K alternatives, in the order of their episodes; K may be 0."""

Asked = tuple[int, str, tuple[int, ...], tuple[Image, ...]]
"""Group, agent, and all that it read."""


@dataclass(frozen=True, slots=True)
class CounterfactualValues:
    """Gives `Signals.values`, `[1]` after every turn, and `signals[COUNTERFACTUAL]`."""

    critic: CriticSpec
    """Its `unit` is `after`."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, Tensor]]:
        """Return the values after the trained turns, and after those that take their places."""
        judged = turns_of(step.groups)
        alike: dict[Asked, list[tuple[TurnKey, Turn]]] = {}
        for key, turn in judged:
            alike.setdefault((key.group, turn.agent, turn.prompt_ids, turn.images), []).append((key, turn))
        # What is read twice is scored once: siblings often say the same.
        numbers: dict[tuple[str, tuple[int, ...], tuple[Image, ...]], int] = {}
        samples: list[Sample] = []

        def number(key: TurnKey, turn: Turn) -> int:
            episode = step.groups[key.group].episodes[key.episode]
            sample = critic_sample(episode, turn, step.team, self.critic, {}, engine.renderer)
            found = numbers.setdefault((sample.learner, sample.tokens, sample.images), len(samples))
            if found == len(samples):
                samples.append(sample)
            return found

        own: dict[TurnKey, int] = {}
        instead: dict[TurnKey, list[int]] = {}
        for key, turn in judged:
            own[key] = number(key, turn)
            instead[key] = [
                number(
                    key,
                    replace(
                        turn,
                        completion_ids=other.completion_ids,
                        logprobs=other.logprobs,
                        versions=other.versions,
                        text=other.text,
                    ),
                )
                for place, other in alike[key.group, turn.agent, turn.prompt_ids, turn.images]
                if place.episode != key.episode
            ]
        values = engine.score(samples) if samples else []
        return {
            "values": {key: values[k] for key, k in own.items()},
            COUNTERFACTUAL: {
                key: torch.cat([values[k] for k in places]) if places else torch.zeros(0)
                for key, places in instead.items()
            },
        }
