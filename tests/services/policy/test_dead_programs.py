"""Programs that end during an episode free their places soon, with a message."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from tests.services.policy.test_outside import PROGRAM
from tests.support.serving import Reciting, Stage, staged

from kapelle.engines.rollout.protocol import Request
from kapelle.rollout.setup import RolloutSetup

ABSENCE = 0.4
NEVER = 3600.0
"""Most seconds between two calls of a program: so long that this limit frees no place."""

BEGIN = """
import json, urllib.request
def post(path, body, **headers):
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    return json.load(urllib.request.urlopen(request))
name = post("/task", {})["session"]
def say(words):
    post("/chat/completions", {"model": "team/first", "messages": [{"role": "user", "content": words}]},
        **{"x-kapelle-session": name})
"""
ENDS = {
    "it exits with its task": "raise SystemExit(1)",
    "it breaks off without a word": "say('x'); import os; os._exit(3)",
    "it is killed between two calls": "say('x'); print('now', flush=True); import time; time.sleep(600)",
    "it is killed while it waits for an answer": "say('x'); print('now', flush=True); say('held')",
}


async def held(request: Request) -> None:
    if request.messages[-1].content == "held":
        await asyncio.sleep(3600)


def asked_for(words: str, engine: Reciting) -> bool:
    return any(request.messages[-1].content == words for request in engine.asked)


def finish(url: str) -> None:
    """Complete one episode."""
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60.0) as client:
        name = client.post("/task", body={}, cast_to=dict[str, Any])["session"]
        own = client.with_options(default_headers={"x-kapelle-session": name})
        own.chat.completions.create(model="team/first", messages=[{"role": "user", "content": "x"}])
        own.post("/reward", body={"reward": 1.0}, cast_to=object)


@pytest.mark.sample(2)
@pytest.mark.parametrize("end", ENDS)
def test_a_dead_program_frees_its_place_soon(end: str, setup: RolloutSetup) -> None:
    engine = Reciting(lambda _: "words", held)
    with staged(setup, engine, 2, NEVER, absence=ABSENCE) as stage:
        code = f"URL = {stage.url!r}{BEGIN}{ENDS[end]}"
        with subprocess.Popen([sys.executable, "-IS", "-c", code], stdout=subprocess.PIPE) as program:
            assert program.stdout is not None
            if program.stdout.readline():
                while end.endswith("answer") and not asked_for("held", engine):
                    time.sleep(0.01)
                program.send_signal(signal.SIGKILL)
        finish(stage.url)
    failed, played = sorted(stage.episodes, key=lambda episode: episode.error is None)
    assert failed.error is not None
    assert "closed its last connection 0.4 s ago" in failed.error
    assert played.error is None
    [line] = stage.said
    assert f"{failed.task.id} failed: Its program closed" in line
    if end.endswith("answer"):
        assert len(engine.broken_off) == 1, "nothing is sampled for it any more"


@pytest.mark.slow
def test_a_program_with_one_connection_per_call_counts_as_alive(setup: RolloutSetup) -> None:
    """Any call that names its session counts."""
    with staged(setup, Reciting(lambda _: "words"), 1, NEVER, absence=1.0) as stage:
        name = httpx.post(f"{stage.url}/task", json={}).json()["session"]
        for _ in range(3):
            time.sleep(0.5)
            assert httpx.get(f"{stage.url}/sessions/{name}").status_code == 200
        with httpx.Client() as web:
            _say_and_pay(web, stage, name)
    assert [episode.error for episode in stage.episodes] == [None]


def test_a_living_launcher_does_not_hide_its_dead_worker(setup: RolloutSetup) -> None:
    """The launcher requests tasks over a permanent connection and passes them on."""
    with (
        staged(setup, Reciting(lambda _: "words"), 2, NEVER, absence=ABSENCE) as stage,
        httpx.Client() as launcher,
    ):
        name = launcher.post(f"{stage.url}/task", json={}).json()["session"]
        query = {"model": "team/first", "messages": [{"role": "user", "content": "x"}]}
        headers = {"x-kapelle-session": name}
        with httpx.Client() as worker:
            assert (
                worker.post(f"{stage.url}/chat/completions", json=query, headers=headers).status_code == 200
            )
        own = launcher.post(f"{stage.url}/task", json={}).json()["session"]
        _say_and_pay(launcher, stage, own)
        episodes = stage.wait()
    assert [episode.error is None for episode in episodes].count(True) == 1
    [failed] = [episode.error for episode in episodes if episode.error]
    assert "closed its last connection 0.4 s ago" in failed


def test_an_episode_can_be_abandoned(setup: RolloutSetup) -> None:
    with staged(setup, Reciting(lambda _: "words"), 1, NEVER) as stage, httpx.Client() as web:
        name = web.post(f"{stage.url}/task", json={}).json()["session"]
        assert web.delete(f"{stage.url}/sessions/{name}").status_code == 200
        [episode] = stage.wait()
        assert (
            web.post(
                f"{stage.url}/reward", json={"reward": 1}, headers={"x-kapelle-session": name}
            ).status_code
            == 404
        )
    assert episode.error is not None
    assert "deleted" in episode.error


def test_the_end_of_a_started_program_is_noticed_while_its_answer_is_sampled(
    setup: RolloutSetup, tmp_path: Path
) -> None:
    """Its place is free although its time limit is an hour and its answer never comes."""
    pipe = tmp_path / "begun"
    os.mkfifo(pipe)

    async def begun(request: Request) -> None:
        await asyncio.to_thread(pipe.write_text, "the program reads this, and ends")
        await held(request)

    code = PROGRAM.replace("team/coder", "team/first").replace('os.environ["KAPELLE_TASK"]', '"held"')
    end = f"open({str(pipe)!r}).read(), os._exit(7)"
    code = f"import os, threading\nthreading.Thread(target=lambda: ({end})).start()\n{code}"
    engine = Reciting(lambda _: "words", begun)
    with staged(setup, engine, 2, NEVER, command=(sys.executable, "-IS", "-c", code), programs=1) as stage:
        episodes = stage.wait()
    for episode in episodes:
        assert episode.error is not None
        assert "ended with code 7 and posted no reward" in episode.error
    assert len(engine.broken_off) == 2
    assert "train-0 failed: The program ended with code 7" in stage.said[0]


def test_a_started_program_may_clean_up_after_its_episode(setup: RolloutSetup, tmp_path: Path) -> None:
    """It may end its container; a program that does not end is killed."""
    left = tmp_path / "tidied"
    code = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path({str(left)!r}).touch())
{PROGRAM.replace("team/coder", "team/first").replace("BROKEN", "'none'")}
while True: time.sleep(1)
"""
    before = set(threading.enumerate())
    with staged(setup, Reciting(lambda _: "words"), 1, NEVER, command=(sys.executable, "-c", code)) as stage:
        [episode] = stage.wait()
    assert episode.error is None
    assert left.exists()
    assert not [each for each in set(threading.enumerate()) - before if each.name == "kapelle-http"]


def _say_and_pay(web: httpx.Client, stage: Stage, name: str) -> None:
    headers = {"x-kapelle-session": name}
    query = {"model": "team/first", "messages": [{"role": "user", "content": "x"}]}
    assert web.post(f"{stage.url}/chat/completions", json=query, headers=headers).status_code == 200
    assert web.post(f"{stage.url}/reward", json={"reward": 1.0}, headers=headers).status_code == 200
