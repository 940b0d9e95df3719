from __future__ import annotations

import pytest
from tests.workflows.stage import TASK, lines, play, transcript

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.tool_questions import Tools
from kapelle.errors import ConfigError
from kapelle.models.embedded import build_tokenizer
from kapelle.models.renderer import ChatRenderer
from kapelle.team import Agent
from kapelle.types import Message
from kapelle.workflows.tool_use import ToolUse

CALL = '[calculator(expression="47+85")]'


async def test_agents_work_side_by_side_and_results_are_tool_messages() -> None:
    environment = Tools(questions=Arithmetic(), form="pythonic")
    agents: list[Agent | str] = [Agent("a", prompt="Solve: {question}"), "b"]
    scripts = {"a": lines(CALL, "132"), "b": lines("132")}
    [episode] = await play(environment, ToolUse(), agents, scripts, TASK)
    assert [(turn.agent, turn.completed_before, turn.new_messages[0].role) for turn in episode.turns] == [
        ("a", 0, "user"),
        ("b", 0, "user"),
        ("a", 2, "tool"),
    ]
    assert episode.turns[0].new_messages[0].content.startswith("Solve: You can call these tools:")
    assert transcript(episode)[2] == "2 seen=2 132 -> a: 132"
    first, second = episode.by("a")
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids, "the conversation goes on"


def test_a_models_own_template_marks_a_result() -> None:
    renderer = ChatRenderer(build_tokenizer(512), 512)
    prompt = renderer.start([Message("user", "47+85")])
    said = renderer.completion(CALL)
    extended = renderer.extend(prompt, said, [Message("tool", "132")])
    whole = renderer.start([Message("user", "47+85"), Message("assistant", CALL), Message("tool", "132")])
    assert extended == whole
    assert extended != renderer.extend(prompt, said, [Message("user", "132")])


def test_a_prompt_with_an_unknown_field_raises_an_error() -> None:
    with pytest.raises(ConfigError, match=r"uses \{notes\}"):
        ToolUse().check([Agent("a", prompt="{notes}")], Tools(questions=Arithmetic()))
