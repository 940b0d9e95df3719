"""Make strings safe to encode and to print, because JSON and Python allow lone surrogates and control characters."""

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
    """Replace every lone surrogate (U+D800 to U+DFFF) of a string by U+FFFD."""
    return _HALF.sub(_REPLACEMENT, text)


def cleaned(text: str) -> str:
    """Return a string that is safe to print on a terminal, in which control characters are escaped.

    Control characters are C0, C1, text directions and surrogates, except line breaks and tabs. Joiners are kept, because Persian
    words and many emoji need them.
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
"""Regular expression of the markers around messages in the chat templates of common models."""


def defused(messages: Sequence[Message]) -> list[Message]:
    """Return messages for a server whose tokeniser is unknown, with a space inserted into every chat marker in their text."""
    return [
        replace(each, content=CHAT_MARKS.sub(lambda mark: f"{mark[0][0]} {mark[0][1:]}", each.content))
        for each in messages
    ]
