"""Two agents of a program without a framework: a planner lists the jobs of a ticket, and a solver replies to each.

pip install openai 'kapelle[serve]'
kapelle train examples/apps/recipe.yaml environment.entry=examples/apps/plain_team.py:episode
"""

from typing import Any

from openai import OpenAI

client = OpenAI()


def ask(agent: str, task: str, words: str) -> str:
    """Return an agent's answer."""
    messages: list[dict[str, str]] = [{"role": "system", "content": task}, {"role": "user", "content": words}]
    said = client.chat.completions.create(model=f"team/{agent}", messages=messages)  # type: ignore[arg-type]
    return said.choices[0].message.content or ""


def episode(task: dict[str, Any]) -> float:
    """Process the ticket of a task, and return its reward."""
    jobs = ask("planner", "List the jobs.", f"Ticket {task['index']}: it is late.").splitlines()[:3]
    replies = [ask("solver", "Reply.", job) for job in jobs]
    return sum("thanks" in reply for reply in replies) / max(1, len(replies))
