"""SHARP: Shapley values by hand, exact and sampled; absent agents; rewards for tool calls."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from statistics import fmean

import pytest
from tests.support.episodes import episode, group, turn

from kapelle.algorithm import Change
from kapelle.algorithms.sharp import SHARP
from kapelle.algorithms.signals.substitutes import Substitute, substitute_name
from kapelle.errors import ConfigError
from kapelle.rows import Signals
from kapelle.team import Agent, Lora, Policy, Team
from kapelle.types import Episode, Intervention

LORA = Lora()

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


def test_drawn_orders_come_near() -> None:
    """What an agent adds has a standard deviation of at most 3.2, of a mean over 400 orders 0.16."""
    settings = SHARP(team_reward="sum", exact=1, permutations=400)
    found = settings.judged(played(settings))
    assert {agent: own[0] for agent, own in found.items()} == pytest.approx(
        {agent: value(agent) for agent in "abc"}, abs=0.48
    )


def test_a_missing_coalition_excludes_its_agents() -> None:
    settings = SHARP(team_reward="sum")
    whole = played(settings)
    without = tuple(each for each in whole.interventions if set(each.agents) != {"b", "c"})
    unknown = replace(whole, interventions=without)
    assert settings.judged(unknown) == {}
    assert len(settings.judged(whole)) == 3
    # What an agent adds is not compared with what the whole team earned: each is the first of its kind.
    given = settings.credit([group(whole, unknown)], Signals()).values()
    assert [each.advantage_T.tolist() for each in given] == [[0.0, 0.0]] * 6


def absences(settings: SHARP) -> list[Change]:
    one = episode(*(turn(name, k) for k, name in enumerate("ab")))
    team = Team((Agent("a"), Agent("b")), {"p": Policy("p", "small", LORA)}, dict.fromkeys("ab", "p"))
    return list(settings.changes(group(one, one), 0, team))


def test_the_base_model_replaces_absent_agents() -> None:
    gone = [("a",), ("b",), ("a", "b")]
    assert absences(SHARP()) == [Change("remove", agents) for agents in gone]
    assert absences(SHARP(absent="reference")) == [
        Change("swap", agents, None, substitute_name("small")) for agents in gone
    ]


def test_the_base_model_joins_the_team_without_an_agent() -> None:
    [signal] = SHARP(absent="reference").build().needs
    assert isinstance(signal, Substitute)
    team = Team((Agent("a"),), {"a": Policy("a", lora=LORA)}, {"a": "a"})
    found = signal.beside(team)
    assert found.policies[substitute_name("base")] == Policy(substitute_name("base"), trained=False)
    assert found.agents_of(substitute_name("base")) == ()
    assert found.trained == team.trained


@pytest.mark.parametrize(
    ("policies", "why"),
    [
        ({"a": Policy("a")}, "trains the base model itself"),
        ({"a": Policy("a", "base", LORA), "b": Policy("b", "other", LORA)}, "have 2 base models"),
    ],
)
def test_a_frozen_common_base_is_required(policies: dict[str, Policy], why: str) -> None:
    team = Team(tuple(map(Agent, policies)), policies, {name: name for name in policies})
    with pytest.raises(ConfigError, match=why):
        Substitute().beside(team)


def test_successful_tool_calls_reward_their_own_agent() -> None:
    """Of a's calls one of two was carried out in the first attempt and all in the second; b never calls."""
    counts = [({"a": 1, "b": 0}, {"a": 1, "b": 0}), ({"a": 3, "b": 0}, {"a": 0, "b": 0})]
    one = group(
        *(
            episode(
                turn("a", 0),
                turn("b", 1),
                rewards={"b": 1.0},
                info={"calls_done": done, "call_faults": faults},
            )
            for done, faults in counts
        )
    )
    give = SHARP(tool_reward=0.4, group_size=2).build().credit
    assert give is not None
    found = {
        (key.episode, key.turn): float(each.advantage_T[0]) for key, each in give([one], Signals()).items()
    }
    # 0.4 · (1/2 − 1) and back; the team earned the same twice.
    assert found == pytest.approx({(0, 0): -0.2, (1, 0): 0.2, (0, 1): 0.0, (1, 1): 0.0})


def test_a_tool_reward_needs_an_environment_with_calls() -> None:
    give = SHARP(tool_reward=0.4).build().credit
    assert give is not None
    plain = group(*(episode(turn("a", 0), rewards={"a": 1.0}) for _ in range(2)))
    with pytest.raises(ConfigError, match="tool calls"):
        give([plain], Signals())
