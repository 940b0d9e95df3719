"""Add the signal of a reward model to the algorithm before a model is loaded."""

from __future__ import annotations

from dataclasses import replace

from kapelle.algorithm import Algorithm
from kapelle.algorithms.signals.verifier import VerifierScores
from kapelle.errors import ConfigError
from kapelle.features.reward_model.settings import RewardModelConfig
from kapelle.setup.feature import FeaturePlan


class RewardModelPlan(FeaturePlan[RewardModelConfig]):
    """Adds the scores of the reward model to the signals of the algorithm."""

    def extend(self, row: Algorithm) -> Algorithm:
        """Return the algorithm with the scores as an additional signal.

        Raises ConfigError if the algorithm does not learn from rewards of turns.
        """
        if row.need(VerifierScores) or (row.data.scores and row.returns is None):
            raise ConfigError(
                f"`reward_model` is added to the environment's reward, but `{row.name}` is rewarded only by a verifier's scores. "
                f"Remove it, and set `algorithm.verifier: {self.settings.path}`."
            )
        if row.returns is None or not row.collects_episodes:
            raise ConfigError(
                f"`reward_model` is added to the rewards of turns, but `{row.name}` does not learn from such rewards. Remove it, or "
                "set an algorithm that does, for example "
                "`algorithm.name: grpo`."
            )
        if row.data.tree is not None:
            raise ConfigError(
                f"`reward_model` scores the turns of an episode, but `{row.name}` with a tree learns from the rewards of "
                "candidates. Remove it, or set `algorithm.tree: false`."
            )
        if row.data.interventions is not None:
            raise ConfigError(
                f"`reward_model` scores the turns of an episode, but `{row.name}` learns from the rewards of continued episodes. Remove "
                "it, or set an algorithm without continuations, for example `algorithm.name: grpo`."
            )
        return replace(
            row, needs=(*row.needs, VerifierScores(self.settings.path, refresh=self.settings.refresh))
        )
