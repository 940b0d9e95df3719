from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.workflows.stage import Say, expert, lines, play, transcript

from kapelle.engines.rollout.judge import query_engine
from kapelle.engines.rollout.protocol import Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import FrozenModel
from kapelle.environments.debate_topics import DebateTopics
from kapelle.environments.grading.judge import Ask, JudgeEndpoint
from kapelle.errors import ConfigError, DataError, EpisodeError, TrainingHalted
from kapelle.setup.preparation import prepare
from kapelle.setup.recipe import resolve
from kapelle.types import Message, Task
from kapelle.workflows.parallel import Parallel

ZOOS = Task("train-0", "Zoos should be closed.")
GOOD = (
    "Zoos should be closed because animals suffer in them every day. First, a study of zoo elephants found that "
    "they die early. Second, 40% of lions pace their cages for hours. In conclusion, zoos should be closed."
)


async def debate(
    environment: DebateTopics, scripts: dict[str, Say], agents: Sequence[str] | None = None
) -> Any:
    [episode] = await play(environment, Parallel(), list(agents or scripts), scripts, ZOOS)
    return episode


async def test_sides_take_turns_and_the_better_form_wins() -> None:
    episode = await debate(DebateTopics(rounds=1), {"ada": lines(GOOD), "ben": lines("Zoos are fun.")})
    assert transcript(episode) == [
        f"0 seen=0 Motion: Zoos should be closed.\nYou argue PRO.\nSpeech 1 of 1. -> ada: {GOOD}",
        (
            "1 seen=1 Motion: Zoos should be closed.\nYou argue CON.\n"
            f"ada (PRO): {GOOD}\nSpeech 1 of 1. -> ben: Zoos are fun."
        ),
    ]
    assert episode.rewards == {"ada": 1.0, "ben": 0.0}
    assert episode.success is None
    assert episode.info["winners"] == ["PRO"]
    assert "a source" in episode.info["explanations"]["CON"]["evidence"]


@pytest.mark.parametrize(
    ("reward", "rewards"),
    [("win", [1.0, 0.0, 0.0]), ("zero_sum", [1.0, -0.5, -0.5]), ("score", [5 / 6, 1 / 3, 0.0])],
)
async def test_rewards_of_three_sides(reward: Any, rewards: list[float]) -> None:
    environment = DebateTopics(sides=("A", "B", "C"), rounds=1, reward=reward, together=True)
    scripts = {"x": lines(GOOD), "y": lines("Zoos are bad."), "z": lines("")}
    episode = await debate(environment, scripts)
    assert [turn.completed_before for turn in episode.turns] == [0, 0, 0]
    assert list(episode.rewards.values()) == pytest.approx(rewards)


@pytest.mark.parametrize(
    ("reward", "tie", "silence"), [("win", 0.5, 0.0), ("zero_sum", 0.0, 0.0), ("score", 5 / 12, 0.0)]
)
async def test_ties_are_shared_and_an_empty_speech_never_wins(
    reward: Any, tie: float, silence: float
) -> None:
    environment = DebateTopics(rounds=1, reward=reward, together=True)
    for text, expected in (("Zoos are bad.", tie), ("", silence)):
        episode = await debate(environment, {"a": lines(text), "b": lines(text)})
        assert episode.rewards == pytest.approx({"a": expected, "b": expected})


def verdict(better: str) -> Say:
    """Return a judge that prefers the text with a word, in either order."""

    def say(request: Request) -> str:
        system, query = request.messages[0].content, request.messages[-1].content
        seal = system.split("VERDICT ")[1].split(":")[0]
        first, second = query.split("</text-1")[0], query.split("<text-2")[1]
        choice = "1" if better in first else "2" if better in second else "TIE"
        return f"Because.\nVERDICT {seal}: {choice}"

    return say


async def test_any_engine_can_judge_in_both_orders() -> None:
    requests: list[Request] = []

    def judge(request: Request) -> str:
        requests.append(request)
        return verdict("fun")(request)

    ask = query_engine(ScriptedEngine({"judge": judge}), "judge")
    environment = DebateTopics(rounds=1).judged_by(ask)
    episode = await debate(environment, {"ada": lines(GOOD), "ben": lines("Zoos are fun.")})
    assert episode.rewards == {"ada": 0.0, "ben": 1.0}
    assert len(requests) == 2, "each pair in both orders"
    assert set(episode.info["explanations"]) == {"PRO against CON"}
    silent = await debate(environment, {"ada": lines(""), "ben": lines("")})
    assert silent.rewards == {"ada": 0.0, "ben": 0.0}


