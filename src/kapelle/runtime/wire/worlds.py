"""The protocol to run episodes with an environment in another process; `docs/environment_server.md` explains it.

A *session* is the state of one episode, from its reset to its close. The caller sends requests, each with an `id`. A request
about a session carries `session`, a number that the caller chooses. The other process answers each request once, in any order.
Requests of one session begin in the order in which they were sent.

    reset     task (or split and index), agents, seed           → scorable, view, version
    act       actions, final, allow_answers                     → rewards, view
    observe                                                     → view with every observation
    score     agent, text                                       → score
    outcome                                                     → outcome
    close     also cancels what the session is doing            → nothing

A *view* is what can be read from an episode without waiting: which agents may move, and each observation that has changed.

An answer has the `id` of its request and one of: `value`; `error`, the class and message of what the environment raised; or
`refused`, an HTTP status and a message.

Two transports carry these messages. A process on this machine gets frames over a socket: four bytes of length, then JSON
(`rollout/workers`). A server gets JSON text over a WebSocket (`services/environments`, `environments/remote`). Closing the
connection closes its sessions. The JSON is exact (`exact_json.py`) and carries no code.
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
"""Version of the protocol; both sides must have the same."""
PATH = "/v1/worlds"
"""Path at which a server accepts WebSockets."""
LARGEST = 16 << 20
"""Maximum bytes of one message to or from a server."""


def to_text(message: Mapping[str, Any], most: int) -> str:
    """Return a message as JSON in ASCII; raise EpisodeError if JSON cannot represent it or it has more than `most` bytes."""
    try:
        text = json.dumps(encode(message, "message"), separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise EpisodeError(
            f"A message cannot be passed between processes: {error}. Change the environment to put only strings, numbers, lists and mappings into "
            "tasks and outcomes, or set `episode.environment_workers: 0`."
        ) from error
    if len(text) > most:
        raise EpisodeError(f"A message has {len(text):,} bytes; at most {most:,} can be passed on.")
    return text


def from_text(text: str | bytes) -> Any:
    """Return the message of a JSON string; raise ValueError for any other string."""
    try:
        return decode(json.loads(text, parse_constant=_no_constant))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def message_form(message: Message) -> Json:
    """Return a message of a conversation as JSON values."""
    return [message.role, message.content, message.speaker, message.structured]


def message_from(form: Sequence[Any]) -> Message:
    """Return the message of a `message_form`."""
    role, content, speaker, structured = form
    return Message(role, content, speaker, structured=structured)


def task_form(task: Task) -> dict[str, Json]:
    """Return a task as JSON values."""
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
    """Return the task of a `task_form`."""
    cast = {agent: Cast(*each) for agent, each in form["cast"].items()}
    messages = tuple(tuple(map(message_from, read)) for read in form["messages"])
    return Task(**{**form, "cast": cast, "messages": messages})


@dataclass(frozen=True, slots=True)
class Description:
    """An environment on a server."""

    name: str
    """Its name on the server."""
    version: int
    """Starts at 1 and increases by 1 with each replacement."""
    content: str
    """Hash of its class, its settings and the files it reads. Equal hashes give equal episodes."""
    kind: str
    """Its `environment.name` in a recipe."""
    least_reward: float
    greatest_reward: float
    sources: Mapping[Split, str]
    sizes: Mapping[Split, int | None]
    """Number of tasks by split; None if it is unlimited."""
    skipped: Mapping[Split, str]
    """Which rows are excluded and why, for splits that exclude some."""
    answerable: bool
    """Whether its tasks are questions with comparable answers."""
    scripted: bool
    """Whether it can provide demonstrations of an agent's messages."""
    answers_per_task: int
    """Number of recorded answers per task; 0 if nothing is recorded."""
    constant_sum: bool
    """Whether the rewards of all agents have a constant sum."""
    alive: Sequence[str]
    """External programs that it calls; their answers may differ the next time."""
    members: Mapping[str, Description]
    """The parts of a mixture."""


def description_from(form: Mapping[str, Any]) -> Description:
    """Return the description of a `dataclasses.asdict` form."""
    members = {name: description_from(each) for name, each in form["members"].items()}
    return Description(**{**form, "members": members})
