"""Two agents of a smolagents program: the planner manages the solver.

pip install 'smolagents[openai]' 'kapelle[serve]'
kapelle train examples/apps/recipe.yaml environment.command='[python, examples/apps/smolagents_team.py]'
"""

import os
from typing import Any

from openai import OpenAI
from smolagents import OpenAIModel, ToolCallingAgent


def agent(name: str, task: str, **more: Any) -> ToolCallingAgent:
    """Return an agent with a short prompt; its model may answer without a tool call too."""
    made = ToolCallingAgent(
        [], OpenAIModel(f"team/{name}", tool_choice="auto"), name=name, max_steps=2, **more
    )
    made.prompt_templates["system_prompt"] = task
    return made


solver = agent("solver", "Reply.", description="Replies.")
planner = agent("planner", "Let reply.", managed_agents=[solver])

if __name__ == "__main__":
    done = planner.run(f"Ticket {os.environ['KAPELLE_INDEX']}: it is late.")
    OpenAI().post("/reward", body={"reward": float("thanks" in str(done))}, cast_to=object)
