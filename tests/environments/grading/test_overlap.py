"""ROUGE, chrF and BLEU by hand, the packages' own results, and lengths with what they cost."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from kapelle.environments.grading.text.overlap import MAX_WORDS, Length, Metric, similarity
from kapelle.errors import ConfigError

METRICS: tuple[Metric, ...] = ("rouge1", "rouge2", "rougeL", "rougeLsum", "chrf", "chrf++", "bleu")
CAT = "the cat sat on the mat"


@pytest.mark.parametrize("metric", METRICS)
def test_a_reference_scores_1_and_a_disjoint_text_0(metric: Metric) -> None:
    assert similarity(metric, CAT, [CAT]) == pytest.approx(1.0)
    assert similarity(metric, CAT, ["unlike", CAT]) == pytest.approx(1.0), "the nearest of several counts"
    for text in ("", "  ", "...", "xyz", "word " * (MAX_WORDS + 1)):
        assert similarity(metric, text, [CAT]) == 0.0


@pytest.mark.parametrize(
    ("metric", "text", "score"),
    [
        ("rouge1", "a cat sat on mats", 2 * (3 / 5) * (3 / 6) / (3 / 5 + 3 / 6)),  # cat, sat, on
        ("rouge2", "a cat sat on mats", 2 * (2 / 4) * (2 / 5) / (2 / 4 + 2 / 5)),  # cat sat, sat on
        ("rougeL", "on the mat sat the cat", 2 * (3 / 6) * (3 / 6) / (3 / 6 + 3 / 6)),  # on the mat
        ("rouge1", "The CAT, sat! on-the (mat)", 1.0),
        ("bleu", "the cat sat", math.exp(1 - 6 / 3)),  # every word and pair is right, and it is too short
        ("chrf", "the cat sat on the", None),
    ],
)  # fmt: skip
def test_by_hand(metric: Metric, text: str, score: float | None) -> None:
    found = similarity(metric, text, [CAT])
    assert found == pytest.approx(score) if score is not None else 0.5 < found < 1.0


@pytest.mark.parametrize("metric", METRICS)
def test_it_equals_the_scores_of_the_packages(metric: Metric) -> None:
    text, references = "a dog sat on the old mat", [CAT, "a dog was sitting on a mat"]
    if metric.startswith("rouge"):
        from rouge_score.rouge_scorer import RougeScorer

        expected = RougeScorer([metric]).score_multi(references, text)[metric].fmeasure
    else:
        import sacrebleu

        if metric == "bleu":
            expected = sacrebleu.sentence_bleu(text, references).score / 100
        else:
            expected = (
                sacrebleu.sentence_chrf(text, references, word_order=2 * (metric == "chrf++")).score / 100
            )
    assert similarity(metric, text, references) == pytest.approx(expected)


def test_words_of_every_alphabet_count_and_stems_are_optional() -> None:
    assert similarity("rouge1", "кошка на ковре", ["кошка на полу"]) == pytest.approx(2 / 3)
    assert similarity("rouge1", "größte Häuser", ["große Häuser"]) == pytest.approx(1 / 2)
    assert similarity("rouge1", "cats running", ["cat runs"]) == 0.0
    assert similarity("rouge1", "cats running", ["cat runs"], stem=True) == 1.0
    assert similarity("bleu", "我喜欢猫", ["我喜欢猫"], tokeniser="zh") == pytest.approx(1.0)


def test_the_longest_texts_take_little_time() -> None:
    began = time.process_time()
    similarity("rougeL", "a b c d " * (MAX_WORDS // 4), ["a c b d " * (MAX_WORDS // 4)])
    similarity("chrf", "abcd " * MAX_WORDS, ["acbd " * MAX_WORDS])
    assert time.process_time() - began < 10.0


@pytest.mark.parametrize(
    ("length", "count", "kept"),
    [
        (Length(most=40), 40, 1.0),
        (Length(most=40), 50, 0.75),
        (Length(most=40, penalty=2.0), 50, 0.5),
        (Length(most=40, penalty=100.0), 41, 0.0),
        (Length(most=40), 400, 0.0),
        (Length(least=20), 15, 0.75),
        (Length(least=20, most=40), 30, 1.0),
        (Length(target=50), 55, 1.0),
        (Length(target=50), 45, 1.0),
        (Length(target=50), 66, 0.8),
        (Length(target=50, tolerance=0.0), 40, 0.8),
        (Length(target=50), 0, 0.0),
    ],
)
def test_the_penalty_of_a_missed_length(length: Length, count: int, kept: float) -> None:
    assert length.kept(count) == pytest.approx(kept)


def test_lengths_are_counted_in_words_characters_or_tokens(tmp_path: Path) -> None:
    from tests.support.tiny import tiny_model

    from kapelle.models.weights import save_model

    save_model(tmp_path / "model", tiny_model())
    assert Length(most=9).count(" two  words\n") == 2
    assert Length(most=9, unit="characters").count(" two  words\n") == 10
    # The embedded model's tokens are bytes.
    assert Length(most=9, unit="tokens", tokeniser=str(tmp_path / "model")).count("größer") == 8
    for wrong in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"length\.tokeniser.*tokenizer\.json"):
            Length(most=9, unit="tokens", tokeniser=str(wrong)).check()
