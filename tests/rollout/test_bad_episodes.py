"""Episode states that misbehave: each costs its own episode and never the run."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
from tests.rollout.test_setup import NAMES, Told, World, stage
from tests.support.episodes import TASK, episode, turn
from tests.support.plugins import Digest, DigestState
from tests.support.tiny import sections

from kapelle.environment import Outcome
from kapelle.errors import EpisodeError
from kapelle.rollout.episodes import roll_out_episode
from kapelle.rollout.outcomes import DEEPEST, plain
from kapelle.runs.episode_json import dump_episode, load_episode
from kapelle.runs.reader import read_episodes, read_metrics
from kapelle.training.trainer import Trainer
from kapelle.types import Task


class Foreign(BaseException):
    """What some library raises that is not an Exception."""


class Unreadable(Exception):
    """Its message cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no message")


def _leave(*_: object) -> Any:
    sys.exit(3)


def _cancel(*_: object) -> Any:
    raise asyncio.CancelledError


def _foreign(*_: object) -> Any:
    raise Foreign("of a library")


def _unreadable(*_: object) -> Any:
    raise Unreadable


async def _leaving() -> Mapping[str, float]:
    return sys.exit(3)


async def _leaving_in_a_task(*_: object) -> Mapping[str, float]:
    (paid,) = await asyncio.gather(_leaving())
    return paid


def _in_itself() -> dict[str, Any]:
    info: dict[str, Any] = {}
    info["again"] = info
    return info


SAID: Mapping[str, tuple[Any, str]] = {
    # What the outcome says, and what the failed episode says of it.
    "success nan": ({"success": math.nan}, "`success` is nan"),
    "success inf": ({"success": math.inf}, "`success` is inf"),
    "success 2": ({"success": 2.0}, "`success` is 2.0"),
    "success below 0": ({"success": -0.5}, "`success` is -0.5"),
    "success text": ({"success": "won"}, "`success` is 'won'"),
    "info of an object": ({"info": {"board": object()}}, "info.board is a object"),
    "info in itself": ({"info": _in_itself()}, "64 levels deep"),
    "info of bytes": ({"info": {"raw": b"x"}}, "info.raw is a bytes"),
    "info too long a number": ({"info": {"n": 10**5000}}, "info.n is an integer"),
    "info no mapping": ({"info": [1]}, "must be a mapping"),
    "info with odd keys": ({"info": {((),): 1, (1, "a"): [1]}}, ""),
    "reward text": ({"rewards": {"agent_0": "much"}}, "The reward of 'agent_0' is 'much'"),
    "reward none": ({"rewards": {"agent_0": None}}, "The reward of 'agent_0' is None"),
    "rewards none": ({"rewards": None}, "None as rewards"),
    "truncated text": ({"truncated": "yes"}, "`truncated` is 'yes'"),
    "role of a number": ({"roles": {"agent_0": 3}}, "A role is 3"),
    # What is right, in other types than ours.
    "numpy": (
        {
            "rewards": {"agent_0": np.float32(0.25), "agent_1": np.int64(1)},
            "success": np.float32(0.5),
            "info": {"score": np.float32(0.1), "won": np.bool_(True), "n": np.int64(7)},
            "truncated": np.bool_(True),
        },
        "",
    ),
}
DONE: Mapping[str, tuple[str, Any, str]] = {
    # Which call does what, and the episode's error.
    "exits in step": ("step", _leave, "SystemExit: 3"),
    "exits in a task": ("step", _leaving_in_a_task, "ended by sys.exit(3)"),
    "exits in outcome": ("outcome", _leave, "SystemExit: 3"),
    "exits in close": ("close", _leave, "SystemExit: 3"),
    "exits in observe": ("observe", _leave, "SystemExit: 3"),
    "cancels in step": ("step", _cancel, "CancelledError"),
    "cancels in outcome": ("outcome", _cancel, "CancelledError"),
    "foreign in step": ("step", _foreign, "Foreign: of a library"),
    "foreign in close": ("close", _foreign, "Foreign: of a library"),
    "unreadable": ("outcome", _unreadable, "Unreadable: (its message cannot be read"),
    "shows a number": ("observe", lambda agent: 3, "The observation of 'agent_0' is 3"),
    "pays nothing at all": ("outcome", lambda: None, "`outcome` returns None. Return a kapelle.Outcome."),
}


