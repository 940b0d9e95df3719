"""Shows one episode of a run as lanes of turns with coloured tokens and their credit. Damaged rows can be read too."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kapelle.runs.step_rows import stored_steps
from kapelle.viewer.calls import results_after, shown_calls
from kapelle.viewer.lines import (
    group_of,
    lines_of,
    listing,
    mapping,
    mean,
    number,
    parsed,
    text,
    trace_lines,
    whole,
)
from kapelle.viewer.pages import shown
from kapelle.viewer.pictures import pictures_of
from kapelle.viewer.skimming import cast_of

FORMS = (1,)
"""The supported versions of the trace format; see experiments/log.md."""
MOST_TOKENS = 6000
"""The maximum number of tokens of one turn that are shown on a page."""


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token with its recorded numbers. Numbers that were not recorded are None."""

    id: int
    piece: str | None
    logprob: float | None
    entropy: float | None = None
    ratio: float | None = None
    advantage: float | None = None
    credit: float | None = None


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """A turn of an episode as shown on a page."""

    agent: str
    policy: str
    version: object
    weights: str
    index: int
    completed_before: int
    prompt: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float | None]
    finish: str
    text: str
    new_messages: Sequence[Mapping[str, Any]]
    reward: float | None
    score: float | None
    parent: int | None
    continuation_return: float | None
    trained: bool
    dropped: int
    summary: bool


@dataclass(frozen=True, slots=True)
class ShownEpisode:
    """An episode as shown on a page."""

    line: int
    group: int
    task: str
    question: str
    seed: object
    agents: Sequence[str]
    turns: Sequence[ShownTurn]
    branches: Sequence[ShownTurn]
    rewards: Mapping[str, float]
    """The return of each agent, which is the sum of its rewards at the end of the episode and between turns."""
    success: float | None
    error: str
    truncated: bool
    info: Mapping[str, Any]
    data: Mapping[str, Any] = field(default_factory=dict)
    cast: Mapping[str, str] = field(default_factory=dict)
    """Mapping from an agent to the league member that replaces the agent."""

    @property
    def reward(self) -> float | None:
        """The mean return of the agents, or None if there are no returns."""
        return sum(self.rewards.values()) / len(self.rewards) if self.rewards else None

    @property
    def tokens(self) -> int:
        """The number of sampled tokens in the turns of the episode."""
        return sum(len(turn.ids) for turn in self.turns)

    @property
    def final(self) -> str:
        """The final answer of the team, if the environment reports one."""
        return text(self.info.get("final"))


def read_step(
    run: Path, split: str, step: int, line: int
) -> tuple[ShownEpisode | None, list[ShownEpisode], int]:
    """Return one episode of a step, the episodes of its group in the order of their lines, and the number of lines.

    The episode is None if its line is missing or cannot be read. Lines of other groups are not parsed.
    """
    lines = lines_of(run, split, step)
    row = parsed(lines[line]) if 0 <= line < len(lines) else None
    if row is None:
        return None, [], len(lines)
    found = episode_of(row, line)
    group = [found]
    for other, raw in enumerate(lines):
        if other != line and group_of(raw) in (None, found.group):
            each = parsed(raw)
            if each is not None and (sibling := episode_of(each, other)).group == found.group:
                group.append(sibling)
    return found, sorted(group, key=lambda each: each.line), len(lines)


def read_episode(run: Path, split: str, step: int, line: int) -> ShownEpisode | None:
    """Return one episode, or None if its line is missing or cannot be read."""
    lines = lines_of(run, split, step)
    row = parsed(lines[line]) if 0 <= line < len(lines) else None
    return None if row is None else episode_of(row, line)


def step_episodes(run: Path, split: str, step: int) -> list[ShownEpisode]:
    """Return the readable episodes of a step in the order of their lines."""
    rows = ((line, parsed(raw)) for line, raw in enumerate(lines_of(run, split, step)))
    return [episode_of(row, line) for line, row in rows if row is not None]


