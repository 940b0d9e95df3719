from __future__ import annotations

import pytest
from tests.workflows.stage import TASK, lines, play, transcript

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.matrix import Matrix
from kapelle.errors import ConfigError
from kapelle.team import Agent
from kapelle.workflows.cory import Cory


async def test_the_observer_reads_the_pioneer_s_answer_and_gives_the_team_s() -> None:
    scripts = {"one": lines("122"), "two": lines("132")}
    [episode] = await play(Arithmetic(), Cory(), ["one", "two"], scripts, TASK)
    assert transcript(episode) == [
        "0 seen=0 47+85 -> one: 122",
        "1 seen=1 47+85\n\none: 122 -> two: 132",
    ]
    assert episode.rewards == {"one": 0.0, "two": 1.0}, "each is paid for its own answer"
    assert episode.success == 1.0
    assert episode.info["final"] == "132"


async def test_prompts_may_use_the_role_or_the_name() -> None:
    scripts = {"one": lines("{question}"), "two": lines("132")}
    for field in ("pioneer", "one"):
        agents = [Agent("one", prompt="Q {question}"), Agent("two", prompt=f"{{question}} after {{{field}}}")]
        [episode] = await play(Arithmetic(), Cory(), agents, scripts, TASK)
        assert [t.new_messages[0].content for t in episode.turns] == ["Q 47+85", "47+85 after {question}"]


def test_unsupported_combinations_raise_an_error() -> None:
    for names in (["a"], ["a", "b", "c"]):
        with pytest.raises(ConfigError, match=r"exactly two, the pioneer first"):
            Cory().check([Agent(name) for name in names], Arithmetic())
    with pytest.raises(ConfigError, match=r"`matrix` is a game of moves"):
        Cory().check([Agent("a"), Agent("b")], Matrix())
    with pytest.raises(ConfigError, match=r"agent 'a' uses \{b\}, .* the pioneer"):
        Cory().check([Agent("a", prompt="{b}"), Agent("b")], Arithmetic())
    with pytest.raises(ConfigError, match=r"uses \{pionner\}.*Did you mean 'pioneer'"):
        Cory().check([Agent("a"), Agent("b", prompt="{pionner}")], Arithmetic())
    with pytest.raises(ConfigError, match="Rename"):
        Cory().check([Agent("question"), Agent("b")], Arithmetic())
