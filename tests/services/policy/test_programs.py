"""Many, silent and forked programs, and repeated rewards: rows of the table in docs/programs.md."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.services.policy.test_outside import trainer
from tests.support.serving import Reciting, Watching, staged
from tests.support.tiny import frozen_copy, same_bits

from kapelle.engines.rollout.protocol import Request
from kapelle.errors import EpisodeError, RequestRefused, TrainingHalted
from kapelle.rollout.setup import RolloutSetup

PYTHON = (sys.executable, "-IS", "-c")
"""The command of these programs: the standard library alone, without a delay."""
POST = """
import json, os, sys, urllib.request
def post(path, body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))
def say(words, agent="first"):
    asked = {"model": "team/" + agent, "messages": [{"role": "user", "content": words}]}
    return post("/chat/completions", asked)["choices"][0]["message"]["content"]
"""


def echo(request: Request) -> str:
    return f"to {request.messages[-1].content}"


def asked(words: str) -> dict[str, Any]:
    return {"model": "team/first", "messages": [{"role": "user", "content": words}]}


@pytest.mark.slow
def test_16_programs_at_once_have_an_episode_each(setup: RolloutSetup) -> None:
    """All programs have their task before the first call, and all call before the first answer."""
    everybody = asyncio.Event()

    async def wait_for_all(_: Request) -> None:
        if len(engine.asked) == 16:
            everybody.set()
        await everybody.wait()

    engine = Reciting(echo, wait_for_all)

    async def perform(url: str) -> dict[str, int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60.0, limits=limits) as web:

            async def post(path: str, body: dict[str, Any], name: str = "") -> dict[str, Any]:
                headers = {"x-kapelle-session": name} if name else {}
                reply = await web.post(f"{url}{path}", json=body, headers=headers)
                assert reply.status_code == 200, reply.text
                answer: dict[str, Any] = reply.json()
                return answer

            taken = await asyncio.gather(*(post("/task", {}) for _ in range(16)))
            index = {each["session"]: each["task"]["index"] for each in taken}
            reply = await asyncio.gather(
                *(post("/chat/completions", asked(f"{k}"), n) for n, k in index.items())
            )
            words = [each["choices"][0]["message"]["content"] for each in reply]
            assert words == [f"to {k}" for k in index.values()]
            await asyncio.gather(*(post("/reward", {"reward": k / 16}, n) for n, k in index.items()))
            return index

    with staged(setup, engine, 16) as stage:
        index = asyncio.run(perform(stage.url))
    assert sorted(index.values()) == list(range(16)), "everyone had a task of its own"
    for episode in stage.episodes:
        k = episode.task.data["index"]
        assert (episode.error, dict(episode.rewards)) == (None, {"first": k / 16})
        assert [turn.text for turn in episode.turns] == [f"to {k}"]


def test_no_more_programs_are_started_than_may_run_at_once(setup: RolloutSetup, tmp_path: Path) -> None:
    """Each program notes how many run at the same time, and ends."""
    note = f'mkdir "$0/$$"; ls "$0" | wc -l >> {tmp_path}/most; sleep 0.05; rmdir "$0/$$"'
    running = tmp_path / "running"
    running.mkdir()
    engine = Reciting(echo)
    with staged(setup, engine, 8, command=("sh", "-c", note, str(running)), programs=3) as stage:
        pass
    assert len(stage.episodes) == 8
    counts = [int(line) for line in (tmp_path / "most").read_text().split()]
    assert len(counts) == 8
    assert max(counts) <= 3


@pytest.mark.slow
def test_a_group_trains_without_a_program_that_ends_without_a_reward(tmp_path: Path) -> None:
    """Three programs of one task: the first ends with a reason, and the agent learns from the others' rewards."""
    code = f"""{POST}
for number in range(3):
    try:
        os.mkdir({str(tmp_path)!r} + f"/{{number}}")
        break
    except FileExistsError:
        pass
if number == 0:
    sys.exit("out of luck")
say("x", "coder")
post("/reward", {{"reward": number - 1.0, "info": {{key: os.environ[key] for key in ("KAPELLE_INDEX", "KAPELLE_SEED")}}}})
"""
    over = {"steps": 1, "tasks_per_step": 1, "max_failed_share": 0.5}
    environment = {"command": [*PYTHON, code], "tasks": 2}
    with trainer(Watching(), environment, training=over) as made:
        before = {agent: frozen_copy(made.engine.weights(agent)) for agent in ("planner", "coder")}
        [step] = made.steps()
        moved = {agent for agent in before if not same_bits(before[agent], made.engine.weights(agent))}
    [group] = step.groups
    played = [episode for episode in group.episodes if episode.error is None]
    [error] = [episode.error for episode in group.episodes if episode.error is not None]
    assert "ended with code 1 and posted no reward. Its output: out of luck" in error
    assert sorted(episode.rewards["coder"] for episode in played) == [0.0, 1.0]
    assert moved == {"coder"}
    index, seeds = str(group.task.data["index"]), {str(episode.seed) for episode in played}
    assert {episode.info["KAPELLE_INDEX"] for episode in played} == {index}, "one task"
    assert {episode.info["KAPELLE_SEED"] for episode in played} == seeds
    assert len({episode.seed for episode in group.episodes}) == 3