def episode_of(row: Mapping[str, Any], line: int) -> ShownEpisode:
    """Convert a recorded row to an episode."""
    task = mapping(row.get("task"))
    turns, branches = (
        [_turn(each, k, row) for k, each in enumerate(listing(row.get(kind))) if isinstance(each, Mapping)]
        for kind in ("turns", "branches")
    )
    rewards = {str(agent): number(value) or 0.0 for agent, value in mapping(row.get("rewards")).items()}
    for turn in turns:
        if turn.reward:
            rewards[turn.agent] = rewards.get(turn.agent, 0.0) + turn.reward
    agents = [text(agent) for agent in listing(row.get("agents"))]
    return ShownEpisode(
        line,
        whole(row.get("group")) or 0,
        text(task.get("id")),
        text(task.get("question")),
        row.get("seed"),
        list(dict.fromkeys([*agents, *(turn.agent for turn in turns)])),
        turns,
        branches,
        rewards,
        number(row.get("success")),
        text(row.get("error")),
        row.get("truncated") is True,
        mapping(row.get("info")),
        mapping(task.get("data")),
        {agent: member for agent, (_, member) in cast_of(row).items()},
    )


def _turn(row: Mapping[str, Any], place: int, episode: Mapping[str, Any]) -> ShownTurn:
    index, seen = whole(row.get("index")), whole(row.get("completed_before"))
    new_messages = [
        {
            "role": text(each.get("role")),
            "content": text(each.get("content")),
            "speaker": text(each.get("speaker")),
            "pictures": pictures_of(each, episode),
        }
        for each in listing(row.get("new_messages"))
        if isinstance(each, Mapping)
    ]
    return ShownTurn(
        text(row.get("agent")) or "?",
        text(row.get("policy")),
        row.get("version"),
        text(row.get("weights_hash")),
        place if index is None else index,
        0 if seen is None else seen,
        [whole(each) or 0 for each in listing(row.get("prompt_ids"))],
        [whole(each) or 0 for each in listing(row.get("completion_ids"))],
        [number(each) for each in listing(row.get("logprobs"))],
        text(row.get("finish_reason")),
        text(row.get("text")),
        new_messages,
        number(row.get("reward")),
        number(row.get("score")),
        whole(row.get("parent")),
        number(row.get("continuation_return")),
        row.get("trained") is not False,
        whole(row.get("dropped")) or 0,
        row.get("summary") is True,
    )


def sees(reader: ShownTurn, turn: ShownTurn, earlier: Sequence[ShownTurn]) -> bool:
    """Return whether the prompt of `reader` contains the text of a turn.

    The result is true if both turns have the same agent, or if the prompt quotes the text of the turn. The argument
    `earlier` contains the turns of the reader's agent up to `reader`. A quote must begin and end at word boundaries;
    for example, `R12345` does not quote `12`.
    """
    words = turn.text.strip()
    if turn.index >= reader.completed_before or not words:
        return False
    if turn.agent == reader.agent:
        return True
    for content in (message["content"] for each in earlier for message in each.new_messages):
        at = content.find(words)
        while at >= 0:
            end = at + len(words)
            # Two adjacent ASCII letters or digits belong to one word. Other scripts may have no spaces, and thus no
            # word boundaries.
            edges = (content[max(0, at - 1) : at + 1], content[end - 1 : end + 1])
            if not any(len(two) == 2 and two.isascii() and two.isalnum() for two in edges):
                return True
            at = content.find(words, end)
    return False


def witnesses(episode: ShownEpisode) -> dict[int, list[str]]:
    """Return, for the index of each turn, the agents whose prompts contain the text of the turn."""
    found: dict[int, list[str]] = {turn.index: [] for turn in episode.turns}
    for agent in episode.agents:
        own = [turn for turn in episode.turns if turn.agent == agent]
        for turn in episode.turns:
            if turn.agent != agent and any(sees(reader, turn, own[: k + 1]) for k, reader in enumerate(own)):
                found[turn.index].append(agent)
    return found


