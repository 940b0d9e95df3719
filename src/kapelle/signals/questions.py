"""A turn as a question to a learner: which tokens it reads, and at which of them it is asked.

Shapes: T completion tokens of one turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from kapelle.algorithm import CriticSpec
from kapelle.errors import ContextError
from kapelle.rows import Reader, Sample
from kapelle.team import Team
from kapelle.types import Episode, Message, Turn

Readers = Callable[[str], Reader]
"""Learner → how text becomes the tokens of the model that it stands on."""


def policy_sample(turn: Turn, team: Team, learner: str, columns: Mapping[str, Tensor]) -> Sample:
    """Return a turn as a question to `learner` (its policy or a reference) about its completion tokens."""
    start = len(turn.prompt_ids)
    tokens = turn.prompt_ids + turn.completion_ids
    return Sample(
        learner,
        tokens,
        tuple(range(start, len(tokens))),
        columns,
        temperature=team[turn.agent].sampling.temperature,
    )


def critic_sample(
    episode: Episode,
    turn: Turn,
    team: Team,
    need: CriticSpec,
    columns: Mapping[str, Tensor],
    after: bool = False,
) -> Sample:
    """Return a turn as a question to its agent's critic: values before its tokens, or before the turn.

    `need.view` is `local` (what the agent itself read) or `central` (see `central_prompt`). With `after`, the
    one value after the last token is asked for instead.
    """
    prompt = turn.prompt_ids if need.view == "local" else central_prompt(episode, turn)
    tokens = prompt + turn.completion_ids
    asked = tokens if need.unit == "token" else tokens[: len(prompt) + 1]
    places = (len(tokens),) if after else tuple(range(len(prompt), len(asked)))
    return Sample(team.critic_of[turn.agent], tokens if after else asked, places, columns)


def answer_sample(
    learner: str, reader: Reader, question: str, text: str, columns: Mapping[str, Tensor]
) -> Sample:
    """Return an answer as a question to a verifier: its one value, after the last token of the text.

    It reads the question and the text in tokens of its own model, whoever said it. Raises ContextError when they
    are too long for it.
    """
    tokens = reader.start([Message("user", question)]) + reader.completion(text)
    if len(tokens) > reader.context:
        raise ContextError(
            f"Question and answer have {len(tokens)} tokens; the verifier's model reads {reader.context}. Use a model "
            "with a longer context for the verifier, or lower the agents' `sampling.max_tokens`."
        )
    return Sample(learner, tokens, (len(tokens),), columns)


def judged_sample(
    episode: Episode,
    turn: Turn,
    team: Team,
    need: CriticSpec,
    columns: Mapping[str, Tensor],
    readers: Readers | None,
) -> Sample:
    """Return a turn as a question to its agent's critic in any view; `answer` needs `readers`."""
    if need.view != "answer":
        return critic_sample(episode, turn, team, need, columns)
    assert readers is not None, "text needs a reader"
    learner = team.critic_of[turn.agent]
    return answer_sample(learner, readers(learner), episode.task.question, turn.text, columns)


def central_prompt(episode: Episode, turn: Turn) -> tuple[int, ...]:
    """Return everything that all agents saw and said before a turn, private views included, as tokens.

    First the turns that were over when this one's prompt was fixed, in time order, then what agents were
    being asked at that same moment, and last this turn's own prompt. Words that an agent has read before are not repeated. What others
    say at the same moment is not in it: a baseline must not depend on simultaneous actions it cannot know.
    """
    tokens: list[int] = []
    last: dict[str, Turn] = {}
    for past in episode.turns[: turn.seen]:
        tokens.extend(_news(past, last.get(past.agent)))
        tokens.extend(past.completion_ids)
        last[past.agent] = past
    for other in episode.turns[turn.seen :]:
        if other.seen <= turn.seen and other.agent != turn.agent:
            tokens.extend(_news(other, last.get(other.agent)))
    return (*tokens, *_news(turn, last.get(turn.agent)))


def _news(turn: Turn, before: Turn | None) -> tuple[int, ...]:
    if before is None:
        return turn.prompt_ids
    known = before.prompt_ids + before.completion_ids
    return turn.prompt_ids[len(known) :] if turn.prompt_ids[: len(known)] == known else turn.prompt_ids
