from __future__ import annotations

import pytest
from tests.workflows.stage import TASK, lines, play, transcript

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.matrix import Matrix
from kapelle.errors import ConfigError
from kapelle.team import Agent
from kapelle.workflow import Workflow
from kapelle.workflows.chain import Chain
from kapelle.workflows.debate import Debate
from kapelle.workflows.solo import Solo


async def test_each_agent_sees_the_others_last_answers_and_the_majority_wins() -> None:
    scripts = {"a": lines("122", "132"), "b": lines("132", "it is 132"), "c": lines("142", "142")}
    [episode] = await play(
        Arithmetic(), Debate(), ["a", Agent("b", prompt="Sum: {question}"), "c"], scripts, TASK
    )
    assert transcript(episode) == [
        "0 seen=0 47+85 -> a: 122",
        "1 seen=0 Sum: 47+85 -> b: 132",
        "2 seen=0 47+85 -> c: 142",
        "3 seen=3 b: 132\nc: 142\n\nAnswer again. -> a: 132",
        "4 seen=3 a: 122\nc: 142\n\nAnswer again. -> b: it is 132",
        "5 seen=3 a: 122\nb: 132\n\nAnswer again. -> c: 142",
    ]
    assert episode.rewards == {"a": 1.0, "b": 1.0, "c": 0.0}, "each is scored by its own last answer"
    assert episode.success == 1.0, "the team by the majority's"
    assert episode.info["final"] == "132"


async def test_ties_are_drawn_by_the_seed_of_the_episode() -> None:
    scripts = {"a": lines("122"), "b": lines("132")}
    episodes = await play(Arithmetic(), Debate(rounds=1), ["a", "b"], scripts, TASK, samples=60)
    finals = [episode.info["final"] for episode in episodes]
    assert 15 < finals.count("132") < 45
    again = await play(Arithmetic(), Debate(rounds=1), ["a", "b"], scripts, TASK, samples=60)
    assert [episode.info["final"] for episode in again] == finals


async def test_the_reply_decides_what_is_seen() -> None:
    debate = Debate(rounds=2, reply="{question}|{b}|{answers}|{other}")
    with pytest.raises(ConfigError, match=r"uses \{other\}"):
        await play(Arithmetic(), debate, ["a", "b"], {}, TASK)
    debate = Debate(rounds=2, reply="{question}|{b}|{answers}")
    scripts = {"a": lines("1", "2"), "b": lines("{a}", "4")}
    [episode] = await play(Arithmetic(), debate, ["a", "b"], scripts, TASK)
    assert episode.turns[2].new_messages[0].content == "47+85|{a}|b: {a}"
    assert episode.turns[3].new_messages[0].content == "47+85|{a}|a: 1"


async def test_enough_agreement_ends_it() -> None:
    rounds = {}
    for share in (None, 1 / 3, 0.6, 2 / 3, 0.67, 1.0):
        debate = Debate(rounds=4, consensus=share)
        scripts = {n: lines(*t) for n, t in CONVERGING.items()}
        [episode] = await play(Arithmetic(), debate, ["a", "b", "c"], scripts, TASK)
        rounds[share] = len(episode.turns) // 3
    # Round 1: all differ. Round 2: two of three agree. Round 3: all do.
    assert rounds == {None: 4, 1 / 3: 1, 0.6: 2, 2 / 3: 2, 0.67: 3, 1.0: 3}


CONVERGING = {
    "a": ("122", "132", "132", "132"),
    "b": ("132", "132", "132", "132"),
    "c": ("142", "122", "132", "132"),
}


async def test_consensus_waits_for_min_rounds_and_ignores_texts_without_answers() -> None:
    scripts = dict.fromkeys("ab", lines("132", "132", "132"))
    [episode] = await play(
        Arithmetic(), Debate(rounds=3, consensus=1.0, min_rounds=2), ["a", "b"], scripts, TASK
    )
    assert len(episode.turns) == 4
    silent = dict.fromkeys("ab", lines("?", "?", "?"))
    [episode] = await play(Arithmetic(), Debate(rounds=3, consensus=0.5), ["a", "b"], silent, TASK)
    assert len(episode.turns) == 6


async def test_an_agent_that_has_settled_stops_and_its_answer_stays_valid() -> None:
    debate = Debate(rounds=4, settled_after=2)
    scripts = {"a": lines("132", "so 132"), "b": lines("1", "2", "3", "122"), "c": lines("5", "132", "132")}
    [episode] = await play(Arithmetic(), debate, ["a", "b", "c"], scripts, TASK)
    assert [turn.agent for turn in episode.turns] == ["a", "b", "c", "a", "b", "c", "b", "c", "b"]
    assert episode.turns[-1].new_messages[0].content.startswith("a: so 132\nc: 132\n"), (
        "the others go on reading it"
    )
    assert episode.rewards == {"a": 1.0, "b": 0.0, "c": 1.0}
    assert episode.success == 1.0


async def test_answers_of_every_round_can_be_scored_without_rewards() -> None:
    scripts = {"a": lines("122", "132"), "b": lines("132", "none")}
    [episode] = await play(Arithmetic(), Debate(score_rounds=True), ["a", "b"], scripts, TASK)
    assert [turn.score for turn in episode.turns] == [0.0, 1.0, 1.0, 0.0]
    assert [turn.reward for turn in episode.turns] == [0.0] * 4
    assert episode.rewards == {"a": 1.0, "b": 0.0}
    [plain] = await play(Arithmetic(), Debate(), ["a", "b"], scripts, TASK)
    assert [turn.score for turn in plain.turns] == [None] * 4


@pytest.mark.parametrize("workflow", [Solo(), Chain(), Debate()])
def test_a_game_of_moves_raises_an_error_with_a_fix(workflow: Workflow) -> None:
    with pytest.raises(
        ConfigError,
        match="`matrix` is a game of moves",
    ):
        workflow.check([Agent("a"), Agent("b")], Matrix())


def test_unsupported_debates_raise_an_error() -> None:
    with pytest.raises(ConfigError, match=r"only 'a'.*set `workflow.name: solo`"):
        Debate().check([Agent("a")], Arithmetic())
    with pytest.raises(ConfigError, match="Rename"):
        Debate().check([Agent("a"), Agent("answers")], Arithmetic())
    with pytest.raises(ConfigError, match="the first round"):
        Debate().check([Agent("a", prompt="{b}"), Agent("b")], Arithmetic())