def tokens_of(turn: ShownTurn, trace: Mapping[str, Any] | None, vocabulary: Mapping[int, str]) -> list[Token]:
    """Return the tokens of a turn, with numbers from a trace and text from the vocabulary of the run."""
    columns = [listing((trace or {}).get(name)) for name in ("entropy", "ratio", "advantage", "credit")]
    pieces = listing((trace or {}).get("pieces"))
    return [
        Token(
            token,
            text(pieces[k]) if k < len(pieces) else vocabulary.get(token),
            turn.logprobs[k] if k < len(turn.logprobs) else None,
            *(number(column[k]) if k < len(column) else None for column in columns),
        )
        for k, token in enumerate(turn.ids[:MOST_TOKENS])
    ]


# -------- Traces: the credit of each token of some episodes

NEWEST = 4
"""The number of most recent steps with traces from which the vocabulary is read."""
_LINE = re.compile(rb'\{"format":\d{1,6},"step":\d{1,12},"line":(\d{1,12}),')
"""A regular expression for the beginning of a row, which contains the line of the episode."""


def trace_of(run: Path, split: str, step: int, line: int) -> dict[int, Mapping[str, Any]]:
    """Return the trace of an episode by turn index, or an empty mapping if there is no trace."""
    if split != "train":
        return {}
    for raw in trace_lines(run, step):
        begins = _LINE.match(raw, 0, 80)
        row = parsed(raw) if begins is None or int(begins[1]) == line else None
        if row is not None and row.get("line") == line and row.get("format") in FORMS:
            turns = row.get("turns")
            found = turns if isinstance(turns, list) else []
            return {
                each["index"]: each
                for each in found
                if isinstance(each, dict) and isinstance(each.get("index"), int)
            }
    return {}


def traced(run: Path, step: int) -> set[int]:
    """Return the line numbers of those episodes of a step that have a trace."""
    found = set()
    for raw in trace_lines(run, step):
        begins = _LINE.match(raw, 0, 80)
        if begins is not None:
            found.add(int(begins[1]))
        elif isinstance(own := (parsed(raw) or {}).get("line"), int):
            found.add(own)
    return found


def vocabulary_of(
    run: Path, step: int, episode: ShownEpisode, trace: Mapping[int, Mapping[str, Any]]
) -> dict[int, str]:
    """Return the text of tokens by token id, read from the traces of the episode's step and of the most recent steps."""
    found: dict[int, str] = {}
    stored = list(stored_steps(run / "traces"))
    for each in dict.fromkeys((*stored[-NEWEST:], *({step} & {*stored}))):
        for raw in trace_lines(run, each):
            pieces = (parsed(raw) or {}).get("vocabulary")
            if isinstance(pieces, dict):
                found |= {
                    int(key): str(piece)
                    for key, piece in pieces.items()
                    if str(key).isdecimal() and len(str(key)) < 12
                }
    for turn in episode.turns:
        pieces = trace.get(turn.index, {}).get("pieces")
        if isinstance(pieces, list):
            found |= {token: str(piece) for token, piece in zip(turn.ids, pieces, strict=False)}
    return found


# -------- The page of an episode: turns in lanes, shaded tokens, and the turns that each agent could read

LANES = 6
"""The maximum number of lanes. All further agents share the last lane."""
COLUMNS = ("logprob", "entropy", "ratio", "advantage", "credit")
"""The choices for the quantity that determines the colour of tokens."""


def conversation(
    episode: ShownEpisode,
    trace: Mapping[int, Mapping[str, Any]],
    vocabulary: Mapping[int, str],
    reader: str,
    form: object = None,
) -> list[dict[str, Any]]:
    """Return the turns of an episode in chronological order, each with its lane and whether `reader` could read the turn.

    The argument `form` is the format of tool calls in the settings of the run.
    """
    seen_by = witnesses(episode)
    drawn = []
    for place, turn in enumerate(episode.turns):
        own = [each for each in episode.turns if each.agent == reader]
        known = turn.agent == reader or any(sees(each, turn, own[: k + 1]) for k, each in enumerate(own))
        candidates = [each for each in episode.branches if each.parent == turn.index]
        drawn.append(
            {
                **_drawn_turn(turn, episode, trace, vocabulary, form),
                "calls": shown_calls(turn.text, form, results_after(episode.turns, place)),
                "hidden": bool(reader) and not known,
                "seen_by": seen_by[turn.index],
                "branches": [_drawn_turn(each, episode, trace, vocabulary, form) for each in candidates],
            }
        )
    return drawn


