"""Shapley values by hand, exact and of drawn orders."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from statistics import fmean

import pytest
from tests.support.episodes import episode, group, turn

from kapelle.algorithms.sharp import SHARP
from kapelle.types import Episode, Intervention

WORTH = {"": 0.0, "a": 1.0, "b": 2.0, "c": 0.0, "ab": 5.0, "ac": 1.0, "bc": 4.0, "abc": 9.0}
"""What the team earns, by who speaks."""


def played(settings: SHARP) -> Episode:
    """An episode of three with what every coalition that is asked for earns."""
    one = episode(
        *(turn(name, k) for k, name in enumerate("abc")),
        rewards=dict.fromkeys("abc", WORTH["abc"] / 3),
    )
    team = None
    changes = settings.changes(group(one, one), 0, team)  # type: ignore[arg-type]
    found = []
    for change in changes:
        left = "".join(name for name in "abc" if name not in change.agents)
        found.append(Intervention(change.what, change.agents, None, (dict.fromkeys("abc", WORTH[left]),)))
    return replace(one, interventions=tuple(found))


def value(agent: str) -> float:
    """By definition: the mean over all orders of what the agent adds."""
    added = []
    for order in permutations("abc"):
        before = "".join(sorted(order[: order.index(agent)]))
        added.append(WORTH["".join(sorted(before + agent))] - WORTH[before])
    return fmean(added)


def test_values_by_hand() -> None:
    settings = SHARP(team_reward="sum")
    found = settings.judged(played(settings))
    assert {agent: own[0] for agent, own in found.items()} == pytest.approx(
        {agent: value(agent) for agent in "abc"}
    )
    assert sum(own[0] for own in found.values()) == pytest.approx(WORTH["abc"])
    # Without a: ∅, b, c and bc, weighed 1/3, 1/6, 1/6, 1/3.
    assert found["a"][1] == pytest.approx(0 / 3 + 2 / 6 + 0 / 6 + 4 / 3)
    assert {own[2] for own in found.values()} == {0.0}


def test_drawn_orders_come_near_and_say_how_near() -> None:
    settings = SHARP(team_reward="sum", exact=1, permutations=400)
    found = settings.judged(played(settings))
    for agent, (own, _, error) in found.items():
        assert 0.0 < error < 0.2
        assert abs(own - value(agent)) < 4 * error


def test_a_coalition_that_was_not_played_leaves_its_agents_out() -> None:
    settings = SHARP(team_reward="sum")
    whole = played(settings)
    without = tuple(each for each in whole.interventions if set(each.agents) != {"b", "c"})
    assert settings.judged(replace(whole, interventions=without)) == {}
    assert len(settings.judged(whole)) == 3
