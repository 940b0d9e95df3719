"""Exports episodes as data for supervised fine-tuning, turn by turn, as JSON lines or as one JSON array.

Each line is one turn, in the order of the episode, for example:

    {"task": "train-17", "episode": 2, "turn": 1, "agent": "actor", "reward": 1.0,
     "messages": [{"role": "user", "content": "2,11+1"}], "completion": "132",
     "policy": "actor", "version": 50, "weights_hash": "v2-…"}

The field `messages` is the agent's own conversation up to this turn and `completion` is its response, so that each line
is one SFT example for the agent. The field `reward` is the reward of the episode. The reward is the score of the team
if the environment defines one, otherwise the mean return of the agents.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kapelle.errors import DataError
from kapelle.rows import label_of
from kapelle.runs.step_rows import PACKED, pack
from kapelle.runtime.randomness import derive_seed
from kapelle.runtime.row_files import held_out, read_rows
from kapelle.types import Episode, Group, Message, conversation


def episode_reward(episode: Episode) -> float:
    """Return the score of the team in an episode, or the mean return of its agents if there is no score."""
    if episode.success is not None:
        return episode.success
    return sum(episode.total(agent) for agent in episode.agents) / len(episode.agents)


def good_episodes(groups: Sequence[Group], least: float) -> Iterator[tuple[int, Episode]]:
    """Yield each episode that has no error and whose reward is at least `least`, with the number of the episode in its group."""
    for group in groups:
        for number, episode in enumerate(group.episodes):
            if episode.error is None and episode_reward(episode) >= least:
                yield number, episode


def sft_rows(number: int, episode: Episode) -> list[dict[str, Any]]:
    """Return the rows of an episode, one per turn, in the format that is shown in the docstring of the module."""
    conversations: dict[str, list[Message]] = {}
    known: dict[str, tuple[int, ...]] = {}
    rows = []
    for turn in episode.turns:
        messages = conversations.setdefault(turn.agent, [])
        before = known.get(turn.agent, ())
        if turn.prompt_ids[: len(before)] != before:
            messages.clear()  # the agent begins a new conversation
        messages.extend(turn.new_messages)
        known[turn.agent] = turn.prompt_ids + turn.completion_ids
        rows.append(
            {
                "task": episode.task.id,
                "episode": number,
                "turn": turn.index,
                "agent": turn.agent,
                "reward": episode_reward(episode),
                "messages": conversation(messages),
                "completion": turn.text,
                "policy": turn.policy,
                "version": turn.version,
                "weights_hash": turn.weights_hash,
            }
        )
        messages.append(Message("assistant", turn.text))
    return rows


def preferred(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return two rows of `sft_rows` for each conversation with completions of different rewards, for the environment `preferences`.

    The two rows are the two different completions with the largest difference in reward. All other conversations are
    excluded.
    """
    answers: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        answers.setdefault(json.dumps([row["agent"], row["messages"]]), []).append(row)
    kept: list[Mapping[str, Any]] = []
    for given in answers.values():
        ranked = sorted(given, key=lambda row: -row["reward"])
        best, worst = ranked[0], ranked[-1]
        # The same completion may have both the best and the worst reward: one of the two is then another completion.
        pairs = [(row, worst) for row in ranked if row["completion"] != worst["completion"]][:1]
        pairs += [(best, row) for row in ranked if row["completion"] != best["completion"]][-1:]
        better, worse = max(pairs, key=lambda p: p[0]["reward"] - p[1]["reward"], default=(best, best))
        if better["reward"] > worse["reward"]:
            kept += [better, worse]
    return kept


def dump_rows(rows: Sequence[Mapping[str, Any]], out: Path | None = None, number: int = 0) -> bytes:
    """Return rows as JSON lines. All non-ASCII characters are escaped, because UTF-8 cannot represent lone surrogates.

    If `out` has the suffix `.jsonl.zst`, the lines are compressed like the episodes of a run, with `number` as the
    step. If `out` has the suffix `.json`, the rows are written as one array.
    """
    if out is not None and out.name.endswith(".json"):
        array = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
        return f"[\n{array}\n]\n".encode("ascii")
    lines = [json.dumps(row, allow_nan=False).encode("ascii") + b"\n" for row in rows]
    return pack(number, lines) if out is not None and out.name.endswith(PACKED) and lines else b"".join(lines)


# -------- Graded answers as data for a verifier: taken from episodes, balanced by question, and summarised.
#
# One line is one answer; the environment `labelled` reads such a file:
#
#     {"question": "48/2", "solution": "24", "is_correct": 1.0, "agent": "ada", "round": 1,
#      "task": "train-17", "policy": "ada", "version": 0, "weights_hash": "v2-…"}
#
# `round` is the number of the turn among the agent's turns in the episode, from 1. An answer is correct if `is_correct`
# is above ½.

HELD_OUT = 0.2
"""The share of the questions that the recipe `verifier_file` holds out."""


