"""Tokens as text while they come: whole characters only, and nothing that a stop string may still take back."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Words:
    """The text of one answer as it grows."""

    def __init__(
        self,
        spoken: Callable[[Sequence[int]], str],
        stops: Sequence[str] = (),
        marks: Sequence[str] = (),
        *,
        trims: bool = False,
    ) -> None:
        """Decode by `spoken`; end before a `mark`, such as the tag of a tool call: what follows is told at the end.

        `trims`: spaces wait for the word behind them, because before a mark they are no part of the words.
        """
        self._spoken = spoken
        self._held = max((len(stop) - 1 for stop in stops), default=0)
        self._marks = tuple(marks)
        self._trims = trims
        self._ids: list[int] = []
        self._from = self._read = 0
        """The window of tokens that is decoded anew: what is before it has no effect on what follows."""
        self._text = ""
        self.told = ""
        """What has been told so far."""

    def hear(self, ids: Sequence[int]) -> str:
        """Take the next tokens and return what can be told now."""
        self._ids += ids
        before = self._spoken(self._ids[self._from : self._read])
        now = self._spoken(self._ids[self._from :])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(self._ids)
        return self._tell(self._text[: len(self._text) - self._held] if self._held else self._text)

    def end(self, text: str) -> str:
        """Return what is left of the whole text."""
        return self._tell(text, whole=True)

    def _tell(self, text: str, *, whole: bool = False) -> str:
        if not whole:
            for mark in self._marks:
                text = text[: _before(text, mark)]
            text = text.rstrip() if self._trims else text
        news = text[len(self.told) :]
        self.told += news
        return news


def _before(text: str, mark: str) -> int:
    """Return where a mark, or what may become one, begins in a text; its length where there is none."""
    place = text.find(mark)
    if place >= 0:
        return place
    begun = next((k for k in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:k])), 0)
    return len(text) - begun
