"""Compute log-probs of the policies' own turns under the same weights with a longer prompt: the self-teacher.

The prompt of the self-teacher is the prompt of the turn followed by one more message, the *context*: what the environment reported,
a correct answer, or another agent's critique. The tokens of the completion are exactly those that were sampled. The tokens of the
conversation before the turn's last messages are also kept, unless the agent's chat template has changed them since.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from kapelle.algorithms.signals.reference import ReferenceLogProbs
from kapelle.algorithms.signals.samples import policy_sample
from kapelle.environment import EXPLANATIONS
from kapelle.errors import ConfigError
from kapelle.rows import Learners, Reader, Sample, Sampled, TurnKey, agent_renderer
from kapelle.runtime.on_demand import Tensor
from kapelle.team import reference_name
from kapelle.types import Episode, Group, Json, Message, Turn

SELF_TEACHER = "self_teacher"
"""The name of the signal, which is used as `signals[SELF_TEACHER]`. Turns without a context have no entry."""
OPENINGS: Mapping[str, str] = {
    "sibling": "A correct answer to this task:",
    "solution": "The reference solution of this task:",
    "feedback": "Feedback on an earlier answer to this task:",
}
"""Mapping from each source of a context to the line before the text. Any other source is the name of an agent."""


@dataclass(frozen=True, slots=True)
class SelfTeacherLogProbs:
    """A signal that computes `signals[SELF_TEACHER]`: the log-probs of each trained turn with a context, of shape (T,)."""

    context: tuple[str, ...]
    """Sources of the context, of which the first one with a text is used: a key of `OPENINGS` or the name of an agent."""
    success: float
    """The lowest score of an episode that counts as a correct answer."""
    is_slow: bool = False
    """Whether the reference of each policy computes the log-probs, in place of the current weights."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, Tensor]]:
        """Return the log-probs of all trained turns that have a context which fits into the model's own context.

        Raises ConfigError if the prompts of the environment are not conversations.
        """
        samples: dict[TurnKey, Sample] = {}
        for key, turn in step.trained:
            group = step.groups[key.group]
            if group.task.rendered:
                raise ConfigError(
                    "`self_distill` adds a message to the conversation of an agent, but this environment gives whole prompts as one "
                    "text. Turn off its setting for rendered prompts."
                )
            text = context_of(group, key.episode, turn, self.context, self.success)
            if text is None:
                continue
            learner = reference_name(turn.policy) if self.is_slow else turn.policy
            reader = agent_renderer(step.team[turn.agent], engine.renderer(learner))
            prompt = prompt_with(reader, group.episodes[key.episode], turn, Message("user", text))
            tokens = prompt + turn.completion_ids
            if len(tokens) <= reader.context:
                samples[key] = replace(
                    policy_sample(turn, step.team, learner, {}),
                    tokens=tokens,
                    targets=tuple(range(len(prompt), len(tokens))),
                    routing=None,  # experts were recorded for the tokens of the shorter prompt
                    begin=len(prompt),
                )
        return {SELF_TEACHER: dict(zip(samples, engine.score(list(samples.values())), strict=True))}


@dataclass(frozen=True, slots=True)
class SlowSelfTeacher(ReferenceLogProbs):
    """The same signal, computed with the reference of each policy."""

    own: SelfTeacherLogProbs

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, Tensor]]:
        """Return the log-probs under the references."""
        return self.own.gather(step, engine)


def prompt_with(reader: Reader, episode: Episode, turn: Turn, message: Message) -> tuple[int, ...]:
    """Return the prompt of a turn with one more message at its end, as token ids. Earlier completions keep their sampled tokens."""
    messages = [*turn.new_messages, message]
    for past in reversed(episode.turns[: turn.completed_before]):
        known = past.prompt_ids + past.completion_ids
        if past.agent == turn.agent and known and turn.prompt_ids[: len(known)] == known:
            return tuple(reader.extend(past.prompt_ids, past.completion_ids, messages))
    return tuple(reader.start(messages))  # `new_messages` is then the whole conversation


def context_of(group: Group, number: int, turn: Turn, sources: Sequence[str], success: float) -> str | None:
    """Return the message that the self-teacher reads in addition to the prompt of a turn, or None if no source has a text.

    The turn belongs to the episode with this number. With `sibling`, the text is the same turn of the same agent in another episode
    of the group whose score is at least `success`. With `solution`, it is the field `solution` or else `answer` of the task's data.
    With `feedback`, it is what the agent reads next, or after its last turn what the environment reports (`environment.EXPLANATIONS`).
    With the name of an agent, it is what this agent wrote next.
    """
    episode = group.episodes[number]
    for source in sources:
        if source == "sibling":
            text = _sibling(group, episode, turn, success)
        elif source == "solution":
            data = episode.task.data
            text = _text(data.get("solution", data.get("answer")))
        elif source == "feedback":
            text = _feedback(episode, turn)
        else:
            later = (each.words for each in episode.by(source) if each.completed_before > turn.index)
            text = next(later, "")
        if text.strip():
            opening = OPENINGS.get(source, f"{source} on an earlier answer to this task:")
            return f"{opening}\n\n{text}\n\nAnswer the original task."
    return None


def _sibling(group: Group, episode: Episode, turn: Turn, success: float) -> str:
    """Return the same turn of the same agent and role in the first other episode that succeeded, or an empty string."""
    place = sum(each.index < turn.index for each in episode.by(turn.agent))
    role = episode.roles.get(turn.agent)
    for other in group.valid:
        score = other.total(turn.agent) if other.success is None else other.success
        own = other.by(turn.agent)
        is_alike = other is not episode and other.roles.get(turn.agent) == role
        if is_alike and score >= success and place < len(own):
            return own[place].words
    return ""


def _feedback(episode: Episode, turn: Turn) -> str:
    """Return the messages between a turn and the next turn of its agent, or the environment's report after the last turn."""
    following = next((each for each in episode.by(turn.agent) if each.index > turn.index), None)
    if following is None:
        report = episode.info.get(EXPLANATIONS)
        return _text(report.get(turn.agent) if isinstance(report, dict) else report)
    # If the conversation was rendered again, the messages of earlier turns come first.
    read = list(takewhile(lambda each: each.role != "assistant", reversed(following.new_messages)))
    return "\n\n".join(each.content for each in reversed(read) if each.role != "system")


def _text(value: Json) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)
