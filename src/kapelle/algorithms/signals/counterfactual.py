"""Critic values of each turn, and of the same turn with other completions of its prompt in its place.

Q(s, a) is the critic's value after a turn (`CriticSpec.unit: after`). The critic reads everything that was read and written until
then, including simultaneous completions of other agents. The alternatives a_i^k are the same agent's completions of the same
prompt in the task's other episodes. Each replaces the turn while everything else stays: Q(s, (a_−i, a_i^k)). No episode is
continued.
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
"""Name of the signal: values `_K` of a turn's K alternatives, in the order of their episodes; K can be 0."""

PromptKey = tuple[int, str, tuple[int, ...], tuple[Image, ...]]
"""Group, agent, and its prompt."""


@dataclass(frozen=True, slots=True)
class CounterfactualValues:
    """Signal that gives `Signals.values`, `[1]` after every turn, and `signals[COUNTERFACTUAL]`."""

    critic: CriticSpec
    """The critic, with `unit: after`."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, Tensor]]:
        """Return the values after the trained turns, and after their alternatives."""
        trained = turns_of(step.groups)
        same_prompt: dict[PromptKey, list[tuple[TurnKey, Turn]]] = {}
        for key, turn in trained:
            same_prompt.setdefault(_prompt_key(key, turn), []).append((key, turn))
        # Equal inputs are scored once: samples of one prompt are often equal.
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
        alternatives: dict[TurnKey, list[int]] = {}
        for key, turn in trained:
            own[key] = number(key, turn)
            alternatives[key] = [
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
                for place, other in same_prompt[_prompt_key(key, turn)]
                if place.episode != key.episode
            ]
        values = engine.score(samples) if samples else []
        return {
            "values": {key: values[k] for key, k in own.items()},
            COUNTERFACTUAL: {
                key: torch.cat([values[k] for k in found]) if found else torch.zeros(0)
                for key, found in alternatives.items()
            },
        }


def _prompt_key(key: TurnKey, turn: Turn) -> PromptKey:
    return key.group, turn.agent, turn.prompt_ids, turn.images
