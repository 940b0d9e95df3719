"""Summaries and translations of the user's own rows, graded by their similarity to references and by their length.

    {"document": "…", "summary": "…"}                summarisation
    {"source": "…", "target": ["…", "…"]}            translation; a list contains several references

The score of a text is the weighted mean of its metrics (`grading.text.overlap`), multiplied by a factor that depends on its length.
Demonstrations are the first reference of each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from kapelle.environments.data.conversations import Question, field_of, question_in, text_in
from kapelle.environments.data.source import DataSettings, Words
from kapelle.environments.grading.text.extraction import ExtractionRule, answer_in, marked
from kapelle.environments.grading.text.overlap import (
    BleuTokeniser,
    Length,
    Metric,
    check_packages,
    similarity,
    too_long,
)
from kapelle.environments.grading.verdict import Grade, no_answer
from kapelle.environments.questions import Answers, Questions
from kapelle.runtime.row_files import DataRow
from kapelle.types import Json, Message, Split, Task


def _weights(metrics: Mapping[Metric, float]) -> Mapping[Metric, float]:
    for metric, weight in metrics.items():
        if weight <= 0.0:
            raise ValueError(f"`metrics.{metric}` is {weight}; set a weight above 0")
    return metrics


Metrics = Annotated[Mapping[Metric, float], AfterValidator(_weights)]


class _Referenced(DataSettings, Questions):
    """Base class of summarisation and translation: rows with a text and references, metrics, and a desired length."""

    doing: ClassVar[str]
    """The first words of the default prompt."""
    metrics: Metrics = Field(min_length=1)
    """Mapping from a metric to its weight. The score is the weighted mean of the metrics."""
    stem: bool = False
    """Whether ROUGE compares the stems of English words, so that `runs` and `running` are equal."""
    tokeniser: BleuTokeniser = "13a"
    """The tokeniser that BLEU uses."""
    length: Length | None = None
    """The length of a good text. If null, any length is accepted."""
    prompt: str | None = None
    """The prompt. The placeholder `{text}` is replaced with the text of the row, and `{length}` with a description of `length`. If
    null, a default prompt is used."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("tag", "whole"), min_length=1)
    """Rules that extract the summary or translation from an agent's text."""

    if TYPE_CHECKING:  # settings of each subclass, with its own defaults
        text_field: str
        reference_field: str

    @property
    def answers(self) -> Answers:
        """The grader of answers. An answer is a text, and its score depends on the similarity to references."""
        return Answers(
            self._graded,
            lambda text: answer_in(text, self.extraction, lambda found: " ".join(found.split()) or None),
            # With the rule `whole`, an answer needs no mark.
            lambda answer: answer if "whole" in self.extraction else marked(answer, self.extraction[0]),
        )

    def check(self, agents: Sequence[str]) -> None:
        """Check the packages and the tokeniser, and then read both splits."""
        check_packages(self.metrics)
        if self.length is not None:
            self.length.check()
        super().check(agents)

    def _key(self) -> tuple[str, str, Words]:
        return self.text_field, "text_field", question_in

    def _read(self, row: DataRow) -> tuple[Question, list[str]]:
        return self.question_of(row), self._references(row)

    def _references(self, row: DataRow) -> list[str]:
        value = field_of(row, self.reference_field, "reference_field")
        texts = value if isinstance(value, list) else [text_in(row, self.reference_field, "reference_field")]
        found = [text for text in texts if isinstance(text, str) and text.strip()]
        if not found or len(found) < len(texts):
            raise row.unusable(
                f"the field '{self.reference_field}' must be a string or a list of strings",
                "reference_field",
            )
        for text in found:
            if too_long(text):
                raise row.unusable(f"a reference of {len(text.split()):,} words is too long to score")
        return found

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index. The question of the task is the prompt with the text of the row."""
        row = self.rows.of(split)[index]
        text, references = self._read(row)
        prompt = self.prompt
        if prompt is None:
            within = "" if self.length is None else f" in {self.length}"
            prompt = f"{self._asks()}{within}.\n\n{{text}}"
        question = prompt.replace("{length}", str(self.length or "")).replace("{text}", text.text)
        data: dict[str, Json] = {"answer": references[0], "references": [*references]}
        return Task(f"{split}-{index}", question, data, system=text.system)

    def _asks(self) -> str:
        return self.doing

    def _graded(self, text: str, task: Task) -> Grade:
        found = answer_in(text, self.extraction, lambda found: found.strip() or None)
        if found is None:
            return no_answer("there is no text")
        if too_long(found):
            return no_answer(f"a text of {len(found.split()):,} words is too long to score")
        references = [str(each) for each in task.data["references"]]
        scores = {
            metric: similarity(metric, found, references, stem=self.stem, tokeniser=self.tokeniser)
            for metric in self.metrics
        }
        score = sum(weight * scores[metric] for metric, weight in self.metrics.items()) / sum(
            self.metrics.values()
        )
        reasons = [f"{metric} {value:.3f}" for metric, value in scores.items()]
        if self.length is not None:
            count = self.length.count(found)
            score *= self.length.kept(count)
            reasons.append(f"{count} {self.length.unit}, {self.length} asked")
        return Grade(min(1.0, score), found, "; ".join(reasons))

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the first reference as a demonstration."""
        return self.answers.written(str(task.data["answer"]))


class Summarisation(_Referenced):
    """Summarisation of documents."""

    doing: ClassVar[str] = "Summarise this text"
    name: Literal["summarisation"] = "summarisation"
    text_field: str = "document"
    """The field that contains the text."""
    reference_field: str = "summary"
    """The field that contains the summary or a list of summaries."""
    metrics: Metrics = Field(default={"rougeL": 1.0}, min_length=1)
    """Mapping from a metric to its weight. The score is the weighted mean of the metrics."""


class Translation(_Referenced):
    """Translation of texts from one language into another."""

    doing: ClassVar[str] = "Translate this text"
    name: Literal["translation"] = "translation"
    text_field: str = "source"
    """The field that contains the text. A dot in the name selects a field inside an object, as in `translation.en`."""
    reference_field: str = "target"
    """The field that contains the translation or a list of translations."""
    source_language: str | None = None
    """The language of the texts, which is named in the default prompt. If null, the prompt does not name it."""
    target_language: str | None = None
    """The language of the translations, which is named in the default prompt. If null, the prompt does not name it."""
    metrics: Metrics = Field(default={"chrf": 1.0}, min_length=1)
    """Mapping from a metric to its weight. The score is the weighted mean of the metrics."""

    def _asks(self) -> str:
        source = f" from {self.source_language}" if self.source_language else ""
        target = f" into {self.target_language}" if self.target_language else ""
        return f"{self.doing}{source}{target}"

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return the source language and the target language, if the settings name them."""
        named = {"source_language": self.source_language, "target_language": self.target_language}
        return {name: language for name, language in named.items() if language}
