from __future__ import annotations

import pytest
from tests.workflows.stage import Say, expert, lines, play, transcript

pytest.importorskip("pyspiel")

from kapelle.engines.rollout.protocol import Request
from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.openspiel.environment import OpenSpiel
from kapelle.errors import ConfigError
from kapelle.team import Agent
from kapelle.workflow import workflow_class
from kapelle.workflows.play import PlayWorkflow

KUHN = OpenSpiel(game="kuhn_poker", wording="short")
TASK = KUHN.task("train", 0)


async def test_the_game_decides_which_agents_move() -> None:
    agents = [Agent("a"), Agent("b", prompt="You see {question}")]
    [episode] = await play(
        KUHN, PlayWorkflow(), agents, {"a": lines("Pass"), "b": lines("Bet")}, TASK, seed=1
    )
    # a's second move opens a new conversation, so its script starts over.
    assert transcript(episode) == [
        "0 seen=0 1/2 1 <Pass | Bet> -> a: Pass",
        "1 seen=1 You see 2/2 0p <Pass | Bet> -> b: Bet",
        "2 seen=2 1/2 1pb <Pass | Bet> -> a: Pass",
    ]
    assert episode.rewards == {"a": -1.0, "b": 1.0}
    assert not episode.truncated


async def test_memory_is_the_current_observation_or_the_whole_conversation() -> None:
    lengths: dict[str, list[int]] = {"observation": [], "conversation": []}

    def speak(memory: str) -> Say:
        def say(request: Request) -> str:
            if request.agent == "a":
                lengths[memory].append(len(request.messages))
            return "Pass" if request.agent == "a" else "Bet"

        return say

    for memory in lengths:
        workflow = PlayWorkflow.model_validate({"memory": memory})
        seats = [Agent("a", system="Play well."), Agent("b")]
        say = speak(memory)
        [episode] = await play(KUHN, workflow, seats, {"a": say, "b": say}, TASK)
        first, last = episode.by("a")
        extends = last.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        assert extends == (memory == "conversation")
        assert [m.role for m in last.new_messages] == (["user"] if extends else ["system", "user"])
    assert lengths == {"observation": [2, 2], "conversation": [2, 4]}


async def test_simultaneous_moves_are_not_observed() -> None:
    game = OpenSpiel(game="matrix_pd", wording="short")
    scripts = {"a": lines("Defect"), "b": lines("Cooperate")}
    [episode] = await play(game, PlayWorkflow(), ["a", "b"], scripts, game.task("train", 0))
    assert [turn.completed_before for turn in episode.turns] == [0, 0]
    assert episode.rewards == {"a": 10.0, "b": 0.0}


async def test_a_limit_of_rounds_cuts_a_game_off() -> None:
    scripts = {"a": lines("Pass"), "b": lines("Bet")}
    [episode] = await play(KUHN, PlayWorkflow(max_rounds=1), ["a", "b"], scripts, TASK)
    assert len(episode.turns) == 1
    assert episode.truncated
    assert episode.error is None


async def test_three_players_and_one_who_drops_out_early() -> None:
    game = OpenSpiel(game="leduc_poker", parameters={"players": 3}, wording="short")
    folds = {name: expert(game) for name in "abc"} | {"b": lambda request: "Raise"}
    folds["a"] = lambda request: "Fold" if "Fold" in request.messages[-1].content else "Call"
    [episode] = await play(game, PlayWorkflow(), ["a", "b", "c"], folds, game.task("train", 0))
    moves = episode.info["moves"]
    assert "1: Fold" in moves
    assert not any(move.startswith("1:") for move in moves[moves.index("1: Fold") + 1 :])
    assert sum(episode.rewards.values()) == pytest.approx(0.0)


def test_questions_and_unknown_fields_raise_errors() -> None:
    with pytest.raises(ConfigError, match="questions"):
        PlayWorkflow().check([Agent("a")], Arithmetic())
    with pytest.raises(ConfigError, match=r"uses \{board\}"):
        PlayWorkflow().check([Agent("a", prompt="{board}")], KUHN)
    assert workflow_class("play") is PlayWorkflow
