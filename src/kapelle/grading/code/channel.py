"""The conversation of the tests with the referee, and what is remembered while it lasts.

Standard library only: the file is copied into sandboxes as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, BinaryIO

from kapelle.grading.code.likeness import Made
from kapelle.grading.code.raised import forget
from kapelle.grading.code.values import encode


class Channel:
    """The two ends of the conversation with the referee."""

    requests: BinaryIO
    replies: BinaryIO
    made: Made
    """The first objects that the tests made."""
    functions: list[Callable[..., Any]]
    """The tests' own functions that were passed to the candidate."""
    heard: bool
    """Whether the candidate has said anything."""
    has_classes: bool
    """Whether the tests have made an object of a class of the candidate's."""
    moment: int
    """How many messages were sent."""
    recent: list[Any]
    """Objects that came since the tests last made one: what they are then is what they may equal."""
    classes: frozenset[str]
    """Names of the candidate's that the test takes for classes."""
    changeable: frozenset[str]
    """Names of arguments that calls may change, whatever they return."""
    values: tuple[str, ...]
    """Names of the candidate's that are plain values."""
    sizes: dict[Any, int]
    """How many items objects said or showed that they have, until something may have changed that."""


def connect(requests: BinaryIO, replies: BinaryIO) -> None:
    """Begin a conversation."""
    Channel.requests, Channel.replies = requests, replies
    forget()
    Channel.functions, Channel.sizes, Channel.recent, Channel.values = [], {}, [], ()
    Channel.made, Channel.classes = Made(), frozenset()
    Channel.moment, Channel.changeable = 0, frozenset()
    Channel.heard = Channel.has_classes = False


def heard() -> bool:
    """Return whether the candidate has said anything yet: before that, what goes wrong is the tests' fault."""
    return Channel.heard


def say(*message: Any) -> None:
    """Send a message to the referee."""
    Channel.moment += 1
    Channel.requests.write(encode(message).encode() + b"\n")
    Channel.requests.flush()
