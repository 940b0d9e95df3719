"""Two agents of a Pydantic AI program: the planner passes a job on by a function for its output, in which the solver replies.

pip install 'pydantic-ai-slim[openai]' 'kapelle[serve]'
kapelle train examples/apps/recipe.yaml environment.command='[python, examples/apps/pydantic_ai_team.py]' warmup.steps=200 warmup.batch=24
"""

import os

from openai import OpenAI
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
    retries=4,  # of a model that is still learning how
)


if __name__ == "__main__":
    replies: list[str] = []
    planner.run_sync(f"Ticket {os.environ['KAPELLE_INDEX']}: it is late.", deps=replies)
    kind = sum("thanks" in reply for reply in replies) / max(1, len(replies))
    OpenAI().post("/reward", body={"reward": kind}, cast_to=object)
