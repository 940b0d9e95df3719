"""Natural-language inference. The question is whether a premise entails a hypothesis, contradicts it, or does neither.

Rows have the format of ANLI (arXiv:1910.14599) and of `facebook/anli` on the Hugging Face hub, on which MAPoRL trains. The fields
of a row are `premise`, `hypothesis` and `label`. The label is a letter (`e`, `n`, `c`), a word or a number (0, 1, 2). Rows with the
same premise belong to the same split.
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
    """Questions with a premise and a hypothesis. The answer is `entailment`, `neutral` or `contradiction`."""

    name: Literal["nli"] = "nli"
    path: str = "facebook/anli"
    train: str = "train_r1"
    test: str = "test_r1"
    question_field: str | None = None
    """The field that contains the whole question, such as `prompt` in verl. If null, the question is created from the fields `premise`
    and `hypothesis`."""
    label_field: str = "label"
    """The field that contains the label."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("tag", "hash", "last_box", "whole"), min_length=1)
    """Rules that extract the answer from an agent's text, in the order in which they are applied."""

    def _key(self) -> tuple[str, str, Words]:
        if self.question_field is not None:
            return self.question_field, "question_field", question_in
        return "premise", "path", question_in

    def _read(self, row: DataRow) -> tuple[str, Label]:
        return self.pair_of(row)

    def pair_of(self, row: DataRow) -> tuple[str, Label]:
        """Return the question and the label in a row. Raises DataError if either is missing or invalid."""
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
        """The grader of answers. An answer is one of three words."""
        return words(
            _label,
            self.extraction,
            "none of entailment, neutral and contradiction",
        )

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return the correct label of the task."""
        return {"label": task.data["answer"]}

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index, whose question contains a premise and a hypothesis."""
        row = self.rows.of(split)[index]
        question, label = self.pair_of(row)
        if self.question_field is None:
            return Task(f"{split}-{index}", question, {"answer": label})
        return self.question_of(row).task(
            f"{split}-{index}", {"answer": label}, rendered=self.rendered_prompts
        )
