"""Two agents of an AutoGen program: the planner uses the solver as a tool.

pip install autogen-agentchat 'autogen-ext[openai]' 'kapelle[serve]'
kapelle train examples/apps/recipe.yaml environment.entry=examples/apps/autogen_team.py:episode
"""

from functools import partial
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.tools import AgentTool
from autogen_ext.models.openai import OpenAIChatCompletionClient


def model(agent: str, **more: Any) -> OpenAIChatCompletionClient:
    """Return an agent's model; AutoGen needs the capabilities of models that it does not know."""
    able = {"vision": False, "function_calling": True, "json_output": False, "structured_output": False}
    return OpenAIChatCompletionClient(model=f"team/{agent}", model_info={"family": "unknown", **able}, **more)


calling = model("planner", parallel_tool_calls=False)  # its tool is an agent
calling.create = partial(calling.create, tool_choice="required")  # it always calls

solver = AssistantAgent("solver", model("solver"), description="Replies.", system_message="Reply.")
planner = AssistantAgent(
    "planner",
    calling,
    tools=[AgentTool(solver, return_value_as_last_message=True)],
    system_message="Let reply.",
)


async def episode(task: dict[str, Any]) -> float:
    """Process the ticket of a task, and return its reward."""
    done = await planner.run(task=f"Ticket {task['index']}: it is late.")
    reply = done.messages[-1].to_text()
    return float("thanks" in reply)
