"""The workflow `reflect`: an actor answers, critics comment, and the actor answers again until all critics accept its answer.

The loop also ends when a maximum number of answers is reached. The workflow is the loop of Reflexion (arXiv:2303.11366) and
Self-Refine (arXiv:2303.17651), with separate critics.
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
    observation_prompt,
)
from kapelle.workflows.graph import mermaid


class Reflect(Settings, Drawable, CountsTurns):
    """A workflow in which the first agent is the actor and all other agents are critics. The actor's last answer is the team's answer.

    The actor first reads its prompt (default `{question}`), and then the message `revise` after every rejection. The prompt of a
    critic can use `{question}` and `{answer}`, which is the actor's latest answer. A critic without a prompt reads the question and
    the first answer, and later only each new answer. Only the actor is scored.
    """

    name: Literal["reflect"] = "reflect"
    attempts: int = Field(default=3, ge=1)
    """Maximum number of answers of the actor. Critics do not read the last possible answer."""
    accept: str = Field(default="ACCEPT", min_length=1)
    """Line with which a critic accepts the answer, as the first or last line of its message. Case and a final full stop are ignored."""
    revise: str = "{notes}\n\nAnswer again."
    """Message to the actor after a rejection. The field `{notes}` contains the messages of the critics that did not accept the answer,
    one per line after the name of the critic. The field `{question}` is the question."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if the environment is a game, if there are no critics, or if a template uses an unknown field."""
        need_answers("reflect", "ends in one answer", environment)
        need_two("`workflow.name: reflect` needs an actor and critics", agents, "Add a critic")
        check_names(agents, ["question", "answer", "notes"])
        actor, *critics = agents
        check_template(actor, ["question"], "the actor of `reflect`")
        check_template(Agent(actor.name, prompt=self.revise), ["question", "notes"], "`workflow.revise`")
        for critic in critics:
            check_template(critic, ["question", "answer"], "a critic of `reflect`")

    async def run(self, scene: Scene) -> None:
        """Run one episode."""
        actor, *critics = scene.names
        question = scene.observe(actor)
        answer = (await scene[actor].say(observation_prompt(scene, actor))).text
        for number in range(1, self.attempts):
            prompts = {
                name: [_critic_prompt(scene, name, actor, answer, first=number == 1)] for name in critics
            }
            turns = await scene.together(prompts)
            notes = {name: turn.text for name, turn in turns.items() if not self.accepts(turn.text)}
            if not notes:
                break
            lines = "\n".join(f"{name}: {text}" for name, text in notes.items())
            revise = fill(self.revise, {"question": question, "notes": lines})
            answer = (await scene[actor].say(revise)).text
        await scene.step({actor: answer}, final=answer)

    def most_turns(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return `attempts` as the maximum number of turns of the actor, and one turn fewer for each critic."""
        actor, *critics = names
        return {actor: self.attempts, **dict.fromkeys(critics, self.attempts - 1)}

    def mermaid(self, names: Sequence[str]) -> str:
        """Return the actor and the critics as a Mermaid flowchart."""
        actor, *critics = names
        return mermaid({actor: critics, **dict.fromkeys(critics, (actor,))}, {}, actor)

    def accepts(self, text: str) -> bool:
        """Return whether the message of a critic accepts the answer.

        For example, the message `I do not ACCEPT` does not accept the answer.
        """
        lines = text.strip().splitlines() or [""]
        mark = self.accept.strip().rstrip(".!").casefold()
        return any(re.sub(r"[.!]+$", "", line.strip()).casefold() == mark for line in (lines[0], lines[-1]))


def _critic_prompt(scene: Scene, critic: str, actor: str, answer: str, *, first: bool) -> str:
    template, question = scene[critic].agent.prompt, scene.observe(critic)
    if template is not None:
        return fill(template, {"question": question, "answer": answer})
    return append_texts(question, {actor: answer}) if first else f"{actor}: {answer}"
