"""The token form of VDN: critics of single agents whose sum is the team's value (1706.05296, over V).

Each agent's critic reads what the agent sees and gives V_i before every token. In a round all agents write in
parallel, position by position; V_tot of a position is Σ_i V_i, an agent that has finished keeping its last value. Rounds
follow one another, the team's reward is on a round's last position, and GAE over V_tot gives one advantage to
all tokens of a position. With λ = 1 that is the team's return less Σ_i V_i. Where agents act one after another, an
agent's advantage leaves out the values of those that have read its turn.

Where a limit cut the episode short, Σ_i U_i of those who moved in the last round takes the place of the future: U_i is the
value after the agent's turn. In rounds that others follow the critics learn it, as a share of γ_turn times V_tot's target at
the next round; if a mover of the last round never had such a round, a cut counts as the end.

The critic of agent i is fitted to A + V_i, which is the target of V_tot less the others' values: its gradient at the
sampling values is that of (V_tot − target)² in V_i, so the sum is fitted, although each critic is trained separately.

Deviations: the others' values are fixed during the epochs of an update; all agents share one credit, and the gain over a
central critic is that each critic reads its own agent's view alone (see `vdn` for credit of each agent).

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
from kapelle.algorithms.shared.rewards import need_team_return
from kapelle.algorithms.value_decomposition.mixer_fit import earned_by_round
from kapelle.functional.advantages import gae
from kapelle.functional.mixing import vdn_mix
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.types import Episode, Group, Turn


class VDNToken(ActorCritic):
    """Settings of the token form of VDN."""

    name: Literal["vdn_token"] = "vdn_token"

    @model_validator(mode="after")
    def _one_return_for_all(self) -> VDNToken:
        need_team_return(self.team_reward)
        if self.gae.unit == "turn" or self.gae.kl_in_reward or self.gae.vtrace:
            raise ValueError(
                "positions of several agents are tokens of one moment: leave out `gae.unit`, `gae.kl_in_reward` and "
                "`gae.vtrace`, or set `algorithm.name: ippo`"
            )
        if self.umad.influence:
            raise ValueError(
                "`umad.influence` pays one agent, and here all share one advantage; set `algorithm.name: vdn`"
            )
        return self

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return actor_critic_row(self, self.name, "local", SummedValues(self))


class SummedValues:
    """Advantages against Σ_i V_i, and each critic's share of the target."""

    def __init__(self, settings: VDNToken) -> None:
        """Take the settings of GAE, rewards and penalties."""
        self._settings = settings

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return each turn's advantage at every token, and the target of its critic there."""
        played = {
            (g, e): (episode, rounds)
            for g, group in enumerate(groups)
            for e, episode in enumerate(group.episodes)
            if episode.error is None and (rounds := episode.rounds(episode.agents, trained=True))
        }
        taught = {agent for _, rounds in played.values() for movers in rounds[:-1] for agent in movers}
        credit: dict[TurnKey, Credit] = {}
        for place, (episode, rounds) in played.items():
            credit |= self._of_episode(place, episode, rounds, taught, signals)
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
        taught: AbstractSet[str],
        signals: Signals,
    ) -> dict[TurnKey, Credit]:
        """Return an episode's credit, with advantages that are not normalised yet."""
        s = self._settings
        paid = earned_by_round(episode, rounds, s.team_reward, s.penalties).tolist()
        keys = [{agent: TurnKey(*place, turn.index) for agent, turn in movers.items()} for movers in rounds]
        to_come = torch.zeros(())
        if s.gae.truncated == "bootstrap" and episode.truncated and keys[-1].keys() <= taught:
            to_come = sum((signals.bootstrap[key] for key in keys[-1].values()), to_come)
        whole = self._advantages(place, rounds, paid, to_come, signals, None)
        after: dict[TurnKey, Tensor] = {}
        if signals.after:
            # Each critic learns its share of what was to come after its turns, in all rounds but the last.
            for now, following, advantage_P in zip(keys, keys[1:], whole[1:], strict=False):
                values = [signals.values[key][0] for key in following.values()]
                came = s.gae.gamma_turn * (advantage_P[0] + sum(values))
                error = came - sum(signals.after[key] for key in now.values())
                after |= {key: signals.after[key] + error for key in now.values()}
        credit: dict[TurnKey, Credit] = {}
        for agent in dict.fromkeys(agent for movers in rounds for agent in movers):
            own = self._advantages(place, rounds, paid, to_come, signals, agent)
            for movers, own_P, whole_P in zip(rounds, own, whole, strict=True):
                if agent in movers:
                    turn = movers[agent]
                    key, length = TurnKey(*place, turn.index), len(turn.completion_ids)
                    target_T = whole_P[:length] + signals.values[key]
                    credit[key] = Credit(own_P[:length], target_T, after=after.get(key))
        return credit

    def _advantages(
        self,
        place: tuple[int, int],
        rounds: Sequence[Mapping[str, Turn]],
        paid: Sequence[float],
        to_come: Tensor,
        signals: Signals,
        agent: str | None,
    ) -> list[Tensor]:
        """Return the advantage at every position of every round against the summed values.

        `to_come` is the value after the last round, discounted to its end. For an agent, values of turns that have read its
        turn of the round are left out: as its baseline they would subtract what that turn caused.
        """
        s = self._settings
        values: list[Tensor] = []
        rewards: list[Tensor] = []
        gammas: list[Tensor] = []
        for movers, reward in zip(rounds, paid, strict=True):
            own = movers.get(agent) if agent is not None else None
            judged = [turn for turn in movers.values() if own is None or turn.seen <= own.index]
            longest = max(len(turn.completion_ids) for turn in movers.values())
            # Σ_i V_i at every position of the round; a finished agent keeps its last value.
            held = []
            for turn in judged:
                value_T = signals.values[TurnKey(*place, turn.index)]
                held.append(torch.cat([value_T, value_T[-1:].expand(longest - len(value_T))]))
            value_PA = torch.stack(held, dim=1)
            value_P = vdn_mix(value_PA, torch.ones_like(value_PA))
            reward_P, gamma_P = torch.zeros_like(value_P), torch.full_like(value_P, s.gae.gamma_token)
            reward_P[-1], gamma_P[-1] = reward, s.gae.gamma_turn
            values, rewards, gammas = [*values, value_P], [*rewards, reward_P], [*gammas, gamma_P]
        rewards[-1][-1] += to_come
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
