from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from tests.workflows.stage import Say, expert, lines, play, transcript

from kapelle.engines.rollout.judge import ask_engine
from kapelle.engines.rollout.protocol import Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import FrozenModel, environment_class
from kapelle.environments.debate_topics import DebateTopics
from kapelle.environments.grading.asking import EndpointJudge
from kapelle.environments.grading.judge import Ask, JudgeEndpoint, ask_endpoint
from kapelle.errors import ConfigError, DataError, EpisodeError, TrainingHalted
from kapelle.rollout.conformance import conform
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


async def test_sides_speak_in_turn_and_the_better_form_wins() -> None:
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
    assert episode.info["explanations"]["CON"]["evidence"] == (
        "has: nothing; lacks: a figure, a source, an example, a cause"
    )


@pytest.mark.parametrize(
    ("reward", "paid"),
    [("win", [1.0, 0.0, 0.0]), ("zero_sum", [1.0, -0.5, -0.5]), ("score", [5 / 6, 1 / 3, 0.0])],
)
async def test_three_sides_and_what_they_are_paid(reward: Any, paid: list[float]) -> None:
    environment = DebateTopics(sides=("A", "B", "C"), rounds=1, reward=reward, together=True)
    scripts = {"x": lines(GOOD), "y": lines("Zoos are bad."), "z": lines("")}
    episode = await debate(environment, scripts)
    assert [turn.seen for turn in episode.turns] == [0, 0, 0], "all at once"
    assert list(episode.rewards.values()) == pytest.approx(paid)


@pytest.mark.parametrize(
    ("reward", "tie", "silence"), [("win", 0.5, 0.0), ("zero_sum", 0.0, 0.0), ("score", 5 / 12, 0.0)]
)
async def test_ties_are_shared_and_silence_never_wins(reward: Any, tie: float, silence: float) -> None:
    environment = DebateTopics(rounds=1, reward=reward, together=True)
    for text, pays in (("Zoos are bad.", tie), ("", silence)):
        episode = await debate(environment, {"a": lines(text), "b": lines(text)})
        assert episode.rewards == pytest.approx({"a": pays, "b": pays})


async def test_two_agents_a_side_share_its_verdict() -> None:
    environment = DebateTopics(rounds=1)
    scripts = {"a": lines(GOOD), "b": lines("No."), "c": lines("Yes."), "d": lines("No.")}
    episode = await debate(environment, scripts)
    assert episode.info["sides"] == {"a": "PRO", "b": "CON", "c": "PRO", "d": "CON"}
    assert episode.rewards == {"a": 1.0, "b": 0.0, "c": 1.0, "d": 0.0}


def verdict(better: str) -> Say:
    """A judge that prefers the text with a word in it, whichever stands first."""

    def say(request: Request) -> str:
        system, asked = request.messages[0].content, request.messages[-1].content
        seal = system.split("VERDICT ")[1].split(":")[0]
        first, second = asked.split("</text-1")[0], asked.split("<text-2")[1]
        choice = "1" if better in first else "2" if better in second else "TIE"
        return f"Because.\nVERDICT {seal}: {choice}"

    return say


async def test_any_engine_can_judge_in_both_orders() -> None:
    asked: list[Request] = []

    def judge(request: Request) -> str:
        asked.append(request)
        return verdict("fun")(request)

    ask = ask_engine(ScriptedEngine({"judge": judge}), "judge")
    environment = DebateTopics(rounds=1).judged_by(ask)
    episode = await debate(environment, {"ada": lines(GOOD), "ben": lines("Zoos are fun.")})
    assert episode.rewards == {"ada": 0.0, "ben": 1.0}
    assert len(asked) == 2, "each pair in both orders"
    assert episode.info["explanations"] == {
        "PRO against CON": "Asked in both orders, the judge prefers the rival."
    }
    silent = await debate(environment, {"ada": lines(""), "ben": lines("")})
    assert silent.rewards == {"ada": 0.0, "ben": 0.0}


async def test_a_judge_that_prefers_a_place_finds_nobody_better() -> None:
    def first(request: Request) -> str:
        seal = request.messages[0].content.split("VERDICT ")[1].split(":")[0]
        return f"VERDICT {seal}: 1"

    environment = DebateTopics(rounds=1).judged_by(ask_engine(ScriptedEngine({"j": first}), "j"))
    episode = await debate(environment, {"ada": lines(GOOD), "ben": lines("Zoos are fun.")})
    assert episode.rewards == {"ada": 0.5, "ben": 0.5}


