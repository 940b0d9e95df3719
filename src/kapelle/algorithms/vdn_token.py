"""Token-level VDN: one critic per agent, whose values add up to the team's value at every token (arXiv:1706.05296, applied to V).

The critic of agent i reads the agent's own view and predicts a value V_i before every token. In a round, all agents write in
parallel, position by position:

    V_tot at a position = Σ_i V_i    (an agent that has finished keeps its last value)

Rounds follow one another. The team's reward is placed on the last position of a round. GAE over V_tot gives all tokens of a
position the same advantage; with λ = 1 the advantage is the team's return minus Σ_i V_i. If agents act one after another, the
advantage of an agent excludes the values of the agents that have read its turn.

Truncation. If the episode ended at a limit, the sum Σ_i U_i over the agents of the last round replaces the future, where U_i
is the critic's value after the agent's turn. In rounds that are followed by another round, each critic learns its share of
γ_turn times the target of V_tot at the next round. If an agent of the last round never acted in such a round, the truncated
episode is treated as terminated.

The critic of agent i is fitted to A + V_i, which is the target of V_tot minus the values of the other agents. At the values
computed during sampling, its gradient equals the gradient of (V_tot − target)² with respect to V_i. The sum is therefore
fitted although each critic is trained separately.

Deviations from the paper:

- The values of the other agents are fixed during the epochs of an update.
- All agents have the same advantage, whereas `vdn` gives each agent its own. The benefit over a central critic is that each
  critic reads only the view of the agent that it evaluates.

Shapes: P positions of an episode (rounds in a row), A agents, T tokens of one turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Literal

from pydantic import model_validator

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.ppo import ActorCritic, actor_critic_row
from kapelle.algorithms.shared.gae import normalised
from kapelle.algorithms.shared.groups import valid_episodes
from kapelle.algorithms.shared.rewards import need_team_return
from kapelle.algorithms.value_decomposition.mixer_fit import earned_by_round
from kapelle.functional.advantages import gae
from kapelle.functional.mixing import vdn_mix
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.types import Episode, Group, Turn


class VDNToken(ActorCritic):
    """Settings of token-level VDN."""

    name: Literal["vdn_token"] = "vdn_token"

    @model_validator(mode="after")
    def _one_return_for_all(self) -> VDNToken:
        need_team_return(self.team_reward)
        if self.gae.unit == "turn" or self.gae.kl_in_reward or self.gae.vtrace:
            raise ValueError(
                "`vdn_token` adds the agents' values per token; remove `gae.unit`, `gae.kl_in_reward` and `gae.vtrace`, or set "
                "`algorithm.name: ippo`"
            )
        if self.umad.influence:
            raise ValueError(
                "`umad.influence` rewards single agents, but here all share one advantage; set `algorithm.name: vdn`"
            )
        return self

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return actor_critic_row(self, self.name, "local", SummedValues(self))


class SummedValues:
    """Compute credit from Σ_i V_i: one advantage per position, and each critic's share of the target."""

    def __init__(self, settings: VDNToken) -> None:
        """Create the credit function from the settings of GAE, rewards and penalties."""
        self._settings = settings

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return the advantage of each turn and the target of its critic at every token."""
        rounds_of = {
            (g, e): rounds
            for g, e, episode in valid_episodes(groups)
            if (rounds := episode.rounds(episode.agents, trained=True))
        }
        has_target = {agent for rounds in rounds_of.values() for movers in rounds[:-1] for agent in movers}
        credit: dict[TurnKey, Credit] = {}
        for (g, e), rounds in rounds_of.items():
            credit |= self._of_episode((g, e), groups[g].episodes[e], rounds, has_target, signals)
        if not credit:
            return {}
        turns = [groups[g].episodes[e].turns[t] for g, e, t in credit]
        steps = [len(turn.completion_ids) for turn in turns]
        advantage_K = torch.cat([given.advantage_T for given in credit.values()])
        pieces = normalised(advantage_K, turns, steps, self._settings.gae.normalise).split(steps)
        return {
            key: replace(given, advantage_T=piece_T)
            for (key, given), piece_T in zip(credit.items(), pieces, strict=True)
        }

    def _of_episode(
        self,
        place: tuple[int, int],
        episode: Episode,
        rounds: Sequence[Mapping[str, Turn]],
        has_target: AbstractSet[str],
        signals: Signals,
    ) -> dict[TurnKey, Credit]:
        """Return the credit of an episode, with advantages that are not yet normalised."""
        s = self._settings
        rewards = earned_by_round(episode, rounds, s.team_reward, s.penalties).tolist()
        keys = [{agent: TurnKey(*place, turn.index) for agent, turn in movers.items()} for movers in rounds]
        future = torch.zeros(())
        if s.gae.truncated == "bootstrap" and episode.truncated and keys[-1].keys() <= has_target:
            future = sum((signals.bootstrap[key] for key in keys[-1].values()), future)
        total = self._advantages(place, rounds, rewards, future, signals, None)
        after: dict[TurnKey, Tensor] = {}
        if signals.after:
            # In all rounds but the last, each critic learns its share of the value after its turns.
            for now, following, advantage_P in zip(keys, keys[1:], total[1:], strict=False):
                values = [signals.values[key][0] for key in following.values()]
                target = s.gae.gamma_turn * (advantage_P[0] + sum(values))
                error = target - sum(signals.after[key] for key in now.values())
                after |= {key: signals.after[key] + error for key in now.values()}
        credit: dict[TurnKey, Credit] = {}
        for agent in dict.fromkeys(agent for movers in rounds for agent in movers):
            own = self._advantages(place, rounds, rewards, future, signals, agent)
            for movers, own_P, total_P in zip(rounds, own, total, strict=True):
                if agent in movers:
                    turn = movers[agent]
                    key, length = TurnKey(*place, turn.index), len(turn.completion_ids)
                    target_T = total_P[:length] + signals.values[key]
                    credit[key] = Credit(own_P[:length], target_T, after=after.get(key))
        return credit

    def _advantages(
        self,
        place: tuple[int, int],
        rounds: Sequence[Mapping[str, Turn]],
        round_rewards: Sequence[float],
        future: Tensor,
        signals: Signals,
        agent: str | None,
    ) -> list[Tensor]:
        """Return, for every round, the advantage over the summed values at every position.

        The argument `future` is the value after the last round, discounted to the end of that round. If `agent` is given, the
        sum excludes turns that have read the agent's turn of the round: they depend on the agent's turn and are therefore not
        a valid baseline.
        """
        s = self._settings
        values: list[Tensor] = []
        rewards: list[Tensor] = []
        gammas: list[Tensor] = []
        for movers, reward in zip(rounds, round_rewards, strict=True):
            own = movers.get(agent) if agent is not None else None
            included = [turn for turn in movers.values() if own is None or turn.completed_before <= own.index]
            longest = max(len(turn.completion_ids) for turn in movers.values())
            # Σ_i V_i at every position of the round; a finished agent keeps its last value.
            columns = []
            for turn in included:
                value_T = signals.values[TurnKey(*place, turn.index)]
                columns.append(torch.cat([value_T, value_T[-1:].expand(longest - len(value_T))]))
            value_PA = torch.stack(columns, dim=1)
            value_P = vdn_mix(value_PA, torch.ones_like(value_PA))
            reward_P, gamma_P = torch.zeros_like(value_P), torch.full_like(value_P, s.gae.gamma_token)
            reward_P[-1], gamma_P[-1] = reward, s.gae.gamma_turn
            values.append(value_P)
            rewards.append(reward_P)
            gammas.append(gamma_P)
        rewards[-1][-1] += future
        value_P = torch.cat(values)
        advantage_P = gae(
            torch.cat(rewards)[None],
            value_P[None],
            torch.ones_like(value_P)[None],
            torch.zeros(1),
            gamma=torch.cat(gammas)[None],
            lam=s.gae.lam,
        ).advantage_NT[0]
        return list(advantage_P.split([len(value_P) for value_P in values]))
