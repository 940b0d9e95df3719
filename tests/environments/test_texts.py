"""Summaries and translations of a user's rows: prompts, scores and errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.workflows.stage import expert, lines, play

from kapelle.environments.grading.text import overlap
from kapelle.environments.texts import Summarisation, Translation
from kapelle.errors import ConfigError, DataError
from kapelle.workflows.parallel import Parallel
from kapelle.workflows.solo import Solo

NEWS = {
    "document": "The cat of the mill sat on the mat all day. Nobody minded.",
    "summary": "the cat sat on the mat",
}
LINE = {"source": "Die Katze sitzt.", "target": ["the cat sits", "the cat is sitting"]}


def rows(path: Path, *given: dict[str, Any]) -> str:
    """Write both splits: the train rows, and one other test row."""
    other = {**given[0], next(iter(given[0])): "Something else."}
    for name, each in (("train", given), ("test", [other])):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    return str(path)


async def scored(environment: Summarisation | Translation, text: str) -> Any:
    [episode] = await play(
        environment, Solo(), ["writer"], {"writer": lines(text)}, environment.task("train", 0)
    )
    assert (episode.error, episode.success) == (None, episode.rewards["writer"])
    return episode.rewards["writer"], episode.info["explanations"]["writer"]


async def test_a_summary_is_scored_by_its_similarity(tmp_path: Path) -> None:
    environment = Summarisation(path=rows(tmp_path, NEWS))
    assert environment.task("train", 0).question == f"Summarise this text.\n\n{NEWS['document']}"
    assert await scored(environment, NEWS["summary"]) == (1.0, "rougeL 1.000")
    assert await scored(environment, "<answer>the mat</answer> is what it says") == (
        pytest.approx(2 * 1.0 * (2 / 6) / (1.0 + 2 / 6)), "rougeL 0.500",
    )  # fmt: skip
    assert await scored(environment, "word " * 2_000) == (0.0, "a text of 2,000 words is too long to score")
    [episode] = await play(
        environment, Solo(), ["a"], {"a": expert(environment)}, environment.task("train", 0)
    )
    assert episode.success == 1.0


async def test_metrics_are_weighted_and_length_is_a_factor(tmp_path: Path) -> None:
    path = rows(tmp_path, NEWS)
    text = "the cat sat on the mat all day long"
    plain, _ = await scored(Summarisation(path=path, metrics={"rouge1": 1.0}), text)
    letters, _ = await scored(Summarisation(path=path, metrics={"chrf": 1.0}), text)
    both, reason = await scored(Summarisation(path=path, metrics={"rouge1": 3.0, "chrf": 1.0}), text)
    assert both == pytest.approx((3 * plain + letters) / 4)
    assert reason == f"rouge1 {plain:.3f}; chrf {letters:.3f}"
    short = Summarisation(path=path, metrics={"rouge1": 1.0}, length={"most": 6})
    assert short.task("train", 0).question.startswith("Summarise this text in at most 6 words.\n\n")
    assert await scored(short, text) == (
        pytest.approx(plain * 0.5),
        f"rouge1 {plain:.3f}; 9 words, at most 6 words asked",
    )
    assert (await scored(short, NEWS["summary"]))[0] == 1.0


async def test_a_translation_is_compared_with_every_reference(tmp_path: Path) -> None:
    environment = Translation(
        path=rows(tmp_path, LINE),
        source_language="German",
        target_language="English",
        metrics={"chrf": 1.0, "bleu": 1.0},
    )
    task = environment.task("train", 0)
    assert task.question == "Translate this text from German into English.\n\nDie Katze sitzt."
    for text in LINE["target"]:
        assert (await scored(environment, text))[0] == pytest.approx(1.0)
    assert 0.1 < (await scored(environment, "a cat sat"))[0] < 0.9
    [episode] = await play(
        environment, Parallel(), ["a", "b"], {"a": lines("the cat sits"), "b": lines("no")}, task
    )
    assert episode.rewards["a"] > 0.9 > episode.rewards["b"]
    assert episode.info["target_language"] == "English"
    assert environment.extract("  the  cat\nsits ") == "the cat sits"


async def test_fields_and_prompt_are_settings(tmp_path: Path) -> None:
    row = {"translation": {"en": "the cat sits", "de": "Die Katze sitzt."}}
    (tmp_path / "rows.json").write_text(
        json.dumps([{"translation": {**row["translation"], "en": f"{k} cats"}} for k in range(40)])
    )
    environment = Translation(
        path=str(tmp_path / "rows.json"), text_field="translation.en", reference_field="translation.de",
        prompt="Auf Deutsch, {length}: {text}", length={"target": 3, "unit": "words"},
    )  # fmt: skip
    assert environment.task("test", 0).question.startswith("Auf Deutsch, about 3 words: ")
    assert (environment.size("train") or 0) + (environment.size("test") or 0) == 40


@pytest.mark.parametrize(
    ("given", "settings", "problem"),
    [
        ([{"document": "x"}], {}, "reference_field"),
        ([{"document": "x", "summary": ""}], {}, "empty"),
        ([{"document": "x", "summary": ["a", 3]}], {}, "list of strings"),
        ([{"document": "x", "summary": "a " * 1_001}], {}, "1,001 words"),
        ([NEWS], {"text_field": "documents"}, "Did you mean 'document'"),
    ],
)
def test_rows_of_another_form_are_errors(
    tmp_path: Path, given: Sequence[dict[str, Any]], settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        Summarisation(path=rows(tmp_path, *given), **settings).check(["a"])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"metrics": {"bleu": 0.0}}, "bleu"),
        ({"length": {"unit": "words"}}, "length"),
    ],
)
def test_impossible_settings_are_errors(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Translation(path="rows.jsonl", **settings)


def test_missing_packages_and_tokenisers_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Summarisation(path="none", length={"most": 5, "unit": "tokens", "tokeniser": "nowhere"}).check(["a"])
    monkeypatch.setattr(overlap, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install"):
        Summarisation(path="none").check(["a"])
