"""Agents answer together, read each other's answers, and answer again; the majority speaks for the team.

Multi-agent debate as in 2305.14325; the vote over final answers as in self-consistency (2203.11171); the
stop at consensus and a score for every round's answer as MAPoRL (2502.18439) needs them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from kapelle.environment import Environment
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.workflow import (
    CountsTurns,
    Drawable,
    GoesOnWithout,
    Scene,
    ScoresRounds,
    check_names,
    check_template,
    fill,
    need_answers,
    need_two,
)
from kapelle.workflows.graph import mermaid
from kapelle.workflows.vote import agreement, majority


class Debate(Settings, Drawable, CountsTurns, ScoresRounds, GoesOnWithout):
    """`rounds` rounds of simultaneous answers; each agent's last one is scored.

    In the first round an agent reads its prompt (`{question}` alone without one), in every later round
    `reply`. The team's answer is the one that most agents gave last; ties are drawn by the episode's seed.
    """

    name: Literal["debate"] = "debate"
    rounds: int = Field(default=2, ge=1)
    """How often every agent answers at most; 1 is a plain majority vote."""
    reply: str = "{answers}\n\nAnswer again."
    """What an agent reads after a round: `{answers}` are the others' last texts, one a line with their
    names before them; `{question}` is the question and an agent's name its last text."""
    consensus: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of all agents that must give one answer for the debate to stop; null never stops early."""
    min_rounds: int = Field(default=1, ge=1)
    """Rounds before consensus can stop the debate, or an agent fall silent."""
    settled_after: int | None = Field(default=None, ge=2)
    """An agent that gave the same answer in so many rounds running falls silent: its last one stands.
    Null lets everybody speak in every round."""
    score_rounds: bool = False
    """True writes what each answer would have earned on its turn (`Turn.score`); it is no reward."""

    @model_validator(mode="after")
    def _some_round_can_stop(self) -> Debate:
        if self.min_rounds > self.rounds:
            raise ValueError(
                f"`min_rounds: {self.min_rounds}` is more than `rounds: {self.rounds}`. Lower it, or raise `rounds`."
            )
        return self

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError for a game, too few agents, or a template with an unknown field."""
        need_answers("debate", "votes on one answer", environment)
        need_two("A debate takes two agents or more", agents)
        check_names(agents, ["question", "answers"])
        known = ["question", "answers", *(agent.name for agent in agents)]
        for agent in agents:
            check_template(agent, ["question"], "the first round of `debate`")
            # `reply` is every agent's prompt of the later rounds.
            check_template(Agent(agent.name, prompt=self.reply), known, "`workflow.reply`")

    async def run(self, scene: Scene) -> None:
        """Play one episode."""
        questions = {name: scene.observe(name) for name in scene.names}
        said: dict[str, str] = {}
        answers: dict[str, str | None] = {}
        running = dict.fromkeys(scene.names, 1)
        speakers = scene.names
        for number in range(1, self.rounds + 1):
            words = {name: [self._prompt(scene, name, questions[name], said)] for name in speakers}
            turns = await scene.together(words)
            if self.score_rounds:
                await asyncio.gather(*map(scene.score, turns.values()))
            before = dict(answers)
            said |= {name: turn.text for name, turn in turns.items()}
            answers |= {name: scene.extract(turn.text) for name, turn in turns.items()}
            for name in speakers:
                same = number > 1 and answers[name] is not None and answers[name] == before[name]
                running[name] = running[name] + 1 if same else 1
            if number < self.min_rounds:
                continue
            if self.consensus is not None and agreement(answers) >= self.consensus - 1e-9:
                break
            if self.settled_after is not None:
                speakers = tuple(name for name in speakers if running[name] < self.settled_after)
            if not speakers:
                break
        ordered = {name: said[name] for name in scene.names}
        await scene.step(ordered, final=majority(ordered, answers, scene.seed))

    def most_turns(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return one turn a round for everybody."""
        return dict.fromkeys(names, self.rounds)

    def mermaid(self, names: Sequence[str]) -> str:
        """Return who reads whom, and the vote as a Mermaid flowchart."""
        readers = {name: tuple(other for other in names if other != name) for name in names}
        return mermaid({**readers, "majority": names}, {}, "majority")

    def _prompt(self, scene: Scene, name: str, question: str, said: Mapping[str, str]) -> str:
        if not said:
            return fill(scene[name].agent.prompt or "{question}", {"question": question})
        others = "\n".join(f"{other}: {said[other]}" for other in scene.names if other != name)
        return fill(self.reply, {"question": question, "answers": others, **said})
