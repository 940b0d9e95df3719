"""Teams that are put together from others."""

from __future__ import annotations

from kapelle.team import Agent, Critic, Lora, Policy, Team

PAIR = Team(
    (Agent("asker", "You ask."), Agent("solver")),
    {name: Policy(name, "small", Lora(2)) for name in ("ask", "first", "second")},
    {"asker": "ask", "solver": "first"},
    {"small": "a/path"},
    critics={"critic": Critic("critic", "small")},
    critic_of={"asker": "critic"},
    turns_of={"solver": ("first", "second", "first")},
)
PERSON = Team.alone(Agent("you", "Play well."), Policy("person", base="", trained=False))


def test_an_agent_keeps_its_prompts_and_weights_in_another_role() -> None:
    team = Team.filling({"north": (PAIR, "solver"), "south": (PERSON, "you"), "west": (PAIR, "asker")})
    assert [(agent.name, agent.system) for agent in team.agents] == [
        ("north", None),
        ("south", "Play well."),
        ("west", "You ask."),
    ]
    assert [team.policy("north", turn).name for turn in range(3)] == ["first", "second", "first"]
    assert team.policy("south") == Policy("person", base="", trained=False)
    assert team.policy("west") == PAIR.policies["ask"]
    assert team.bases == {"small": "a/path"}


def test_a_gathered_team_has_only_its_roles_and_no_critics() -> None:
    team = Team.filling({"one": (PAIR, "asker"), "two": (PAIR, "asker")})
    assert set(team.policies) == {"ask"}
    assert team.agents_of("ask") == ("one", "two")
    assert not team.critics
    assert not team.turns_of


def test_a_team_of_another_size_uses_its_first_agent_in_all_roles() -> None:
    assert [PAIR.agent_for_role(seat, 2) for seat in range(2)] == ["asker", "solver"]
    assert [PAIR.agent_for_role(seat, 3) for seat in range(3)] == ["asker"] * 3