def answer_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return a row for every graded turn of every episode without an error. The format is described in the comment above this function."""
    rows = []
    for episode in (episode for group in groups for episode in group.valid):
        taken: dict[str, int] = {}
        for turn in episode.turns:
            taken[turn.agent] = taken.get(turn.agent, 0) + 1
            label = label_of(episode, turn)
            if label is not None:
                rows.append(
                    {
                        "question": episode.task.question,
                        "solution": turn.text,
                        "is_correct": label,
                        "agent": turn.agent,
                        "round": taken[turn.agent],
                        "task": episode.task.id,
                        "policy": turn.policy,
                        "version": turn.version,
                        "weights_hash": turn.weights_hash,
                    }
                )
    return rows


@dataclass(frozen=True, slots=True)
class Balance:
    """Graded answers after balancing, with equal numbers of correct and incorrect answers to each question."""

    rows: tuple[Mapping[str, Any], ...]
    """The remaining answers, which are distinct. For each question, half of them are correct."""
    graded: int
    repeated: int
    """The number of answers with the same text as another answer to their question."""
    one_kind: int
    """The number of distinct answers to questions that have only correct or only incorrect answers. All of these answers are excluded."""
    one_kind_questions: int
    surplus: int
    """The number of distinct answers that were excluded because their question has more answers of this kind than of the other kind."""


def balance(rows: Sequence[Mapping[str, Any]], seed: int, *, equal: bool = True) -> Balance:
    """Return equal numbers of correct and incorrect answers to each question, sampled with a seed.

    If `equal` is false, all distinct answers are returned. Sampling is over all answers, so that frequent answers are
    more likely to be sampled. Duplicates are then removed.
    """
    by_question: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_question.setdefault(row["question"], []).append(row)
    kept: list[Mapping[str, Any]] = []
    different = one_kind = questions = 0
    for question, given in by_question.items():
        drawn = random.Random(derive_seed(seed, question)).sample(given, len(given))
        texts: dict[str, Mapping[str, Any]] = {}
        for row in drawn:
            texts.setdefault(row["solution"], row)
        right = [row for row in texts.values() if row["is_correct"] > 0.5]
        wrong = [row for row in texts.values() if row["is_correct"] <= 0.5]
        different += len(texts)
        if equal and not (right and wrong):
            one_kind, questions = one_kind + len(texts), questions + 1
            continue
        most = min(len(right), len(wrong)) if equal else len(texts)
        kept += [*right[:most], *wrong[:most]]
    return Balance(
        tuple(kept), len(rows), len(rows) - different, one_kind, questions, different - one_kind - len(kept)
    )


@dataclass(frozen=True, slots=True)
class Survey:
    """Statistics of a file of graded answers."""

    answers: int
    right: int
    questions: int
    both: int
    """The number of questions with both correct and incorrect answers. With `balance: question`, all other questions are excluded."""
    only_right: int
    only_wrong: int
    per_question: tuple[int, float, int]
    """The smallest, the median and the largest number of answers to one question."""
    held_out: int
    """The number of questions in the test split of `labelled`, with its default `test_share`."""
    by_agent: Mapping[str, AnswerCount]
    by_round: Mapping[str, AnswerCount]
    examples: tuple[Mapping[str, Any], ...]
    """Correct and incorrect answers to the first questions that have both."""

    def row(self) -> dict[str, Any]:
        """Return the statistics as plain JSON values."""
        return asdict(self)


def survey(file: Path, shown: int = 3) -> Survey:
    """Read and summarise a file of graded answers. Raises DataError, which names the first row with an unknown format."""
    rows: list[Mapping[str, Any]] = []
    for read in read_rows(file):
        row, label = read.fields, read.fields.get("is_correct")
        texts = isinstance(row.get("question"), str) and isinstance(row.get("solution"), str)
        if not (texts and isinstance(label, bool | int | float) and 0 <= label <= 1):
            raise DataError(
                f"{read.place} is not a graded answer: `question` and `solution` must be strings, and "
                "`is_correct` must be true, false or a number from 0 to 1. Fix or remove the row."
            )
        rows.append(row)
    if not rows:
        raise DataError(f"{file} contains no answers. Collect some with `kapelle collect … --for verifier`.")
    by_question: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_question.setdefault(row["question"], []).append(row)
    kinds = [{row["is_correct"] > 0.5 for row in given} for given in by_question.values()]
    counts = [len(given) for given in by_question.values()]
    examples: list[Mapping[str, Any]] = []
    for question, given in by_question.items():
        right = next((row["solution"] for row in given if row["is_correct"] > 0.5), None)
        wrong = next((row["solution"] for row in given if row["is_correct"] <= 0.5), None)
        if right is not None and wrong is not None and len(examples) < shown:
            examples.append({"question": question, "right": right, "wrong": wrong})
    return Survey(
        answers=len(rows),
        right=sum(row["is_correct"] > 0.5 for row in rows),
        questions=len(by_question),
        both=sum(kind == {True, False} for kind in kinds),
        only_right=sum(kind == {True} for kind in kinds),
        only_wrong=sum(kind == {False} for kind in kinds),
        per_question=(min(counts), median(counts), max(counts)),
        held_out=sum(held_out(question, HELD_OUT) for question in by_question),
        by_agent=_counts(rows, "agent"),
        by_round=_counts(rows, "round"),
        examples=tuple(examples),
    )


@dataclass(frozen=True, slots=True)
class AnswerCount:
    """The number of answers of one kind, and the share of these answers that are correct."""

    answers: int
    right: float
    """The share of correct answers, in [0, 1]."""


def _counts(rows: Sequence[Mapping[str, Any]], field: str) -> dict[str, AnswerCount]:
    labels: dict[str, list[bool]] = {}
    for row in rows:
        if field in row:
            labels.setdefault(str(row[field]), []).append(row["is_correct"] > 0.5)
    return {name: AnswerCount(len(known), sum(known) / len(known)) for name, known in sorted(labels.items())}
