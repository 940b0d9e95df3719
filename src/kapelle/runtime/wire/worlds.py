"""The protocol to run episodes with an environment in another process, which `docs/environment_server.md` explains.

A *session* is the state of one episode, from its reset to its close. The caller sends requests, each with an `id`. A request about a
session contains the field `session`, a number that the caller chooses. The other process responds to each request exactly once, in
any order. Requests of one session are started in the order in which they were sent.

    reset     Arguments: task (or split and index), agents, seed. Result: scorable, view, version.
    act       Arguments: actions, final, allow_answers. Result: rewards, view.
    observe   Result: a view with every observation.
    score     Arguments: agent, text. Result: score.
    outcome   Result: outcome.
    close     Also cancels the running calls of the session. There is no result.

A *view* contains the data of an episode that can be read without waiting: the agents that may move, and each observation that has
changed.

A response contains the `id` of its request and one of three fields: `value` is the result, `error` is the class and message of an
exception of the environment, and `refused` is an HTTP status and a message.

There are two transports for these messages. A process on this machine receives frames over a socket, which consist of four bytes for
the length and the JSON (`rollout/workers`). A server receives JSON over a WebSocket (`services/environments`, `environments/remote`).
When a connection is closed, its sessions are closed. The JSON is exact (`exact_json.py`) and contains no code.
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
"""Version of the protocol, which must be the same on both sides."""
PATH = "/v1/worlds"
"""URL path at which a server accepts WebSocket connections."""
LARGEST = 16 << 20
"""Maximum number of bytes of one message to or from a server."""


def to_text(message: Mapping[str, Any], most: int) -> str:
    """Return a message as an ASCII JSON string.

    Raises EpisodeError if JSON cannot represent the message or if it has more than `most` bytes.
    """
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
    """Return the message in a JSON string. Raises ValueError if the string is not valid JSON."""
    try:
        return decode(json.loads(text, parse_constant=_no_constant))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def message_form(message: Message) -> Json:
    """Return a chat message as JSON values."""
    return [message.role, message.content, message.speaker, message.structured]


def message_from(form: Sequence[Any]) -> Message:
    """Return the chat message from JSON values that `message_form` returned."""
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
    """Return the task from JSON values that `task_form` returned."""
    cast = {agent: Cast(*each) for agent, each in form["cast"].items()}
    messages = tuple(tuple(map(message_from, read)) for read in form["messages"])
    return Task(**{**form, "cast": cast, "messages": messages})


@dataclass(frozen=True, slots=True)
class Description:
    """Description of an environment on a server."""

    name: str
    """Name of the environment on the server."""
    version: int
    """Version of the environment, which starts at 1 and increases by 1 with each replacement."""
    content: str
    """Hash of the environment's class, its settings and the files that it reads. If the hashes are equal, episodes are equal."""
    kind: str
    """Value of `environment.name` in a recipe for this environment."""
    least_reward: float
    greatest_reward: float
    sources: Mapping[Split, str]
    sizes: Mapping[Split, int | None]
    """Number of tasks of each split, or None if the number is unlimited."""
    skipped: Mapping[Split, str]
    """Description of the excluded rows and the reasons, for each split with excluded rows."""
    answerable: bool
    """Whether the tasks are questions with comparable answers."""
    scripted: bool
    """Whether the environment can provide demonstrations of an agent's messages."""
    answers_per_task: int
    """Number of recorded answers per task, or 0 if no answers are recorded."""
    constant_sum: bool
    """Whether the sum of the rewards of all agents is constant."""
    alive: Sequence[str]
    """External programs that the environment calls and whose responses may vary."""
    members: Mapping[str, Description]
    """Descriptions of the parts of a mixture."""


def description_from(form: Mapping[str, Any]) -> Description:
    """Return the description from the dict that `dataclasses.asdict` returned."""
    members = {name: description_from(each) for name, each in form["members"].items()}
    return Description(**{**form, "members": members})
