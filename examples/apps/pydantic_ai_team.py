"""Two agents of a Pydantic AI program: the planner passes a job to its output function, in which the solver replies.

pip install 'pydantic-ai-slim[openai]' 'kapelle[serve]'
kapelle train examples/apps/recipe.yaml environment.entry=examples/apps/pydantic_ai_team.py:episode warmup.steps=200 warmup.batch=24
"""

from typing import Any

from pydantic_ai import Agent, RunContext
from pydantic_ai.models.openai import OpenAIChatModel

solver = Agent(OpenAIChatModel("team/solver"), instructions="Reply.")


async def reply(ctx: RunContext[list[str]], job: str) -> str:
    """Write a reply."""
    done = await solver.run(job, usage=ctx.usage)
    ctx.deps.append(done.output)
    return done.output


planner = Agent(
    OpenAIChatModel("team/planner"),
    instructions="Let reply.",
    deps_type=list[str],
    output_type=reply,  # a call, always
    retries=4,  # for a model that is still learning the format
)


def episode(task: dict[str, Any]) -> float:
    """Process the ticket of a task, and return its reward."""
    replies: list[str] = []
    planner.run_sync(f"Ticket {task['index']}: it is late.", deps=replies)
    return sum("thanks" in reply for reply in replies) / max(1, len(replies))
