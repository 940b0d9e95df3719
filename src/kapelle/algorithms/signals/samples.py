"""Turns as samples for a learner: which tokens it reads, and which of them are targets.

A critic on the model of the agents that it judges reads the very tokens that they read and sampled. A critic on another model
(`team.critic_model`) reads the same conversation as text, by its own chat template and tokeniser. Its value before a token of the
agent's is the one after the last of its own tokens that lies wholly before it: a baseline knows nothing of the action.

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
    """Return a turn's sample for its agent's critic: values before its tokens, before the turn, or after it (`need.unit`).

    `need.view` is `local` (what the agent itself read), `central` (see `central_prompt`), or `answer` (the task's question
    and the turn's text, as `readers` tokenise them). With `after`, the value after the last token is a target too, the
    last one; the view `answer` has no such value. `readers` are needed too for a critic that reads text.
    """
    learner = team.critic_of[turn.agent]
    if need.view == "answer":
        assert readers is not None, "text needs a reader"
        ends = () if need.ends is None else need.ends(episode.task.question, turn.text)
        asked = episode.task.asked
        return conversation_sample(learner, readers(learner), asked, turn.text, columns, ends)
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
    """Return a text's sample for a verifier: a value after each of the `ends` (characters), and one after its last token.

    The verifier reads the conversation before it and the text in tokens of its own model, whichever agent answered. A part
    that ends inside a token is judged after that token, and of parts that end in one token the earlier one before it; those
    for which there is no token are left out, the first ones. Raises ContextError if they are too long.
    """
    start, written = reader.start(messages), reader.completion(text)
    tokens = start + written
    if len(tokens) > reader.context:
        raise ContextError(
            f"Question and answer have {len(tokens)} tokens; the verifier's model reads {reader.context}. Use a model "
            "with a longer context for the verifier, or lower the agents' `sampling.max_tokens`."
        )
    closing = len(reader.completion(""))
    targets = [len(tokens)]
    for end in reversed(ends):
        part = reader.completion(text[:end])
        part = part[: len(part) - closing]
        same = next(
            (k for k, ids in enumerate(zip(part, written, strict=False)) if ids[0] != ids[1]), len(part)
        )
        # Where the text goes on inside a token, it is tokenised otherwise from there on.
        read = len(start) + (same if same == len(part) else same + 1)
        if (target := min(read, targets[-1] - 1)) > len(start):
            targets.append(target)
    return Sample(learner, tokens, tuple(reversed(targets)), columns)


def central_prompt(episode: Episode, turn: Turn, *, answered: bool = False) -> tuple[int, ...]:
    """Return everything that all agents read and wrote before a turn, private views included, as tokens.

    First the turns that were over when this one's prompt was fixed, in time order, then the prompts of other agents at
    the same moment, and last this turn's own prompt. Tokens that an agent has read before are not repeated. The
    answers of others at the same moment are left out: a baseline must not depend on simultaneous actions. They follow their
    prompts with `answered`, for what a turn is worth among them.
    """
    return _central(episode, turn, _new_tokens, lambda past: past.completion_ids, answered=answered)


def _central(
    episode: Episode,
    turn: Turn,
    new: Callable[[Turn, Turn | None], tuple[T, ...]],
    said: Callable[[Turn], tuple[T, ...]],
    *,
    answered: bool = False,
) -> tuple[T, ...]:
    """Return `central_prompt` in some model's tokens: what is `new` in a turn after its agent's last one, and what a turn `said`."""
    tokens: list[T] = []
    last: dict[str, Turn] = {}
    for past in episode.turns[: turn.seen]:
        tokens.extend(new(past, last.get(past.agent)))
        tokens.extend(said(past))
        last[past.agent] = past
    for other in episode.turns[turn.seen :]:
        if other.seen <= turn.seen and other.agent != turn.agent:
            tokens.extend(new(other, last.get(other.agent)))
            tokens.extend(said(other) if answered else ())
    return (*tokens, *new(turn, last.get(turn.agent)))


def _new_tokens(turn: Turn, before: Turn | None) -> tuple[int, ...]:
    if before is None:
        return turn.prompt_ids
    known = before.prompt_ids + before.completion_ids
    return turn.prompt_ids[len(known) :] if turn.prompt_ids[: len(known)] == known else turn.prompt_ids


def _new_images(turn: Turn, before: Turn | None) -> tuple[Image, ...]:
    """Return the pictures in `_new_tokens`."""
    if before is None or turn.prompt_ids == _new_tokens(turn, before):
        return turn.images
    return turn.images[len(before.images) :]


# -------- A turn as text, for a critic on another model than the agent's


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
    """Return `critic_sample` in the tokens of the critic's own model."""
    reader = readers(learner)
    if need.view == "local":
        prompt = reader.start(_conversation(episode, turn))
    else:
        prompt = _central(
            episode,
            turn,
            lambda new, _: reader.start(new.heard) if new.heard else (),
            lambda past: reader.completion(past.text),
            answered=need.unit == "after",
        )
    said = reader.completion(turn.text)
    if need.unit == "turn":
        places: Ids = (len(prompt),)
    elif need.unit == "after":
        places = (len(prompt) + len(said),)
    else:
        # The values before the agent's tokens, each after as many of the critic's tokens as end where the agent's token begins.
        own, others = _ends(reader, said), _ends(readers(turn.policy), turn.completion_ids, early=True)
        # Where the agent's tokens hold more than its text (special ones), nothing after that place can be told apart.
        written = zip(readers(turn.policy).decode(turn.completion_ids), turn.text, strict=False)
        known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], written))
        begins = [0, *(min(end, known) for end in others[:-1])]
        places = tuple(len(prompt) + bisect_right(own, begin) for begin in begins)
    tokens = prompt + said
    if need.view == "local":
        images = images_in(_conversation(episode, turn))
    else:
        images = _central(episode, turn, lambda new, _: images_in(new.heard), lambda _: ())
    if after:
        return Sample(learner, tokens, (*places, len(tokens)), columns, images=images)
    return Sample(learner, tokens[: max(places)], places, columns, images=images)


def _conversation(episode: Episode, turn: Turn) -> list[Message]:
    """Return all that an agent had read and said when it answered, from the start of its conversation on."""
    for past in reversed(episode.turns[: turn.seen]):
        known = past.prompt_ids + past.completion_ids
        if past.agent == turn.agent and known and turn.prompt_ids[: len(known)] == known:
            said = Message("assistant", past.text, speaker=past.agent)
            return [*_conversation(episode, past), said, *turn.heard]
    return list(turn.heard)


def _ends(reader: Reader, ids: Ids, *, early: bool = False) -> list[int]:
    """Return after how many characters of the text each token ends.

    A token that ends inside a character (a byte of it) counts as ending after it; `early`, before it.
    """
    lengths: list[int] = []
    begun, open_characters = 0, 0
    for k in range(len(ids)):
        # Decoded after the token before it: at the start of a text some tokenisers drop a space.
        before = ids[max(0, begun - 1) : begun]
        piece = reader.decode((*before, *ids[begun : k + 1]))[len(reader.decode(before)) if before else 0 :]
        is_open = piece.endswith("\ufffd") and k - begun < LONGEST_CHARACTER
        characters = len(piece.rstrip("\ufffd")) + (not early) if is_open else len(piece)
        lengths.append(characters - open_characters)
        open_characters = characters if is_open else 0
        begun = begun if is_open else k + 1
    return list(accumulate(lengths))


LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, and so the most tokens that it is written with."""
