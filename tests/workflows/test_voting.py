from __future__ import annotations

import pytest

from kapelle.workflows.vote import agreement, majority


def test_texts_without_an_answer_have_no_vote() -> None:
    said = {"a": "?", "b": "!", "c": "so 5", "d": "?"}
    assert majority(said, {"a": None, "b": None, "c": "5", "d": None}, seed=0) == "so 5"
    assert majority({"a": "?", "b": "!"}, {"a": None, "b": None}, seed=0) == "?"


def test_the_vote_is_independent_of_the_order_of_agents() -> None:
    said = {"a": "x", "b": "x", "c": "y", "d": "y"}
    backward = dict(reversed(said.items()))
    for seed in range(20):
        forward = majority(said, said, seed)
        assert majority(backward, backward, seed) == forward


def test_a_weighted_tie_is_drawn_too() -> None:
    said = {"a": "x", "b": "y", "c": "y"}
    drawn = [majority(said, said, seed, {"a": 2.0}) for seed in range(60)]
    assert 15 < drawn.count("x") < 45


@pytest.mark.parametrize(
    ("answers", "share"),
    [
        ({"a": "1", "b": "1", "c": "2"}, 2 / 3),
        ({"a": "1", "b": None, "c": None, "d": None}, 0.25),
        ({"a": None, "b": None}, 0.0),
        ({"a": "1"}, 1.0),
    ],
)
def test_agreement_is_a_share_of_all(answers: dict[str, str | None], share: float) -> None:
    assert agreement(answers) == share
