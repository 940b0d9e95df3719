"""MADA-RL: an agent that reads other answers is credited for what it adds to them (arXiv:2607.18006).

    A = r − mean score of the answers that the agent has read        (critics)
    A = r − mean r of the agent's same turn in the other episodes    (generators)

r is the score of the turn's own answer. A turn is a critic's if other agents had answered when its prompt was created; the
last answer of each of them counts. Otherwise, the turn is a generator's, with the leave-one-out baseline of RLOO. A critic
that repeats the answers it has read has an advantage of about 0: it gains only by correcting them. Both baselines are
independent of the turn's own tokens, so the gradient of the turn's expected score is unbiased.

Scores come from workflows that score every answer (`score_rounds: true` of a debate), or are the terminal rewards of agents
that answer once (`score_drafts: true` of a summary).

Deviations from the paper:

- The equation is that of the paper's abstract, and the rest is as in the other algorithms of kapelle. In particular, a
  generator is not rewarded for what critics make of its answer, and advantages are not divided by a standard deviation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

from pydantic import model_validator

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import (
    LEAVE_ONE_OUT,
    Earlier,
    Member,
    compare,
    place_of,
    valid_episodes,
)
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.errors import AlgorithmError
from kapelle.rows import Signals, TurnKey
from kapelle.types import Episode, Group, Turn


class MADARL(MonteCarlo):
    """Settings of MADA-RL, which compares an answer with the answers that its agent has read."""

    name: Literal["mada_rl"] = "mada_rl"

    @model_validator(mode="after")
    def _own_scores(self) -> MADARL:
        if self.team_reward != "mean":
            raise ValueError("`mada_rl` rewards each answer by its own score; remove `team_reward`")
        return self

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the score of each turn minus the mean score of the answers that it has read, or minus a group baseline.

        Raises AlgorithmError if an answer has no score.
        """
        reward: dict[TurnKey, float] = {}
        for g, e, episode in valid_episodes(groups):
            trained = [turn for turn in episode.turns if turn.trained]
            reward |= {
                TurnKey(g, e, turn.index): _score(episode, turn) + self.forms.of(turn) for turn in trained
            }
        shaped = self.umad.with_influence(reward, groups, signals)
        advantage: dict[TurnKey, float] = {}
        generators: list[Member] = []
        for g, e, episode in valid_episodes(groups):
            for k, movers in enumerate(episode.rounds(trained=True)):
                for agent, turn in movers.items():
                    key = TurnKey(g, e, turn.index)
                    if read := answers_read(episode, turn):
                        advantage[key] = shaped[key] - fmean(_score(episode, each) for each in read)
                    else:
                        like = (*place_of(episode, agent), k)
                        tokens = len(turn.completion_ids)
                        generators.append(Member((g, agent, k), shaped[key], tokens, (key,), like))
        return spread(self, groups, advantage | compare(generators, LEAVE_ONE_OUT, earlier))


def answers_read(episode: Episode, turn: Turn) -> list[Turn]:
    """Return the last turn of every other agent that was complete when the prompt of the turn was created."""
    before = episode.turns[: turn.completed_before]
    return list({each.agent: each for each in before if each.agent != turn.agent}.values())


def _score(episode: Episode, turn: Turn) -> float:
    """Return the score of a turn's answer, or the terminal reward of its agent if the turn is the agent's last."""
    if turn.score is not None:
        return turn.score
    if turn.agent not in episode.rewards or episode.by(turn.agent)[-1] is not turn:
        raise AlgorithmError(
            f"Algorithm 'mada_rl': turn {turn.index} of agent '{turn.agent}' has no score. Use a workflow that scores every answer: "
            "`debate` with `score_rounds: true`, or `summary` with `score_drafts: true`."
        )
    return turn.reward + episode.rewards[turn.agent]