async def test_a_judge_that_prefers_a_position_gives_a_tie() -> None:
    def first(request: Request) -> str:
        seal = request.messages[0].content.split("VERDICT ")[1].split(":")[0]
        return f"VERDICT {seal}: 1"

    environment = DebateTopics(rounds=1).judged_by(query_engine(ScriptedEngine({"j": first}), "j"))
    episode = await debate(environment, {"ada": lines(GOOD), "ben": lines("Zoos are fun.")})
    assert episode.rewards == {"ada": 0.5, "ben": 0.5}


async def test_a_judge_of_the_settings_is_cached_counted_and_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries: list[Sequence[Message]] = []

    def query_endpoint(judge: JudgeEndpoint) -> Ask:
        engine = ScriptedEngine({"j": verdict("fun")})

        async def ask(messages: Sequence[Message]) -> str:
            queries.append(messages)
            return await query_engine(engine, "j")(messages)

        return ask

    monkeypatch.setattr("kapelle.environments.judged.query_endpoint", query_endpoint)
    server = {"endpoint": "http://judge/v1", "model": "big", "cache": str(tmp_path / "verdicts.jsonl")}
    environment = DebateTopics.model_validate({"rounds": 1, "judge": {**server, "budget": 2}})
    speeches = {"ada": lines(GOOD), "ben": lines("Zoos are fun.")}
    for _ in range(2):
        assert (await debate(environment, speeches)).rewards == {"ada": 0.0, "ben": 1.0}
    assert len(queries) == 2, "each order once"
    assert environment.costs() == {"judge/calls": 2.0, "judge/cached": 2.0, "judge/ungraded": 0.0}
    resumed = DebateTopics.model_validate({"rounds": 1, "judge": {**server, "budget": 1}})
    assert (await debate(resumed, speeches)).rewards == {"ada": 0.0, "ben": 1.0}
    assert len(queries) == 2, "a resumed run repeats its verdicts"
    with pytest.raises(TrainingHalted, match="budget"):
        await debate(resumed, {"ada": lines("A new speech."), "ben": lines("Zoos are fun.")})


def test_a_judge_that_is_a_model_has_its_engine() -> None:
    near = DebateTopics.model_validate({"judge": {"path": "embedded", "max_tokens": 9}})
    assert near.frozen_models == [FrozenModel("embedded", 9)]
    with pytest.raises(ConfigError, match="endpoint"):
        near.start(near.task("train", 0), ("ada", "ben"), 0)
    settings = {
        "environment": near,
        "workflow": {"name": "play"},
        "algorithm": {"name": "grpo"},
        "team": {"agents": 2},
    }
    with pytest.raises(ConfigError, match="endpoint"):
        prepare(resolve({**settings, "episode": {"environment_workers": 1}}))


async def test_a_judge_without_a_verdict_fails_the_episode() -> None:
    environment = DebateTopics(rounds=1).judged_by(
        query_engine(ScriptedEngine({"j": lines("hm", "hm")}), "j")
    )
    episode = await debate(environment, {"ada": lines(GOOD), "ben": lines("Zoos are fun.")})
    assert "PRO against CON" in episode.error
    assert episode.rewards == {}


async def test_the_script_argues_its_side() -> None:
    environment = DebateTopics(rounds=1, reward="score")
    say = expert(environment)
    episode = await debate(environment, {"a": say, "b": say})
    assert episode.turns[1].text.startswith("I argue CON on the motion that zoos should be closed.")
    assert min(episode.rewards.values()) > 0.7


def test_motions_from_a_file(tmp_path: Path, data_folder: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps([f"Motion {k}." for k in range(20)]))
    environment = DebateTopics(path=str(tmp_path / "mine.json"))
    environment.check(["a", "b"])
    assert (environment.size("train") or 0) + (environment.size("test") or 0) == 20
    real = DebateTopics(path=str(data_folder / "debate_topics" / "arguments.txt"))
    real.check(["a", "b"])
    assert (real.size("train") or 0) + (real.size("test") or 0) == 100


def test_unfit_teams_and_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 sides"):
        DebateTopics().check(["a", "b", "c"])
    with pytest.raises(DataError, match="cannot be read"):
        DebateTopics(path=str(tmp_path / "gone.txt")).check(["a", "b"])
    (tmp_path / "odd.json").write_text("{}")
    with pytest.raises(DataError, match="motion"):
        DebateTopics(path=str(tmp_path / "odd.json")).check(["a", "b"])
    (tmp_path / "one.txt").write_text("Only this.\n")
    with pytest.raises(DataError, match="split"):
        DebateTopics(path=str(tmp_path / "one.txt")).check(["a", "b"])
    with pytest.raises(ValidationError, match="twice"):
        DebateTopics(sides=("A", "A"))


async def test_an_unfinished_debate_has_no_rewards() -> None:
    world = DebateTopics().start(ZOOS, ["a", "b"], 0)
    await world.step({"a": GOOD})
    assert world.outcome().truncated
    assert world.outcome().rewards == {}
    with pytest.raises(EpisodeError, match="turn"):
        await world.step({"a": GOOD})
