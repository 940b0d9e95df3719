"""Long episodes: a conversation that no longer fits is begun anew from its ends, by a declared rule (`episode.compaction`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from kapelle.types import Message


class CompactionRule(Protocol):
    """What of a conversation is kept (`settings.schema.CompactionConfig`)."""

    @property
    def over(self) -> int | None:
        """Tokens of a prompt beyond which it is shortened; None is where the answer would not fit the context."""
        ...

    @property
    def keep_first(self) -> int:
        """Messages after the system message, from the beginning."""
        ...

    @property
    def keep_last(self) -> int:
        """Most messages from the end; at least the last one stays."""
        ...

    @property
    def note(self) -> str:
        """What stands in their place, `{dropped}` for their number; empty for nothing."""
        ...


def compacted(
    messages: Sequence[Message], rule: CompactionRule, fits: Callable[[Sequence[Message]], bool]
) -> tuple[list[Message], int]:
    """Return the conversation with which an agent goes on, and how many messages were dropped.

    The system message, the first messages and as many of the last ones as `rule` allows and `fits` accepts stay, in their order;
    the note is written under the last of the first messages. Two messages of one role that meet where others were dropped become
    one, since many chat templates take roles in turn only. Nothing may fit: then the shortest conversation is returned.
    """
    system = 1 if messages and messages[0].role == "system" else 0
    head = list(messages[: system + rule.keep_first])
    rest = messages[len(head) :]
    kept = min(rule.keep_last, len(rest) - 1)  # one at least goes
    while True:
        kept = max(1, kept)
        dropped = len(rest) - kept
        found = _joined(head, rest[dropped:], rule.note.format(dropped=dropped))
        if kept == 1 or fits(found):
            return found, dropped
        kept -= 1


def _joined(head: Sequence[Message], tail: Sequence[Message], note: str) -> list[Message]:
    found = list(head)
    if note and found and found[-1].role != "system":
        found[-1] = replace(found[-1], content=f"{found[-1].content}\n\n{note}")
    elif note:
        found.append(Message("user", note))
    for message in tail:
        last = found[-1] if found else None
        if message is tail[0] and last is not None and last.role == message.role:
            found[-1] = replace(
                last, content=f"{last.content}\n\n{message.content}", images=(*last.images, *message.images)
            )
        else:
            found.append(message)
    return found
