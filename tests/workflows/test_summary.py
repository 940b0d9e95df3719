from __future__ import annotations

import pytest
from tests.workflows.stage import TASK, lines, play, transcript

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.matrix import Matrix
from kapelle.errors import ConfigError
from kapelle.team import Agent
from kapelle.workflows.summary import Summary


async def test_the_aggregator_reads_all_drafts_and_answers() -> None:
    scripts = {"a": lines("122"), "b": lines("132"), "chief": lines("132")}
    [episode] = await play(Arithmetic(), Summary(), ["a", "b", "chief"], scripts, TASK)
    assert transcript(episode) == [
        "0 seen=0 47+85 -> a: 122",
        "1 seen=0 47+85 -> b: 132",
        "2 seen=2 47+85\n\na: 122\n\nb: 132 -> chief: 132",
    ]
    assert episode.rewards == {"chief": 1.0}
    assert episode.success == 1.0


async def test_a_mixture_of_agents_reads_the_layer_before() -> None:
    scripts = {"a": lines("1", "2", "3"), "b": lines("4", "5", "6"), "chief": lines("132")}
    agents: list[Agent | str] = ["a", "b", Agent("chief", prompt="{question}: {drafts}; {b}")]
    [episode] = await play(Arithmetic(), Summary(layers=3, reply="{drafts}"), agents, scripts, TASK)
    assert [(turn.agent, turn.completed_before, turn.new_messages[0].content) for turn in episode.turns] == [
        ("a", 0, "47+85"),
        ("b", 0, "47+85"),
        ("a", 2, "a: 1\nb: 4"),
        ("b", 2, "a: 1\nb: 4"),
        ("a", 4, "a: 2\nb: 5"),
        ("b", 4, "a: 2\nb: 5"),
        ("chief", 6, "47+85: a: 3\nb: 6; 6"),
    ]


async def test_layers_of_different_agents() -> None:
    scripts = {"chief": lines("132"), "a": lines("1"), "b": lines("2"), "c": lines("3")}
    workflow = Summary(aggregator="chief", layers=(("a", "b"), ("c",)))
    [episode] = await play(Arithmetic(), workflow, ["chief", "a", "b", "c"], scripts, TASK)
    assert [(turn.agent, turn.new_messages[0].content) for turn in episode.turns] == [
        ("a", "47+85"),
        ("b", "47+85"),
        ("c", "47+85\n\na: 1\nb: 2\n\nAnswer again."),
        ("chief", "47+85\n\nc: 3"),
    ]


async def test_drafts_are_scored_on_demand_and_never_decide() -> None:
    scripts = {"a": lines("122", "132"), "b": lines("132", "1"), "chief": lines("131")}
    [episode] = await play(
        Arithmetic(), Summary(layers=2, score_drafts=True), ["a", "b", "chief"], scripts, TASK
    )
    assert episode.rewards == {"a": 1.0, "b": 0.0, "chief": 0.0}, "each by its last draft"
    assert episode.success == 0.0


def test_unsupported_combinations_raise_an_error() -> None:
    three = [Agent("a"), Agent("b"), Agent("chief")]
    for workflow, says in (
        (Summary(aggregator="cheif"), r"unknown agent 'cheif'. Did you mean 'chief'"),
        (Summary(layers=0), "layers is 0"),
        (Summary(layers=()), "a layer without drafters"),
        (Summary(layers=(("a",), ())), "a layer without drafters"),
        (Summary(layers=(("a", "bb"),)), r"layers refers to the unknown agent 'bb'"),
        (Summary(layers=(("a", "a"),)), "an agent twice"),
        (Summary(layers=(("a", "chief"),)), "is also the aggregator"),
        (Summary(layers=(("a",), ("b",)), reply="{b}"), r"`workflow.reply`"),
    ):
        with pytest.raises(ConfigError, match=says):
            workflow.check(three, Arithmetic())
    Summary(layers=(("a",), ("b",)), reply="{a}").check(three, Arithmetic())
    with pytest.raises(ConfigError, match="only 'a'"):
        Summary().check([Agent("a")], Arithmetic())
    with pytest.raises(ConfigError, match="is a game of moves"):
        Summary().check(three, Matrix())
    with pytest.raises(ConfigError, match=r"uses \{b\}, .* a first draft"):
        Summary().check([Agent("a", prompt="{b}"), *three[1:]], Arithmetic())
    with pytest.raises(ConfigError, match="Rename"):
        Summary().check([Agent("drafts"), *three], Arithmetic())
