"""Turns as samples for a learner: which tokens it reads, and which of them are targets.

Shapes: T completion tokens of one turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kapelle.algorithm import CriticSpec
from kapelle.errors import ContextError
from kapelle.rows import Reader, Sample
from kapelle.runtime.on_demand import Tensor
from kapelle.team import Team
from kapelle.types import Episode, Message, Turn

Readers = Callable[[str], Reader]
"""Learner → how text becomes the tokens of its model."""


def policy_sample(turn: Turn, team: Team, learner: str, columns: Mapping[str, Tensor]) -> Sample:
    """Return the sample of a turn's completion tokens for `learner` (its policy or a reference)."""
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
    readers: Readers | None = None,
    *,
    after: bool = False,
) -> Sample:
    """Return a turn's sample for its agent's critic: values before its tokens, or before the turn.

    `need.view` is `local` (what the agent itself read), `central` (see `central_prompt`), or `answer` (the task's question
    and the turn's text, as `readers` tokenise them). With `after`, the value after the last token is a target too, the
    last one; the view `answer` has no such value.
    """
    learner = team.critic_of[turn.agent]
    if need.view == "answer":
        assert readers is not None, "text needs a reader"
        return answer_sample(learner, readers(learner), episode.task.question, turn.text, columns)
    prompt = turn.prompt_ids if need.view == "local" else central_prompt(episode, turn)
    tokens = prompt + turn.completion_ids
    end = len(tokens) if need.unit == "token" else len(prompt) + 1
    places = tuple(range(len(prompt), end))
    if after:
        return Sample(learner, tokens, (*places, len(tokens)), columns)
    return Sample(learner, tokens[:end], places, columns)


def answer_sample(
    learner: str, reader: Reader, question: str, text: str, columns: Mapping[str, Tensor]
) -> Sample:
    """Return the sample of an answer to a question for a verifier; see `conversation_sample`."""
    return conversation_sample(learner, reader, [Message("user", question)], text, columns)


def conversation_sample(
    learner: str, reader: Reader, messages: Sequence[Message], text: str, columns: Mapping[str, Tensor]
) -> Sample:
    """Return a text's sample for a verifier: its one value, after the last token of the text.

    The verifier reads the conversation before it and the text in tokens of its own model, whichever agent answered.
    Raises ContextError if they are too long.
    """
    tokens = reader.start(messages) + reader.completion(text)
    if len(tokens) > reader.context:
        raise ContextError(
            f"Question and answer have {len(tokens)} tokens; the verifier's model reads {reader.context}. Use a model "
            "with a longer context for the verifier, or lower the agents' `sampling.max_tokens`."
        )
    return Sample(learner, tokens, (len(tokens),), columns)


def central_prompt(episode: Episode, turn: Turn) -> tuple[int, ...]:
    """Return everything that all agents read and wrote before a turn, private views included, as tokens.

    First the turns that were over when this one's prompt was fixed, in time order, then the prompts of other agents at
    the same moment, and last this turn's own prompt. Tokens that an agent has read before are not repeated. The
    answers of others at the same moment are left out: a baseline must not depend on simultaneous actions.
    """
    tokens: list[int] = []
    last: dict[str, Turn] = {}
    for past in episode.turns[: turn.seen]:
        tokens.extend(_new_tokens(past, last.get(past.agent)))
        tokens.extend(past.completion_ids)
        last[past.agent] = past
    for other in episode.turns[turn.seen :]:
        if other.seen <= turn.seen and other.agent != turn.agent:
            tokens.extend(_new_tokens(other, last.get(other.agent)))
    return (*tokens, *_new_tokens(turn, last.get(turn.agent)))


def _new_tokens(turn: Turn, before: Turn | None) -> tuple[int, ...]:
    if before is None:
        return turn.prompt_ids
    known = before.prompt_ids + before.completion_ids
    return turn.prompt_ids[len(known) :] if turn.prompt_ids[: len(known)] == known else turn.prompt_ids
