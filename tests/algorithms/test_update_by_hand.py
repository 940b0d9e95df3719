"""One whole update by hand, from recorded episodes to the direction in which the weights go.

Two attempts or three at one task, with advantages that were worked out on paper from the algorithm's paper. The update
must be Σ_turns A · ∇ log π(turn) over the number of tokens, for these A and no others: another estimator gives others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.episodes import group
from tests.support.expected import Game, Run, Tables

from kapelle.algorithm import algorithm_class
from kapelle.algorithms.sft import SFT
from kapelle.types import Episode, Task

TASK = Task("t", "")
SHORT, LONG = 0, 1
"""Places of a completion of one token and of one of two, in `LONG_AND_SHORT`."""


def attempts(order: str, *played: tuple[Sequence[int], float]) -> tuple[Game, list[Episode]]:
    """Episodes of agents that speak in the order given, each with what was said and what its last speaker earned."""
    rewards = iter([reward for _, reward in played])
    game = Game(tuple(order), lambda said: {order[-1]: next(rewards)})
    return game, [game.episode(outcome, TASK) for outcome, _ in played]


SOLO = (((SHORT,), 4.0), ((LONG,), 1.0), ((LONG,), 0.0))
S2 = 1 / math.sqrt(2)


@pytest.mark.parametrize(
    ("name", "settings", "order", "played", "by_hand"),
    [
        # Mean 5/3; unbiased variance ((7/3)² + (2/3)² + (5/3)²)/2 = 13/3.
        ("grpo", {"group_size": 3}, "a", SOLO, [x / math.sqrt(13 / 3) for x in (7 / 3, -2 / 3, -5 / 3)]),
        # Each less the mean of the other two: 4 − ½, 1 − 2, 0 − 5/2.
        ("rloo", {"group_size": 3}, "a", SOLO, [3.5, -1.0, -2.5]),
        # Lengths 1, 2, 2: baseline (1·4 + 2·1 + 2·0)/5 = 6/5.
        ("opo", {"group_size": 3}, "a", SOLO, [2.8, -0.2, -1.2]),
        # The greedy attempt earned 1.
        ("remax", {"group_size": 3}, "a", SOLO, [3.0, 0.0, -1.0]),
        # A token costs a half, the greedy attempt's too: 3½, 0 and −1, against ½.
        (
            "remax",
            {"group_size": 3, "penalties": {"length": 0.5, "length_limit": 1}},
            "a",
            SOLO,
            [3.0, -0.5, -1.5],
        ),
        # a speaks twice in the first attempt and each turn holds its trajectory's return: 6, 6 and 0. Mean 4,
        # variance (4 + 4 + 16)/2 = 12. GRPO would compare 6 with 0 alone.
        (
            "dr_mas",
            {"group_size": 2},
            "aa|a",
            (((SHORT, LONG), 6.0), ((SHORT,), 0.0)),
            [2 / math.sqrt(12), 2 / math.sqrt(12), -4 / math.sqrt(12)],
        ),
        # Return-to-go of a's turns, 6 and 6 and 0, over all turns of the player in the step: the same numbers here.
        (
            "mars",
            {},
            "aa|a",
            (((SHORT, LONG), 6.0), ((SHORT,), 0.0)),
            [2 / math.sqrt(12), 2 / math.sqrt(12), -4 / math.sqrt(12)],
        ),
        # By turn number: first turns 6 and 0; the second one is alone, and nothing is known of such turns yet.
        (
            "at_grpo",
            {"group_size": 2},
            "aa|a",
            (((SHORT, LONG), 6.0), ((SHORT,), 0.0)),
            [S2, 0.0, -S2],
        ),
    ],
)
def test_the_update_is_that_of_these_advantages(
    name: str,
    settings: dict[str, Any],
    order: str,
    played: Sequence[tuple[Sequence[int], float]],
    by_hand: Sequence[float],
) -> None:
    orders = order.split("|") if "|" in order else [order] * len(played)
    games = [attempts(one, each) for one, each in zip(orders, played, strict=True)]
    episodes = [episodes[0] for _, episodes in games]
    tables = Tables(games[0][0], seed=None)
    kind: Any = algorithm_class(name)
    algorithm = kind.model_validate({"name": name, "epochs": 1, **settings}).build()
    run = Run(algorithm, tables, greedy=lambda task: attempts(order[0], ((SHORT,), 1.0))[1][0])
    (direction,) = torch.autograd.grad(mean_over_tokens(tables, episodes, by_hand), tables.logits["a"])
    run.step([group(*episodes)])
    torch.testing.assert_close(tables.ascent["a"], direction, rtol=1e-5, atol=1e-6)


def mean_over_tokens(
    tables: Tables, episodes: Sequence[Episode], advantages: Sequence[float]
) -> torch.Tensor:
    """Σ over turns of A · log π(turn), over the number of tokens."""
    logp = [logp_T for episode in episodes for logp_T in tables.turns(episode)]
    weighed = [a * logp_T.sum() for a, logp_T in zip(advantages, logp, strict=True)]
    return torch.stack(weighed).sum() / sum(map(len, logp))


def test_a_supervised_update() -> None:
    game, episodes = attempts("a", ((SHORT,), 0.0), ((LONG,), 0.0))
    tables = Tables(game, seed=0)
    # Three tokens are shown, of two completions: the mean of their log-probs rises.
    logp_K = torch.cat([logp_T for episode in episodes for logp_T in tables.turns(episode)])
    assert len(logp_K) == 3
    (direction,) = torch.autograd.grad(logp_K.mean(), tables.logits["a"])
    Run(SFT().build(), tables).step([group(*episodes)])
    torch.testing.assert_close(tables.ascent["a"], direction, rtol=1e-5, atol=1e-6)
