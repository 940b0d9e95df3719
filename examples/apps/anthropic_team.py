"""Two agents of a program that uses Anthropic's client: a planner calls a tool, in which a solver replies to the ticket.

pip install anthropic 'kapelle[serve]'
kapelle train examples/apps/recipe.yaml environment.entry=examples/apps/anthropic_team.py:episode
"""

from typing import Any

from anthropic import Anthropic, beta_tool

client = Anthropic()


def episode(task: dict[str, Any]) -> float:
    """Process the ticket of a task, and return its reward."""
    replies = list[str]()

    @beta_tool
    def reply(job: str) -> str:
        """Reply to the ticket."""
        answer = client.messages.create(
            model="team/solver", max_tokens=96, system="Reply.", messages=[{"role": "user", "content": job}]
        )
        replies.extend(block.text for block in answer.content if block.type == "text")
        return replies[-1]

    ticket = f"Ticket {task['index']}: it is late."
    runner = client.beta.messages.tool_runner(
        model="team/planner", max_tokens=96, tools=[reply], messages=[{"role": "user", "content": ticket}]
    )
    runner.until_done()
    return float(any("thanks" in each for each in replies))
