"""What the agents of these programs say in demonstrations: the embedded model has never spoken, and learns from this how.

The planner passes work on as its program lets it: by a tool call where it is offered a tool, else by a list of jobs. The solver is
polite in one of three replies, so that something is left for rewards to teach.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

from kapelle.types import Message, Task


def say(agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
    """Return what an agent answers."""
    draw = random.Random(seed)
    words = draw.choice(["Sent.", "Sent.", "Sent, thanks."]) if agent == "solver" else "Done."
    offered = {tool["name"]: tool["parameters"].get("properties", {}) for tool in _tools(messages)}
    others = [name for name in offered if name != "final_answer"]
    called = any(message.role == "assistant" for message in messages)
    if others and not called:
        return _call(others[0], dict.fromkeys(list(offered[others[0]])[:1], "Reply."))
    if "final_answer" in offered:  # smolagents ends by a tool call
        last = messages[-1].content
        return _call("final_answer", {"answer": words if agent == "solver" else _reply(last)})
    if agent == "planner" and not offered:
        return "\n".join(["Call", "Pay", "Mail"][: draw.randint(1, 3)])
    return words


def _tools(messages: Sequence[Message]) -> list[dict[str, Any]]:
    for message in messages:
        if message.role == "user" and "<tools>" in message.content:
            listed = message.content.partition("<tools>")[2].partition("</tools>")[0]
            return [json.loads(line) for line in listed.strip().splitlines()]
    return []


def _call(name: str, arguments: dict[str, str]) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def _reply(heard: str) -> str:
    return "Sent, thanks." if "thanks" in heard else "Sent."
