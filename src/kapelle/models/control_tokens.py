"""Prevent the text of messages from being tokenised as control tokens, which mark the start and end of messages.

A tokeniser reads `<|im_end|>` as one token anywhere in a string. The text of a partner, a dataset, a tool or a user
could therefore end a message and start another message. Before the chat template renders a message, the first letter of
each such mark is replaced by a private character. After rendering, marks that contain a private character are tokenised
in two pieces. The agent reads the same letters, but no control token. Messages without marks keep their token ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence

from kapelle.types import Json

_PRIVATE = 0x10F000
"""The first private character. Each letter with which a mark can begin has its own private character."""
_ESCAPE = chr(0x10FFFD)
"""The character that escapes a private character that a text already contains."""
_OWN = re.compile(f"[{chr(_PRIVATE)}-{_ESCAPE}]")
_SPLIT = re.compile(f"({_ESCAPE}.|[{chr(_PRIVATE)}-{_ESCAPE}])", re.DOTALL)


class ControlTokens:
    """The control tokens of one model."""

    def __init__(self, tokens: Mapping[str, int], encode: Callable[[str], Sequence[int]]) -> None:
        """Take the control tokens by their text, and a function that tokenises a string."""
        self._tokens, self._encode = tokens, encode
        marks = sorted(tokens, key=len, reverse=True)  # the longest match wins, as in tokenisers
        self._mark = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        self._first = re.compile(f"[{re.escape(''.join({mark[0] for mark in marks}))}]" if marks else r"(?!)")
        letters = sorted(set("".join(marks)))
        self._hidden = {letter: chr(_PRIVATE + k) for k, letter in enumerate(letters)}
        self._shown = {private: letter for letter, private in self._hidden.items()}
        self._begun = {mark[:k] for mark in marks for k in range(1, len(mark))}
        self._rest = {mark[k:] for mark in marks for k in range(1, len(mark))}
        self._longest = len(marks[0]) if marks else 0
        unknown = set(encode(_ESCAPE))  # the token for unknown letters does not open a message
        self._ids = frozenset(tokens.values()) - unknown

    def _marks(self, text: str) -> list[re.Match[str]]:
        """Return all marks in a text, including overlapping marks."""
        starts = (found.start() for found in self._first.finditer(text))
        return [mark for start in starts if (mark := self._mark.match(text, start))]

    def hide(self, value: Json, allowed: Container[str] = ()) -> Json:
        """Return the text of a message with private characters where a mark may begin. In JSON, each string is handled separately.

        Marks in `allowed` stay unchanged.
        """
        if isinstance(value, list):
            return [self.hide(each, allowed) for each in value]
        if isinstance(value, dict):
            return {
                self.hide(name): each if name in ("role", "type") else self.hide(each, allowed)
                for name, each in value.items()
            }
        if not isinstance(value, str) or not self._tokens:
            return value
        text = _OWN.sub(rf"{_ESCAPE}\g<0>", value)
        places = {mark.start() for mark in self._marks(text) if mark[0] not in allowed}
        # The neighbouring text, from the template or another message, may complete a mark.
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        places |= {
            end - k for k in range(1, min(self._longest, end + 1)) if text[end - k : end] in self._begun
        }
        if any(text[start : start + k] in self._rest for k in range(1, self._longest)):
            places.add(start)
        return "".join(self._hidden[c] if k in places else c for k, c in enumerate(text)) if places else text

    def show(self, text: str) -> str:
        """Return the original text of a text that `hide` has changed."""
        return "".join(
            self._shown.get(part, part[-1:]) if k % 2 else part for k, part in enumerate(_SPLIT.split(text))
        )

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a rendered text, with control tokens only where the template itself wrote them."""
        if not _OWN.search(text):
            ids = self._encode(text)
            if self._of_control(ids) == self._known(self._mark.findall(text)):
                return [*ids]
        hidden: list[int] = []
        length = 0
        for k, part in enumerate(_SPLIT.split(text)):
            if k % 2 and part in self._shown:
                hidden.append(length)
            length += len(part) if k % 2 == 0 else 1
        text = self.show(text)
        cuts, own, end = [0], list[re.Match[str]](), 0
        for mark in self._marks(text):
            if any(mark.start() <= place < mark.end() for place in hidden):
                cuts.append(mark.start() + 1)
            elif mark.start() >= end:
                own.append(mark)
                end = mark.end()
        ids = self._pieces(text, cuts)
        if self._of_control(ids) == self._known([mark[0] for mark in own]):
            return ids
        # The tokeniser also reads other letters as a mark, such as full-width letters that it normalises.
        ids, end = [], 0
        for mark in own:
            ids += [*self._spelled(text, end, mark.start(), cuts), self._tokens[mark[0]]]
            end = mark.end()
        return ids + self._spelled(text, end, len(text), cuts)

    def _of_control(self, ids: Sequence[int]) -> list[int]:
        return [each for each in ids if each in self._ids]

    def _known(self, marks: Sequence[str]) -> list[int]:
        return self._of_control([self._tokens[mark] for mark in marks])

    def _pieces(self, text: str, cuts: Sequence[int]) -> list[int]:
        """Return the token ids of a text that is tokenised in the pieces between the positions in `cuts`."""
        pieces = [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
        ids = [*self._encode(pieces[0])]
        line = [*self._encode("\n")] if len(pieces) > 1 else []
        for piece in pieces[1:]:
            # Some tokenisers add a space at the beginning of a text.
            behind = [*self._encode(f"\n{piece}")]
            ids += behind[len(line) :] if behind[: len(line)] == line else self._encode(piece)
        return ids

    def _spelled(self, text: str, start: int, end: int, cuts: Sequence[int]) -> list[int]:
        """Return the token ids of a part of a text. If the part would contain a control token, it is tokenised letter by letter."""
        ids = self._pieces(text[start:end], [0, *(cut - start for cut in cuts if start < cut < end)])
        if self._ids.isdisjoint(ids):
            return ids
        return [each for letter in text[start:end] for each in self._encode(letter) if each not in self._ids]
