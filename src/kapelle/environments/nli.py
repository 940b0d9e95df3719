"""Natural-language inference: does a premise entail a hypothesis, contradict it, or leave it open?

The form of ANLI (1910.14599) and of the hub's `facebook/anli`, which MAPoRL trains on: fields `premise`,
`hypothesis` and `label`, the label a letter (`e`, `n`, `c`), a word or a number (0, 1, 2). Rows with one
premise stay in one split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from kapelle.configured import Configured
from kapelle.environments.data_source import DataSource, Row
from kapelle.environments.question_world import QuestionWorld
from kapelle.errors import DataError
from kapelle.grading.exact import plain_text
from kapelle.grading.extraction import Policy, extract
from kapelle.grading.verdict import Grade, no_answer, right, wrong
from kapelle.types import Message, Split, Task

Label = Literal["entailment", "neutral", "contradiction"]
_LABELS: Mapping[str, Label] = {
    **dict.fromkeys(("e", "0", "entailment"), "entailment"),
    **dict.fromkeys(("n", "1", "neutral"), "neutral"),
    **dict.fromkeys(("c", "2", "contradiction"), "contradiction"),
}
_ANSWERS: Mapping[str, Label] = {name: label for name, label in _LABELS.items() if not name.isdigit()}


class NLI(Configured):
    """Premise and hypothesis in, one of three words out."""

    name: Literal["nli"] = "nli"
    path: str = "facebook/anli"
    """A folder with a file per split, one file, or `owner/name` on the Hugging Face hub."""
    config: str | None = None
    """Configuration of the hub's data set; null for its only one."""
    train: str = "train_r1"
    """File (suffix optional) or hub split to train on."""
    test: str = "test_r1"
    """File or hub split to evaluate on."""
    test_share: float = Field(0.1, gt=0.0, lt=1.0)
    """Share of the premises held out for testing where `path` is one file; a hash of each decides."""
    extraction: tuple[Policy, ...] = Field(("tag", "hash", "last_box", "whole"), min_length=1)
    """Where an agent's answer is looked for, in this order."""

    @model_validator(mode="after")
    def _apart(self) -> NLI:
        if self.train == self.test:
            raise ValueError(
                f"`train` and `test` both name '{self.train}'. Nothing is tested on what it trains on."
            )
        return self

    @property
    def reward_range(self) -> tuple[float, float]:
        """An answer is right or wrong."""
        return (0.0, 1.0)

    @property
    def sources(self) -> Mapping[Split, str]:
        """The file or hub split of each."""
        return {"train": self._source.describe("train"), "test": self._source.describe("test")}

    @property
    def _source(self) -> DataSource:
        return DataSource(self.path, self.config, self.train, self.test, self.test_share)

    def _rows(self, split: Split) -> tuple[Row, ...]:
        return self._source.load("premise", "path").of(split)

    def check(self, agents: Sequence[str]) -> None:
        """Read both splits; DataError names the file and line of the first row without a label."""
        for split in ("train", "test"):
            for row in self._rows(split):
                _label(row)
                row.text("hypothesis", "path")

    def size(self, split: Split) -> int | None:
        """Return the number of pairs."""
        return len(self._rows(split))

    def task(self, split: Split, index: int) -> Task:
        """Return the pair at an index."""
        row = self._rows(split)[index]
        premise, hypothesis = row.text("premise", "path"), row.text("hypothesis", "path")
        question = (
            f"Premise: {premise}\nHypothesis: {hypothesis}\n"
            "Does the premise entail the hypothesis? Answer entailment, neutral or contradiction."
        )
        return Task(f"{split}-{index}", question, {"answer": _label(row)})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> QuestionWorld:
        """Open the world of one pair."""
        gold = str(task.data["answer"])
        return QuestionWorld(task, agents, lambda text: self._grade(text, gold), {"label": gold})

    def _grade(self, text: str, gold: str) -> Grade:
        found = extract(text, self.extraction)
        if found.text is None:
            return no_answer(found.problem)
        answer = _answer(found.text)
        if answer is None:
            return no_answer(f"'{found.text[:80]}' is none of entailment, neutral and contradiction.")
        return right(answer) if answer == gold else wrong(answer, gold)

    def extract(self, text: str) -> str | None:
        """Return which of the three a text answers, None when it answers none."""
        found = extract(text, self.extraction).text
        return None if found is None else _answer(found)

    def script(self, agent: str, task: Task, heard: Sequence[Message], seed: int) -> str:
        """Return the label, in the form that is looked for first."""
        return _MARKED.get(self.extraction[0], "{}").format(task.data["answer"])


_MARKED: Mapping[Policy, str] = {
    "tag": "<answer>{}</answer>",
    "hash": "#### {}",
    "last_box": "\\boxed{{{}}}",
    "first_box": "\\boxed{{{}}}",
    "only_box": "\\boxed{{{}}}",
}


def _answer(text: str) -> Label | None:
    return _ANSWERS.get(plain_text(text).casefold().strip(" .*()\"'"))


def _label(row: Row) -> Label:
    written = row.text("label", "path").strip().casefold()
    if written not in _LABELS:
        raise DataError(
            f"{row.place}: the label '{written}' is none of e, n, c (0, 1, 2). Mend or drop the row."
        )
    return _LABELS[written]
