"""What a page draws of an episode: turns in lanes, tokens in shades, what each agent could read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kapelle.viewer.episode import Episode, Token, Turn, sees, tokens_of, witnesses
from kapelle.viewer.plain_text import shown
from kapelle.viewer.traces import prompt_of

LANES = 6
"""Agents beside one another; further ones share the last lane."""
COLUMNS = ("logprob", "entropy", "ratio", "advantage", "credit")
"""What tokens may be coloured by."""


def conversation(
    episode: Episode, trace: Mapping[int, Mapping[str, Any]], vocabulary: Mapping[int, str], reader: str
) -> list[dict[str, Any]]:
    """Return the turns of an episode in time order, each with its lane and with what `reader` knows of it."""
    seen_by = witnesses(episode)
    drawn = []
    for turn in episode.turns:
        own = [each for each in episode.turns if each.agent == reader]
        known = turn.agent == reader or any(sees(each, turn, own[: k + 1]) for k, each in enumerate(own))
        candidates = [each for each in episode.branches if each.parent == turn.index]
        drawn.append(
            {
                **_turn(turn, episode, trace, vocabulary),
                "hidden": bool(reader) and not known,
                "seen_by": seen_by[turn.index],
                "branches": [_turn(each, episode, trace, vocabulary) for each in candidates],
            }
        )
    return drawn


def _turn(
    turn: Turn, episode: Episode, trace: Mapping[int, Mapping[str, Any]], vocabulary: Mapping[int, str]
) -> dict[str, Any]:
    own = trace.get(turn.index)
    tokens = tokens_of(turn, own, vocabulary)
    readable = bool(tokens) and all(token.piece is not None for token in tokens)
    lane = episode.agents.index(turn.agent) if turn.agent in episode.agents else 0
    return {
        "turn": turn,
        "lane": 1 + min(lane, LANES - 1),
        "color": 1 + lane % 7,
        "tokens": [_token(token) for token in tokens]
        if readable or not turn.text
        else [_token(t) for t in tokens],
        "readable": readable,
        "more_tokens": len(turn.ids) - len(tokens),
        "prompt": prompt_of(turn, vocabulary),
        "traced": own is not None,
        "hidden": False,
        "mean_logprob": _mean([token.logprob for token in tokens]),
        "advantage": _mean([token.advantage for token in tokens]),
    }


def _token(token: Token) -> dict[str, Any]:
    values = [getattr(token, name) for name in COLUMNS]
    return {
        "text": shown(token.piece) if token.piece is not None else f"{token.id}",
        "known": token.piece is not None,
        "id": token.id,
        "values": " ".join("-" if value is None else f"{value:.6g}" for value in values),
        "break": "\n" in (token.piece or ""),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def folded(info: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what an environment reports of an outcome: a name, one line, and the whole as text."""
    rows = []
    for name, value in info.items():
        whole = (
            value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=True, default=str)
        )
        rows.append({"name": str(name), "line": " ".join(whole.split()), "whole": whole})
    return rows
