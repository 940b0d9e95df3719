"""Two agents of the OpenAI Agents SDK: a planner reads a ticket and hands it off to a solver, who replies.

pip install openai-agents 'kapelle[serve]'
kapelle train examples/apps/recipe.yaml environment.entry=examples/apps/openai_agents_team.py:episode
"""

from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)  # traces would go to OpenAI
client = AsyncOpenAI()

solver = Agent(
    name="solver",
    instructions="Reply.",
    model=OpenAIChatCompletionsModel("team/solver", client),
)
planner = Agent(
    name="planner",
    instructions="Hand off.",
    handoffs=[solver],
    model_settings=ModelSettings(tool_choice="required"),  # it always hands off
    model=OpenAIChatCompletionsModel("team/planner", client),
)


def episode(task: dict[str, Any]) -> float:
    """Process the ticket of a task, and return its reward."""
    done = Runner.run_sync(planner, f"Ticket {task['index']}: it is late.", max_turns=3)
    return float(done.last_agent is solver and "thanks" in done.final_output)
