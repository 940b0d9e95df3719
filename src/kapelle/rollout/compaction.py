"""Shorten conversations that no longer fit in the context (`episode.compaction`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kapelle.features.compaction.settings import CompactionConfig
from kapelle.types import Message


def compacted(
    messages: Sequence[Message],
    rule: CompactionConfig,
    fits: Callable[[Sequence[Message]], bool],
    summary: str = "",
) -> tuple[list[Message], int]:
    """Return the shortened conversation of an agent, and the number of messages that were removed.

    The system message, the first messages, and as many of the last messages as `rule` and `fits` allow are kept. At least one of the
    last messages is kept, even if it does not fit. The note about removed messages and the `summary` are added after the text of the
    last of the first messages. Messages of the same role that become adjacent are joined, because many chat templates require alternating roles.
    """
    system = 1 if messages and messages[0].role == "system" else 0
    head = list(messages[: system + rule.keep_first])
    rest = messages[len(head) :]
    kept = min(rule.keep_last, len(rest) - 1)  # drop at least one
    while True:
        kept = max(1, kept)
        dropped = len(rest) - kept
        note = "\n\n".join(text for text in (rule.note.format(dropped=dropped), summary) if text)
        found = _joined(head, rest[dropped:], note)
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
