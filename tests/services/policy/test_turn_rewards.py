"""Programs give rewards to single turns, and to an episode in which a part of the program failed."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from tests.services.policy.test_programs import asked, echo
from tests.support.serving import Reciting, staged

from kapelle.algorithms import MARS
from kapelle.engines.rollout.protocol import Request
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import Signals, TurnKey
from kapelle.services.policy.recording import read_recorded
from kapelle.types import Group

PROGRAM = """
from openai import OpenAI

client = OpenAI()

def ask(agent, words):
    return client.chat.completions.create(model=f"team/{agent}", messages=[{"role": "user", "content": words}])

plan = ask("first", "plan")
client.post(f"/turns/{plan.id}/reward", body={"reward": 0.75}, cast_to=object)
client.post(f"/turns/{plan.id}/reward", body={"reward": 0.25}, cast_to=object)   # in place of the first one
ask("second", "solve")
ask("first", "check")
client.post("/reward", body={"reward": 0.5}, cast_to=object)
"""


def test_credit_reads_the_reward_of_a_turn(setup: RolloutSetup, tmp_path: Path) -> None:
    """By hand: the returns of `first` are 0.25 + 0.5 and 0.5; their mean is 0.625, and their standard deviation 0.125 √2."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, "utf-8")
    with staged(setup, Reciting(echo), command=(sys.executable, str(file))) as stage:
        pass
    [episode] = stage.episodes
    assert episode.error is None
    assert [(turn.agent, turn.reward) for turn in episode.turns] == [
        ("first", 0.25),
        ("second", 0.0),
        ("first", 0.0),
    ]
    assert dict(episode.rewards) == {"first": 0.5, "second": 0.5}
    credit = MARS().credit([Group(episode.task, (episode,))], Signals())
    advantages = [float(credit[TurnKey(0, 0, turn)].advantage_T[0]) for turn in (0, 2)]
    assert advantages == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-4)


def test_a_recorded_session_keeps_the_rewards_of_its_turns(client: OpenAI, recorded: Path) -> None:
    """Turns are named by a response of either API, or by their number in the session."""
    own = client.with_options(default_headers={"x-kapelle-session": "turns"})
    chat = own.chat.completions.create(
        model="first", messages=[{"role": "user", "content": "a"}], max_tokens=2
    )
    response = own.responses.create(model="second", input="b", max_output_tokens=2)
    both = own.chat.completions.create(
        model="second", messages=[{"role": "user", "content": "c"}], max_tokens=2, n=2
    )
    client.post(f"/turns/{chat.id}/reward", body={"reward": 0.5}, cast_to=object)  # an `id` needs no session
    own.post(f"/turns/{response.id}/reward", body={"reward": -0.5}, cast_to=object)
    own.post("/turns/3/reward", body={"reward": 0.125}, cast_to=object)
    with pytest.raises(BadRequestError, match=r"2 choices.* 2, 3"):
        own.post(f"/turns/{both.id}/reward", body={"reward": 0.1}, cast_to=object)
    with pytest.raises(NotFoundError, match="has this turn"):
        own.post("/turns/9/reward", body={"reward": 0.1}, cast_to=object)
    own.post("/reward", body={"reward": 1.0}, cast_to=object)
    with pytest.raises(NotFoundError, match="has this turn"):
        own.post(f"/turns/{chat.id}/reward", body={"reward": 0.1}, cast_to=object)
    [episode] = [each for each in read_recorded(recorded) if each.info["session"] == "turns"]
    assert [turn.reward for turn in episode.turns] == [0.5, -0.5, 0.0, 0.125]


def test_a_failed_part_of_a_program_is_a_reward(setup: RolloutSetup, web: httpx.Client) -> None:
    """The program posts what failed while another of its calls waits for an answer; that call ends with the episode."""

    begun = threading.Event()

    async def never(request: Request) -> None:
        if request.messages[-1].content == "slow":
            begun.set()
            await asyncio.Event().wait()

    with staged(setup, Reciting(echo, never)) as stage:
        name = web.post(f"{stage.url}/task", json={}).json()["session"]
        own = {"x-kapelle-session": name}
        assert web.post(f"{stage.url}/chat/completions", json=asked("quick"), headers=own).status_code == 200
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(web.post, f"{stage.url}/chat/completions", json=asked("slow"), headers=own)
            assert begun.wait(60.0)
            busy = web.post(f"{stage.url}/reward", json={"reward": 0.0}, headers=own)
            posted = web.post(
                f"{stage.url}/reward", json={"reward": 0.0, "failed": "ValueError: no tool"}, headers=own
            )
            assert (busy.status_code, posted.status_code) == (409, 200)
            assert slow.result(60.0).status_code == 410
    [episode] = stage.episodes
    assert (episode.error, dict(episode.rewards)) == (None, {"first": 0.0})
    assert episode.info["program"] == "ValueError: no tool"
    assert [turn.text for turn in episode.turns] == ["to quick"]
