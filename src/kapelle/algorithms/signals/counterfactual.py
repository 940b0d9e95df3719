"""Compute critic values of each turn, and of the same turn with alternative completions of its prompt.

Q(s, a) is the critic's value after a turn (`CriticSpec.unit: after`). The critic reads everything that was read and written
up to that point, including simultaneous completions of other agents. The alternatives a_i^k are completions of the same
prompt by the same agent in other episodes of the task. Q(s, (a_−i, a_i^k)) is the value with the turn replaced by an
alternative and everything else unchanged. No episode is continued.
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
"""The name of the signal that contains, for each turn, the values of its K alternatives (shape (K,), in the order of their
episodes). K can be 0."""

PromptKey = tuple[int, str, tuple[int, ...], tuple[Image, ...]]
"""The key of a prompt: the group number, the agent, and the tokens and images of the prompt."""


@dataclass(frozen=True, slots=True)
class CounterfactualValues:
    """A signal that computes `Signals.values` (one value after every turn, shape (1,)) and `signals[COUNTERFACTUAL]`."""

    critic: CriticSpec
    """The specification of the critic, with `unit: after`."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, Tensor]]:
        """Return the values after all trained turns, and the values after their alternatives."""
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
