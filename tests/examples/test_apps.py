"""The teacher of `examples/apps` calls offered tools. `tests/apps` plays the programs with their packages."""

from __future__ import annotations

from pathlib import Path

from kapelle.runtime.plugins import find_object
from kapelle.types import Message, Task

ROOT = Path(__file__).parents[2]
APPS = ROOT / "examples" / "apps"


def test_teacher_calls_offered_tool() -> None:
    say = find_object(f"{APPS}/teacher.py:say", "teacher")
    tools = '<tools>\n{"name": "reply", "parameters": {"properties": {"job": {"type": "string"}}}}\n</tools>'
    offered = [Message("user", tools)]
    assert say("planner", Task("t", ""), offered, 0) == (
        '<tool_call>\n{"name": "reply", "arguments": {"job": "Reply."}}\n</tool_call>'
    )
    assert say("planner", Task("t", ""), [*offered, Message("assistant", "…"), Message("tool", "ok")], 0) == (
        "Done."
    )
    replies = {say("solver", Task("t", ""), [Message("user", "Call")], seed) for seed in range(20)}
    assert replies == {"Sent.", "Sent, thanks."}
