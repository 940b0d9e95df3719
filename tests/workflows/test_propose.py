from __future__ import annotations

import pytest
from tests.workflows.stage import lines, play, transcript

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.proposals import Proposals
from kapelle.errors import ConfigError
from kapelle.team import Agent
from kapelle.types import Task
from kapelle.workflow import workflow_class
from kapelle.workflows.propose import Propose

GIVEN = Task("train-0", "47", {"given": 47})
SUMS = Proposals(proposer="one")


async def test_solvers_read_the_problem_at_the_same_moment() -> None:
    scripts = {"one": lines("47 + 85"), "two": lines("132"), "three": lines("122")}
    agents = [Agent("one", prompt="{question}+?"), Agent("two"), Agent("three", prompt="Add: {question}")]
    [episode] = await play(SUMS, Propose(), agents, scripts, GIVEN)
    assert transcript(episode) == [
        "0 seen=0 47+? -> one: 47 + 85",
        "1 seen=1 47+85 -> two: 132",
        "2 seen=1 Add: 47+85 -> three: 122",
    ]


async def test_a_proposer_reads_why_its_problem_was_rejected_and_writes_again() -> None:
    scripts = {"one": lines("85+47", "47+", "47+85"), "two": lines("132")}
    agents = [Agent("one", prompt="{question}+?"), Agent("two")]
    [episode] = await play(SUMS, Propose(tries=3), agents, scripts, GIVEN)
    assert transcript(episode) == [
        "0 seen=0 47+? -> one: 85+47",
        "1 seen=1 It does not begin with 47. -> one: 47+",
        "2 seen=2 This is not a problem of arithmetic. -> one: 47+85",
        "3 seen=3 47+85 -> two: 132",
    ]
    [episode] = await play(SUMS, Propose(tries=2), agents, scripts, GIVEN)
    assert [turn.text for turn in episode.turns] == ["85+47", "47+"]
    assert episode.rewards == {"one": 0.0}


def test_unsupported_combinations_raise_an_error() -> None:
    with pytest.raises(ConfigError, match=r"environment\.name: proposals"):
        Propose().check([Agent("a"), Agent("b")], Arithmetic())
    with pytest.raises(ConfigError, match="Add solvers"):
        Propose().check([Agent("one")], SUMS)
    with pytest.raises(ConfigError, match=r"uses \{one\}, .*`propose`"):
        Propose().check([Agent("one"), Agent("two", prompt="{one}")], SUMS)


def test_turns_are_counted_and_drawn() -> None:
    assert Propose(tries=3).most_turns(["one", "two", "three"]) == {"one": 3, "two": 1, "three": 1}
    drawn = Propose().mermaid(["one", "two", "three"])
    assert "n0 --> n1" in drawn
    assert "n0 --> n2" in drawn
    assert "n2 --> n3" in drawn
    assert workflow_class("propose") is Propose
