"""Episodes as data for supervised fine-tuning: the good ones, turn by turn, as JSON lines.

One line is one turn, in the order of the episode:

    {"task": "train-17", "episode": 2, "turn": 1, "agent": "actor", "reward": 1.0,
     "messages": [{"role": "user", "content": "2,11+1"}], "completion": "132",
     "policy": "actor", "version": 50, "weights_hash": "3f…"}

`messages` is the agent's own conversation up to this turn and `completion` its answer, so that a line is one SFT
example for that agent. `reward` is the episode's: the team's score where the environment has one,
else the mean of what its agents earned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kapelle.runs.packed_rows import pack
from kapelle.runs.step_rows import PACKED
from kapelle.types import Episode, Group, Message, conversation


def episode_reward(episode: Episode) -> float:
    """Return the team's score of an episode, or the mean return of its agents where it has none."""
    if episode.success is not None:
        return episode.success
    return sum(episode.total(agent) for agent in episode.agents) / len(episode.agents)


def good_episodes(groups: Sequence[Group], least: float) -> Iterator[tuple[int, Episode]]:
    """Yield every episode that did not fail and has at least this reward, with its number in its group."""
    for group in groups:
        for number, episode in enumerate(group.episodes):
            if episode.error is None and episode_reward(episode) >= least:
                yield number, episode


def sft_rows(number: int, episode: Episode) -> list[dict[str, Any]]:
    """Return the rows of an episode, one per turn; the module's docstring shows the form."""
    conversations: dict[str, list[Message]] = {}
    known: dict[str, tuple[int, ...]] = {}
    rows = []
    for turn in episode.turns:
        messages = conversations.setdefault(turn.agent, [])
        before = known.get(turn.agent, ())
        if turn.prompt_ids[: len(before)] != before:
            messages.clear()  # the agent began a new conversation
        messages.extend(turn.heard)
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


def dump_rows(rows: Sequence[Mapping[str, Any]], out: Path | None = None, number: int = 0) -> bytes:
    """Return rows as JSON lines; everything but ASCII is escaped, which keeps what UTF-8 cannot hold.

    For a file `out` that ends in `.jsonl.zst` they are compressed as a run's episodes are, under this number of a step.
    """
    lines = [json.dumps(row, allow_nan=False).encode("ascii") + b"\n" for row in rows]
    return pack(number, lines) if out is not None and out.name.endswith(PACKED) and lines else b"".join(lines)
