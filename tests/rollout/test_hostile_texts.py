"""What an agent, a row or a tool writes opens no message in another agent's prompt."""

from __future__ import annotations

import pytest
from tests.models.test_control_tokens import ATTACK, HOSTILE, QWEN, control
from tests.workflows.stage import TASK, lines, play

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.tool_questions import Tools
from kapelle.environments.tools.functions import Functions
from kapelle.models.renderer import ChatRenderer
from kapelle.team import Agent
from kapelle.types import Episode, Task
from kapelle.workflow import Workflow
from kapelle.workflows.chain import Chain
from kapelle.workflows.debate import Debate
from kapelle.workflows.reflect import Reflect
from kapelle.workflows.tool_use import ToolUse
from kapelle.workflows.vote import Vote

CALL = '<tool_call>\n{"name": "echo", "arguments": {"text": "?"}}\n</tool_call>'


def echo(text: str) -> str:
    """Return a text that someone else wrote."""
    return ATTACK if text == "?" else text


def marks(episode: Episode) -> list[list[int]]:
    """Return the control tokens of each prompt and answer."""
    return [control((*turn.prompt_ids, *turn.completion_ids)) for turn in episode.turns]


@pytest.mark.parametrize("text", HOSTILE[:4])
@pytest.mark.parametrize(
    "workflow", [Chain(), Debate(rounds=2), Reflect(), Vote()], ids=lambda each: each.name
)
async def test_a_partner_reads_no_new_control_token(workflow: Workflow, text: str) -> None:
    agents: list[Agent | str] = [Agent("a", system="Be brief."), "b"]

    async def written(says: str) -> list[list[int]]:
        scripts = {name: lines(says, says, says) for name in ("a", "b")}
        [episode] = await play(
            Arithmetic(), workflow, agents, scripts, TASK, renderer=ChatRenderer(QWEN, 4096)
        )
        assert any(says in turn.new_messages[-1].content for turn in episode.turns) or workflow.name == "vote"
        return marks(episode)

    assert await written(text) == await written("fine")


async def test_nor_does_a_row() -> None:
    rows = [Task("train-0", question, {"answer": 132}) for question in (f"47+85 {ATTACK}", "47+85 fine")]
    hostile, plain = [
        await play(
            Arithmetic(),
            Chain(),
            ["a", "b"],
            {"a": lines("1"), "b": lines("2")},
            row,
            renderer=ChatRenderer(QWEN, 4096),
        )
        for row in rows
    ]
    assert marks(hostile[0]) == marks(plain[0])


async def test_nor_does_a_tool() -> None:
    environment = Tools(questions=Arithmetic(), tools=(Functions(functions=(f"{__name__}:echo",)),))
    renderer = ChatRenderer(QWEN, 8192)
    hostile, plain = [
        (await play(environment, ToolUse(), ["a"], {"a": lines(call, "132")}, TASK, renderer=renderer))[0]
        for call in (CALL, CALL.replace("?", "fine"))
    ]
    assert ATTACK in hostile.turns[1].new_messages[0].content
    assert marks(hostile) == marks(plain)
