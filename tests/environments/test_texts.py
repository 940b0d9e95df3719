"""Summaries and translations of a user's rows: what is asked, what is paid, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.cli.conftest import call
from tests.support.tiny import SIZE
from tests.workflows.stage import expert, lines, play

import kapelle
from kapelle.environments.grading.text import overlap
from kapelle.environments.grading.text.overlap import chrf, rouge_l
from kapelle.environments.rewarded import Reward, Rewarded, RowsInMemory, rows_in_memory
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
    """Write both splits: the rows to train on, and one other to test on."""
    other = {**given[0], next(iter(given[0])): "Something else."}
    for name, each in (("train", given), ("test", [other])):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    return str(path)


async def paid(environment: Summarisation | Translation, text: str) -> Any:
    [episode] = await play(
        environment, Solo(), ["writer"], {"writer": lines(text)}, environment.task("train", 0)
    )
    assert (episode.error, episode.success) == (None, episode.rewards["writer"])
    return episode.rewards["writer"], episode.info["explanations"]["writer"]


async def test_a_summary_earns_what_it_says_of_the_reference(tmp_path: Path) -> None:
    environment = Summarisation(path=rows(tmp_path, NEWS))
    assert environment.task("train", 0).question == f"Summarise this text.\n\n{NEWS['document']}"
    assert await paid(environment, NEWS["summary"]) == (1.0, "rougeL 1.000")
    assert await paid(environment, "<answer>the mat</answer> is what it says") == (
        pytest.approx(2 * 1.0 * (2 / 6) / (1.0 + 2 / 6)), "rougeL 0.500",
    )  # fmt: skip
    assert await paid(environment, "word " * 2_000) == (0.0, "a text of 2,000 words is not scored")
    [episode] = await play(
        environment, Solo(), ["a"], {"a": expert(environment)}, environment.task("train", 0)
    )
    assert episode.success == 1.0


async def test_metrics_are_weighted_and_length_keeps_a_share(tmp_path: Path) -> None:
    path = rows(tmp_path, NEWS)
    text = "the cat sat on the mat all day long"
    plain, _ = await paid(Summarisation(path=path, metrics={"rouge1": 1.0}), text)
    letters, _ = await paid(Summarisation(path=path, metrics={"chrf": 1.0}), text)
    both, said = await paid(Summarisation(path=path, metrics={"rouge1": 3.0, "chrf": 1.0}), text)
    assert both == pytest.approx((3 * plain + letters) / 4)
    assert said == f"rouge1 {plain:.3f}; chrf {letters:.3f}"
    short = Summarisation(path=path, metrics={"rouge1": 1.0}, length={"most": 6})
    assert short.task("train", 0).question.startswith("Summarise this text in at most 6 words.\n\n")
    assert await paid(short, text) == (
        pytest.approx(plain * 0.5),
        f"rouge1 {plain:.3f}; 9 words, at most 6 words asked",
    )
    assert (await paid(short, NEWS["summary"]))[0] == 1.0


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
        assert (await paid(environment, text))[0] == pytest.approx(1.0)
    assert 0.1 < (await paid(environment, "a cat sat"))[0] < 0.9
    [episode] = await play(
        environment, Parallel(), ["a", "b"], {"a": lines("the cat sits"), "b": lines("no")}, task
    )
    assert episode.rewards["a"] > 0.9 > episode.rewards["b"]
    assert episode.info["target_language"] == "English"
    assert environment.extract("  the  cat\nsits ") == "the cat sits"


async def test_the_fields_and_the_prompt_are_the_user_s_own(tmp_path: Path) -> None:
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
        ([{"document": "x"}], {}, r"no field 'summary'.* Set `environment\.reference_field`"),
        ([{"document": "x", "summary": ""}], {}, "the field 'summary' is empty"),
        ([{"document": "x", "summary": ["a", 3]}], {}, "is no text and no list of texts"),
        ([{"document": "x", "summary": "a " * 1_001}], {}, "a reference has 1,001 words"),
        ([NEWS], {"text_field": "documents"}, "Did you mean 'document'"),
    ],
)
def test_rows_of_another_form_are_named(
    tmp_path: Path, given: Sequence[dict[str, Any]], settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        Summarisation(path=rows(tmp_path, *given), **settings).check(["a"])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"metrics": {}}, "at least 1 item"),
        (
            {"metrics": {"rouge": 1.0}},
            "'rouge1', 'rouge2', 'rougeL', 'rougeLsum', 'chrf', 'chrf\\+\\+' or 'bleu'",
        ),
        ({"metrics": {"bleu": 0.0}}, r"`metrics\.bleu` is 0\.0; a weight is above 0"),
        ({"tokeniser": "spacy"}, "'13a', 'intl', 'char', 'zh' or 'none'"),
        ({"length": {"unit": "words"}}, "sets no length"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Translation(path="rows.jsonl", **settings)


def test_missing_packages_and_tokenisers_are_found_before_rows_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"`length\.tokeniser: nowhere` cannot be read"):
        Summarisation(path="none", length={"most": 5, "unit": "tokens", "tokeniser": "nowhere"}).check(["a"])
    monkeypatch.setattr(overlap, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'kapelle\[text\]'"):
        Summarisation(path="none").check(["a"])


def test_a_model_is_evaluated_and_trained_on_summaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    rows(tmp_path / "data", NEWS, {**NEWS, "document": "Another text."})
    small = [f"model.embedded.{key}={value}" for key, value in SIZE.items()]
    said = call(
        "eval", "--model", "embedded", "--environment", "summarisation", "environment.path=data", "environment.length={most: 20}",
        "team.sampling.max_tokens=4", *small, "--json",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert said.json["team"]["scored"] == 1


def test_metrics_are_reward_functions() -> None:
    assert (rouge_l.__name__, rouge_l("the mat", "the cat sat on the mat"), chrf("a", ["b", "a"])) == (
        "rouge_l",
        0.5,
        1.0,
    )
    table = [{"question": f"say {k}", "reference": "the mat"} for k in range(4)]
    tiny: Any = {"embedded": SIZE}
    trainer = kapelle.Trainer(
        model=tiny,
        environment=Rewarded(path="in-memory", rewards=(Reward(function=PLACE.format("rouge_l")), Reward(function=PLACE.format("chrf"), weight=0.5)), eval_path="none").holding(RowsInMemory(rows_in_memory(table, "rows"))),
        workflow=Solo(), team={"agents": 1, "sampling": {"max_tokens": 3}},
        algorithm={"name": "grpo", "group_size": 2}, training={"tasks_per_step": 2},
        evaluation={"before_and_after": False},
    )  # fmt: skip
    with trainer:
        step = next(iter(trainer.steps(1)))
    paid = [episode for group in step.groups for episode in group.episodes]
    assert all({"reward/rouge_l", "reward/chrf"} <= set(episode.info) for episode in paid)
    assert all(
        episode.rewards["agent_0"]
        == pytest.approx(
            rouge_l(episode.turns[-1].text, "the mat") + 0.5 * chrf(episode.turns[-1].text, "the mat")
        )
        for episode in paid
    )


PLACE = "kapelle.environments.grading.text.overlap:{}"
