"""Create samples of turns. A sample defines which tokens a learner reads, and which of them are targets.

A critic with the same base model as its agents reads the exact tokens that the agents read and sampled. A critic with a
different model (`team.critic_model`) reads the same conversation as text, with its own chat template and tokeniser. The value
before a token of the agent is then the value after the last critic token that ends before the agent's token, so the baseline
is independent of the action.

Shapes: T completion tokens of one turn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import TypeVar

from kapelle.algorithm import CriticSpec
from kapelle.errors import ContextError
from kapelle.rows import Reader, Sample
from kapelle.runtime.on_demand import Tensor
from kapelle.team import Team
from kapelle.types import Episode, Image, Message, Turn, images_in

T = TypeVar("T")
Ids = tuple[int, ...]
Readers = Callable[[str], Reader]
"""A function from the name of a learner to the reader that converts text to tokens of the learner's model."""


def policy_sample(turn: Turn, team: Team, learner: str, columns: Mapping[str, Tensor]) -> Sample:
    """Return the sample of a turn for `learner`, which is the turn's policy or its reference. The targets are the completion tokens."""
    start = len(turn.prompt_ids)
    tokens = turn.prompt_ids + turn.completion_ids
    return Sample(
        learner,
        tokens,
        tuple(range(start, len(tokens))),
        columns,
        temperature=team[turn.agent].sampling.temperature,
        images=turn.images,
        routing=turn.routing,
        constraint=turn.constraint,
        begin=start,
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
    """Return the sample of a turn for its critic, with values before its tokens, before the turn, or after the turn (`need.unit`).

    The view `need.view` is `local` (what the agent itself read), `central` (see `central_prompt`), or `answer` (the task's
    question and the turn's text). With `after`, the last target is the value after the last token; the view `answer` has no
    such value. The argument `readers` is required for the view `answer` and for critics that read text.
    """
    learner = team.critic_of[turn.agent]
    if need.view == "answer":
        assert readers is not None, "text needs a reader"
        ends = () if need.ends is None else need.ends(episode.task.question, turn.text)
        question = episode.task.prompt_messages
        return conversation_sample(learner, readers(learner), question, turn.text, columns, ends)
    if team.critics[learner].reads_text:
        assert readers is not None, "text needs a reader"
        return _text_sample(episode, turn, learner, need, columns, readers, after=after)
    prompt = turn.prompt_ids
    if need.view != "local":
        prompt = central_prompt(episode, turn, answered=need.unit == "after")
    tokens = prompt + turn.completion_ids
    end = len(tokens) if need.unit == "token" else len(prompt) + 1
    places = tuple(range(len(prompt), end))
    images = turn.images if need.view == "local" else _central(episode, turn, _new_images, lambda _: ())
    if need.unit == "after":
        return Sample(learner, tokens, (len(tokens),), columns, images=images)
    if after:
        return Sample(learner, tokens, (*places, len(tokens)), columns, images=images)
    return Sample(learner, tokens[:end], places, columns, images=images)


def conversation_sample(
    learner: str,
    reader: Reader,
    messages: Sequence[Message],
    text: str,
    columns: Mapping[str, Tensor],
    ends: Sequence[int] = (),
) -> Sample:
    """Return the sample of a string for a verifier, with a value at each of the `ends` (in characters) and a value after the last token.

    The verifier reads the conversation and the string as tokens of its own model, for any agent. If a part of the string ends
    inside a token, its value is placed after that token. If several parts end in the same token, the values of the earlier
    parts move to earlier tokens; if there are too few tokens, the first parts have no value. Raises ContextError if the
    tokens exceed the context of the verifier's model.
    """
    start, written = reader.start(messages), reader.completion(text)
    tokens = start + written
    if len(tokens) > reader.context:
        raise ContextError(
            f"Question and answer have {len(tokens)} tokens, but the context of the verifier's model is {reader.context} "
            "tokens. Use a model with a longer context for the verifier, or lower the agents' `sampling.max_tokens`."
        )
    closing = len(reader.completion(""))
    targets = [len(tokens)]
    for end in reversed(ends):
        part = reader.completion(text[:end])
        part = part[: len(part) - closing]
        same = next(
            (k for k, ids in enumerate(zip(part, written, strict=False)) if ids[0] != ids[1]), len(part)
        )
        # If the part ends inside a token of the text, its tokens differ from there on.
        end_token = len(start) + (same if same == len(part) else same + 1)
        if (target := min(end_token, targets[-1] - 1)) > len(start):
            targets.append(target)
    return Sample(learner, tokens, tuple(reversed(targets)), columns)


def central_prompt(episode: Episode, turn: Turn, *, answered: bool = False) -> tuple[int, ...]:
    """Return everything that all agents read and wrote before a turn, including private views, as tokens.

    The order is: first the turns that had ended when the turn's prompt was fixed, in time order; then the prompts of
    simultaneous turns of other agents; then the turn's own prompt. Tokens that an agent has read before appear only once.
    Simultaneous completions are excluded, because a baseline must be independent of simultaneous actions. With `answered`,
    simultaneous completions follow their prompts, as Q values require.
    """
    return _central(episode, turn, _new_tokens, lambda past: past.completion_ids, answered=answered)


def _central(
    episode: Episode,
    turn: Turn,
    new: Callable[[Turn, Turn | None], tuple[T, ...]],
    completion: Callable[[Turn], tuple[T, ...]],
    *,
    answered: bool = False,
) -> tuple[T, ...]:
    """Return the items of one kind (tokens or images) in the order of `central_prompt`.

    The function `new` returns the items that the prompt of a turn adds after its agent's last turn. The function `completion`
    returns the items of the completion.
    """
    items: list[T] = []
    last: dict[str, Turn] = {}
    for past in episode.turns[: turn.completed_before]:
        items.extend(new(past, last.get(past.agent)))
        items.extend(completion(past))
        last[past.agent] = past
    for other in episode.turns[turn.completed_before :]:
        if other.completed_before <= turn.completed_before and other.agent != turn.agent:
            items.extend(new(other, last.get(other.agent)))
            items.extend(completion(other) if answered else ())
    return (*items, *new(turn, last.get(turn.agent)))


def _new_tokens(turn: Turn, before: Turn | None) -> tuple[int, ...]:
    if before is None:
        return turn.prompt_ids
    known = before.prompt_ids + before.completion_ids
    return turn.prompt_ids[len(known) :] if turn.prompt_ids[: len(known)] == known else turn.prompt_ids


def _new_images(turn: Turn, before: Turn | None) -> tuple[Image, ...]:
    """Return the images that belong to the tokens of `_new_tokens`."""
    if before is None or turn.prompt_ids == _new_tokens(turn, before):
        return turn.images
    return turn.images[len(before.images) :]


# -------- Samples of text, for a critic whose model differs from the agent's


def _text_sample(
    episode: Episode,
    turn: Turn,
    learner: str,
    need: CriticSpec,
    columns: Mapping[str, Tensor],
    readers: Readers,
    *,
    after: bool,
) -> Sample:
    """Return the same sample as `critic_sample`, but in tokens of the critic's own model."""
    reader = readers(learner)
    if need.view == "local":
        prompt = reader.start(_conversation(episode, turn))
    else:
        prompt = _central(
            episode,
            turn,
            lambda new, _: reader.start(new.new_messages) if new.new_messages else (),
            lambda past: reader.completion(past.text),
            answered=need.unit == "after",
        )
    completion = reader.completion(turn.text)
    if need.unit == "turn":
        places: Ids = (len(prompt),)
    elif need.unit == "after":
        places = (len(prompt) + len(completion),)
    else:
        # The value before an agent's token is placed after all of the critic's tokens that end before the agent's token
        # begins.
        own, others = _ends(reader, completion), _ends(readers(turn.policy), turn.completion_ids, early=True)
        # The agent's tokens can contain more than its text (special tokens); positions match only up to there.
        written = zip(readers(turn.policy).decode(turn.completion_ids), turn.text, strict=False)
        matching = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], written))
        begins = [0, *(min(end, matching) for end in others[:-1])]
        places = tuple(len(prompt) + bisect_right(own, begin) for begin in begins)
    tokens = prompt + completion
    if need.view == "local":
        images = images_in(_conversation(episode, turn))
    else:
        images = _central(episode, turn, lambda new, _: images_in(new.new_messages), lambda _: ())
    if after:
        return Sample(learner, tokens, (*places, len(tokens)), columns, images=images)
    return Sample(learner, tokens[: max(places)], places, columns, images=images)


