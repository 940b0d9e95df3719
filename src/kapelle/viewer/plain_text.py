"""Text that somebody else wrote, made fit to be shown: what would act or hide in it becomes visible."""

from __future__ import annotations

import re

LONGEST = 20_000
"""Characters of one text on a page; the rest is a click away."""
_RISKY = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e0fff]"
)


def shown(text: object) -> str:
    """Return a text in which every control, override and half character stands as a visible sign.

    Escape codes of terminals become `␛[31m`, a right-to-left override `⟨U+202E⟩`. It is not escaped for HTML.
    """
    return _RISKY.sub(_sign, str(text).replace("\r\n", "\n"))


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"⟨U+{code:04X}⟩"


def cut(text: str, most: int = LONGEST) -> str:
    """Return the beginning of a text, with a word about how much was left out."""
    return text if len(text) <= most else f"{text[:most]} … {len(text) - most:,} more characters"


def one_line(text: object, most: int = 160) -> str:
    """Return a text as one short line."""
    whole = " ".join(shown(str(text)[: most * 4]).split())
    return whole if len(whole) <= most else f"{whole[: most - 1]}…"
