"""Where the program of a text stands."""

from __future__ import annotations

from kapelle.grading.text.extraction import MAX_TEXT, own_turn

_FENCE = "```"
_LANGUAGES = frozenset({"", "python", "python3", "py"})


def program_of(text: str) -> str | None:
    """Return the program that a turn hands in, letter by letter; None when it hands in none.

    It is the last fenced block of Python (or of no named language) that is closed. A text without any fence
    is the program as a whole. Thoughts and what follows the end of the turn do not count.
    """
    if len(text) > MAX_TEXT:
        return None
    said = own_turn(text)
    if _FENCE not in said:
        return said if said.strip() else None
    found, block, language = None, list[str](), ""
    inside = False
    for line in said.replace("\r\n", "\n").split("\n"):
        mark = line.strip()
        if inside and mark == _FENCE:
            inside = False
            if language in _LANGUAGES:
                found = "".join(f"{part}\n" for part in block)
        elif inside:
            block.append(line)
        elif mark.startswith(_FENCE):
            inside, block, language = True, [], mark.removeprefix(_FENCE).strip().lower()
    return found if found and found.strip() else None