def _conversation(episode: Episode, turn: Turn) -> list[Message]:
    """Return the agent's conversation from its start up to a turn."""
    for past in reversed(episode.turns[: turn.completed_before]):
        known = past.prompt_ids + past.completion_ids
        if past.agent == turn.agent and known and turn.prompt_ids[: len(known)] == known:
            answer = Message("assistant", past.text, speaker=past.agent)
            return [*_conversation(episode, past), answer, *turn.new_messages]
    return list(turn.new_messages)


def _ends(reader: Reader, ids: Ids, *, early: bool = False) -> list[int]:
    """Return, for each token, the number of characters in the text up to the end of the token.

    A token that ends between the bytes of a character is treated as if it ended after the character, or before the character
    with `early`.
    """
    lengths: list[int] = []
    begun, open_characters = 0, 0
    for k in range(len(ids)):
        # Decode with the previous token: some tokenisers drop a space at the start of a text.
        before = ids[max(0, begun - 1) : begun]
        piece = reader.decode((*before, *ids[begun : k + 1]))[len(reader.decode(before)) if before else 0 :]
        is_open = piece.endswith("\ufffd") and k - begun < LONGEST_CHARACTER
        characters = len(piece.rstrip("\ufffd")) + (not early) if is_open else len(piece)
        lengths.append(characters - open_characters)
        open_characters = characters if is_open else 0
        begun = begun if is_open else k + 1
    return list(accumulate(lengths))


LONGEST_CHARACTER = 4
"""The maximum number of bytes of a character in UTF-8, and therefore the maximum number of tokens of a character."""
