"""A chain whose worths are known, and what builds and reads trees: what tests of branching build on."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from tests.support.plugins import Endless
from tests.support.tiny import LORA

from kapelle.algorithm import Algorithm
from kapelle.algorithms.at_grpo import ATGRPO
from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import Environment, Outcome, Scorable
from kapelle.errors import EpisodeError
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.team import Agent, Policy, Team
from kapelle.types import Episode, Group, Task, Turn
from kapelle.workflow import Scene, Workflow
from kapelle.workflows.chain import Chain

NOTES = {"A": 0.5, "B": 0.3, "C": 0.2}
"""The reasoner's policy: note → probability."""
WINS = {"A": 0.2, "B": 0.9, "C": 0.5}
"""How often the actor wins with a note: exactly Q of the reasoner's candidates."""
TASK = Task("t", "?")


class Wins(Endless):
    """Pays the last word: `win` is 1, `half` 0.5, `boom` fails the episode, anything else 0."""

    name: Literal["tests.support.trees:Wins"] = "tests.support.trees:Wins"
    odd: Literal["", "shown", "paid", "over"] = ""
    """What differs from world to world, whatever the seed."""

    @property
    def reward_range(self) -> tuple[float, float]:
        return (0.0, 100.0)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> WinsState:
        return WinsState(self.odd)


class WinsState(Scorable):
    opened = 0

    def __init__(self, odd: str) -> None:
        WinsState.opened += 1
        self.odd, self.number, self.last = odd, WinsState.opened, ""

    def observe(self, agent: str) -> str:
        return f"world {self.number}" if self.odd == "shown" else "?"

    def movers(self) -> tuple[str, ...]:
        return ()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        if self.odd == "over" and self.number > 3:
            raise EpisodeError("the world is over")
        [self.last] = actions.values()
        if self.last == "boom":
            raise EpisodeError("boom")
        return {agent: float(self.number) for agent in actions} if self.odd == "paid" else {}

    async def score(self, agent: str, text: str) -> float:
        return {"win": 1.0, "half": 0.5}.get(text, 0.0)

    def outcome(self) -> Outcome:
        paid = {"win": 1.0, "half": 0.5}.get(self.last, 0.0)
        return Outcome({"actor": paid}, success=paid)

    async def close(self) -> None:
        pass


class PaysTheFirst(Wins):
    """Pays whom the team names first 1 whenever the world moves, whoever has spoken."""

    name: Literal["tests.support.trees:PaysTheFirst"] = "tests.support.trees:PaysTheFirst"  # type: ignore[assignment]

    def start(self, task: Task, agents: Sequence[str], seed: int) -> WinsState:
        return PayingState(agents[0])


class PayingState(WinsState):
    def __init__(self, paid: str) -> None:
        super().__init__("")
        self.paid = paid

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        self.last = final or ""
        return {self.paid: 1.0}


class TwoSteps(Chain):
    """A chain of two in which the world moves after each, so that it has something to repeat."""

    async def run(self, scene: Scene) -> None:
        first = await scene["reasoner"].say(scene.observe("reasoner"))
        await scene.step({"reasoner": first.text})
        second = await scene["actor"].say(f"{first.text} {scene.observe('actor')}")
        await scene.step({"actor": second.text}, final=second.text)


def reasoner(request: Request) -> str:
    return random.Random(request.seed).choices(list(NOTES), list(NOTES.values()))[0]


def numbered(request: Request) -> str:
    """Words that differ with the seed."""
    return f"{request.seed % 97:02d}"


def actor(request: Request) -> str:
    note = request.messages[-1].content[0]
    return "win" if random.Random(request.seed).random() < WINS[note] else "lose"


class Counting(ScriptedEngine):
    """Scripts, and what they were asked."""

    def __init__(self, *scripts: Any) -> None:
        super().__init__(dict(zip(("reasoner", "actor"), scripts, strict=True)))
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request)
        return await super().generate(request)


def stage(algorithm: Algorithm, engine: ScriptedEngine | None = None, **over: Any) -> RolloutSetup:
    names = over.pop("names", ("reasoner", "actor"))
    frozen = over.pop("frozen", ())
    prompts = {"actor": "{reasoner}"}
    agents = tuple(Agent(name, prompt=prompts.get(name)) for name in names)
    policies = {name: Policy(name, lora=LORA, trained=name not in frozen) for name in names}
    return RolloutSetup(
        Team(agents, policies, {name: name for name in names}),
        cast("Environment", over.pop("environment", Wins())),
        cast("Workflow", over.pop("workflow", Chain())),
        engine or Counting(reasoner, actor),
        data=algorithm.data,
        **over,
    )


def at_grpo(group_size: int = 4, **settings: Any) -> Algorithm:
    return ATGRPO(tree=True, group_size=group_size, **{"scale": "none", **settings}).build()


def candidates(episode: Episode, agent: str) -> list[Turn]:
    """All candidates of an agent, in no particular order."""
    return [turn for turn in (*episode.turns, *episode.branches) if turn.agent == agent]


def moments(episode: Episode) -> dict[int, list[Turn]]:
    found: dict[int, list[Turn]] = {turn.index: [turn] for turn in episode.turns}
    for turn in episode.branches:
        assert turn.parent is not None
        found[turn.parent].append(turn)
    return found


async def many(setup: RolloutSetup, tasks: int, seed: int = 0) -> list[Group]:
    return await rollout(setup, [Task(f"t{k}", "?") for k in range(tasks)], 1, seed)
