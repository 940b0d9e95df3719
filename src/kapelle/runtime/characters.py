"""Text that can be encoded and shown: JSON and Python allow halves of characters and what a terminal obeys."""

from __future__ import annotations

import re
import unicodedata

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