async def test_a_judge_of_the_settings_is_cached_counted_and_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[Message]] = []

    def ask_endpoint(judge: JudgeEndpoint) -> Ask:
        engine = ScriptedEngine({"j": verdict("fun")})

        async def ask(messages: Sequence[Message]) -> str:
            asked.append(messages)
            return await ask_engine(engine, "j")(messages)

        return ask

    monkeypatch.setattr("kapelle.environments.judged.ask_endpoint", ask_endpoint)
    server = {"endpoint": "http://judge/v1", "model": "big", "cache": str(tmp_path / "verdicts.jsonl")}
    environment = DebateTopics.model_validate({"rounds": 1, "judge": {**server, "budget": 2}})
    speeches = {"ada": lines(GOOD), "ben": lines("Zoos are fun.")}
    for _ in range(2):
        assert (await debate(environment, speeches)).rewards == {"ada": 0.0, "ben": 1.0}
    assert len(asked) == 2, "each order once"
    assert environment.costs() == {"judge/calls": 2.0, "judge/cached": 2.0, "judge/ungraded": 0.0}
    again = DebateTopics.model_validate({"rounds": 1, "judge": {**server, "budget": 1}})
    assert (await debate(again, speeches)).rewards == {"ada": 0.0, "ben": 1.0}
    assert len(asked) == 2, "a resumed run repeats its verdicts"
    with pytest.raises(TrainingHalted, match=r"`judge.budget` allows"):
        await debate(again, {"ada": lines("A new speech."), "ben": lines("Zoos are fun.")})
    one = JudgeEndpoint(endpoint="http://judge/v1", model="big")
    assert DebateTopics.model_validate({"judge": one}) == DebateTopics(
        judge=EndpointJudge(**one.model_dump())
    )
    with pytest.raises(ValidationError, match=r"`\{endpoint: …, model: …\}` or"):
        DebateTopics.model_validate({"judge": "gpt"})
    near = DebateTopics.model_validate({"judge": {"path": "embedded", "max_tokens": 9}})
    assert near.frozen_models == [FrozenModel("embedded", 9)]
    with pytest.raises(ConfigError, match="this process has none"):
        near.start(near.task("train", 0), ("ada", "ben"), 0)
    settings = {
        "environment": near,
        "workflow": {"name": "play"},
        "algorithm": {"name": "grpo"},
        "team": {"agents": 2},
    }
    with pytest.raises(ConfigError, match="to 0, or name an endpoint"):
        prepare(resolve({**settings, "episode": {"environment_workers": 1}}))


async def test_a_judge_without_a_verdict_makes_a_failed_episode() -> None:
    environment = DebateTopics(rounds=1).judged_by(ask_engine(ScriptedEngine({"j": lines("hm", "hm")}), "j"))
    episode = await debate(environment, {"ada": lines(GOOD), "ben": lines("Zoos are fun.")})
    assert "gave up on PRO against CON" in episode.error
    assert episode.rewards == {}


async def test_a_judge_behind_a_url() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert (body["model"], body["temperature"]) == ("big", 0.0)
        return httpx.Response(200, json={"choices": [{"message": {"content": "yes"}}]})

    settings = JudgeEndpoint(endpoint="http://judge/v1", model="big")
    assert await ask_endpoint(settings, httpx.MockTransport(answer))([Message("user", "?")]) == "yes"
    for broken in (httpx.Response(500), httpx.Response(200, json={}), httpx.Response(200, text="no")):
        ask = ask_endpoint(settings, httpx.MockTransport(lambda request, broken=broken: broken))
        with pytest.raises(EpisodeError, match="gave no answer"):
            await ask([Message("user", "?")])
    with pytest.raises(ValueError, match="no http"):
        DebateTopics(judge=JudgeEndpoint(endpoint="judge", model="big"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"sides": ("A", "B", "C"), "reward": "zero_sum"}, {"together": True, "reward": "score"}]
)
async def test_it_conforms(settings: dict[str, Any]) -> None:
    assert environment_class("debate_topics") is DebateTopics
    assert [f for f in await conform(DebateTopics(**settings)) if f.status == "failed"] == []


async def test_the_script_argues_its_side_in_good_form() -> None:
    environment = DebateTopics(rounds=1, reward="score")
    say = expert(environment)
    episode = await debate(environment, {"a": say, "b": say})
    assert episode.turns[1].text.startswith("I argue CON on the motion that zoos should be closed.")
    assert min(episode.rewards.values()) > 0.7


def test_motions_of_ones_own(tmp_path: Path, data_folder: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps([f"Motion {k}." for k in range(20)]))
    environment = DebateTopics(path=str(tmp_path / "mine.json"))
    environment.check(["a", "b"])
    assert (environment.size("train") or 0) + (environment.size("test") or 0) == 20
    real = DebateTopics(path=str(data_folder / "debate_topics" / "arguments.txt"))
    real.check(["a", "b"])
    assert (real.size("train") or 0) + (real.size("test") or 0) == 100


def test_what_cannot_be_debated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 sides \(PRO, CON\) and the team 3"):
        DebateTopics().check(["a", "b", "c"])
    with pytest.raises(DataError, match=r"cannot be read"):
        DebateTopics(path=str(tmp_path / "gone.txt")).check(["a", "b"])
    (tmp_path / "odd.json").write_text("{}")
    with pytest.raises(DataError, match="holds no list of motions"):
        DebateTopics(path=str(tmp_path / "odd.json")).check(["a", "b"])
    (tmp_path / "one.txt").write_text("Only this.\n")
    with pytest.raises(DataError, match="No motion of"):
        DebateTopics(path=str(tmp_path / "one.txt")).check(["a", "b"])
    with pytest.raises(ValidationError, match="names a side twice"):
        DebateTopics(sides=("A", "A"))


async def test_an_unfinished_debate_pays_nobody() -> None:
    world = DebateTopics().start(ZOOS, ["a", "b"], 0)
    await world.step({"a": GOOD})
    assert world.outcome().truncated
    assert world.outcome().rewards == {}
    with pytest.raises(EpisodeError, match="turn of"):
        await world.step({"a": GOOD})
