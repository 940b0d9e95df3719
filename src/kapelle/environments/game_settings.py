"""What every view of a game begins with: its rules, and whether players may think before a move."""

from __future__ import annotations

import re

from pydantic import field_validator

from kapelle.errors import did_you_mean
from kapelle.settings.base import Settings
from kapelle.types import Split, Task

# -------- Reasoning before a move: `<think>…</think>`, then the move
#
# The move is read after the last `</think>`, so that nothing written inside is ever made. A `<think>` that is not
# closed leaves no move, wherever it stands. An opening tag may be missing: chat templates put it into the prompt.

_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)

INVITATION = "You may think first, between <think> and </think>; only what you write after that is your move."
"""What a player reads where thinking is allowed."""


def spoken(text: str) -> str | None:
    """Return a text without its thinking: what follows the last `</think>`. None where a `<think>` is not closed."""
    tags = list(_TAG.finditer(text))
    if not tags:
        return text
    return text[tags[-1].end() :] if tags[-1][1] else None


def without_tags(text: str) -> str:
    """Return a text without the tags themselves."""
    return _TAG.sub("", text)


# -------- Games that are played again and again: nothing but the seed tells one match from another


class Endless(Settings):
    """Base of environments without problems of their own: a task is one match, and its text is empty."""

    def size(self, split: Split) -> int | None:
        """Return None: matches come without end."""
        return None

    def task(self, split: Split, index: int) -> Task:
        """Return one match."""
        return Task(f"{split}-{index}", "")


RULES = ("full", "short", "none")
"""What `rules` may say beside a text of the user's own."""


class GameSettings(Endless):
    """What every game lets a recipe set."""

    rules: str | None = None
    """What stands before every view: `full` or `short` rules, `none`, or a text of your own; null is `full`, and `none`
    where the wording is `short`."""
    thinking: bool = False
    """True allows `<think>…</think>` before a move, which is then read after the last `</think>`."""

    @field_validator("rules")
    @classmethod
    def _a_known_word_or_a_text(cls, rules: str | None) -> str | None:
        if rules is not None and rules not in RULES and len(rules.split()) < 2:
            known = ", ".join(f"`{word}`" for word in RULES)
            raise ValueError(f"`rules` is {known} or the rules themselves.{did_you_mean(rules, RULES)}")
        return rules

    def head(self, full: str, short: str, unset: str = "full") -> str:
        """Return what stands before every view, of a game's rules in full and in short; empty for nothing."""
        word = self.rules or unset
        text = {"full": full, "short": short, "none": ""}.get(word, word)
        return "\n".join(part for part in (text, INVITATION if self.thinking else "") if part)

    def move_in(self, text: str) -> str | None:
        """Return the part of a text in which a move is looked for; None where thinking is not closed."""
        return spoken(text) if self.thinking else text
