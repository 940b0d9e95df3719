from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.workflows.stage import lines, play

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.grading.text.tool_call import Form, ReadCall, write_calls
from kapelle.environments.math import Math
from kapelle.environments.matrix import Matrix
from kapelle.environments.tool_questions import Tools
from kapelle.environments.tools.calculator import Calculator
from kapelle.environments.tools.functions import Functions
from kapelle.errors import ConfigError, EpisodeError
from kapelle.types import Episode, Task
from kapelle.workflows.tool_use import ToolUse

LIBRARY = "tests.environments.tools.tool_library"
TASK = Task("train-0", "47+85", {"answer": 132})
FORMS: tuple[Form, ...] = ("hermes", "llama", "pythonic")


def call(name: str, form: Form = "hermes", **arguments: Any) -> str:
    return write_calls([ReadCall(name, arguments)], form)


def functions(*names: str) -> Functions:
    return Functions(functions=tuple(f"{LIBRARY}:{name}" for name in names))


async def one(environment: Tools, *texts: str) -> Episode:
    [episode] = await play(environment, ToolUse(), ["solver"], {"solver": lines(*texts)}, TASK)
    return episode


def results(episode: Episode) -> list[str]:
    return [turn.new_messages[0].content for turn in episode.turns[1:]]


@pytest.mark.parametrize("form", FORMS)
async def test_an_agent_calls_reads_and_answers(form: Form) -> None:
    environment = Tools(questions=Arithmetic(), form=form)
    environment.check(["solver"])
    says = [call("calculator", form, expression="47+85"), "It is 132."]
    [episode] = await play(environment, ToolUse(), ["solver"], {"solver": lines(*says)}, TASK)
    first, second = episode.turns
    assert first.new_messages[0].content.endswith("\n\n47+85")
    assert '"name": "calculator"' in first.new_messages[0].content
    assert [(message.role, message.content) for message in second.new_messages] == [("tool", "132")]
    assert episode.rewards == {"solver": 1.0}
    assert episode.success == 1.0
    assert episode.info["calls"] == {"solver": ["calculator"]}
    assert episode.info["call_faults"] == {"solver": 0}
    assert episode.info["calls_done"] == {"solver": 1}


async def test_the_prompt() -> None:
    environment = Tools(questions=Arithmetic(), tools=(functions("forecast"),), form="pythonic")
    episode = await one(environment, "132")
    assert episode.turns[0].new_messages[0].content == (
        "You can call these tools:\n<tools>\n"
        '{"name": "forecast", "description": "Return the forecast of a city.", "parameters": {"type": "object", '
        '"properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}, '
        '"unit": {"enum": ["C", "F"], "default": "C"}}, "required": ["city"]}}\n</tools>\n'
        "To call tools, answer with a list of calls and nothing else; every argument is named:\n"
        '[tool_name(argument="value"), other_tool(argument=1)]\n\n47+85'
    )


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (call("calculatr", expression="1"), "Error: There is no tool 'calculatr'"),
        (call("calculator"), "Error: the arguments lack `expression`."),
        (call("calculator", expression=5), "Error: `expression` must be string, not integer."),
        (call("calculator", expression="1", base=2), "Error: There is no argument `base`."),
        (call("calculator", expression="1/0"), "Error: '1/0'"),
        (call("calculator", expression="9**9**9"), "Error: '9**9**9'"),
        (call("fail", kindly=True), "Error: It is closed on Sundays."),
        (call("fail", kindly=False), "Error: RuntimeError: broken"),
        (call("sleep", seconds=0.5), "Error: `sleep`"),
        ("</tool_call>", "Error: The `tool_call` tags"),
        ('<tool_call>{"name": "fail"}</tool_call>', "Error: A call must"),
        ("<tool_call>" + "[" * 9999 + "</tool_call>", "Error: A call cannot be read"),
    ],
)
async def test_an_agent_reads_the_error_of_a_call(text: str, result: str) -> None:
    tools = (Calculator(), functions("fail", "sleep"))
    call_s = 0.05 if "sleep" in text else 30.0
    environment = Tools(questions=Arithmetic(), tools=tools, call_s=call_s)
    episode = await one(environment, text, "132")
    assert episode.error is None
    assert results(episode)[0].startswith(result)
    assert episode.rewards == {"solver": 1.0}
    assert episode.info["call_faults"] == {"solver": 1}
    assert episode.info["calls_done"] == {"solver": 0}


