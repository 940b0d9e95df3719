"""Compute log-probs of the policies' own turns under frozen teachers.

A teacher is the path of a model, or the PEFT folder of an adapter with the same base model as the policy that learns from it.
The teacher reads the exact tokens that were sampled, so teacher and policy must have the same tokeniser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kapelle.algorithms.signals.reference import samples_for
from kapelle.errors import ConfigError, ContextError, did_you_mean
from kapelle.models.adapters import read_lora
from kapelle.rows import Beside, Learners, ReadsTokens, Sampled, TurnKey
from kapelle.runtime.on_demand import Tensor
from kapelle.team import Policy, Team

TEACHER = "teacher"
"""The name of the signal, which is used as `signals[TEACHER]`."""


@dataclass(frozen=True, slots=True)
class TeacherLogProbs(Beside, ReadsTokens):
    """A signal that computes `signals[TEACHER]`: the log-probs of every trained turn under its teacher.

    The log-probs have shape (T,) and are computed at the sampling temperature of the turn.
    """

    teachers: str | Mapping[str, str]
    """The path or folder of one teacher for all policies, or a mapping from policies to teachers."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, Tensor]]:
        """Return the log-probs of all trained turns under their teachers. Raises ContextError if a turn is too long for its teacher."""
        samples = samples_for(step, self.readers(step.team))
        for sample in samples.values():
            context = engine.renderer(sample.learner).context
            if len(sample.tokens) > context:
                raise ContextError(
                    f"A turn and its prompt have {len(sample.tokens)} tokens, but the context of '{sample.learner}' is "
                    f"{context} tokens. Use a teacher with a longer context, or lower the agents' `sampling.max_tokens`."
                )
        return {TEACHER: dict(zip(samples, engine.score(list(samples.values())), strict=True))}

    def readers(self, team: Team) -> Mapping[str, str]:
        """Return a mapping from policies to the names of their teachers."""
        return {policy: f"{TEACHER}:{policy}" for policy in team.trained}

    def beside(self, team: Team) -> Team:
        """Return the team with the teachers added.

        Raises ConfigError if a policy has no teacher, and ModelError for an invalid folder.
        """
        named = (
            dict.fromkeys(team.trained, self.teachers) if isinstance(self.teachers, str) else self.teachers
        )
        for policy in named:
            if policy not in team.trained:
                raise ConfigError(
                    f"`algorithm.teacher` names '{policy}', which is not a trained policy of this team."
                    f"{did_you_mean(policy, team.trained)}"
                )
        for policy in team.trained:
            if policy not in named:
                raise ConfigError(
                    f"Policy '{policy}' has no teacher. Set `algorithm.teacher.{policy}`, or set `algorithm.teacher` to "
                    "one path for all policies."
                )
            team = _with_teacher(team, policy, named[policy])
        return team


def _with_teacher(team: Team, policy: str, path: str) -> Team:
    """Return the team with the teacher of one policy added."""
    name, student = f"{TEACHER}:{policy}", team.policies[policy]
    if not (Path(path) / "adapter_config.json").is_file():
        return team.with_beside(Policy(name, f"{TEACHER}:{path}", trained=False), path)
    # The adapter needs the student's initial base. A student without an adapter changes its base, so the teacher loads a
    # copy.
    base = student.base if student.lora is not None else f"{student.base}@{TEACHER}"
    adapter = Policy(name, base, read_lora(Path(path)), past=path, trained=False)
    return team.with_beside(adapter, team.bases[student.base])
