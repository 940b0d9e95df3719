"""Natural-language inference: does a premise entail a hypothesis, contradict it, or leave it open?

Rows have the format of ANLI (1910.14599) and the hub's `facebook/anli`, on which MAPoRL trains: the fields
are `premise`, `hypothesis` and `label`. The label is a letter (`e`, `n`, `c`), a word or a number (0, 1, 2).
Rows with the same premise stay in the same split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from kapelle.environments.data.conversations import question_in, text_in
from kapelle.environments.data.source import DataWithQuestions, Words
from kapelle.environments.grading.text.extraction import ExtractionRule, statements
from kapelle.environments.questions import Answers, Questions, words
from kapelle.runtime.row_files import DataRow
from kapelle.types import Json, Split, Task

Label = Literal["entailment", "neutral", "contradiction"]
_LABELS: Mapping[str, Label] = {
    **dict.fromkeys(("e", "0", "entailment"), "entailment"),
    **dict.fromkeys(("n", "1", "neutral"), "neutral"),
    **dict.fromkeys(("c", "2", "contradiction"), "contradiction"),
}
_ANSWERS: Mapping[str, Label] = {name: label for name, label in _LABELS.items() if not name.isdigit()}


def _label(text: str) -> Label | None:
    found = (_ANSWERS.get(each.casefold().strip(" .*()")) for each in statements(text))
    return next(filter(None, found), None)


class NLI(DataWithQuestions, Questions):
    """An agent reads a premise and a hypothesis, and answers with one of three words."""

    name: Literal["nli"] = "nli"
    path: str = "facebook/anli"
    train: str = "train_r1"
    test: str = "test_r1"
    question_field: str | None = None
    """A field with the whole question, such as verl's `prompt`; null builds it from `premise` and `hypothesis`."""
    label_field: str = "label"
    """The field with the answer."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("tag", "hash", "last_box", "whole"), min_length=1)
    """Rules that extract an agent's answer, in this order."""

    def _key(self) -> tuple[str, str, Words]:
        if self.question_field is not None:
            return self.question_field, "question_field", question_in
        return "premise", "path", question_in

    def _read(self, row: DataRow) -> tuple[str, Label]:
        return self.pair_of(row)

    def pair_of(self, row: DataRow) -> tuple[str, Label]:
        """Return the question and the label of a row; raise DataError if either is missing."""
        written = text_in(row, self.label_field, "label_field").strip().casefold()
        if written not in _LABELS:
            raise row.unusable(f"the label '{written}' must be e, n or c (0, 1, 2)")
        label = _LABELS[written]
        if self.question_field is not None:
            return question_in(row, self.question_field, "question_field"), label
        premise, hypothesis = (question_in(row, field, "path") for field in ("premise", "hypothesis"))
        question = (
            f"Premise: {premise}\nHypothesis: {hypothesis}\n"
            "Does the premise entail the hypothesis? Answer entailment, neutral or contradiction."
        )
        return question, label

    @property
    def answers(self) -> Answers:
        """An answer of one of three words."""
        return words(
            _label,
            self.extraction,
            "none of entailment, neutral and contradiction",
        )

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return the label."""
        return {"label": task.data["answer"]}

    def task(self, split: Split, index: int) -> Task:
        """Return the pair at an index."""
        row = self.rows.of(split)[index]
        question, label = self.pair_of(row)
        if self.question_field is None:
            return Task(f"{split}-{index}", question, {"answer": label})
        return self.question_of(row).task(
            f"{split}-{index}", {"answer": label}, rendered=self.rendered_prompts
        )