class Odd(Digest):
    """One episode of each task misbehaves in the way that is named, the others do not."""

    name: Literal["tests.rollout.test_bad_episodes:Odd"] = "tests.rollout.test_bad_episodes:Odd"  # type: ignore[assignment]
    way: str = ""

    def start(self, task: Task, agents: Sequence[str], seed: int) -> DigestState:
        world: Any = super().start(task, agents, seed)
        if seed % 3:
            return cast("DigestState", world)
        if self.way in DONE:
            call, does, _ = DONE[self.way]
            setattr(world, call, does)
        else:
            before = world.outcome
            world.outcome = lambda: replace(before(), **SAID[self.way][0])
        return cast("DigestState", world)


@pytest.mark.sample(10)
@pytest.mark.parametrize("way", [*SAID, *DONE])
def test_a_whole_run_goes_on_and_counts_it(way: str, tmp_path: Path) -> None:
    fails = SAID[way][1] if way in SAID else DONE[way][2]
    settings = sections(
        environment={"name": "tests.rollout.test_bad_episodes:Odd", "way": way},
        training={"steps": 2, "tasks_per_step": 4, "max_failed_share": 0.95},
        evaluation={"problems": 6, "before_and_after": True},
    )
    with Trainer(**settings, run_dir=tmp_path / "run") as trainer:
        assert trainer.train().steps == 2
    rows = read_metrics(tmp_path / "run")
    played = [list(read_episodes(tmp_path / "run", step)) for step in (1, 2)]
    odd = [episode for episodes in played for episode in episodes if episode.seed % 3 == 0]
    assert 0 < len(odd) < sum(map(len, played))
    for row, episodes in zip(rows, played, strict=True):
        assert row["failed_episodes"] == sum(e.error is not None for e in episodes) / len(episodes)
    assert {e.seed for episodes in played for e in episodes if e.error} == (
        {e.seed for e in odd} if fails else set()
    )
    assert all(fails in str(episode.error) for episode in odd)
    if way == "numpy":
        assert all(e.rewards == {"agent_0": 0.25, "agent_1": 1.0} for e in odd)
        assert all(type(e.success) is float and e.truncated is True for e in odd)
        assert all(e.info == {"score": float(np.float32(0.1)), "won": True, "n": 7} for e in odd)


def test_what_a_world_says_of_itself_is_read_back_equal() -> None:
    said = {"a": [1, (2.5, None)], 3: {"deep": math.inf}, ("x", 1): True, "n": np.float32(0.1)}
    kept = plain(said, "info")
    recorded = episode(turn("a", 0), info=kept)
    assert load_episode(json.loads(dump_episode(recorded))) == recorded


@pytest.mark.parametrize("depth", [DEEPEST - 1, DEEPEST])
def test_the_deepest_that_is_taken_can_be_written(depth: int) -> None:
    deep: Any = 0
    for _ in range(depth):
        deep = {1: deep}
    recorded = episode(turn("a", 0), info={"deep": plain(deep, "info.deep")})
    assert load_episode(json.loads(dump_episode(recorded))) == recorded
    with pytest.raises(EpisodeError, match="levels deep"):
        plain([deep] * (DEEPEST + 1 - depth) if depth == DEEPEST else [[deep]], "info")


class TestFromOutside:
    @pytest.mark.slow
    async def test_an_episode_that_is_cancelled_ends(self) -> None:
        reached = asyncio.Event()
        swallowed = False

        class Waits(Digest):
            def start(self, task: Task, agents: Sequence[str], seed: int) -> Any:
                world: Any = super().start(task, agents, seed)

                async def step(*_: object, **__: object) -> Mapping[str, float]:
                    reached.set()
                    try:
                        await asyncio.sleep(60)
                    except asyncio.CancelledError:
                        if swallowed:
                            raise ValueError("made something else of it") from None
                        raise
                    return {}

                world.step = step
                return world

        for swallowed in (False, True):  # noqa: B007 - the world reads it
            reached.clear()
            playing = asyncio.create_task(roll_out_episode(stage(environment=Waits()), TASK, 7))
            await reached.wait()
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            assert playing.cancelled()

    def test_ctrl_c_in_a_world_stops_everything(self) -> None:
        class Pressed(World):
            def outcome(self) -> Outcome:
                raise KeyboardInterrupt

        class Pressing(Told):
            def start(self, task: Task, agents: Sequence[str], seed: int) -> Any:
                return Pressed(Outcome(dict.fromkeys(NAMES, 0.0)), [])

        with pytest.raises(KeyboardInterrupt):
            asyncio.run(roll_out_episode(stage(environment=Pressing()), TASK, 7))
