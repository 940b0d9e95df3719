"""A few episodes of a step as a table of texts, for trackers."""

from __future__ import annotations

from collections.abc import Sequence

from kapelle.types import Group

EPISODES = 4
"""Episodes of a step in its table: the first one of as many groups."""
CHARACTERS = 2000
"""Of one text; the rest is left out, and said to be."""


def transcripts(groups: Sequence[Group]) -> list[dict[str, str]]:
    """Return a row for each turn of a few episodes: task, agent, what it said, what it was paid, and how the episode ended."""
    chosen = [group.episodes[0] for group in groups if group.episodes][:EPISODES]
    return [
        {
            "task": _short(episode.task.question or episode.task.id),
            "agent": turn.agent,
            "said": _short(turn.text),
            "reward": f"{episode.rewards.get(turn.agent, 0.0):.4g}",
            "ended": _short(episode.error) if episode.error else ("cut" if episode.truncated else "whole"),
        }
        for episode in chosen
        for turn in episode.turns
    ]


def _short(text: str) -> str:
    left = len(text) - CHARACTERS
    return text if left <= 0 else f"{text[:CHARACTERS]} … and {left} characters more"
