"""The protocol by which one process plays worlds that live in another one; `docs/environment_server.md` explains it.

A *session* is one world, from its reset to its close. The player sends requests, each with an `id` and, if it concerns a world,
with the `session`, a number that the player chooses. The other process answers each request once, in any order; requests of a
session begin in the order in which they were sent.

    reset     task (or pick: split, index), agents, seed        → scorable, view, version
    act       actions, final, allow_answers                     → rewards, view
    observe                                                     → view, with all that is shown
    score     agent, text                                       → score
    outcome                                                     → outcome
    close     whatever the world is doing                       → nothing

A *view* is all that may be read from a world without waiting: who may move, and what each agent is shown, if that has changed.

An answer has the `id` of its request and one of: `value`; `error`, the class and message of what the environment raised; or
`refused`, an HTTP status and a message.

Two transports carry these messages: the socket of a process on this machine, as frames of four bytes of length and JSON
(`rollout/workers`), and a WebSocket to a server, as texts of JSON (`services/environments`, `environments/remote`). A session
ends with the connection over which it began. The JSON is exact (`exact_json.py`); no code travels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from kapelle.errors import EpisodeError
from kapelle.runtime.wire.exact_json import decode, encode
from kapelle.types import Cast, Json, Message, Split, Task

VERSION = 1
"""Of the protocol; both sides must have the same."""
PATH = "/v1/worlds"
"""Where a server takes WebSockets."""


def to_text(message: Mapping[str, Any], most: int) -> str:
    """Return a message as JSON in ASCII; EpisodeError for one that JSON cannot hold or that has more than `most` bytes."""
    try:
        text = json.dumps(encode(message, "message"), separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise EpisodeError(
            f"It cannot be passed to or from another process: {error}. Let the environment put only text, numbers, lists and "
            "mappings into tasks and outcomes; other values need `episode.environment_workers: 0` and no server."
        ) from error
    if len(text) > most:
        raise EpisodeError(
            f"A message of {len(text):,} bytes is too large to pass on; {most:,} are the most."
        )
    return text


def from_text(text: str | bytes) -> Any:
    """Return the message of a JSON text; ValueError for a text that is no message."""
    try:
        return decode(json.loads(text, parse_constant=_no_constant))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def message_form(message: Message) -> Json:
    """Return a message of a conversation as plain values."""
    return [message.role, message.content, message.speaker, message.structured]


def message_from(form: Sequence[Any]) -> Message:
    """Return the message that `message_form` was given."""
    role, content, speaker, structured = form
    return Message(role, content, speaker, structured=structured)


def task_form(task: Task) -> dict[str, Json]:
    """Return a task as plain values."""
    return {
        "id": task.id,
        "question": task.question,
        "data": task.data,
        "part": task.part,
        "cast": {agent: [each.policy, each.player] for agent, each in task.cast.items()},
        "system": task.system,
        "messages": [[message_form(message) for message in read] for read in task.messages],
        "rendered": task.rendered,
    }


def task_from(form: Mapping[str, Any]) -> Task:
    """Return the task that `task_form` was given."""
    cast = {agent: Cast(*each) for agent, each in form["cast"].items()}
    messages = tuple(tuple(map(message_from, read)) for read in form["messages"])
    return Task(**{**form, "cast": cast, "messages": messages})


@dataclass(frozen=True, slots=True)
class Description:
    """What an environment on a server is."""

    name: str
    """By which the server knows it."""
    version: int
    """1 at first, and one more each time it is replaced."""
    content: str
    """A hash of its class and settings, and of the files it reads: equal ones play equal episodes."""
    kind: str
    """The name of its class, as a recipe has it."""
    least_reward: float
    greatest_reward: float
    sources: Mapping[Split, str]
    sizes: Mapping[Split, int | None]
    """How many tasks a split has; None if the supply is endless."""
    skipped: Mapping[Split, str]
    """Which rows are left out and why, for splits that leave some out."""
    answerable: bool
    """Whether its tasks are questions with answers that can be compared."""
    scripted: bool
    """Whether it can demonstrate what an agent should say."""
    answers_per_task: int
    """How many recorded answers a task has; 0 for an environment that is no record."""
    constant_sum: bool
    """Whether one agent wins what the others lose."""
    alive: Sequence[str]
    """What it calls whose answers may differ the next time."""
    members: Mapping[str, Description]
    """The parts of a mixture."""


def description_from(form: Mapping[str, Any]) -> Description:
    """Return the description whose `dataclasses.asdict` this is."""
    members = {name: description_from(each) for name, each in form["members"].items()}
    return Description(**{**form, "members": members})
