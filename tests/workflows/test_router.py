from __future__ import annotations

import pytest
from tests.workflows.stage import TASK, lines, play, transcript

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.matrix import Matrix
from kapelle.errors import ConfigError
from kapelle.team import Agent
from kapelle.workflows.router import Router, addressee


async def test_the_named_agent_answers_for_the_team() -> None:
    scripts = {"desk": lines("For @adder: mind the carry."), "adder": lines("132"), "poet": lines("ode")}
    [episode] = await play(Arithmetic(), Router(), ["desk", "adder", "poet"], scripts, TASK)
    assert transcript(episode) == [
        "0 seen=0 47+85 -> desk: For @adder: mind the carry.",
        "1 seen=1 47+85\n\ndesk: For @adder: mind the carry. -> adder: 132",
    ]
    assert episode.rewards == {"adder": 1.0}
    assert episode.success == 1.0


async def test_a_text_without_a_name_is_an_answer() -> None:
    scripts = {"desk": lines("132"), "adder": lines("1")}
    [episode] = await play(Arithmetic(), Router(), ["desk", "adder"], scripts, TASK)
    assert [turn.agent for turn in episode.turns] == ["desk"]
    assert episode.rewards == {"desk": 1.0}


async def test_handovers_are_limited() -> None:
    agents = [Agent(n, prompt="{agents}|{message}|{question}") for n in ("a", "b", "c")]
    scripts = {"a": lines("@b", "132 @c"), "b": lines("@c"), "c": lines("@a")}
    [episode] = await play(Arithmetic(), Router(handovers=3), agents, scripts, TASK)
    assert transcript(episode) == [
        "0 seen=0 @b, @c||47+85 -> a: @b",
        "1 seen=1 @a, @c|@b|47+85 -> b: @c",
        "2 seen=2 @a, @b|@c|47+85 -> c: @a",
        "3 seen=3 @b, @c|@a|47+85 -> a: 132 @c",
    ]
    assert episode.rewards == {"a": 1.0}


async def test_another_agent_may_begin() -> None:
    scripts = {"a": lines("132"), "b": lines("@a")}
    [episode] = await play(Arithmetic(), Router(first="b"), ["a", "b"], scripts, TASK)
    assert [turn.agent for turn in episode.turns] == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "to"),
    [
        ("@b", "b"),
        ("Ask @b. Really @b!", "b"),
        ("@b or @c", None),
        ("b", None),
        ("@a", None),
        ("@a, no, @c", "c"),
        ("x@b", None),
        ("@bb", None),
        ("@nobody", None),
        ("", None),
    ],
)
def test_whom_a_text_names(text: str, to: str | None) -> None:
    assert addressee(text, "a", ["a", "b", "c"]) == to


def test_unsupported_combinations_raise_an_error() -> None:
    two = [Agent("a"), Agent("b")]
    with pytest.raises(ConfigError, match="only 'a'"):
        Router().check([Agent("a")], Arithmetic())
    with pytest.raises(ConfigError, match=r"first refers to the unknown agent 'c'"):
        Router(first="c").check(two, Arithmetic())
    with pytest.raises(ConfigError, match="is a game of moves"):
        Router().check(two, Matrix())
    with pytest.raises(ConfigError, match=r"uses \{a\}"):
        Router().check([Agent("a"), Agent("b", prompt="{a}")], Arithmetic())
    with pytest.raises(ConfigError, match="Rename"):
        Router().check([Agent("a"), Agent("agents")], Arithmetic())