async def test_several_calls_are_executed_in_order() -> None:
    environment = Tools(questions=Arithmetic(), tools=(Calculator(), functions("forecast")))
    several = [
        ReadCall("calculator", {"expression": "1/3"}),
        ReadCall("forecast", {"city": "Bern", "days": 3}),
    ]
    episode = await one(environment, write_calls(several, "hermes"), "132")
    assert results(episode) == ["calculator: 1/3\n\nforecast: Bern: 23 C"]


async def test_a_long_result_is_cut() -> None:
    environment = Tools(questions=Arithmetic(), tools=(functions("forecast"),), max_characters=100)
    episode = await one(environment, call("forecast", city="x" * 200), "132")
    assert results(episode) == ["x" * 100 + "\n… (106 more characters)"]


async def test_an_agent_without_an_answer_receives_no_reward() -> None:
    environment = Tools(questions=Arithmetic(), max_turns=2)
    repeated = call("calculator", expression="132")
    scripts = {"caller": lines(repeated, repeated), "solver": lines("132")}
    [episode] = await play(environment, ToolUse(), [*scripts], scripts, TASK)
    assert [turn.agent for turn in episode.turns] == ["caller", "solver", "caller"]
    assert episode.rewards == {"caller": 0.0, "solver": 1.0}
    assert episode.success == 0.5
    assert episode.truncated
    [alone] = await play(environment, ToolUse(), ["caller"], scripts, TASK)
    assert (alone.rewards, alone.success, alone.truncated) == ({"caller": 0.0}, 0.0, True)


async def test_a_text_with_a_call_is_no_answer() -> None:
    environment = Tools(questions=Arithmetic(), max_turns=1)
    episode = await one(environment, "132\n" + call("calculator", expression="132"))
    assert episode.rewards == {"solver": 0.0}


async def test_each_agent_has_separate_tools(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("old")
    tools = [{"tool": "files", "root": str(tmp_path), "write": True}]
    environment = Tools.model_validate({"questions": {"name": "arithmetic"}, "tools": tools})
    write = call("write_file", path="note.txt", text="132")
    scripts = {
        "a": lines(write, call("list_files"), call("read_file", path="note.txt"), "132"),
        "b": lines(call("list_files"), call("list_files"), call("read_file", path="note.txt"), "132"),
    }
    [episode] = await play(environment, ToolUse(), ["a", "b"], scripts, TASK)
    read = {name: [turn.new_messages[0].content for turn in episode.by(name)][1:] for name in ("a", "b")}
    assert read == {
        "a": ["Wrote 3 bytes to note.txt.", "note.txt\nold.txt", "132"],
        "b": ["old.txt", "old.txt", "Error: There is no 'note.txt'."],
    }
    assert os.listdir(tmp_path) == ["old.txt"]  # noqa: PTH208 (it is tiny)


async def test_impossible_steps_are_errors() -> None:
    world = Tools(questions=Arithmetic(), max_turns=1).start(TASK, ["solver"], 0)
    with pytest.raises(EpisodeError, match="acted"):
        await world.step({})
    with pytest.raises(EpisodeError, match="Did you mean 'solver'"):
        await world.step({"slver": "5"})
    await world.step({"solver": "132"})
    with pytest.raises(EpisodeError, match="used all turns"):
        await world.step({"solver": "132"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"questions": {"name": "arithmatic"}}, "Did you mean 'arithmetic'"),
        ({"questions": {"digits": 2}}, "names no environment"),
        ({"questions": {"name": "arithmetic"}, "tools": [{"tool": "search"}]}, "corpus"),
    ],
)
def test_impossible_settings_are_errors(values: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Tools.model_validate(values)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Tools(questions=Matrix()), "matrix"),
        (Tools(questions=Arithmetic(), tools=(Calculator(), Calculator())), "Two tools"),
        (Tools(questions=Arithmetic(flaws={"b": 0.5})), "unknown agent 'b'"),
        (Tools(questions=Arithmetic(), tools=(functions("forcast"),)), "Did you mean 'forecast'"),
    ],
)
def test_unfit_questions_and_tools_are_errors(environment: Tools, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        environment.check(["a"])


@pytest.mark.data
async def test_gsm8k_with_a_calculator(gsm8k_folder: Path) -> None:
    environment = Tools(questions=Math(path=str(gsm8k_folder)))
    environment.check(["solver"])
    task = environment.task("test", 0)
    says = lines(call("calculator", expression="(16-3-4)*2"), "#### 18")
    [episode] = await play(environment, ToolUse(), ["solver"], {"solver": says}, task)
    assert episode.turns[1].new_messages[0].content == "18"
    assert episode.rewards == {"solver": 1.0}
