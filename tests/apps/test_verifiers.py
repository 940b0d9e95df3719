"""Environments of the real package verifiers, played by teams (`make test-apps`)."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.workflows.stage import expert, lines, play

from kapelle.environment import Answerable, Scripted, TeamMoves, offers
from kapelle.environments.adapters import verifiers as adapter
from kapelle.environments.adapters.verifiers import Verifiers
from kapelle.errors import ConfigError
from kapelle.rollout.conformance import conform
from kapelle.types import Task
from kapelle.workflows.chain import Chain
from kapelle.workflows.debate import Debate
from kapelle.workflows.play import PlayWorkflow
from kapelle.workflows.solo import Solo
from kapelle.workflows.tool_use import ToolUse

pytestmark = pytest.mark.apps
pytest.importorskip("verifiers")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    adapter._load.cache_clear()
    yield
    sys.modules.pop("vf_sums", None)


def world(kind: str, **settings: Any) -> Verifiers:
    args = {"kind": kind, **settings.pop("args", {})}
    return Verifiers(id="vf-sums", args=args, **settings)


async def test_a_rubric_of_weighted_functions_pays_and_its_functions_are_metrics() -> None:
    environment = world("single")
    task = environment.task("train", 3)
    assert task.question == "Add.\n\n3+4"
    said = {"a": lines("<answer>7</answer>")}
    (episode,) = await play(environment, Solo(), ["a"], said, task)
    assert episode.rewards == {"a": 1.0}
    assert episode.success == 1.0
    assert (episode.info["right"], episode.info["short"], episode.info["length"]) == (1.0, 1.0, 18.0)
    (wordy,) = await play(environment, Solo(), ["a"], {"a": lines(f"{'.' * 40}<answer>7</answer>")}, task)
    assert wordy.rewards == {"a": 0.75}
    (wrong,) = await play(environment, Solo(), ["a"], {"a": lines("8")}, task)
    assert wrong.rewards == {"a": 0.25}


async def test_agents_debate_a_question_of_single_turns() -> None:
    environment = world("single")
    assert offers(environment, Answerable)
    assert not offers(environment, TeamMoves)
    said = {
        "a": lines("<answer>9</answer>", "<answer>7</answer>"),
        "b": lines("<answer>7</answer>", "<answer>7</answer>"),
    }
    task = environment.task("train", 3)
    (episode,) = await play(environment, Debate(rounds=2, score_rounds=True), ["a", "b"], said, task)
    assert [turn.score for turn in episode.turns] == [0.25, 1.0, 1.0, 1.0]
    assert episode.rewards == {"a": 1.0, "b": 1.0}
    assert episode.info["right"] == {"a": 1.0, "b": 1.0}
    (chained,) = await play(
        environment, Chain(), ["a", "b"], {"a": lines("perhaps 7"), "b": lines("<answer>7</answer>")}, task
    )
    assert chained.rewards == {"b": 1.0}


async def test_a_demonstration_is_written_as_the_parser_reads_it() -> None:
    environment = world("single", demonstration="<answer>{answer}</answer>")
    assert offers(environment, Scripted)
    task = environment.task("test", 0)
    (episode,) = await play(environment, Solo(), ["a"], {"a": expert(environment)}, task)
    assert episode.rewards == {"a": 1.0}
    assert environment.extract("<answer> 7 </answer>") == "7"
    assert environment.extract("7") is None


def test_its_evaluation_set_is_the_test_split_and_never_in_training() -> None:
    apart = world("single")
    assert (apart.size("train"), apart.size("test")) == (20, 5)
    mixed = world("single", args={"overlap": 2})
    assert (mixed.size("train"), mixed.size("test")) == (18, 5)
    assert mixed.skipped() == {"train": "2 of 20 rows, which are also in the evaluation set"}
    one = world("single", args={"evaluation": 0})
    splits: dict[str, set[str]] = {
        "train": {one.task("train", k).question for k in range(one.size("train") or 0)},
        "test": {one.task("test", k).question for k in range(one.size("test") or 0)},
    }
    assert len(splits["train"]) + len(splits["test"]) == 20
    assert not splits["train"] & splits["test"]
    assert "hash of the prompt" in one.sources["test"]


async def test_a_conversation_goes_on_until_the_environment_ends_it() -> None:
    environment = world("guess")
    assert offers(environment, TeamMoves)
    assert not offers(environment, Answerable)
    task = environment.task("train", 4)  # 4+5: the answer is 9
    assert task.question == ""
    remembering = PlayWorkflow(memory="conversation")
    (episode,) = await play(environment, remembering, ["a"], {"a": lines("5", "12", "9")}, task)
    assert [turn.new_messages[-1].content for turn in episode.turns] == ["4+5", "higher", "lower"]
    assert episode.rewards == {"a": 1.0}
    assert episode.info["num_turns"] == 3.0
    assert not episode.truncated
    (lost,) = await play(environment, remembering, ["a"], {"a": lines("1", "2", "3", "4", "5")}, task)
    assert lost.rewards == {"a": 0.0}
    assert len(lost.turns) == 4


async def test_a_chain_works_on_each_move_of_a_conversation() -> None:
    environment = world("guess")
    said = {"planner": lines("low?", "go up"), "player": lines("5", "9")}
    (episode,) = await play(environment, Chain(), ["planner", "player"], said, environment.task("train", 4))
    heard = [(turn.agent, turn.new_messages[-1].content) for turn in episode.turns]
    assert heard[2:] == [("planner", "higher"), ("player", "higher\n\nplanner: go up")]
    assert episode.rewards == {"player": 1.0}


async def test_tools_are_called_by_the_package_and_results_are_read() -> None:
    environment = world("tools")
    task = environment.task("train", 4)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 4, "b": 5}}\n</tool_call>'
    (episode,) = await play(environment, ToolUse(), ["a"], {"a": lines(call, "9")}, task)
    first, second = (turn.new_messages[-1] for turn in episode.turns)
    assert '"name": "add"' in first.content
    assert first.content.endswith("4+5")
    assert (second.role, second.content) == ("tool", "9")
    assert episode.rewards == {"a": 1.0}


async def test_what_breaks_fails_the_episode_and_pays_nothing() -> None:
    environment = world("broken")
    (episode,) = await play(environment, Solo(), ["a"], {"a": lines("7")}, environment.task("train", 3))
    assert episode.error is not None
    assert "no such column" in episode.error
    environment = world("loud")
    (episode,) = await play(environment, Solo(), ["a"], {"a": lines("7")}, environment.task("train", 3))
    assert episode.rewards == {"a": 1.0}
    (episode,) = await play(environment, Solo(), ["a"], {"a": lines("7.0")}, environment.task("train", 3))
    assert episode.error is not None
    assert "environment.rewards" in episode.error
    environment = world("guess")
    (episode,) = await play(
        environment, PlayWorkflow(), ["a"], {"a": lines("crash")}, environment.task("train", 3)
    )
    assert episode.error is not None
    assert "the guess broke the game" in episode.error


async def test_a_world_that_is_closed_early_leaves_no_task_behind() -> None:
    environment = world("guess")
    before = asyncio.all_tasks()
    opened: Any = environment.start(environment.task("train", 4), ["a"], 0)
    await opened.reset()
    assert opened.observe("a") == "4+5"
    await opened.close()
    assert asyncio.all_tasks() == before
    assert opened.outcome().truncated


def test_what_cannot_be_trained_on_is_refused_before_anything_loads() -> None:
    with pytest.raises(ConfigError, match="compares the rollouts of a group"):
        world("group").check(["a"])
    with pytest.raises(ConfigError, match="cannot load the environment 'no-such-env'"):
        Verifiers(id="no-such-env").check(["a"])
    with pytest.raises(ConfigError, match="unexpected keyword argument 'colour'"):
        world("single", args={"colour": "red"}).check(["a"])


def test_a_group_of_environments_is_one() -> None:
    environment = world("both")
    assert offers(environment, Answerable)
    assert environment.size("test") == 10


def test_loading_leaves_signals_to_the_run() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    world("single").check(["a"])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("kind", ["single", "guess", "tools"])
async def test_it_conforms(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    demonstration = "<answer>{answer}</answer>"
    environment = world(kind, demonstration=demonstration)
    findings = await conform(environment, ["agent_0"], tasks=3)
    failed = [f for f in findings if f.status == "failed"]
    if (
        kind == "single"
    ):  # brevity alone pays: the rubric's own choice, which the check of cheating points out
        assert {f.name for f in failed} <= {"cheating"}, failed
    else:
        assert not failed
        assert any("all agents share one role" in f.detail for f in findings)


def test_a_task_is_plain() -> None:
    assert world("single").task("train", 0) == Task(
        "train-0", "Add.\n\n0+1", {"split": "train", "index": 0, "answer": "1"}
    )
