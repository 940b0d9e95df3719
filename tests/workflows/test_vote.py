from __future__ import annotations

import pytest
from tests.workflows.stage import TASK, lines, play, transcript

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.matrix import Matrix
from kapelle.errors import ConfigError
from kapelle.team import Agent
from kapelle.workflows.vote import Vote


async def test_the_majority_is_the_team_s_answer_and_each_agent_is_scored_by_its_own() -> None:
    scripts = {"a": lines("122"), "b": lines("132"), "c": lines("it is 132")}
    [episode] = await play(Arithmetic(), Vote(), ["a", Agent("b", prompt="{question}="), "c"], scripts, TASK)
    assert transcript(episode) == [
        "0 seen=0 47+85 -> a: 122",
        "1 seen=0 47+85= -> b: 132",
        "2 seen=0 47+85 -> c: it is 132",
    ]
    assert episode.rewards == {"a": 0.0, "b": 1.0, "c": 1.0}
    assert episode.success == 1.0


@pytest.mark.parametrize(("weight", "final"), [(1.0, "132"), (1.9, "132"), (2.1, "122")])
async def test_weights_count_instead_of_heads(weight: float, final: str) -> None:
    scripts = {"a": lines("122"), "b": lines("132"), "c": lines("132")}
    [episode] = await play(Arithmetic(), Vote(weights={"a": weight}), ["a", "b", "c"], scripts, TASK)
    assert episode.info["final"] == final
    assert episode.rewards == {"a": 0.0, "b": 1.0, "c": 1.0}


async def test_an_agent_without_votes_is_still_scored() -> None:
    scripts = {"a": lines("132"), "b": lines("122"), "c": lines("132")}
    [episode] = await play(Arithmetic(), Vote(weights={"a": 0, "c": 0}), ["a", "b", "c"], scripts, TASK)
    assert episode.info["final"] == "122"
    assert episode.rewards == {"a": 1.0, "b": 0.0, "c": 1.0}


def test_unsupported_combinations_raise_an_error() -> None:
    two = [Agent("a"), Agent("b")]
    with pytest.raises(ConfigError, match=r"only 'a'.*set `workflow.name: solo`"):
        Vote().check([Agent("a")], Arithmetic())
    with pytest.raises(ConfigError, match=r"unknown agent 'aa'. Did you mean 'a'"):
        Vote(weights={"aa": 1}).check(two, Arithmetic())
    with pytest.raises(ConfigError, match=r"workflow.weights.a is -1.0"):
        Vote(weights={"a": -1}).check(two, Arithmetic())
    with pytest.raises(ConfigError, match=r"workflow\.weights is 0"):
        Vote(weights={"a": 0, "b": 0}).check(two, Arithmetic())
    with pytest.raises(ConfigError, match=r"`matrix` is a game of moves"):
        Vote().check(two, Matrix())
    with pytest.raises(ConfigError, match=r"uses \{b\}"):
        Vote().check([Agent("a", prompt="{b}"), Agent("b")], Arithmetic())
