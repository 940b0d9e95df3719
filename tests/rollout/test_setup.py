"""Playing episodes: seeds, limits, what a turn remembers, and faults that become data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.support.episodes import TASK
from tests.support.plugins import Digest, DigestState, Echo
from tests.support.tiny import LORA

from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import Environment, Outcome
from kapelle.errors import EngineError
from kapelle.models.embedded import build_tokenizer
from kapelle.models.renderer import ChatRenderer
from kapelle.rollout.episodes import roll_out_episode, rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.team import Agent, Policy, Team
from kapelle.types import Episode, Sampling, Task
from kapelle.workflow import Scene, Workflow
from kapelle.workflows.parallel import Parallel

NAMES = ("a", "b")


def team(**agents: Agent) -> Team:
    seats = tuple(agents.get(name, Agent(name)) for name in NAMES)
    policies = {"a": Policy("a", lora=LORA), "b": Policy("b", trained=False)}
    return Team(seats, policies, {name: name for name in NAMES})


class Watched(ScriptedEngine):
    """A scripted engine that keeps what it was asked."""

    def __init__(self, say: Any = lambda r: r.agent, **fields: Any) -> None:
        renderer = ChatRenderer(build_tokenizer(200), 200)
        super().__init__(dict.fromkeys(NAMES, say), dict.fromkeys(NAMES, renderer))
        self.asked: list[Request] = []
        self.fields = fields

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request)
        return replace(await super().generate(request), **self.fields)


def stage(
    engine: Watched | None = None, workflow: Any = None, seats: Team | None = None, **over: Any
) -> RolloutSetup:
    environment = cast("Environment", over.pop("environment", Digest()))
    return RolloutSetup(
        seats or team(),
        environment,
        cast("Workflow", workflow or Echo()),
        engine or Watched(),
        **over,
    )


async def play(**over: Any) -> Episode:
    return await roll_out_episode(stage(**over), TASK, seed=7)


class TestTurns:
    async def test_each_remembers_who_spoke_with_what_and_when(self) -> None:
        engine = Watched(version=3, weights_hash="abc")
        found = await play(engine=engine)
        assert [(t.agent, t.policy, t.index, t.completed_before, t.trained) for t in found.turns] == [
            ("a", "a", 0, 0, True),
            ("b", "b", 1, 0, False),
            ("a", "a", 2, 2, True),
        ]
        assert {(t.version, t.weights_hash) for t in found.turns} == {(3, "abc")}
        assert [m.content for m in found.turns[2].new_messages] == ["b"]
        assert found.agents == NAMES
        assert found.seed == 7

    async def test_the_next_prompt_goes_on_from_the_very_tokens(self) -> None:
        found = await play()
        first, second = found.by("a")
        before = first.prompt_ids + first.completion_ids
        assert second.prompt_ids[: len(before)] == before
        assert len(second.prompt_ids) > len(before)

    async def test_simultaneous_turns_stand_in_seat_order_however_they_end(self) -> None:
        import asyncio

        class Slow(Watched):
            async def generate(self, request: Request) -> Completion:
                for _ in range(5 if request.agent == "a" else 0):
                    await asyncio.sleep(0)
                return await super().generate(request)

        found = await play(engine=Slow())
        assert [t.agent for t in found.turns] == ["a", "b", "a"]


async def test_an_agent_without_a_turn_receives_its_rewards_at_the_end() -> None:
    class PaysBoth(DigestState):
        async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
            await super().step(actions, final)
            return {"a": 0.25, "b": 0.5}

        def movers(self) -> tuple[str, ...]:
            return () if self.said else ("a",)

        def outcome(self) -> Outcome:
            return Outcome({"a": 1.0, "b": 2.0})

    class Pays(Digest):
        @property
        def reward_range(self) -> tuple[float, float]:
            return 0.0, 3.0

        def start(self, task: Task, agents: Sequence[str], seed: int) -> PaysBoth:
            return PaysBoth(task, tuple(agents), 2, 0)

    found = await play(environment=Pays(), workflow=Parallel())
    assert [turn.reward for turn in found.turns] == [0.25]
    assert found.rewards == {"a": 1.0, "b": 2.5}


class TestSeeds:
    async def test_they_do_not_depend_on_other_tasks_or_on_how_many_run_at_once(self) -> None:
        async def seeds(tasks: Sequence[Task], **over: Any) -> set[int]:
            engine = Watched()
            await rollout(stage(engine), tasks, samples=2, seed=5, **over)
            return {r.seed for r in engine.asked if r.task == TASK}

        alone = await seeds([TASK])
        assert await seeds([Task("t1", "x"), TASK]) == alone
        assert await seeds([TASK, Task("t1", "x")], max_concurrent=1) == alone


class TestGroups:
    async def test_no_more_than_allowed_run_at_once(self) -> None:
        alive = most = 0

        class Counted(Digest):
            def start(self, task: Task, agents: Sequence[str], seed: int) -> Any:
                nonlocal alive, most
                alive += 1
                most = max(most, alive)
                world = super().start(task, agents, seed)

                async def close() -> None:
                    nonlocal alive
                    alive -= 1

                world.close = close  # type: ignore[method-assign]
                return world

        play = stage(environment=Counted())
        await rollout(play, [TASK], samples=9, seed=0, max_concurrent=2)
        assert (most, alive) == (2, 0)


class TestLimits:
    async def test_a_completion_gets_what_the_context_has_left(self) -> None:
        engine = Watched()
        seats = team(a=Agent("a", sampling=Sampling(max_tokens=1000)))
        found = await play(engine=engine, seats=seats)
        for request, made in zip(engine.asked, found.turns, strict=True):
            if request.agent == "a":
                assert request.sampling.max_tokens == 200 - len(made.prompt_ids)
            else:
                assert request.sampling.max_tokens == 64

    async def test_a_prompt_without_room_fails_the_episode_with_the_numbers(self) -> None:
        found = await play(engine=Watched(lambda r: "x" * (90 if r.agent == "a" else 30)))
        assert found.error is None
        found = await play(engine=Watched(lambda r: "x" * 190))
        assert found.error is not None
        assert found.error.startswith("ContextError: The prompt of agent 'a' has 2")
        assert re.search(r"has 220 tokens; its model reads.* 200\.", found.error)
        assert len(found.turns) == 2


class World:
    """An episode state with an outcome as told."""

    def __init__(self, outcome: Outcome, log: list[str]) -> None:
        self._outcome, self.log = outcome, log

    def observe(self, agent: str) -> str:
        return "?"

    def movers(self) -> tuple[str, ...]:
        return NAMES

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        return {}

    def outcome(self) -> Outcome:
        return self._outcome

    async def close(self) -> None:
        self.log.append("closed")


class Told(Digest):
    """An environment whose episode states end as told."""

    outcome: Any = None
    log: Any = None

    def start(self, task: Task, agents: Sequence[str], seed: int) -> Any:
        return World(self.outcome, self.log)


class TestFaults:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.001, -0.001, 1e308])
    async def test_a_reward_that_cannot_be_is_an_error_and_no_number(self, value: float) -> None:
        log: list[str] = []
        found = await play(environment=Told(outcome=Outcome({"a": value, "b": 0.0}), log=log))
        assert found.error is not None
        assert "outside the declared range [0.0, 1.0]" in found.error
        assert found.rewards == {}
        assert found.success is None
        assert log == ["closed"]

    @pytest.mark.parametrize("value", [math.nan, -math.inf])
    async def test_broken_log_probs_are_named(self, value: float) -> None:
        class Broken(Watched):
            async def generate(self, request: Request) -> Completion:
                said = await super().generate(request)
                return replace(said, logprobs=(value, *said.logprobs[1:]))

        found = await play(engine=Broken())
        assert found.error is not None
        assert "log-probs that are not finite" in found.error

    async def test_a_fault_of_a_workflow_keeps_what_was_said_before(self) -> None:
        class Stumbles(Echo):
            async def run(self, scene: Scene) -> None:
                await scene["a"].say("?")
                raise ZeroDivisionError("in the workflow")

        found = await play(workflow=Stumbles())
        assert re.fullmatch(
            r"ZeroDivisionError: in the workflow \(test_setup.py, line \d+\)", str(found.error)
        )
        assert len(found.turns) == 1

    async def test_an_engine_that_fails_fails_the_run(self) -> None:
        def gone(_request: Request) -> str:
            raise EngineError("gone")

        log: list[str] = []
        with pytest.raises(EngineError, match="gone"):
            await play(engine=Watched(gone), environment=Told(outcome=Outcome(), log=log))
        assert log == ["closed"]

    async def test_a_world_that_cannot_be_opened_fails_its_episode(self) -> None:
        class Closed(Digest):
            def start(self, task: Task, agents: Sequence[str], seed: int) -> Any:
                raise OSError("no board")

        found = await play(environment=Closed())
        assert re.fullmatch(r"OSError: no board \(test_setup.py, line \d+\)", str(found.error))
        assert found.turns == ()

    async def test_one_bad_episode_leaves_the_others_alone(self) -> None:
        def say(request: Request) -> str:
            if request.seed % 2:
                raise ValueError("odd")
            return "fine"

        (members,) = await rollout(stage(Watched(say)), [TASK], samples=30, seed=0)
        failed = [e for e in members.episodes if e.error]
        assert 0 < len(failed) < 30
        assert len(members.valid) == 30 - len(failed)
        (error,) = {str(e.error) for e in failed}
        assert re.fullmatch(r"ValueError: odd \(test_setup.py, line \d+\)", error)


async def test_a_task_that_stands_there_twice_is_played_by_other_seeds() -> None:
    environment = Digest()
    task, other = (environment.task("train", k) for k in range(2))
    team = Team((Agent("a"),), {"a": Policy("a", base="", trained=False)}, {"a": "a"})
    stage = RolloutSetup(
        team, environment, Parallel(), ScriptedEngine({"a": lambda request: str(request.seed)})
    )
    alone = await rollout(stage, [task], 2, 0)
    twice = await rollout(stage, [task, other, task], 2, 0)
    said = [[episode.turns[0].text for episode in group.episodes] for group in twice]
    assert said[0] == [episode.turns[0].text for episode in alone[0].episodes]
    assert len({text for texts in said for text in texts}) == 6


class PaysEarly(Digest):
    """In turn: `b` is paid for what `a` does, each time, before its own first word too."""

    def start(self, task: Task, agents: Sequence[str], seed: int) -> Any:
        return PaysEarlyState()


class PaysEarlyState:
    def __init__(self) -> None:
        self.left = ["a", "a", "b", "a"]

    def observe(self, agent: str) -> str:
        return "?"

    def movers(self) -> tuple[str, ...]:
        return tuple(self.left[:1])

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        return {"b": 0.125} if self.left.pop(0) == "a" else {"b": 0.25}

    def outcome(self) -> Outcome:
        return Outcome({"a": 1.0})

    async def close(self) -> None:
        pass


async def test_what_an_agent_earns_before_it_speaks_stands_on_its_first_turn() -> None:
    played = await roll_out_episode(stage(workflow=Parallel(), environment=PaysEarly()), TASK, 0)
    assert played.error is None
    assert [turn.agent for turn in played.turns] == ["a", "a", "b", "a"]
    # Twice an eighth before it spoke, a quarter for its own word, an eighth after it.
    assert [turn.reward for turn in played.turns] == [0.0, 0.0, 0.625, 0.0]
    assert played.rewards == {"a": 1.0}


async def test_what_an_agent_earns_that_never_speaks_is_terminal() -> None:
    class Cut(PaysEarly):
        def start(self, task: Task, agents: Sequence[str], seed: int) -> Any:
            world = PaysEarlyState()
            world.left = ["a", "a"]
            return world

    played = await roll_out_episode(stage(workflow=Parallel(), environment=Cut()), TASK, 0)
    assert played.error is None
    assert played.rewards == {"a": 1.0, "b": 0.25}
    assert played.total("b") == 0.25
