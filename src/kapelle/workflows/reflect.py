"""An actor answers, critics say what is wrong, the actor tries again until all accept or time is up.

The loop of Reflexion (2303.11366) and self-refinement (2303.17651), with critics of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from kapelle.environment import Environment
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.workflow import (
    CountsTurns,
    Drawable,
    Scene,
    append_texts,
    check_names,
    check_template,
    fill,
    need_answers,
    need_two,
)
from kapelle.workflows.graph import mermaid


class Reflect(Settings, Drawable, CountsTurns):
    """The first seat is the actor, all others are critics; the actor's last attempt is the team's answer.

    The actor reads its prompt (`{question}` alone without one), then `revise` after every rejection. A
    critic's prompt may use `{question}` and `{answer}`, the attempt; without one it reads both, and
    afterwards each new attempt. Only the actor is scored.
    """

    name: Literal["reflect"] = "reflect"
    attempts: int = Field(default=3, ge=1)
    """How often the actor answers at most; nobody criticises the last attempt, as nothing follows it."""
    accept: str = Field(default="ACCEPT", min_length=1)
    """A critic accepts with a text whose first or last line is this alone, case and final stop aside."""
    revise: str = "{notes}\n\nAnswer again."
    """What the actor reads after a rejection: `{notes}` are the texts of the critics who did not accept, one
    a line with names before them; `{question}` is the question."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError for a game, an actor alone, or a template with an unknown field."""
        need_answers("reflect", "ends in one answer", environment)
        need_two("`workflow.name: reflect` has an actor and critics", agents, "Add a critic")
        check_names(agents, ["question", "answer", "notes"])
        actor, *critics = agents
        check_template(actor, ["question"], "the actor of `reflect`")
        check_template(Agent(actor.name, prompt=self.revise), ["question", "notes"], "`workflow.revise`")
        for critic in critics:
            check_template(critic, ["question", "answer"], "a critic of `reflect`")

    async def run(self, scene: Scene) -> None:
        """Play one episode."""
        actor, *critics = scene.names
        question = scene.observe(actor)
        prompt = fill(scene[actor].agent.prompt or "{question}", {"question": question})
        attempt = (await scene[actor].say(prompt)).text
        for number in range(1, self.attempts):
            words = {name: [_to_judge(scene, name, actor, attempt, first=number == 1)] for name in critics}
            said = {name: turn.text for name, turn in (await scene.together(words)).items()}
            notes = {name: text for name, text in said.items() if not self.accepts(text)}
            if not notes:
                break
            told_lines = "\n".join(f"{name}: {text}" for name, text in notes.items())
            attempt = (
                await scene[actor].say(fill(self.revise, {"question": question, "notes": told_lines}))
            ).text
        await scene.step({actor: attempt}, final=attempt)

    def most_turns(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the attempts of the actor; critics see all but the last."""
        actor, *critics = names
        return {actor: self.attempts, **dict.fromkeys(critics, self.attempts - 1)}

    def mermaid(self, names: Sequence[str]) -> str:
        """Return actor and critics as a Mermaid flowchart."""
        actor, *critics = names
        return mermaid({actor: critics, **dict.fromkeys(critics, (actor,))}, {}, actor)

    def accepts(self, text: str) -> bool:
        """Return whether a critic's text accepts; `I do not ACCEPT` does not."""
        lines = text.strip().splitlines() or [""]
        mark = self.accept.strip().rstrip(".!").casefold()
        return any(re.sub(r"[.!]+$", "", line.strip()).casefold() == mark for line in (lines[0], lines[-1]))


def _to_judge(scene: Scene, critic: str, actor: str, attempt: str, *, first: bool) -> str:
    template, question = scene[critic].agent.prompt, scene.observe(critic)
    if template is not None:
        return fill(template, {"question": question, "answer": attempt})
    return append_texts(question, {actor: attempt}) if first else f"{actor}: {attempt}"
