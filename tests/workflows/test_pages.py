"""The transcript on each workflow's page is that of the workflow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.workflows.stage import Say, expert, lines, play, transcript

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.matrix import Matrix
from kapelle.environments.proposals import Proposals
from kapelle.team import Agent
from kapelle.types import Episode, Task
from kapelle.workflow import Workflow
from kapelle.workflows.chain import Chain
from kapelle.workflows.cory import Cory
from kapelle.workflows.dag import Dag, Node
from kapelle.workflows.debate import Debate
from kapelle.workflows.parallel import Parallel
from kapelle.workflows.propose import Propose
from kapelle.workflows.reflect import Reflect
from kapelle.workflows.router import Router
from kapelle.workflows.solo import Solo
from kapelle.workflows.summary import Summary
from kapelle.workflows.vote import Vote

PAGES = Path(__file__).parents[2] / "docs" / "workflows"
ARITHMETIC = Arithmetic()
SUM = Task("train-0", "47+85", {"answer": 132})


def once_each(*texts: str) -> Say:
    """Say these texts one after another, in conversations that begin again."""
    left = iter(texts)
    return lambda request: next(left)


@dataclass(frozen=True)
class Shown:
    workflow: Workflow
    agents: Sequence[Agent | str]
    scripts: Mapping[str, Say]
    environment: Arithmetic | Matrix | Proposals = ARITHMETIC
    task: Task = SUM


SCENES: Mapping[str, Shown] = {
    "solo": Shown(Solo(), ["solver"], {"solver": expert(Arithmetic())}),
    "parallel": Shown(
        Parallel(),
        ["a", "b"],
        {"a": lines("C", "C"), "b": lines("C", "D")},
        Matrix(game="prisoners_dilemma", rounds=2, rules="none"),
        Task("train-0", ""),
    ),
    "chain": Shown(
        Chain(),
        [Agent("reasoner", prompt="{question}"), Agent("actor", prompt="{reasoner}")],
        {"reasoner": expert(Arithmetic()), "actor": expert(Arithmetic())},
    ),
    "debate": Shown(
        Debate(),
        ["a", "b", "c"],
        {"a": lines("122", "132"), "b": lines("132", "it is 132"), "c": lines("142", "142")},
    ),
    "vote": Shown(Vote(), ["a", "b", "c"], {"a": lines("122"), "b": lines("132"), "c": lines("it is 132")}),
    "summary": Shown(
        Summary(layers=2),
        ["a", "b", "chief"],
        {"a": lines("122", "132"), "b": lines("132", "132"), "chief": lines("132")},
    ),
    "reflect": Shown(
        Reflect(),
        ["actor", "critic"],
        {"actor": lines("122", "132"), "critic": lines("The carry is lost.", "ACCEPT")},
    ),
    "cory": Shown(Cory(), ["one", "two"], {"one": lines("122"), "two": lines("132")}),
    "dag": Shown(
        Dag(
            nodes=(
                Node(id="plan", agent="reasoner", prompt="Plan ${question}:"),
                Node(id="check", agent="critic", dependencies=("plan",), prompt="${plan.output}?"),
                Node(id="solve", agent="actor", dependencies=("plan", "check")),
            )
        ),
        ["reasoner", "critic", "actor"],
        {"reasoner": lines("2,12"), "critic": lines("carry 1"), "actor": lines("132")},
    ),
    "dag: several turns": Shown(
        Dag(
            nodes=(
                Node(id="plan", agent="reasoner"),
                Node(id="solve", agent="actor", dependencies=("plan",)),
            ),
            max_assistant_turns=3,
        ),
        ["reasoner", "actor"],
        {"reasoner": once_each("add", "carry"), "actor": once_each("122", "132")},
    ),
    "propose": Shown(
        Propose(tries=2),
        ["one", "two", "three"],
        {"one": lines("85+47", "47+85"), "two": lines("132"), "three": lines("122")},
        Proposals(proposer="one"),
        Task("train-0", "47", {"given": 47}),
    ),
    "router": Shown(
        Router(), ["desk", "adder", "poet"], {"desk": lines("@adder, mind the carry."), "adder": lines("132")}
    ),
}


def shown(episode: Episode) -> str:
    """What a page shows of an episode."""
    paid = ", ".join(f"{agent} {episode.total(agent):g}" for agent in episode.agents if _paid(episode, agent))
    success = "" if episode.success is None else f"; success {episode.success:g}"
    return "\n".join([*transcript(episode), f"rewards: {paid}{success}", ""])


def _paid(episode: Episode, agent: str) -> bool:
    return agent in episode.rewards


@pytest.mark.parametrize("name", SCENES)
async def test_a_page_shows_what_happens(name: str) -> None:
    scene = SCENES[name]
    [episode] = await play(scene.environment, scene.workflow, scene.agents, scene.scripts, scene.task)
    assert episode.error is None
    page = (PAGES / ("dag.md" if name.startswith("dag") else "README.md")).read_text(encoding="utf-8")
    assert shown(episode) in re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