def _drawn_turn(
    turn: ShownTurn,
    episode: ShownEpisode,
    trace: Mapping[int, Mapping[str, Any]],
    vocabulary: Mapping[int, str],
    form: object,
) -> dict[str, Any]:
    own = trace.get(turn.index)
    tokens = tokens_of(turn, own, vocabulary)
    readable = bool(tokens) and all(token.piece is not None for token in tokens)
    lane = episode.agents.index(turn.agent) if turn.agent in episode.agents else 0
    prompt = [vocabulary.get(token) for token in turn.prompt]
    return {
        "turn": turn,
        "lane": 1 + min(lane, LANES - 1),
        "color": 1 + lane % 7,
        "tokens": [
            {
                "text": shown(token.piece) if token.piece is not None else f"{token.id}",
                "known": token.piece is not None,
                "id": token.id,
                "values": " ".join(
                    "-" if (value := getattr(token, name)) is None else f"{value:.6g}" for name in COLUMNS
                ),
                "break": "\n" in (token.piece or ""),
            }
            for token in tokens
        ],
        "readable": readable,
        "more_tokens": len(turn.ids) - len(tokens),
        # The prompt as text, if the text of every token is known.
        "prompt": None if None in prompt else "".join(piece for piece in prompt if piece is not None),
        "traced": own is not None,
        "calls": shown_calls(turn.text, form),
        "messages": [
            {**each, "calls": shown_calls(each["content"], form) if each["role"] == "assistant" else None}
            for each in turn.new_messages
        ],
        "hidden": False,
        "mean_logprob": mean([token.logprob for token in tokens]),
        "advantage": mean([token.advantage for token in tokens]),
    }


TURNS = 40
"""The maximum number of columns of a credit map."""
ATTEMPTS = 16
"""The maximum number of episodes of a group in a credit map."""


@dataclass(frozen=True, slots=True)
class CreditCell:
    """The credit of one turn of an episode."""

    index: int
    value: float | None
    """The mean advantage of the turn's tokens, or the turn's reward, or None if neither was recorded."""
    recorded: bool
    """Whether the value is the advantage."""
    shade: str
    """The style class of the value, relative to the whole map: one of `p1` to `p4` and `m1` to `m4`, or empty."""


def credit_map(run: Path, split: str, step: int, group: Sequence[ShownEpisode]) -> list[dict[str, Any]]:
    """Return a row for each episode and agent of a group, with one cell for each turn of the agent.

    For turns of other agents, the cell is None. The result is empty for a single episode, and if no value was recorded.
    """
    rows: list[dict[str, Any]] = []
    for each in group[:ATTEMPTS]:
        trace = trace_of(run, split, step, each.line)
        for agent in each.agents:
            cells: list[CreditCell | None] = []
            for turn in each.turns[:TURNS]:
                own = turn.agent == agent
                advantage = mean(
                    [number(value) for value in listing(trace.get(turn.index, {}).get("advantage"))]
                )
                value = (turn.reward or None) if advantage is None else advantage
                cells.append(CreditCell(turn.index, value, advantage is not None, "") if own else None)
            rows.append({"episode": each, "agent": agent, "cells": cells})
    sizes = [abs(cell.value) for row in rows for cell in row["cells"] if cell and cell.value is not None]
    if len(group) < 2 or not sizes:
        return []
    most = max(filter(math.isfinite, sizes), default=0.0)
    for row in rows:
        row["cells"] = [cell and replace(cell, shade=_shade(cell.value, most)) for cell in row["cells"]]
    return rows


def _shade(value: float | None, most: float) -> str:
    if not value or not most or not math.isfinite(value):  # numbers in damaged files may add up to infinity
        return ""
    return f"{'p' if value > 0 else 'm'}{max(1, math.ceil(4 * (abs(value) / most)))}"


def folded(info: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the entries of an episode's `info`, each with its name, a one-line form and the full content."""
    rows = []
    for name, value in info.items():
        whole = (
            value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=True, default=str)
        )
        rows.append({"name": str(name), "line": " ".join(whole.split()), "whole": whole})
    return rows
