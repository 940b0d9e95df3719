"""From episodes to samples: which tokens each learner is asked about.

Shapes: T completion tokens of one turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kapelle.algorithm import Credit, CriticSpec, Signals, TurnKey, turns_of
from kapelle.engines.rollout.protocol import WritingRenderer
from kapelle.engines.train.batch import Sample
from kapelle.errors import ContextError
from kapelle.team import VERIFIER, Team
from kapelle.types import Episode, Group, Message, Turn

Readers = Callable[[str], WritingRenderer]
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
    learner: str, reader: WritingRenderer, question: str, text: str, columns: Mapping[str, Tensor]
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


def verifier_samples(groups: Sequence[Group], reader: WritingRenderer) -> dict[TurnKey, Sample]:
    """Return what to ask the verifier about every turn of every agent."""
    return {
        key: answer_sample(VERIFIER, reader, groups[key.group].task.question, turn.text, {})
        for key, turn in turns_of(groups, trained_only=False)
    }


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


def reference_samples(groups: Sequence[Group], team: Team, name: Mapping[str, str]) -> dict[TurnKey, Sample]:
    """Return what to ask each policy's reference (`name`: policy → reference) about every trained turn."""
    return {key: policy_sample(turn, team, name[turn.policy], {}) for key, turn in turns_of(groups)}


def fresh_samples(groups: Sequence[Group], team: Team, most: int) -> list[Sample]:
    """Return up to `most` trained turns of each policy with the log-probs that they were sampled with."""
    chosen: dict[str, list[Sample]] = {name: [] for name in team.trained}
    for _, turn in turns_of(groups):
        if len(chosen[turn.policy]) < most:
            columns = {"behaviour": torch.tensor(turn.logprobs)}
            chosen[turn.policy].append(policy_sample(turn, team, turn.policy, columns))
    return [sample for own in chosen.values() for sample in own]


def value_samples(
    groups: Sequence[Group], team: Team, need: CriticSpec, readers: Readers | None = None
) -> tuple[dict[TurnKey, Sample], dict[TurnKey, Sample]]:
    """Return what to ask the critics: values of every turn they judge, and those after turns cut short.

    `readers` are needed for the view `answer`, which knows no place after the text.
    """
    values: dict[TurnKey, Sample] = {}
    after: dict[TurnKey, Sample] = {}
    for key, turn in turns_of(groups, trained_only=not need.everyone):
        episode = groups[key.group].episodes[key.episode]
        values[key] = _judged(episode, turn, team, need, {}, readers)
        last = turn is episode.by(turn.agent)[-1]
        if need.view != "answer" and last and episode.truncated:
            after[key] = critic_sample(episode, turn, team, need, {}, after=True)
    return values, after


def _judged(
    episode: Episode,
    turn: Turn,
    team: Team,
    need: CriticSpec,
    columns: Mapping[str, Tensor],
    readers: Readers | None,
) -> Sample:
    if need.view != "answer":
        return critic_sample(episode, turn, team, need, columns)
    assert readers is not None, "text needs a reader"
    learner = team.critic_of[turn.agent]
    return answer_sample(learner, readers(learner), episode.task.question, turn.text, columns)


def policy_samples(
    groups: Sequence[Group], team: Team, credit: Mapping[TurnKey, Credit], signals: Signals
) -> dict[TurnKey, Sample]:
    """Return what each policy learns from: one sample per credited turn."""
    samples: dict[TurnKey, Sample] = {}
    for key, turn in turns_of(groups):
        given = credit[key]
        if given.weight > 0:
            columns = {
                "behaviour": torch.tensor(turn.logprobs),
                "advantage": given.advantage_T.float(),
                **({"reference": signals.reference[key]} if key in signals.reference else {}),
                **({"proximal": signals.proximal[key]} if key in signals.proximal else {}),
                **({} if given.pair is None else {"pair": torch.full_like(given.advantage_T, given.pair)}),
            }
            samples[key] = replace(policy_sample(turn, team, turn.policy, columns), bundle=given.pair)
    return samples


def critic_samples(
    groups: Sequence[Group],
    team: Team,
    credit: Mapping[TurnKey, Credit],
    signals: Signals,
    need: CriticSpec,
    readers: Readers | None = None,
) -> list[Sample]:
    """Return what critics learn from: one sample per turn that has a target."""
    samples: list[Sample] = []
    for key, turn in turns_of(groups, trained_only=not need.everyone):
        given = credit[key]
        target_T = given.return_T
        if target_T is not None:
            columns = {
                "return": target_T.float(),
                "value": signals.values[key],
                "weight": torch.full_like(target_T, given.weight, dtype=torch.float32),
                **(
                    {}
                    if given.pair is None
                    else {"pair": torch.full_like(target_T, given.pair, dtype=torch.float32)}
                ),
            }
            episode = groups[key.group].episodes[key.episode]
            sample = _judged(episode, turn, team, need, columns, readers)
            samples.append(replace(sample, bundle=given.pair))
    return samples


def demonstrated_samples(groups: Sequence[Group], team: Team, observations: float) -> list[Sample]:
    """Return every trained turn as something to say, and with `observations` > 0 what its agent heard next.

    What was heard is found where an agent's next prompt goes on from its last words, and weighs so much.
    """
    turns = turns_of(groups)
    if not observations:
        return [policy_sample(turn, team, turn.policy, {}) for _, turn in turns]
    samples: list[Sample] = []
    last: dict[tuple[int, int, str], Turn] = {}
    for key, turn in turns:
        ones_T = torch.ones(len(turn.completion_ids))
        columns = {"weight": ones_T, "heard": torch.zeros_like(ones_T)}
        samples.append(policy_sample(turn, team, turn.policy, columns))
        before = last.get((key.group, key.episode, turn.agent))
        known = before.prompt_ids + before.completion_ids if before else ()
        if known and turn.prompt_ids[: len(known)] == known and len(turn.prompt_ids) > len(known):
            places = tuple(range(len(known), len(turn.prompt_ids)))
            ones_T = torch.ones(len(places))
            samples.append(
                Sample(
                    turn.policy, turn.prompt_ids, places, {"weight": observations * ones_T, "heard": ones_T}
                )
            )
        last[key.group, key.episode, turn.agent] = turn
    return samples


def embedding_samples(
    groups: Sequence[Group], name: Mapping[str, str]
) -> tuple[dict[TurnKey, Sample], dict[TurnKey, Sample]]:
    """Return what to ask the embedders (`name`: policy → embedder) about every trained turn: saw, and said.

    The prompt is read alone and the completion after its prompt.
    """
    saw: dict[TurnKey, Sample] = {}
    said: dict[TurnKey, Sample] = {}
    for key, turn in turns_of(groups):
        embedder, start = name[turn.policy], len(turn.prompt_ids)
        tokens = turn.prompt_ids + turn.completion_ids
        # A hidden state is asked for by the place after its token.
        saw[key] = Sample(embedder, turn.prompt_ids, tuple(range(1, start + 1)))
        said[key] = Sample(embedder, tokens, tuple(range(start + 1, len(tokens) + 1)))
    return saw, said
