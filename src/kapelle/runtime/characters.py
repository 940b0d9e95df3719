"""Text that can be encoded and shown: JSON and Python allow halves of characters and what a terminal obeys."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kapelle.types import Message

_HALF = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_KEPT = "\n\t\u200c\u200d"


def replace_surrogates(text: str) -> str:
    """Return a text with every half of a character (a lone surrogate, U+D800 to U+DFFF) replaced by U+FFFD."""
    return _HALF.sub(_REPLACEMENT, text)


def cleaned(text: str) -> str:
    """Return a text for a terminal: its lines and tabs, and each other control character (C0, C1, directions, halves) escaped.

    Joiners stay: Persian words and many emoji are written with them.
    """
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(
        c if c in _KEPT or unicodedata.category(c)[0] != "C" else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


CHAT_MARKS = re.compile(
    r"<\|(?:im_start|im_end|start_header_id|end_header_id|eot_id|endoftext|begin_of_text|system|user|assistant|tool"
    r"|end)\|>|\[/?INST\]|<</?SYS>>|</s>|<(?:start|end)_of_turn>"
)
"""What opens and closes messages in the chat templates of common models."""


def defused(messages: Sequence[Message]) -> list[Message]:
    """Return messages for another server, whose tokeniser is unknown: no such mark stands whole in their texts."""
    return [
        replace(each, content=CHAT_MARKS.sub(lambda mark: f"{mark[0][0]} {mark[0][1:]}", each.content))
        for each in messages
    ]
