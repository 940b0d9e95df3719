"""Demonstrations for the agents of these programs: the embedded model is untrained, and learns the format from them.

The planner delegates work in the way that its program allows: by a tool call if it has a tool, else by a list of jobs. The solver is
polite in one of three replies, so that something remains to be learned from rewards.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

from kapelle.types import Message, Task


def say(agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
    """Return an agent's answer."""
    draw = random.Random(seed)
    words = draw.choice(["Sent.", "Sent.", "Sent, thanks."]) if agent == "solver" else "Done."
    offered = {tool["name"]: tool["parameters"].get("properties", {}) for tool in _tools(messages)}
    others = [name for name in offered if name != "final_answer"]
    called = any(message.role == "assistant" for message in messages)
    if others and not called:
        return _call(others[0], dict.fromkeys(list(offered[others[0]])[:1], "Reply."))
    if "final_answer" in offered:  # smolagents ends with a tool call
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
