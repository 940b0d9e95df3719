"""What pages say of programs that exist is counted here; `tests/apps` plays them with the packages themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kapelle.runtime.plugins import find_object
from kapelle.types import Message, Task

ROOT = Path(__file__).parents[2]
APPS = ROOT / "examples" / "apps"
ADDED = re.compile(
    r"team/|OpenAI\(\)|from openai import|set_tracing_disabled\(|model_info|able = |tool_choice|base_url|partial|parallel_tool_calls"
)
"""What stands in lines that a user of a framework adds."""
PROGRAMS = sorted(path.stem.removesuffix("_team") for path in APPS.glob("*_team.py"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_lines_that_a_user_adds(name: str) -> None:
    body = (APPS / f"{name}_team.py").read_text("utf-8").split('"""', 2)[2]
    added = sum(bool(ADDED.search(line)) for line in body.splitlines())
    assert added <= 15
    table = (ROOT / "docs" / "programs.md").read_text("utf-8")
    [said] = re.findall(rf"\| (\d+) \| \[.*?{name}", table)
    assert added == int(said)


def test_the_teacher_passes_work_on_as_it_is_offered() -> None:
    say = find_object(f"{APPS}/teacher.py:say", "teacher")
    tools = '<tools>\n{"name": "reply", "parameters": {"properties": {"job": {"type": "string"}}}}\n</tools>'
    offered = [Message("user", tools)]
    assert say("planner", Task("t", ""), offered, 0) == (
        '<tool_call>\n{"name": "reply", "arguments": {"job": "Reply."}}\n</tool_call>'
    )
    assert say("planner", Task("t", ""), [*offered, Message("assistant", "…"), Message("tool", "ok")], 0) == (
        "Done."
    )
    said = {say("solver", Task("t", ""), [Message("user", "Call")], seed) for seed in range(20)}
    assert said == {"Sent.", "Sent, thanks."}
