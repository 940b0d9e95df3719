"""Golden trees: every candidate with its worth, what was sampled to judge it, and in which order it was asked for.

Nothing may change in them unnoticed: the order decides which rows share a batch, and so the last bits of what models sample. After
a change that is meant, `KAPELLE_WRITE_GOLDEN=1 pytest tests/rollout/test_golden_trees.py` writes them again; read the difference
before it is committed.
"""

from __future__ import annotations

import os
import random
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.test_branching_worlds import TABLE, moves
from tests.support.plugins import Digest
from tests.support.trees import candidates, stage

from kapelle.algorithm import Algorithm
from kapelle.algorithms.at_grpo import ATGRPO
from kapelle.algorithms.magrpo import MAGRPO
from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import Environment
from kapelle.environments.matrix import Matrix
from kapelle.rollout.episodes import rollout
from kapelle.types import Group, Task
from kapelle.workflow import Workflow
from kapelle.workflows.chain import Chain
from kapelle.workflows.debate import Debate
from kapelle.workflows.parallel import Parallel
from kapelle.workflows.reflect import Reflect
from kapelle.workflows.vote import Vote

GOLDEN = Path(__file__).parent / "golden"

ROWS: dict[str, Algorithm] = {
    "at_grpo": ATGRPO(tree=True, group_size=3).build(),
    "at_grpo_twice": ATGRPO(tree=True, group_size=2, continuations=2).build(),
    "magrpo": MAGRPO(tree=True, group_size=3).build(),
    "magrpo_cross": MAGRPO(tree=True, group_size=2, joint="cross", continuations=2).build(),
}


def babbles(request: Request) -> str:
    return random.Random(request.seed).choice(["yes", "no", "@b", "@c well"])


STAGES: dict[str, tuple[str, Any, Environment, Workflow]] = {
    "chain of two": ("ab", babbles, Digest(), Chain()),
    "chain of three": ("abc", babbles, Digest(), Chain()),
    "debate of two": ("ab", babbles, Digest(), Debate(rounds=2)),
    "debate of three": ("abc", babbles, Digest(), Debate(rounds=2)),
    "vote of three": ("abc", babbles, Digest(), Vote()),
    "reflection": ("ab", babbles, Digest(), Reflect(attempts=3, accept="yes")),
    "game": ("ab", moves, Matrix(game="custom", payoffs=TABLE, rounds=2, memory=None), Parallel()),
}


class Overheard(ScriptedEngine):
    """Scripts, and a digest of what they were asked, in this order."""

    def __init__(self, agents: str, script: Any) -> None:
        super().__init__(dict.fromkeys(agents, script))
        self.asked = 0
        self.digest = blake2b(digest_size=8)

    async def generate(self, request: Request) -> Completion:
        self.asked += 1
        self.digest.update(repr((request.agent, request.seed, request.prompt_ids)).encode())
        return await super().generate(request)


def shown(groups: list[Group]) -> list[str]:
    lines = []
    for one in groups:
        for episode in one.episodes:
            lines.append(f"{one.task.id}: success={episode.success} continued={dict(episode.continued)}")
            for agent in episode.agents:
                own = (
                    f"{turn.text}{'*' * (turn.parent is None)}={turn.continuation_return}"
                    for turn in candidates(episode, agent)
                )
                lines.append(f"  {agent}: {' | '.join(own)}")
    return lines


@pytest.mark.parametrize("name", ROWS)
async def test_trees(name: str) -> None:
    lines = []
    for where, (agents, script, environment, workflow) in STAGES.items():
        for seed in (0, 1):
            engine = Overheard(agents, script)
            setup = stage(ROWS[name], engine, names=tuple(agents), environment=environment, workflow=workflow)
            groups = await rollout(setup, [Task("t0", "?"), Task("t1", "?")], 1, seed)
            assert [episode.error for one in groups for episode in one.episodes] == [None, None]
            asked = f"{engine.asked} requests {engine.digest.hexdigest()}"
            lines += [f"== {where}, seed {seed}: {asked}", *shown(groups), ""]
    text = "\n".join(lines)
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("KAPELLE_WRITE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
