"""Store groups of earlier steps for replay, and draw the groups that a step trains on."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kapelle.algorithms.signals.samples import policy_sample
from kapelle.features.replay.settings import ReplayConfig
from kapelle.rows import turns_of
from kapelle.runs.episode_json import dump_groups, load_groups
from kapelle.runtime.randomness import derive_seed
from kapelle.training.feature import Feature, StartedRun, StepInProgress
from kapelle.types import Group

Kept = tuple[tuple[int, Group], ...]
"""Pairs of a step and a group that this step collected, oldest first."""


def replayed(kept: Kept, settings: ReplayConfig, step: int, seed: int, fresh: Sequence[Group]) -> Kept:
    """Return the past groups that a step trains on in addition to its new groups `fresh`.

    The groups are drawn with a seed, from other tasks than those of the new groups.
    """
    now = {group.task.id for group in fresh}
    free = [
        (when, group) for when, group in kept if group.task.id not in now and _young(settings, step, when)
    ]
    draw = random.Random(derive_seed(seed, "replay", step))
    return tuple(sorted(draw.sample(free, min(settings.groups, len(free))), key=lambda each: each[0]))


def remembered(kept: Kept, settings: ReplayConfig, step: int, fresh: Sequence[Group]) -> Kept:
    """Return the stored groups after a step.

    New groups with both successes and failures are added, and the oldest groups are removed.
    """
    mixed = []
    for group in fresh:
        scored = [each.success >= 1.0 for each in group.valid if each.success is not None]
        if any(scored) and not all(scored):
            mixed.append((step, group))
    newer = {group.task.id for _, group in mixed}
    before = [each for each in kept if each[1].task.id not in newer and _young(settings, step + 1, each[0])]
    return (*before, *mixed)[-settings.capacity :]


def _young(settings: ReplayConfig, step: int, when: int) -> bool:
    return settings.max_age is None or step - when <= settings.max_age


class EpisodeReplay(Feature):
    """Adds groups of earlier steps to the batch of a step."""

    def __init__(self, settings: ReplayConfig, run: StartedRun) -> None:
        self._settings, self._run = settings, run
        self.kept: Kept = ()

    def after_rollouts(self, step: StepInProgress) -> None:
        """Draw earlier groups for this step, and store groups of this step."""
        drawn = replayed(self.kept, self._settings, step.number, self._run.config.seed, step.groups)
        self.kept = remembered(self.kept, self._settings, step.number, step.groups)
        step.earlier += [group for _, group in drawn]
        step.metrics |= {"replay_groups": float(len(drawn))}
        if drawn:
            step.metrics["replay_age"] = sum(step.number - when for when, _ in drawn) / len(drawn)

    def before_update(self, step: StepInProgress) -> None:
        """Measure how much the weights have changed since the earlier groups were sampled."""
        turns = turns_of(step.earlier)
        samples = [policy_sample(turn, step.setup.team, turn.policy, {}) for _, turn in turns]
        scored = self._run.engine.score(samples) if samples else ()
        gaps = [now_T - torch.tensor(t.logprobs) for now_T, (_, t) in zip(scored, turns, strict=True)]
        if gaps:
            step.metrics["replay_log_ratio"] = float(torch.cat(gaps).abs().mean())

    def forget(self) -> None:
        """Remove all stored groups."""
        self.kept = ()

    def state(self) -> dict[str, Any]:
        """Return the stored groups as JSON lines, and the steps that sampled them."""
        return {
            "groups": [dump_groups(step, [group]).decode("ascii") for step, group in self.kept],
            "steps": [step for step, _ in self.kept],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""
        groups = [load_groups(map(json.loads, text.splitlines()))[0] for text in state["groups"]]
        self.kept = tuple(zip(state["steps"], groups, strict=True))
