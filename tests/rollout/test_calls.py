"""What an episode costs in calls of Python functions: a count that is exact where times are not."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from tests.workflows.stage import lines, team_of

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments.arithmetic import Arithmetic
from kapelle.rollout.play import Play, rollout
from kapelle.runtime.event_loop import run_async
from kapelle.team import Agent
from kapelle.workflows.chain import Chain

MOST = 860
"""Calls of an episode: 816 with Python 3.11, whose event loop makes a quarter of them."""


def test_an_episode_of_two_turns_takes_few_calls() -> None:
    environment = Arithmetic(digits=2)
    agents = Agent("reasoner", prompt="{question}"), Agent("actor", prompt="{reasoner}")
    engine = ScriptedEngine({"reasoner": lines("12"), "actor": lines("132")})
    play = Play(team_of(*agents), environment, Chain(), engine)
    tasks = [environment.task("train", index) for index in range(8)]
    calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    def counted(number: int) -> int:
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        try:
            run_async(lambda: rollout(play, tasks[:number], 8, seed=1))
        finally:
            sys.setprofile(None)
        return calls

    counted(8)  # what is made once is made
    assert (counted(8) - counted(2)) / 48 <= MOST
