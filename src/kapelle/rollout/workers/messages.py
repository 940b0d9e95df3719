"""What is said between a process that plays and one that holds worlds: the vocabulary, the frames, the forms of values.

A *session* is one world, from its reset to its close. The player asks, the worker answers each question once, in any order;
questions of a session begin in the order in which they were asked:

    serve     the environment's settings, first of all         → nothing
    reset     task, agents, seed: open a world                 → view, scorable
    act       actions, final                                   → rewards, view
    score     agent, text                                      → score
    outcome                                                    → outcome
    close     whatever the world is doing                      → nothing

A *view* is all that may be asked of a world without waiting: who may move, and what each agent is shown, where that has changed.

A frame is its length in four bytes and then JSON in ASCII, which loses nothing (`runs/exact_json.py`). No code travels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kapelle.environment import Outcome
from kapelle.errors import EngineError, EpisodeError
from kapelle.rollout.outcomes import LONGEST, said
from kapelle.runs.exact_json import decode, encode
from kapelle.types import Json, Task

VERSION = 1
"""Of this vocabulary; both sides must speak the same."""
LENGTH = 4
"""Bytes of a frame's length."""
LARGEST = 1 << 30
"""Most bytes of a frame."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as a frame; EpisodeError for one that JSON cannot hold or that is too large."""
    try:
        body = json.dumps(encode(message, "message"), separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise EpisodeError(
            f"It cannot be passed to or from another process: {error}. Let the environment put only text, numbers, lists "
            "and mappings into its tasks, or set `episode.environment_workers: 0`."
        ) from error
    if len(body) > LARGEST:
        raise EpisodeError(
            f"A message of {len(body):,} bytes is too large to pass on; {LARGEST:,} are the most."
        )
    return len(body).to_bytes(LENGTH, "big") + body


class Frames:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._arrived = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that are complete with these bytes; ValueError for what is no message."""
        self._arrived += data
        while len(self._arrived) >= LENGTH:
            end = LENGTH + int.from_bytes(self._arrived[:LENGTH], "big")
            if end > LARGEST + LENGTH:
                raise ValueError(f"a frame of {end:,} bytes")
            if len(self._arrived) < end:
                return
            body = bytes(self._arrived[LENGTH:end])
            del self._arrived[:end]
            yield decode(json.loads(body))


def task_form(task: Task) -> dict[str, Json]:
    """Return a task as plain values."""
    return {"id": task.id, "question": task.question, "data": task.data, "part": task.part}


def outcome_form(outcome: Outcome) -> dict[str, Json]:
    """Return an outcome as plain values."""
    return {
        "rewards": outcome.rewards,
        "success": outcome.success,
        "info": outcome.info,
        "truncated": outcome.truncated,
        "roles": outcome.roles,
    }


def error_form(error: BaseException) -> list[str]:
    """Return an error as its name and message."""
    return [type(error).__name__, said(error)[:LONGEST]]


def engine_error(form: list[str]) -> EngineError:
    """Return the error of a worker that could not begin."""
    return EngineError(
        f"An environment worker could not begin: {': '.join(form)} Set `episode.environment_workers: 0` to see "
        "whether the environment itself is at fault."
    )
