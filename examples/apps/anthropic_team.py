"""Two agents of a program that uses Anthropic's client: a planner calls a tool, with which a solver replies to the ticket.

pip install anthropic 'kapelle[serve]'
kapelle train examples/apps/recipe.yaml environment.entry=examples/apps/anthropic_team.py:episode
"""

from typing import Any

from anthropic import Anthropic

client = Anthropic()
reply: Any = {
    "name": "reply",
    "description": "Reply to a job.",
    "input_schema": {"type": "object", "properties": {"job": {"type": "string"}}, "required": ["job"]},
}
# A small model calls a tool only if it must.
must_call: Any = {"type": "any", "disable_parallel_tool_use": True}


def ask(agent: str, words: str, **more: Any) -> Any:
    """Return an agent's message."""
    messages: Any = [{"role": "user", "content": words}]
    return client.messages.create(model=f"team/{agent}", max_tokens=96, messages=messages, **more)


def episode(task: dict[str, Any]) -> float:
    """Process the ticket of a task, and return its reward."""
    plan = ask("planner", f"Ticket {task['index']}: it is late.", tools=[reply], tool_choice=must_call)
    jobs = [block.input["job"] for block in plan.content if block.type == "tool_use"]
    answers = [ask("solver", job, system="Reply.").content[-1].text for job in jobs]
    return float(any("thanks" in answer for answer in answers))
