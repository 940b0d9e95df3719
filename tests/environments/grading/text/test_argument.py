from __future__ import annotations

import pytest

from kapelle.environments.grading.text.argument import score_argument

TOPIC = "Zoos should be closed."
GOOD = (
    "Zoos should be closed because animals suffer in them every day. First, a study of zoo elephants found that "
    "they die early. Second, 40% of lions pace their cages for hours. For example, bears in small pits stop "
    "moving at all. In conclusion, zoos should be closed."
)


def score(text: str, rival: str = "") -> tuple[float, float, float]:
    verdict = score_argument([text], TOPIC, "PRO", [rival] if rival else [], ["CON"])
    return verdict.evidence, verdict.structure, verdict.consistency


def test_a_good_argument_has_everything() -> None:
    verdict = score_argument([GOOD], TOPIC, "PRO", [], ["CON"])
    assert (verdict.evidence, verdict.structure, verdict.consistency, verdict.total) == (1.0, 1.0, 1.0, 1.0)
    assert verdict.explanations["evidence"] == (
        "has: a figure, a source, an example, a cause; lacks: nothing"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (0.0, 0.0, 0.0)),
        ("?!...", (0.0, 0.0, 0.0)),
        ("<think>" + GOOD + "</think>", (0.0, 0.0, 0.0)),
        ("Zoos are bad.", (0.0, 0.25, 1.0)),
        ("Nice weather today, is it not.", (0.0, 0.0, 1.0)),
    ],
)
def test_a_small_overlap_has_a_small_score(text: str, expected: tuple[float, float, float]) -> None:
    assert score(text) == expected


def test_keywords_in_a_heap_count_once() -> None:
    heap = "Study survey report 40% because for example therefore data from 1999 according to research."
    assert score(heap)[0] == 0.25, "one sentence is one piece of evidence"
    assert score("Study. 40%. Because. For example.")[0] == 0.0, "and a word is not a sentence"


def test_repetition_is_seen() -> None:
    assert score(GOOD + " " + GOOD)[2] == 0.75
    assert score(GOOD + " " + GOOD)[0] == score(GOOD)[0]


@pytest.mark.parametrize(
    "turn", ["I concede.", "My opponent is right.", "I argue for CON.", "We stand for the CON side."]
)
def test_changing_sides_is_seen(turn: str) -> None:
    verdict = score_argument([GOOD, turn], TOPIC, "PRO", [], ["CON"])
    assert "keeps its side" in verdict.explanations["consistency"].split("lacks: ")[1]


def test_the_other_side_wants_an_answer() -> None:
    rival = "Breeding programmes saved the condor and the oryx from extinction."
    assert score(GOOD, rival)[2] == 0.75
    assert (
        score(GOOD + " Breeding programmes could run outside of cages, as the condor shows.", rival)[2] == 1.0
    )
