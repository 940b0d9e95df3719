"""Questions whose answers are single letters, for tables that play workflows of questions."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_uppercase
from typing import Literal

from pydantic import Field

from kapelle.environments.questions import Answers, Questions, words
from kapelle.types import Split, Task


class Letters(Questions):
    """As many questions as there are letters; the first one's answer is A, the second one's B, and so on."""

    name: Literal["experiments.questions:Letters"] = "experiments.questions:Letters"
    letters: int = Field(default=4, ge=2, le=26)

    @property
    def alphabet(self) -> str:
        """The letters."""
        return ascii_uppercase[: self.letters]

    @property
    def asked(self) -> Mapping[str, str]:
        """Question → its answer."""
        return {f"{k + 1}?": letter for k, letter in enumerate(self.alphabet)}

    @property
    def sources(self) -> Mapping[Split, str]:
        """The same questions in both splits."""
        return {"train": "letters", "test": "letters"}

    @property
    def answers(self) -> Answers:
        """A letter, as it is."""
        return words(str)

    def task(self, split: Split, index: int) -> Task:
        """Return a question, in turn."""
        question, answer = list(self.asked.items())[index % self.letters]
        return Task(f"{split}-{index}", question, {"answer": answer})
