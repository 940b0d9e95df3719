from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import Environment
from kapelle.environments.arithmetic import Arithmetic
from kapelle.rollout.evaluation.evaluate import (
    answer_alone,
    chosen_by_majority,
    compute_matched,
    vote,
)
from kapelle.rollout.setup import RolloutSetup
from kapelle.team import Agent, Policy, Team
from kapelle.types import Episode, Group, Sampling, Task, Turn
from kapelle.workflow import Workflow
from kapelle.workflows.chain import Chain

WORLD = Arithmetic()
TASKS = [Task(f"t{k}", f"{k}+1", {"answer": k + 1}) for k in range(4)]


class Listening(ScriptedEngine):
    """A scripted engine that remembers what it was asked."""

    def __init__(self, scripts: Mapping[str, Callable[[Request], str]]) -> None:
        super().__init__(scripts)
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request)
        return await super().generate(request)


def right(request: Request) -> str:
    return str(request.task.data["answer"])


def team(*agents: Agent, policies: Mapping[str, str] | None = None) -> Team:
    of = {agent.name: (policies or {}).get(agent.name, agent.name) for agent in agents}
    return Team(agents, {name: Policy(name, base="", trained=False) for name in of.values()}, of)


def playing(
    engine: ScriptedEngine,
    *agents: Agent,
    world: Environment = WORLD,
    workflow: Workflow | None = None,
    policies: Mapping[str, str] | None = None,
) -> RolloutSetup:
    return RolloutSetup(team(*agents, policies=policies), world, workflow or Chain(), engine)


READER = Agent(
    "reader",
    system="Read.",
    prompt="Notes on {question}",
    sampling=Sampling(30, temperature=0.5, stop=("#",)),
)
WRITER = Agent("writer", prompt="{reader}", sampling=Sampling(30, temperature=0.5))


async def test_alone_an_agent_reads_the_bare_question_with_the_teams_tokens() -> None:
    engine = Listening({"reader": right, "writer": right})
    result = await answer_alone(playing(engine, READER, WRITER), TASKS, "reader", 12.4, seed=0)
    assert result.success == 1.0
    assert result.problems == 4
    assert {request.agent for request in engine.asked} == {"reader"}
    first = engine.asked[0]
    assert [(m.role, m.content) for m in first.messages] == [("system", "Read."), ("user", "0+1")]
    assert first.sampling == Sampling(12, temperature=0.5, stop=("#",))


async def test_alone_an_agent_samples_as_the_team_was_measured() -> None:
    engine = Listening({"reader": right, "writer": right})
    greedy = {"reader": Sampling(30, temperature=0.0)}
    setup = replace(playing(engine, READER, WRITER), sampling=greedy)
    await answer_alone(setup, TASKS, "reader", 5.0, seed=0)
    assert {request.sampling for request in engine.asked} == {Sampling(5, temperature=0.0)}


async def test_a_vote_is_of_as_many_answers_as_fit_and_pays_for_them_all() -> None:
    engine = Listening({"reader": right, "writer": lambda _: "7777"})
    found = await compute_matched(playing(engine, READER, WRITER), TASKS, tokens=10.9, seed=0)
    # The reader's answers have one byte, the writer's four: 10 and 2 of them fit into 10.9 tokens.
    assert [(each.agents, each.answers) for each in found] == [
        (("reader",), 1),
        (("writer",), 1),
        (("reader",), 10),
        (("writer",), 2),
    ]
    assert [each.result.tokens for each in found] == [1.0, 4.0, 10.0, 8.0]
    assert [each.result.success for each in found] == [1.0, 0.0, 1.0, 0.0]
    votes = [r.sampling for r in engine.asked if r.agent == "writer" and r.sampling.temperature == 1.0]
    assert votes == [Sampling(5, temperature=1.0)] * 8  # 4 tasks × 2 answers of ⌊10.9 / 2⌋ tokens
    assert all(each.result.tokens <= 10.9 for each in found)


async def test_the_majority_is_right_where_most_answers_are() -> None:
    def two_of_three(request: Request) -> str:
        seen.append(request.seed)
        return str(request.task.data["answer"] + (len(seen) % 3 == 0))

    seen: list[int] = []
    engine = ScriptedEngine({"reader": two_of_three, "writer": right})
    result = await vote(playing(engine, READER, WRITER), TASKS, "reader", 30.0, 3, seed=0)
    assert result.success == 1.0
    assert len(set(seen)) == 12, "every answer is sampled with a seed of its own"


def answered(text: str, *, error: str | None = None) -> Episode:
    said = Turn("a", "a", 0, "h", 0, 0, (1,), (2,), (0.0,), "stop", text)
    return Episode(TASKS[0], 0, ("a",), (said,), success=float(text == "5"), error=error)


@pytest.mark.parametrize("texts", [["?", "5"], ["?", "?", "5"]])
def test_texts_without_an_answer_have_no_vote(texts: list[str]) -> None:
    group = Group(TASKS[0], tuple(map(answered, texts)))
    assert chosen_by_majority(WORLD, group, seed=0).success == 1.0


def test_failed_attempts_have_no_vote_unless_all_failed() -> None:
    broken = answered("5", error="broke")
    assert chosen_by_majority(WORLD, Group(TASKS[0], (broken, answered("7"))), seed=0).error is None
    assert chosen_by_majority(WORLD, Group(TASKS[0], (broken, broken)), seed=0).error == "broke"