@pytest.mark.parametrize(
    ("answers", "rewards"),
    [
        ([("a", True)], {"first": -1.0}),
        ([("a", True), ("a", False)], None),  # it continued without a fault, and failed later
        ([("a", False)], None),
    ],
)
def test_a_program_that_ends_after_an_answer_that_was_cut_receives_the_least_reward(
    setup: RolloutSetup, answers: list[tuple[str, bool]], rewards: dict[str, float] | None
) -> None:
    """As with frameworks that raise on a response whose `finish_reason` is `length`."""
    cut = iter([was_cut for _, was_cut in answers])
    calls = "\n".join(f"say({words!r})" for words, _ in answers)
    code = f"{POST}\n{calls}\nsys.exit('ModelBehaviorError')"
    engine = Reciting(echo, is_cut=lambda _: next(cut))
    with staged(setup, engine, command=(*PYTHON, code), rewards=(-1.0, 1.0)) as stage:
        pass
    [episode] = stage.episodes
    if rewards is None:
        assert episode.error is not None
    else:
        assert (episode.error, dict(episode.rewards)) == (None, rewards)
        assert [turn.finish_reason for turn in episode.turns] == ["length"]
        assert "ModelBehaviorError" in str(episode.info["program"])
        assert any("ModelBehaviorError" in line for line in stage.said), (
            "a defect of the program is not hidden"
        )


def test_too_many_failed_programs_stop_the_run_with_their_reason() -> None:
    environment = {"command": ["sh", "-c", "echo no key; exit 3"], "tasks": 2}
    over = {"steps": 1, "tasks_per_step": 1, "max_failed_share": 0.5}
    with (
        trainer(Watching(), environment, training=over) as made,
        pytest.raises(TrainingHalted, match=r"3 of 3 .*code 3 and posted no reward\. Its output: no key"),
    ):
        next(made.steps())


def test_a_program_silent_for_too_long_loses_its_episode(setup: RolloutSetup, web: httpx.Client) -> None:
    """Its connection stays open, and its next call returns the reason."""
    with staged(setup, Reciting(echo), timeout=0.3) as stage:
        name = web.post(f"{stage.url}/task", json={}).json()["session"]
        own = {"x-kapelle-session": name}
        assert web.post(f"{stage.url}/chat/completions", json=asked("x"), headers=own).status_code == 200
        [episode] = stage.wait()
        late = web.post(f"{stage.url}/chat/completions", json=asked("y"), headers=own)
    assert episode.error is not None
    assert "environment.timeout" in episode.error
    assert late.status_code == 410, late.text


