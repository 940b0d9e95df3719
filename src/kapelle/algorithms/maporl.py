"""MAPoRL: debaters trained together by PPO, paid for their answers now and later and for moving one another.

2502.18439. v_t^i in [0, 1] scores agent i's answer at debate turn t: by a trained verifier (`verifier`, see
`verifier.py`), or by the environment where none is named (`workflow.score_rounds: true`). With γ = `discount` and
V_t the mean of the agents' scores at t (`sharing: all`) or the agent's own (`individual`):

    discounted_sum    R_t^i = [v_t^i + Σ_{t'>t} γ^{t'−t}·V_t'] / Σ_{t'≥t} γ^{t'−t}
    last              R_t^i = V_T        (T the last turn)
    current           R_t^i = V_t

Influence terms α0…α3 pay for correction and persuasion (`functional.shaping.maporl_influence`): helping others to
the truth pays, misleading them costs. "Right" is v > ½, or the environment's score where `correctness: label`;
the others are right when more than half of them are.

An agent that has stopped answering (its own consensus, `settled_after`) keeps the score of its last answer, which
is still valid: it enters the means of later turns, and its influence on others is paid on that last turn. Rounds that
were not played do not exist. The environment's rewards are not used: v takes their place.

Deviations. R_t holds the future already, so GAE does not pass it on from turn to turn by default (`gae.gamma_turn:
0`): each turn is an action of its own, as each is one PPO sample in the authors' code. That code seems to have α2
and α3 with other signs and places; here they follow the meaning in words. A team may share weights or have an adapter or
a model for each agent, or an adapter for each agent and turn as the authors' (`weights: {per_turn: 3}`); critics belong to
agents in either case.

A verifier that cannot tell right from wrong answers to one question pays noise: `least_auc` is the AUC that it must
have reached on held-out questions (see `training/held_out.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm
from kapelle.algorithms.ppo import ActorCritic, actor_critic_row
from kapelle.algorithms.shared.gae import GAEConfig, GAECredit
from kapelle.algorithms.signals.verifier import Together, VerifierScores
from kapelle.errors import ConfigError
from kapelle.features.reward_model.settings import RefreshConfig
from kapelle.functional import shaping
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.types import Episode, Group, Turn

NO_INFLUENCE = (0.0, 0.0, 0.0, 0.0)


class TurnwiseGAE(GAEConfig):
    """GAE that by default passes nothing on from turn to turn: R_t holds the future already."""

    gamma_turn: float = Field(default=0.0, ge=0.0, le=1.0)


class MAPoRL(ActorCritic):
    """Settings of MAPoRL."""

    name: Literal["maporl"] = "maporl"
    verifier: str | tuple[str, ...] | None = None
    """Folder of a trained verifier, or of several that judge together; null takes the environment's own score of each answer."""
    together: Together = "mean"
    """What several verifiers give an answer: the mean of their probabilities, or the least of them."""
    least_auc: float | None = Field(default=0.7, gt=0.5, le=1.0)
    """Least area under the curve that the verifier must have reached among answers to one held-out question, with an
    interval above ½, before it may pay; null lets any verifier pay."""
    refresh: RefreshConfig | None = None
    """Lets the verifier go on learning from graded answers of the team that it pays; null leaves it as it was saved."""
    horizon: Literal["discounted_sum", "last", "current"] = "discounted_sum"
    """Which scores pay a turn: this one and the discounted later ones, the last one, or this one."""
    sharing: Literal["all", "individual"] = "all"
    """Whether a turn is paid for the scores of all agents, or for its own agent's."""
    discount: float = Field(default=1.0, ge=0.0, le=1.0)
    """γ of R_t; read with `horizon: discounted_sum`."""
    influence: tuple[float, float, float, float] = NO_INFLUENCE
    """α0, α1, α2, α3."""
    correctness: Literal["score", "label"] = "score"
    """What decides which answers were right: v, or the environment's score (`workflow.score_rounds: true`)."""
    gae: TurnwiseGAE = TurnwiseGAE()

    @model_validator(mode="after")
    def _consistent(self) -> MAPoRL:
        if self.team_reward != "mean":
            raise ValueError(
                "`team_reward` means nothing here; `algorithm.sharing` decides whose scores count"
            )
        if self.refresh is not None and self.verifier is None:
            raise ValueError(
                "`refresh` lets a verifier go on learning, but the environment pays. Name one with `verifier`, or remove it"
            )
        if isinstance(self.verifier, tuple) and not self.verifier:
            raise ValueError("`verifier` is an empty list. Name a folder in it, or set it to null")
        if self.refresh is not None and len(self.folders) > 1:
            raise ValueError(
                "`refresh` lets one verifier go on learning, and `verifier` names several. Name one, or remove it"
            )
        return self

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of all verifiers."""
        if self.verifier is None:
            return ()
        return (self.verifier,) if isinstance(self.verifier, str) else self.verifier

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        row = actor_critic_row(self, self.name, "local", credit=GAECredit(self.gae, self.rewards))
        labels = self.correctness == "label" and self.influence != NO_INFLUENCE
        judge: tuple[VerifierScores, ...] = ()
        if self.folders:
            first, *others = self.folders
            judge = (VerifierScores(first, self.least_auc, self.refresh, tuple(others), self.together),)
        data = replace(row.data, scores=self.verifier is None or labels)
        return replace(row, data=data, needs=(*row.needs, *judge), returns=None)

    def rewards(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, float]:
        """Return R_t^i and what is paid for influence on others, for every turn."""
        paid = {
            TurnKey(g, e, index): reward
            for g, group in enumerate(groups)
            for e, episode in enumerate(group.episodes)
            if episode.error is None
            for index, reward in self._of_episode((g, e), episode, signals).items()
        }
        return self.umad.with_influence(paid, groups, signals) if self.umad.influence else paid

    def _of_episode(self, place: tuple[int, int], episode: Episode, signals: Signals) -> Mapping[int, float]:
        own = {agent: turns for agent in episode.agents if (turns := episode.by(agent))}
        if not own:
            return {}
        scores = {
            turn.index: signals.score.get(TurnKey(*place, turn.index))
            for turns in own.values()
            for turn in turns
        }
        score_TA = _standing(own, lambda turn: _label(turn) if (s := scores[turn.index]) is None else s)
        # Sharing `all`: every agent gets the mean score of all agents at the turn.
        counted_TA = score_TA
        if self.sharing == "all":
            counted_TA = score_TA.mean(dim=-1, keepdim=True).expand(score_TA.shape)
        if self.horizon == "discounted_sum":
            reward_TA = shaping.maporl_discounted_sum(score_TA, counted_TA, gamma=self.discount)
        elif self.horizon == "last":
            reward_TA = counted_TA[-1:].expand(counted_TA.shape)
        else:
            reward_TA = counted_TA
        moved_TA = torch.zeros_like(score_TA)
        if self.influence != NO_INFLUENCE and len(own) > 1:
            right_TA = score_TA if self.correctness == "score" else _standing(own, _label)
            moved_TA = shaping.maporl_influence(right_TA > 0.5, alpha=self.influence)
        paid: dict[int, float] = {}
        for a, turns in enumerate(own.values()):
            for t, turn in enumerate(turns):
                # The influence of an answer that is still valid is paid on the turn that gave it.
                moved = moved_TA[t:, a].sum() if turn is turns[-1] else moved_TA[t, a]
                paid[turn.index] = float(reward_TA[t, a] + moved) + self.penalties.of(turn) * turn.trained
        return paid


def _standing(own: Mapping[str, tuple[Turn, ...]], value: Callable[[Turn], float]) -> Tensor:
    """Return the value `_TA` of every agent's standing answer at every turn."""
    length = max(len(turns) for turns in own.values())
    columns = []
    for turns in own.values():
        values = [value(turn) for turn in turns]
        columns.append(torch.tensor(values + values[-1:] * (length - len(values)), dtype=torch.float64))
    return torch.stack(columns, dim=-1)


def _label(turn: Turn) -> float:
    if turn.score is None:
        raise ConfigError(
            f"Turn {turn.index} of agent '{turn.agent}' has no score. Set `workflow.score_rounds: true`, or name a "
            "trained verifier with `algorithm.verifier` (and `correctness: score`)."
        )
    return turn.score
