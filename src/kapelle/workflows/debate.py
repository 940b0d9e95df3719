"""The workflow `debate`: agents answer at the same time, read each other's answers and answer again. The majority answer wins.

Multi-agent debate is described in arXiv:2305.14325. The vote over the final answers is self-consistency (arXiv:2203.11171). The
options to stop at a consensus and to score the answers of all rounds follow MAPoRL (arXiv:2502.18439).
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
    """A workflow with several rounds of simultaneous answers. The last answer of each agent is scored.

    In the first round, each agent reads its prompt (default `{question}`). In later rounds, each agent reads the message `reply`. The
    team's answer is the most frequent last answer. Ties are broken at random with the seed of the episode.
    """

    name: Literal["debate"] = "debate"
    rounds: int = Field(default=2, ge=1)
    """Maximum number of rounds. With 1, the workflow is a plain majority vote."""
    reply: str = "{answers}\n\nAnswer again."
    """Message to an agent after each round. The field `{answers}` contains the last messages of the other agents, one per line after the
    name of the agent. The field `{question}` is the question, and `{NAME}` is the last message of the agent NAME."""
    consensus: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of agents with the same answer at which the debate stops early. With null, the debate never stops early."""
    min_rounds: int = Field(default=1, ge=1)
    """Minimum number of rounds before the debate can stop early (`consensus`) or an agent can stop (`settled_after`)."""
    settled_after: int | None = Field(default=None, ge=2)
    """Number of consecutive rounds with the same answer after which an agent stops. The last answer of this agent stays valid. With null,
    all agents answer in every round."""
    score_rounds: bool = False
    """Whether the score of each answer is recorded on its turn (`Turn.score`). These scores are not rewards."""

    @model_validator(mode="after")
    def _some_round_can_stop(self) -> Debate:
        if self.min_rounds > self.rounds:
            raise ValueError(
                f"`min_rounds: {self.min_rounds}` exceeds `rounds: {self.rounds}`. Lower it, or raise `rounds`."
            )
        return self

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if the environment is a game, if there are too few agents, or if a template uses an unknown field."""
        need_answers("debate", "votes on one answer", environment)
        need_two("`workflow.name: debate` needs at least two agents", agents)
        check_names(agents, ["question", "answers"])
        known = ["question", "answers", *(agent.name for agent in agents)]
        for agent in agents:
            check_template(agent, ["question"], "the first round of `debate`")
            # `reply` is every agent's prompt of the later rounds.
            check_template(Agent(agent.name, prompt=self.reply), known, "`workflow.reply`")

    async def run(self, scene: Scene) -> None:
        """Run one episode."""
        questions = {name: scene.observe(name) for name in scene.names}
        texts: dict[str, str] = {}
        answers: dict[str, str | None] = {}
        repeats = dict.fromkeys(scene.names, 1)
        active = scene.names
        for number in range(1, self.rounds + 1):
            prompts = {name: [self._prompt(scene, name, questions[name], texts)] for name in active}
            turns = await scene.together(prompts)
            if self.score_rounds:
                await asyncio.gather(*map(scene.score, turns.values()))
            before = dict(answers)
            texts |= {name: turn.text for name, turn in turns.items()}
            answers |= {name: scene.extract(turn.text) for name, turn in turns.items()}
            for name in active:
                same = number > 1 and answers[name] is not None and answers[name] == before[name]
                repeats[name] = repeats[name] + 1 if same else 1
            if number < self.min_rounds:
                continue
            if self.consensus is not None and agreement(answers) >= self.consensus - 1e-9:
                break
            if self.settled_after is not None:
                active = tuple(name for name in active if repeats[name] < self.settled_after)
            if not active:
                break
        ordered = {name: texts[name] for name in scene.names}
        await scene.step(ordered, final=majority(ordered, answers, scene.seed))

    def most_turns(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the number of rounds as the maximum number of turns of each agent."""
        return dict.fromkeys(names, self.rounds)

    def mermaid(self, names: Sequence[str]) -> str:
        """Return the exchange of answers and the vote as a Mermaid flowchart."""
        readers = {name: tuple(other for other in names if other != name) for name in names}
        return mermaid({**readers, "majority": names}, {}, "majority")

    def _prompt(self, scene: Scene, name: str, question: str, texts: Mapping[str, str]) -> str:
        if not texts:
            return fill(scene[name].agent.prompt or "{question}", {"question": question})
        others = "\n".join(f"{other}: {texts[other]}" for other in scene.names if other != name)
        return fill(self.reply, {"question": question, "answers": others, **texts})
