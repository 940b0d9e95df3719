"""Environments that need no data, with one task each: the agent's observation, the script's answer and its reward.

    python examples/every_environment.py           # all of them
    python examples/every_environment.py algebra   # one

`tools` and `code` have their own examples (`use_tools.py`, `repair_code.py`). `math`, `nli`, `code`, `bfcl`, `trajectories`,
`preferences` and `labelled` read data sets; docs/environments describes their formats.
"""

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from kapelle.environments import (
    Algebra,
    Arithmetic,
    DebateTopics,
    Matrix,
    Mixture,
    MultiStep,
    OpenSpiel,
    WordProblems,
)
from kapelle.errors import ConfigError
from kapelle.types import Message

PARTS = {"sums": {"environment": {"name": "arithmetic"}}, "chains": {"environment": {"name": "multi_step"}}}
SHOWN: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "arithmetic": (Arithmetic(digits=3), ("solver",)),
    "algebra": (Algebra(), ("solver",)),
    "word_problems": (WordProblems(), ("solver",)),
    "multi_step": (MultiStep(), ("solver",)),
    "mixture": (Mixture.model_validate({"parts": PARTS}), ("solver",)),
    "matrix": (Matrix(game="climbing"), ("row", "column")),
    "openspiel": (OpenSpiel(game="kuhn_poker"), ("first", "second")),
    "debate_topics": (DebateTopics(), ("pro", "con")),
}


async def shown(name: str) -> tuple[str, str, Mapping[str, float]]:
    """Let every agent that may move give the script's message, until the episode ends."""
    environment, agents = SHOWN[name]
    task = environment.task("train", 0)
    world = environment.start(task, agents, seed=0)
    first = world.movers()[0]
    saw, said = world.observe(first), ""
    earned = dict.fromkeys(agents, 0.0)
    while movers := world.movers():
        words = {a: environment.script(a, task, [Message("user", world.observe(a))], 0) for a in movers}
        said = said or words[first]
        for agent, reward in (await world.step(words)).items():
            earned[agent] += reward
    for agent, reward in world.outcome().rewards.items():
        earned[agent] += reward
    await world.close()
    return saw, said, earned


def main(*names: str) -> None:
    for name in names or SHOWN:
        try:
            saw, said, earned = asyncio.run(shown(name))
        except ConfigError as missing:  # OpenSpiel is an extra
            print(f"== {name}\n{missing}\n")
            continue
        rewards = ", ".join(f"{agent} {reward:g}" for agent, reward in earned.items())
        print(f"== {name}\n{saw}\n-> {said}\nrewards: {rewards}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
