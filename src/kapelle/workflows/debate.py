"""Agents answer together, read each other's answers, and answer again; the majority speaks for the team.

Multi-agent debate as in 2305.14325; the vote over final answers as in self-consistency (2203.11171).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from kapelle.configured import Configured
from kapelle.environment import Environment
from kapelle.errors import ConfigError
from kapelle.team import Agent
from kapelle.types import Turn
from kapelle.workflow import Scene, check_template, fill, need_answers


class Debate(Configured):
    """`rounds` rounds of simultaneous answers; each agent's last one is scored.

    In the first round an agent reads its prompt (`{question}` alone without one), in every later round
    `reply`. The team's answer is the one that most agents gave last; ties are drawn by the episode's seed.
    """

    name: Literal["debate"] = "debate"
    rounds: int = Field(2, ge=1)
    """How often every agent answers; 1 is a plain majority vote."""
    reply: str = "{answers}\n\nAnswer again."
    """What an agent reads after a round: `{answers}` are the others' last texts, one a line with their
    names before them; `{question}` is the question and an agent's name its last text."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError for a game, too few agents, or a template with an unknown field."""
        need_answers("debate", "votes on one answer", environment)
        if len(agents) < 2:
            raise ConfigError(
                f"A debate takes two agents or more, and the team has only '{agents[0].name}'. "
                "Add agents, or set `workflow.name: solo`."
            )
        for agent in agents:
            if agent.name in {"question", "answers"}:
                raise ConfigError(
                    f"An agent named '{agent.name}' cannot be told from {{{agent.name}}}. Rename it."
                )
            check_template(agent, ["question"], "the first round of `debate`")
            # `reply` is every agent's prompt of the later rounds.
            known = ["question", "answers", *(other.name for other in agents)]
            check_template(Agent(agent.name, prompt=self.reply), known, "`workflow.reply`")

    async def run(self, scene: Scene) -> None:
        """Play one episode."""
        questions = {name: scene.observe(name) for name in scene.names}
        words = {
            name: [fill(scene[name].agent.prompt or "{question}", {"question": questions[name]})]
            for name in scene.names
        }
        said = _texts(await scene.together(words))
        for _ in range(self.rounds - 1):
            words = {
                name: [
                    fill(self.reply, {"question": questions[name], "answers": _others(name, said), **said})
                ]
                for name in scene.names
            }
            said = _texts(await scene.together(words))
        await scene.step(
            said, final=majority(said, {n: scene.extract(t) for n, t in said.items()}, scene.seed)
        )


def _texts(turns: Mapping[str, Turn]) -> dict[str, str]:
    return {name: turn.text for name, turn in turns.items()}


def _others(name: str, said: Mapping[str, str]) -> str:
    return "\n".join(f"{other}: {text}" for other, text in said.items() if other != name)


def majority(said: Mapping[str, str], answers: Mapping[str, str | None], seed: int) -> str:
    """Return the text whose answer most agents gave; `seed` draws among answers that tie.

    Texts without an answer have no vote, unless none has one.
    """
    votes = Counter(answer for answer in answers.values() if answer is not None)
    if not votes:
        return next(iter(said.values()))
    most = max(votes.values())
    chosen = random.Random(f"{seed}/majority").choice(sorted(a for a, n in votes.items() if n == most))
    return next(text for name, text in said.items() if answers[name] == chosen)
