"""C3's variants with a critic, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.episodes import TASK, episode, group, turn

from kapelle.algorithms.c3 import C3
from kapelle.rows import Signals, TurnKey
from kapelle.types import Episode, Group

EARNED = (1.0, 0.0, 1.0, 1.0)
VALUES = {
    (0, 0): 0.3,
    (1, 0): 0.3,
    (2, 0): 0.7,
    (3, 0): 0.7,
    (0, 1): 0.8,
    (1, 1): 0.4,
    (2, 1): 0.6,
    (3, 1): 0.9,
}


def tree() -> list[Episode]:
    """Two first turns of a, each with two of b's."""
    return [
        episode(turn("a", 0, 2, copied=e % 2 == 1), turn("b", 1, 3), rewards={"b": earned})
        for e, earned in enumerate(EARNED)
    ]


def credit(
    one: Group, values: dict[tuple[int, int], float] = VALUES, **settings: Any
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Return the advantages of turns that are trained on, and the critic's targets."""
    give = C3.model_validate({"widths": (2, 2), **settings}).build().credit
    assert give is not None
    signals = Signals(values={TurnKey(0, *place): torch.tensor([value]) for place, value in values.items()})
    found = give([one], signals)
    better = {
        (key.episode, key.turn): each.advantage_T.tolist() for key, each in found.items() if each.weight
    }
    assert all(len(set(of)) == 1 for of in better.values()), "one advantage for all tokens of a turn"
    targets = {(k.episode, k.turn): each.return_T for k, each in found.items() if each.return_T is not None}
    return {place: of[0] for place, of in better.items()}, {
        place: float(target_T) for place, target_T in targets.items() if target_T.shape == (1,)
    }


@pytest.mark.parametrize(
    ("settings", "by_hand"),
    [
        # What was earned on average, 0.5 and 1 by a's two turns, less the critic's value of the other one: 0.5 − 0.7, 1 − 0.3, …
        ({"variant": "value_assisted"}, (-0.2, 0.7, 0.6, -0.8, 0.1, 0.4)),
        # 0.5 − 0.75 · 1 − 0.25 · 0.7, …
        ({"variant": "value_assisted", "alpha": 0.25}, (-0.425, 0.55, 0.9, -0.95, 0.025, 0.1)),
        ({"variant": "value_assisted", "alpha": 0.0}, (-0.5, 0.5, 1.0, -1.0, 0.0, 0.0)),
        ({"variant": "value_only"}, (-0.4, 0.4, 0.4, -0.4, -0.3, 0.3)),
    ],
    ids=["assisted", "mixed", "returns alone", "values alone"],
)
def test_what_a_turn_is_compared_with(settings: dict[str, Any], by_hand: tuple[float, ...]) -> None:
    better, targets = credit(group(*tree()), **settings)
    sampled = ((0, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 1))
    assert better == pytest.approx(dict(zip(sampled, by_hand, strict=True)))
    assert targets == dict(zip(sampled, (0.5, 1.0, *EARNED), strict=True)), "each node is learned once"


def test_the_value_of_a_branch_is_that_of_its_first_episode_that_did_not_fail() -> None:
    episodes = tree()
    episodes[0] = Episode(TASK, 0, ("a", "b"), error="EpisodeError: gone")
    values = VALUES | {(1, 0): 0.35}
    better, _ = credit(group(*episodes), values, variant="value_assisted")
    # b's turn in episode 1 has lost its sibling.
    assert better == pytest.approx({(1, 0): 0.0 - 0.7, (2, 0): 1.0 - 0.35, (2, 1): 0.1, (3, 1): 0.4})


def test_at_one_moment_each_is_compared_with_its_own_other_turns() -> None:
    played = [
        episode(
            turn("a", 0, 1, completed_before=0), turn("b", 1, 1, completed_before=0), rewards={"a": earned}
        )
        for earned in (1.0, 0.0)
    ]
    values = {(0, 0): 0.1, (0, 1): 0.2, (1, 0): 0.3, (1, 1): 0.4}
    better, _ = credit(group(*played), values, widths=(2,), variant="value_assisted")
    assert better == pytest.approx({(0, 0): 0.7, (0, 1): 0.6, (1, 0): -0.1, (1, 1): -0.2})


def test_beyond_the_last_branch_the_turns_of_that_moment_are_what_counts() -> None:
    played = tree()[::2]
    values = {(0, 0): 0.3, (1, 0): 0.7, (0, 1): 0.8, (1, 1): 0.6}
    better, _ = credit(group(*played), values, widths=(2, 1), variant="value_only")
    # b's turns against a's in the other branch: 0.8 − 0.7 and 0.6 − 0.3.
    assert better == pytest.approx({(0, 0): -0.4, (1, 0): 0.4, (0, 1): 0.1, (1, 1): 0.3})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"variant": "value_only", "replay": False}, "sibling turns"),
        ({"alpha": 0.5}, "value_assisted"),
        ({"alpha": 0.5, "variant": "value_only"}, "value_assisted"),
    ],
)
def test_inconsistent_settings_raise_an_error(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        C3.model_validate(settings)