def test_a_program_continues_after_a_request_that_an_endpoint_refuses(
    setup: RolloutSetup, web: httpx.Client
) -> None:
    def script(request: Request) -> str:
        if "refused" in request.messages[-1].content:
            raise RequestRefused("The endpoint did not answer: HTTP 400: bad tool.")
        return echo(request)

    with staged(setup, Reciting(script)) as stage:
        name = web.post(f"{stage.url}/task", json={}).json()["session"]
        there = f"{stage.url.removesuffix('/v1')}/sessions/{name}/v1"
        replies = [
            web.post(f"{there}/chat/completions", json=asked(words)) for words in ("one", "refused", "two")
        ]
        web.post(f"{there}/reward", json={"reward": 0.5})
    assert [reply.status_code for reply in replies] == [200, 400, 200]
    assert "HTTP 400: bad tool" in replies[1].json()["error"]["message"]
    [episode] = stage.episodes
    assert (episode.error, dict(episode.rewards)) == (None, {"first": 0.5})
    assert [turn.text for turn in episode.turns] == ["to one", "to two"]


def test_an_endpoint_that_does_not_answer_ends_the_episode_with_the_reason(
    setup: RolloutSetup, web: httpx.Client
) -> None:
    def script(request: Request) -> str:
        raise EpisodeError("The endpoint did not answer: HTTP 503.")

    with staged(setup, Reciting(script)) as stage:
        name = web.post(f"{stage.url}/task", json={}).json()["session"]
        reply = web.post(
            f"{stage.url}/chat/completions", json=asked("x"), headers={"x-kapelle-session": name}
        )
        [episode] = stage.wait()
    assert reply.status_code == 410
    assert "HTTP 503" in reply.json()["error"]["message"]
    assert "HTTP 503" in str(episode.error)


def test_a_program_that_forks_plays_one_episode(setup: RolloutSetup) -> None:
    """The started process calls and ends; its copy calls and posts the reward."""
    code = f"""{POST}
say("one")
if os.fork():
    os._exit(0)
say("two")
post("/reward", {{"reward": 0.5}})
"""
    with staged(setup, Reciting(echo), command=(*PYTHON, code)) as stage:
        pass
    [episode] = stage.episodes
    assert (episode.error, dict(episode.rewards)) == (None, {"first": 0.5})
    assert [turn.text for turn in episode.turns] == ["to one", "to two"]


def test_two_episodes_in_one_process_are_distinguished_by_header_and_address(
    setup: RolloutSetup, web: httpx.Client
) -> None:
    with staged(setup, Reciting(echo), 2) as stage:
        names = [web.post(f"{stage.url}/task", json={}).json()["session"] for _ in range(2)]
        headed = {"x-kapelle-session": names[0]}
        addressed = f"{stage.url.removesuffix('/v1')}/sessions/{names[1]}/v1"
        for k in range(2):
            web.post(f"{stage.url}/chat/completions", json=asked(f"a{k}"), headers=headed)
            web.post(f"{addressed}/chat/completions", json=asked(f"b{k}"))
        assert web.post(f"{addressed}/reward", json={"reward": 0.25}).status_code == 200
        assert web.post(f"{stage.url}/reward", json={"reward": 0.75}, headers=headed).status_code == 200
    found = {
        episode.info["session"]: ([turn.text for turn in episode.turns], dict(episode.rewards))
        for episode in stage.episodes
    }
    assert found == {
        names[0]: (["to a0", "to a1"], {"first": 0.75}),
        names[1]: (["to b0", "to b1"], {"first": 0.25}),
    }


def test_the_first_of_two_rewards_stays(setup: RolloutSetup, web: httpx.Client) -> None:
    with staged(setup, Reciting(echo)) as stage:
        name = web.post(f"{stage.url}/task", json={}).json()["session"]
        there = f"{stage.url.removesuffix('/v1')}/sessions/{name}/v1"
        web.post(f"{there}/chat/completions", json=asked("x"))
        first, again, other = (
            web.post(f"{there}/reward", json={"reward": rewarded}) for rewarded in (0.25, 0.25, 0.5)
        )
        assert again.json() == first.json()
        assert (first.status_code, again.status_code) == (200, 200)
        assert other.status_code == 404
        assert "its first reward, which cannot be changed" in other.json()["error"]["message"]
    [episode] = stage.episodes
    assert (episode.error, dict(episode.rewards)) == (None, {"first": 0.25})
