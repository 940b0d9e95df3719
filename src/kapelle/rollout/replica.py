"""Build a copy of a run's team in another process from the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kapelle.engines.rollout.protocol import RolloutEngine
from kapelle.models.weights import hash_of_base
from kapelle.rollout.outcomes import FirstFailures
from kapelle.rollout.setup import RolloutSetup, make_rollout_setup
from kapelle.rollout.workers.pool import HeldHere, Hold
from kapelle.runs.timeline import Timeline
from kapelle.runtime.randomness import keep_imports_from_drawing
from kapelle.settings.schema import RunConfig
from kapelle.setup.model_loading import build_engine, load_models
from kapelle.setup.recipe import resolve
from kapelle.setup.team_builder import build_algorithm, build_team
from kapelle.team import Policy, Team

Elsewhere = Callable[[RunConfig, Team], tuple[RolloutEngine, dict[str, str]]]
"""Function that returns the engine of the policies that other processes sample, and the hashes of the weights of their base models by
name."""


class TeamReplica:
    """A copy of the team with its models and rollout engine. The training process sends the trained weights."""

    def __init__(
        self,
        config: Mapping[str, Any],
        bases: Mapping[str, str],
        threads: int,
        hold: Hold = HeldHere,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """Build the team from resolved settings and the paths of the base models by name.

        Only the base models of policies that this process samples are loaded; critics and the policies of `elsewhere` are not loaded.
        The argument `hold` has the same meaning as in `make_rollout_setup`.
        """
        torch.set_num_threads(threads)
        keep_imports_from_drawing()
        self.config = resolve(config)
        self.algorithm = build_algorithm(self.config)
        team = build_team(self.config, self.algorithm)
        others, hashes = None, dict[str, str]()
        if elsewhere is not None:
            others, hashes = elsewhere(self.config, team)
        own = [
            policy for name, policy in team.policies.items() if others is None or name not in others.policies
        ]
        needed = {policy.base for policy in own}
        team = replace(team, bases={base: path for base, path in bases.items() if base in needed})
        models = load_models(team, self.config.model, {})
        self.hashes = {base: hash_of_base(model) for base, model in models.items()} | hashes
        """Mapping from the name of each base model to the hash of its weights."""
        for policy in own:
            if policy.lora is not None and policy.endpoint is None:
                models[policy.base].bank.add(policy.name, policy.lora, self.config.seed)
        self.setup = replace(
            make_rollout_setup(self.config, team, build_engine(self.config, models, team, others), hold=hold),
            first_failures=FirstFailures(self.config.training.max_failed_share),
        )
        self._loaded: dict[str, int] = {}

    @property
    def continuous_setup(self) -> RolloutSetup:
        """The setup for rolling out the groups of training steps."""
        return replace(self.setup, data=self.algorithm.data, timeline=Timeline())

    def load(self, policy: str, weights: Callable[[], Mapping[str, Tensor]], version: int) -> None:
        """Load a policy's weights unless the policy already has this version.

        The weights of version 0 are always loaded, because they may have changed.
        """
        if self._loaded.get(policy) != version or version == 0:
            self.setup.engine.load(policy, weights(), version)
            self._loaded[policy] = version


def moves(policy: Policy) -> bool:
    """Return whether the weights of a policy differ from its base model on disk."""
    return policy.endpoint is None and bool(policy.lora or policy.trained or policy.past)
