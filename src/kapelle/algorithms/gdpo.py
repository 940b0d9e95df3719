"""GDPO: several reward functions, each of which is normalised within its group before they are added (arXiv:2601.05242).

    A_j = Σ_k w_k · (r_kj − mean_g r_k) / (std_g r_k + ε), then whitened over the batch

A sum of rewards that is normalised afterwards, as in GRPO, gives different combinations of rewards the same advantage, and
the reward with the largest spread hides the others. With GDPO, the weight w_k alone decides how much a reward counts.

The rewards are numbers in the `info` of an episode: the results of the reward functions and judges of the environment
`rewarded` (before the environment's weights), or any other number that an environment reports. A reward whose name ends with
`/AGENT` belongs to this agent. All other rewards belong to every agent with a turn. `team_reward` shares each reward among
the agents as usual.

Deviations from the paper:

- The last normalisation is per policy, so that a joint step of several policies is identical to separate steps. Each
  trajectory of an agent counts once.
- An episode in which a reward does not apply (None) is excluded from the group of this reward only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, FiniteFloat, model_validator

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import SCALED, Earlier, by_agent, compare, valid_episodes
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.algorithms.shared.rewards import FREE, step_rewards, turn_rewards
from kapelle.environment import REWARD_PREFIX
from kapelle.errors import AlgorithmError
from kapelle.functional.masking import masked_whiten
from kapelle.rows import Signals, TurnKey, turns_of
from kapelle.runtime.on_demand import torch
from kapelle.types import Episode, Group


class GDPO(MonteCarlo):
    """Settings of GDPO, which normalises each of several rewards separately."""

    name: Literal["gdpo"] = "gdpo"
    weights: dict[str, FiniteFloat] = Field(min_length=1)
    """Mapping from each reward to its weight, such as `{exact: 1.0, brief: 0.5}`. A name is that of a reward function or judge,
    as in the metric `reward_function/NAME`, or the key of another number in the `info` of episodes. Other rewards are not
    used."""

    @model_validator(mode="after")
    def _only_named_rewards(self) -> GDPO:
        if self.forms != FREE or self.umad.influence:
            raise ValueError(
                "`gdpo` uses only the rewards in `weights`; write a penalty as a reward function, and remove `penalties`, "
                "`truncation_penalty` and `umad.influence`"
            )
        return self

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the weighted sum of the normalised rewards of each turn, whitened over the trajectories of each policy.

        Raises AlgorithmError if no episode has one of the rewards.
        """
        total: dict[TurnKey, float] = {}
        for name, weight in self.weights.items():
            own = [_rewarded_by(name, group) for group in groups]
            members = by_agent(own, step_rewards(own, turn_rewards, self.team_reward))
            if not members and valid_episodes(groups):
                raise _absent(name, groups)
            members = [member._replace(like=(*member.like, name)) for member in members]
            for key, advantage in compare(members, SCALED, earlier).items():
                total[key] = total.get(key, 0.0) + weight * advantage
        return spread(self, groups, _whitened(groups, total))


def _whitened(groups: Sequence[Group], total: Mapping[TurnKey, float]) -> dict[TurnKey, float]:
    """Return the values of all turns, whitened over the trajectories of each policy."""
    trajectories: dict[str, dict[tuple[int, int, str], list[TurnKey]]] = {}
    for key, turn in turns_of(groups):
        if key in total:
            own = trajectories.setdefault(turn.policy, {})
            own.setdefault((key.group, key.episode, turn.agent), []).append(key)
    whitened: dict[TurnKey, float] = {}
    for own in trajectories.values():
        value_B = torch.tensor([total[keys[0]] for keys in own.values()], dtype=torch.float64)
        values = masked_whiten(value_B, torch.ones_like(value_B)).tolist()
        whitened |= {key: value for keys, value in zip(own.values(), values, strict=True) for key in keys}
    return whitened


def _rewarded_by(name: str, group: Group) -> Group:
    """Return the group with one reward as the only reward of its episodes. Episodes without this reward are marked as failed."""
    episodes = []
    for episode in group.episodes:
        value = _value(episode, name)
        if episode.error is None and value is not None:
            agent = name.rpartition("/")[2]
            rewarded = [agent] if agent in episode.agents else [turn.agent for turn in episode.turns]
            turns = tuple(replace(turn, reward=0.0) for turn in episode.turns)
            rewards = dict.fromkeys(rewarded, value)
            episodes.append(replace(episode, turns=turns, rewards=rewards, reward_events=()))
        else:
            episodes.append(replace(episode, error=episode.error or f"the reward `{name}` does not apply"))
    return replace(group, episodes=tuple(episodes))


def _value(episode: Episode, name: str) -> float | None:
    value = episode.info.get(f"{REWARD_PREFIX}{name}", episode.info.get(name))
    return float(value) if isinstance(value, int | float) else None


def _absent(name: str, groups: Sequence[Group]) -> AlgorithmError:
    known = {
        key.removeprefix(REWARD_PREFIX)
        for _, _, episode in valid_episodes(groups)
        for key, value in episode.info.items()
        if isinstance(value, int | float)
    }
    names = (
        f"They report {', '.join(f'`{each}`' for each in sorted(known))}."
        if known
        else "They report no number."
    )
    return AlgorithmError(
        f"Algorithm 'gdpo': no episode of the step reports `{name}`, which `algorithm.weights` names. {names} Name these, or "
        "use the environment `rewarded` with reward functions."
    )
