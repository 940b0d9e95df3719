"""What a debate costs beside its models: 200 debates of three agents at once, played by scripts.

Two rounds, six turns an episode, on two-digit sums; everything but the model is real: prompts, votes, grading
and records. Bars: 2,000 turns a second on one core, and memory that does not grow over 20,000 episodes.
"""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

from kapelle.engines.rollout.protocol import Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments.arithmetic import Arithmetic
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.team import Agent, Policy, Team
from kapelle.workflows.debate import Debate

AT_ONCE = 200
EPISODES = 20_000
WARM = 2_000
"""Episodes before memory is first measured."""
AGENTS = ("a", "b", "c")


def run() -> dict[str, Any]:
    """Return turns a second and how much memory 18,000 further episodes took."""
    setup = _play()
    turns, started, before = 0, time.perf_counter(), 0
    for batch in range(EPISODES // AT_ONCE):
        tasks = [setup.environment.task("train", batch * AT_ONCE + k) for k in range(AT_ONCE)]
        groups = asyncio.run(rollout(setup, tasks, 1, seed=batch, max_concurrent=AT_ONCE))
        turns += sum(len(episode.turns) for group in groups for episode in group.episodes)
        assert all(episode.error is None for group in groups for episode in group.episodes)
        if (batch + 1) * AT_ONCE == WARM:
            before = _memory()
    seconds = time.perf_counter() - started
    return {
        "episodes": EPISODES,
        "turns": turns,
        "turns_per_second": round(turns / seconds),
        "memory_mib_after_2000": round(before / 2**20, 1),
        "memory_growth_mib": round((_memory() - before) / 2**20, 1),
    }


def _play() -> RolloutSetup:
    environment = Arithmetic()

    def speak(request: Request) -> str:
        answer = environment.script("solver", request.task, [], request.seed)
        return answer if request.agent != "c" or len(request.messages) > 1 else "7"

    team = Team(
        tuple(Agent(name) for name in AGENTS),
        {name: Policy(name, base="", trained=False) for name in AGENTS},
        {name: name for name in AGENTS},
    )
    return RolloutSetup(team, environment, Debate(rounds=2), ScriptedEngine(dict.fromkeys(AGENTS, speak)))


def _memory() -> int:
    """Return the bytes that the process holds in memory now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096
