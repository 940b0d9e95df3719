"""MAPoRL: PPO for debating agents, which are rewarded for their answers and for their influence on one another (arXiv:2502.18439).

The score v_t^i in [0, 1] rates the answer of agent i at debate turn t. The score comes from a trained verifier (`verifier`,
see `verifier.py`), or from the environment if no verifier is set (`workflow.score_rounds: true`). With γ = `discount`, and
V_t the mean score of all agents at turn t (`sharing: all`) or the agent's own score (`sharing: individual`), the reward R_t^i
is

    discounted_sum    [v_t^i + Σ_{t'>t} γ^{t'−t}·V_t'] / Σ_{t'≥t} γ^{t'−t}
    last              V_T        (T is the last turn)
    current           V_t

The influence terms α0…α3 reward correction and persuasion (`functional.shaping.maporl_influence`): an agent gains reward if
it leads others to the correct answer, and loses reward if it misleads them. An answer counts as correct if v > ½. With
`correctness: label`, the environment's score replaces v. The other agents count as correct if more than half of them are
correct.

An agent that has stopped answering (because it has settled, `settled_after`) keeps the score of its last answer, which
remains valid. This score is included in the means of later turns, and the agent's influence in later rounds is rewarded on
its last turn. Rounds that did not take place do not count. The scores v replace the environment's rewards.

A verifier that cannot distinguish correct from incorrect answers to one question rewards noise. The setting `least_auc` is
the minimum AUC that the verifier must have reached on held-out questions (see `training/held_out.py`).

Deviations from the paper and the authors' code:

- R_t already contains future scores. By default, GAE therefore passes no value from turn to turn (`gae.gamma_turn: 0`), and
  each turn is a separate action, just as each turn is one PPO sample in the authors' code.
- The authors' code seems to use different signs and positions for α2 and α3. In this implementation, α2 and α3 have the
  meaning stated above.
- A team can share weights, have one adapter or one model per agent, or have one adapter per agent and turn as in the authors'
  code (`weights: {per_turn: 3}`). In every case, each agent has its own critic.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm
from kapelle.algorithms.ppo import ActorCritic, actor_critic_row
from kapelle.algorithms.shared.gae import GAEConfig, GAECredit
from kapelle.algorithms.shared.groups import valid_episodes
from kapelle.algorithms.signals.verifier import Together, VerifierScores
from kapelle.errors import ConfigError
from kapelle.features.reward_model.settings import RefreshConfig
from kapelle.functional import shaping
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.types import Episode, Group, Turn

NO_INFLUENCE = (0.0, 0.0, 0.0, 0.0)


class TurnwiseGAE(GAEConfig):
    """Settings of GAE for MAPoRL.

    By default, no value is passed from turn to turn, because the reward R_t already contains future scores.
    """

    gamma_turn: float = Field(default=0.0, ge=0.0, le=1.0)


class MAPoRL(ActorCritic):
    """Settings of MAPoRL, which is PPO for debating agents with scored answers."""

    name: Literal["maporl"] = "maporl"
    verifier: str | tuple[str, ...] | None = None
    """The folder of a trained verifier, or a list of the folders of several verifiers. With null, the environment scores each
    answer."""
    together: Together = "mean"
    """How the scores of several verifiers are combined: the mean of their probabilities (`mean`), or the lowest probability
    (`least`)."""
    least_auc: float | None = Field(default=0.7, gt=0.5, le=1.0)
    """The minimum AUC of the verifier among answers to the same held-out question. The confidence interval of the AUC must
    also lie above ½. With null, any verifier is accepted."""
    refresh: RefreshConfig | None = None
    """The settings for training the verifier further on graded answers of the team. With null, the verifier is frozen."""
    horizon: Literal["discounted_sum", "last", "current"] = "discounted_sum"
    """The scores in the reward of a turn: the current score and discounted later scores (`discounted_sum`), the score of the
    last turn (`last`), or the current score (`current`)."""
    sharing: Literal["all", "individual"] = "all"
    """The agents whose scores are included in the reward of a turn: all agents (`all`), or only the agent of the turn
    (`individual`)."""
    discount: float = Field(default=1.0, ge=0.0, le=1.0)
    """γ, the discount of later scores in the reward of a turn. This setting is used only with `horizon: discounted_sum`."""
    influence: tuple[float, float, float, float] = NO_INFLUENCE
    """The weights α0, α1, α2, α3 of the influence terms."""
    correctness: Literal["score", "label"] = "score"
    """How the influence terms decide whether an answer is correct: by the score v (`score`), or by the environment's score
    (`label`, with `workflow.score_rounds: true`)."""
    gae: TurnwiseGAE = TurnwiseGAE()

    @model_validator(mode="after")
    def _consistent(self) -> MAPoRL:
        if self.team_reward != "mean":
            raise ValueError("`maporl` does not use `team_reward`; remove it, and set `algorithm.sharing`")
        if self.refresh is not None and self.verifier is None:
            raise ValueError(
                "`refresh` trains a verifier, but `verifier` is not set. Set it to a folder, or remove `refresh`"
            )
        if isinstance(self.verifier, tuple) and not self.verifier:
            raise ValueError("`verifier` is an empty list. Add a folder, or set it to null")
        if self.refresh is not None and len(self.folders) > 1:
            raise ValueError(
                "`refresh` trains one verifier, but `verifier` lists several. Keep one, or remove `refresh`"
            )
        return self

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of all verifiers."""
        if self.verifier is None:
            return ()
        return (self.verifier,) if isinstance(self.verifier, str) else self.verifier

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        row = actor_critic_row(self, self.name, "local", credit=GAECredit(self.gae, self.rewards))
        labels = self.correctness == "label" and self.influence != NO_INFLUENCE
        judge: tuple[VerifierScores, ...] = ()
        if self.folders:
            first, *others = self.folders
            judge = (VerifierScores(first, self.least_auc, self.refresh, tuple(others), self.together),)
        data = replace(row.data, scores=self.verifier is None or labels)
        return replace(row, data=data, needs=(*row.needs, *judge), returns=None)

    def rewards(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, float]:
        """Return the reward of every turn, which is R_t^i plus the influence terms."""
        rewards = {
            TurnKey(g, e, index): reward
            for g, e, episode in valid_episodes(groups)
            for index, reward in self._of_episode((g, e), episode, signals).items()
        }
        return self.umad.with_influence(rewards, groups, signals)

    def _of_episode(self, place: tuple[int, int], episode: Episode, signals: Signals) -> Mapping[int, float]:
        own = {agent: turns for agent in episode.agents if (turns := episode.by(agent))}
        if not own:
            return {}
        scores: dict[int, float] = {}
        for turn in itertools.chain(*own.values()):
            score = signals.score.get(TurnKey(*place, turn.index))
            scores[turn.index] = _label(turn) if score is None else score
        score_TA = _by_turn(own, lambda turn: scores[turn.index])
        # With `sharing: all`, every agent gets the mean score of all agents at the turn.
        counted_TA = score_TA
        if self.sharing == "all":
            counted_TA = score_TA.mean(dim=-1, keepdim=True).expand(score_TA.shape)
        if self.horizon == "discounted_sum":
            reward_TA = shaping.maporl_discounted_sum(score_TA, counted_TA, gamma=self.discount)
        elif self.horizon == "last":
            reward_TA = counted_TA[-1:].expand(counted_TA.shape)
        else:
            reward_TA = counted_TA
        influence_TA = torch.zeros_like(score_TA)
        if self.influence != NO_INFLUENCE and len(own) > 1:
            correct_TA = score_TA if self.correctness == "score" else _by_turn(own, _label)
            influence_TA = shaping.maporl_influence(correct_TA > 0.5, alpha=self.influence)
        rewards: dict[int, float] = {}
        for a, turns in enumerate(own.values()):
            for t, turn in enumerate(turns):
                # The last answer stays valid in later rounds; their influence terms are placed on its turn.
                influence = influence_TA[t:, a].sum() if turn is turns[-1] else influence_TA[t, a]
                rewards[turn.index] = (
                    float(reward_TA[t, a] + influence) + self.penalties.of(turn) * turn.trained
                )
        return rewards


def _by_turn(own: Mapping[str, tuple[Turn, ...]], value: Callable[[Turn], float]) -> Tensor:
    """Return the values of all answers as a tensor of shape (T, A) for T debate turns and A agents; an agent's last answer is repeated."""
    length = max(len(turns) for turns in own.values())
    columns = []
    for turns in own.values():
        values = [value(turn) for turn in turns]
        columns.append(torch.tensor(values + values[-1:] * (length - len(values)), dtype=torch.float64))
    return torch.stack(columns, dim=-1)


def _label(turn: Turn) -> float:
    if turn.score is None:
        raise ConfigError(
            f"Turn {turn.index} of agent '{turn.agent}' has no score. Set `workflow.score_rounds: true`, or set `algorithm.verifier` "
            "to the folder of a trained verifier (with `correctness: score`)."
        )
    return turn.score
