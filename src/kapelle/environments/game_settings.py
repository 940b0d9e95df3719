"""What every view of a game begins with: its rules, and whether players may think before a move."""

from __future__ import annotations

from pydantic import field_validator

from kapelle.environments.endless import Endless
from kapelle.environments.thinking import INVITATION, spoken
from kapelle.errors import did_you_mean
from kapelle.former_names import renamed_in

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


__getattr__ = renamed_in(__name__)
