from __future__ import annotations

import pytest
from tests.workflows.stage import TASK, lines, play, transcript

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.matrix import Matrix
from kapelle.errors import ConfigError
from kapelle.team import Agent
from kapelle.workflows.reflect import Reflect


async def test_the_actor_tries_until_the_critic_accepts() -> None:
    scripts = {"actor": lines("122", "132"), "critic": lines("The carry is lost.", "Accept.")}
    [episode] = await play(Arithmetic(), Reflect(attempts=9), ["actor", "critic"], scripts, TASK)
    assert transcript(episode) == [
        "0 seen=0 47+85 -> actor: 122",
        "1 seen=1 47+85\n\nactor: 122 -> critic: The carry is lost.",
        "2 seen=2 critic: The carry is lost.\n\nAnswer again. -> actor: 132",
        "3 seen=3 actor: 132 -> critic: Accept.",
    ]
    assert episode.rewards == {"actor": 1.0}, (
        "a critic answers nothing and is paid by the team's reward alone"
    )
    assert episode.success == 1.0


async def test_after_the_last_attempt_critics_do_not_read_it() -> None:
    scripts = {"actor": lines("132", "122"), "critic": lines("No.", "No.")}
    [episode] = await play(Arithmetic(), Reflect(attempts=2), ["actor", "critic"], scripts, TASK)
    assert [turn.agent for turn in episode.turns] == ["actor", "critic", "actor"]
    assert episode.success == 0.0
    [single] = await play(Arithmetic(), Reflect(attempts=1), ["actor", "critic"], scripts, TASK)
    assert [turn.agent for turn in single.turns] == ["actor"]


async def test_all_critics_must_accept_and_only_objections_are_read() -> None:
    scripts = {
        "actor": lines("122", "132"),
        "c1": lines("ACCEPT", "ACCEPT"),
        "c2": lines("Carry!", "Fine now.\nACCEPT"),
    }
    [episode] = await play(Arithmetic(), Reflect(), ["actor", "c1", "c2"], scripts, TASK)
    assert [turn.agent for turn in episode.turns] == ["actor", "c1", "c2", "actor", "c1", "c2"]
    assert episode.turns[2].completed_before == 1, "critics do not hear one another"
    assert episode.turns[3].new_messages[0].content == "c2: Carry!\n\nAnswer again."


async def test_prompts_and_the_revision_are_templates() -> None:
    scripts = {"a": lines("{question}", "132"), "c": lines("no", "ok")}
    agents = [Agent("a", prompt="Q {question}"), Agent("c", prompt="{question}? {answer}")]
    workflow = Reflect(accept="OK", revise="{question} {notes}")
    [episode] = await play(Arithmetic(), workflow, agents, scripts, TASK)
    assert [turn.new_messages[0].content for turn in episode.turns] == [
        "Q 47+85",
        "47+85? {question}",
        "47+85 c: no",
        "47+85? 132",
    ]


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("ACCEPT", True),
        (" accept. ", True),
        ("ACCEPT\nThe carry is there.", True),
        ("The carry is there.\nACCEPT!", True),
        ("I do not ACCEPT", False),
        ("ACCEPT?", False),
        ("ACCEPTED", False),
        ("no\nACCEPT\nno", False),
        ("", False),
    ],
)
def test_what_accepting_is(text: str, accepted: bool) -> None:
    assert Reflect().accepts(text) is accepted


def test_unsupported_combinations_raise_an_error() -> None:
    two = [Agent("a"), Agent("c")]
    with pytest.raises(ConfigError, match=r"only 'a'. Add a critic"):
        Reflect().check([Agent("a")], Arithmetic())
    with pytest.raises(ConfigError, match="is a game of moves"):
        Reflect().check(two, Matrix())
    with pytest.raises(ConfigError, match=r"uses \{answers\}.*Did you mean 'answer'"):
        Reflect().check([Agent("a"), Agent("c", prompt="{answers}")], Arithmetic())
    with pytest.raises(ConfigError, match=r"uses \{answer\}, .* the actor"):
        Reflect().check([Agent("a", prompt="{answer}"), Agent("c")], Arithmetic())
    with pytest.raises(ConfigError, match=r"uses \{c\}, .*`workflow.revise`"):
        Reflect(revise="{c}").check(two, Arithmetic())
    with pytest.raises(ConfigError, match="Rename"):
        Reflect().check([Agent("a"), Agent("notes")], Arithmetic())
