from __future__ import annotations

import pytest
from tests.workflows.stage import TASK, expert, lines, play, transcript

from kapelle.environments.arithmetic import Arithmetic
from kapelle.errors import ConfigError
from kapelle.team import Agent
from kapelle.workflows.solo import Solo


async def test_the_first_agent_answers_and_the_others_do_not_act() -> None:
    environment = Arithmetic()
    say = expert(environment)
    [episode] = await play(
        environment, Solo(), [Agent("solver", prompt="{question}="), "b"], {"solver": say}, TASK
    )
    assert transcript(episode) == ["0 seen=0 47+85= -> solver: 132"]
    assert episode.rewards == {"solver": 1.0}
    assert episode.success == 1.0
    assert episode.info["final"] == "132"
    assert episode.agents == ("solver", "b")


async def test_the_agent_that_is_named_answers() -> None:
    [episode] = await play(Arithmetic(), Solo(agent="b"), ["a", "b"], {"b": lines("131")}, TASK)
    assert transcript(episode) == ["0 seen=0 47+85 -> b: 131"]
    assert episode.rewards == {"b": 0.0}


def test_unsupported_combinations_raise_an_error() -> None:
    with pytest.raises(ConfigError, match=r"unknown agent 'solvr'. Did you mean 'solver'"):
        Solo(agent="solvr").check([Agent("solver")], Arithmetic())
    with pytest.raises(ConfigError, match=r"uses \{notes\}"):
        Solo().check([Agent("solver", prompt="{notes}")], Arithmetic())


def test_the_turns_of_an_episode_are_known_before_it() -> None:
    assert Solo().most_turns(["a", "b"]) == {"a": 1, "b": 0}
    assert Solo(agent="b").most_turns(["a", "b"]) == {"a": 0, "b": 1}
