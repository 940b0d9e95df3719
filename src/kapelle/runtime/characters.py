"""Text that can be encoded: JSON and Python allow halves of characters, UTF-8 and tokenisers do not."""

from __future__ import annotations

import re

_HALF = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


def whole(text: str) -> str:
    """Return a text with every half of a character (a lone surrogate, U+D800 to U+DFFF) replaced by U+FFFD."""
    return _HALF.sub(_REPLACEMENT, text)
