"""Episodes that are written by hand: what tests of credit, of batches and of records build on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kapelle.types import Episode, Group, Task, Turn

TASK = Task("t0", "1+1")


def turn(agent: str, index: int, tokens: int = 2, **fields: Any) -> Turn:
    """Return a turn of `tokens` tokens after a prompt of three; any field may be set."""
    values: dict[str, Any] = {
        "agent": agent,
        "policy": agent,
        "version": 0,
        "weights_hash": "h",
        "index": index,
        "completed_before": index,
        "prompt_ids": (5, 10 + index, 11),
        "completion_ids": tuple(range(20, 20 + tokens)),
        "logprobs": (-1.0,) * tokens,
        "finish_reason": "stop",
        "text": "x",
    }
    return Turn(**{**values, **fields})


def episode(*turns: Turn, agents: Sequence[str] | None = None, task: Task = TASK, **fields: Any) -> Episode:
    """Return an episode of these turns; its agents are those who speak unless named."""
    names = tuple(agents or dict.fromkeys(t.agent for t in turns))
    return Episode(task, 0, names, turns, **fields)


def group(*episodes: Episode) -> Group:
    """Return a group of episodes of one task."""
    return Group(episodes[0].task, episodes)
