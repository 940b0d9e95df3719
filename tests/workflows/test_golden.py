"""Golden transcripts: every environment under every workflow that can play it, with scripted agents.

Nothing may change in them unnoticed. After a change that is meant, `KAPELLE_WRITE_GOLDEN=1 pytest
tests/workflows/test_golden.py` writes them again; read the difference before it is committed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.workflows.stage import Say, play, transcript

from kapelle.engines.rollout.protocol import Request
from kapelle.environment import Answerable, Environment, Scripted, offers
from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.debate_topics import DebateTopics
from kapelle.environments.matrix import Matrix
from kapelle.environments.mixture import Mixture, Part
from kapelle.environments.procedural import Algebra, MultiStep, WordProblems
from kapelle.types import Episode, Task
from kapelle.workflow import Workflow
from kapelle.workflows.chain import Chain
from kapelle.workflows.cory import Cory
from kapelle.workflows.dag import Dag, Node
from kapelle.workflows.debate import Debate
from kapelle.workflows.parallel import Parallel
from kapelle.workflows.play import PlayWorkflow
from kapelle.workflows.reflect import Reflect
from kapelle.workflows.router import Router
from kapelle.workflows.solo import Solo
from kapelle.workflows.summary import Summary
from kapelle.workflows.vote import Vote

GOLDEN = Path(__file__).parent / "golden"

ENVIRONMENTS: Mapping[str, Environment] = {
    "arithmetic": Arithmetic(operators=("+", "-")),
    "algebra": Algebra(kinds=("equation", "inequality"), difficulty=(1, 5)),
    "word_problems": WordProblems(difficulty=(1, 3)),
    "multi_step": MultiStep(),
    "mixture": Mixture(
        parts={"sums": Part(environment=Arithmetic()), "chains": Part(environment=MultiStep())}
    ),
    "matrix": Matrix(game="prisoners_dilemma", rounds=2, memory=None),
    "debate_topics": DebateTopics(rounds=1, reward="zero_sum"),
}
DIAMOND = Dag(
    nodes=(
        Node(id="plan", agent="ann"),
        Node(id="check", agent="bob", dependencies=("plan",), prompt="${question}? ${plan.output}"),
        Node(id="solve", agent="cid", dependencies=("plan", "check")),
    )
)
QUESTIONS: Sequence[tuple[Workflow, Sequence[str]]] = [
    (Solo(), ["bob"]),
    (Chain(), ["ann", "bob"]),
    (Debate(rounds=3, consensus=1.0, score_rounds=True), ["ann", "bob", "cid"]),
    (Vote(weights={"cid": 0.5}), ["ann", "bob", "cid"]),
    (Summary(layers=2, score_drafts=True), ["ann", "bob", "cid"]),
    (Reflect(), ["ann", "cid"]),
    (Cory(), ["ann", "bob"]),
    (Router(), ["cid", "bob"]),
    (DIAMOND, ["ann", "bob", "cid"]),
    (Parallel(), ["ann", "bob"]),
]
GAMES: Sequence[tuple[Workflow, Sequence[str]]] = [
    (Parallel(), ["bob", "eve"]),
    (PlayWorkflow(memory="conversation"), ["bob", "eve"]),
]


def scripts(environment: Environment) -> Mapping[str, Say]:
    """Ann learns (wrong first, right then), Bob is right, Cid accepts what he reads, Eve is wrong."""
    assert offers(environment, Scripted)

    def right(request: Request) -> str:
        return environment.script("solver", request.task, request.messages, 0)

    def spoken(request: Request) -> int:
        return sum(message.role == "assistant" for message in request.messages)

    return {
        "ann": lambda request: right(request) if spoken(request) else "0",
        "bob": right,
        "cid": lambda request: ("No.\n@bob", "ACCEPT")[min(spoken(request), 1)],
        "eve": lambda request: "?",
    }


def shown(workflow: Workflow, episode: Episode) -> str:
    scores = [turn.score for turn in episode.turns if turn.score is not None]
    rewards = {agent: episode.total(agent) for agent in episode.rewards}
    return "\n".join(
        [
            f"== {workflow.name}: {', '.join(episode.agents)}",
            *transcript(episode),
            f"rewards={rewards} success={episode.success} truncated={episode.truncated}",
            *([f"scores={scores}"] if scores else []),
            "",
        ]
    )


@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_transcripts(name: str) -> None:
    environment = ENVIRONMENTS[name]
    parts = []
    for workflow, agents in QUESTIONS if offers(environment, Answerable) else GAMES:
        task: Task = environment.task("test", 4)
        [episode] = await play(environment, workflow, agents, scripts(environment), task, seed=1)
        assert episode.error is None
        parts.append(shown(workflow, episode))
    text = "\n".join(parts)
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("KAPELLE_WRITE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
