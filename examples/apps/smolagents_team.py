"""Two agents of a smolagents program: the planner manages the solver.

pip install 'smolagents[openai]' 'kapelle[serve]'
kapelle train examples/apps/recipe.yaml environment.entry=examples/apps/smolagents_team.py:episode warmup.steps=200 warmup.batch=24
"""

from typing import Any

from smolagents import OpenAIModel, ToolCallingAgent


def agent(name: str, task: str, **more: Any) -> ToolCallingAgent:
    """Return an agent with a short prompt; smolagents forces a call in every step."""
    made = ToolCallingAgent([], OpenAIModel(f"team/{name}"), name=name, max_steps=2, **more)
    made.prompt_templates["system_prompt"] = task
    # Only the task and the answer: smolagents adds 800 bytes to them, and each byte is a token of the embedded model.
    made.prompt_templates["managed_agent"] = {"task": "{{task}}", "report": "{{final_answer}}"}
    return made


solver = agent("solver", "Reply.", description="Replies.")
planner = agent("planner", "Let reply.", managed_agents=[solver])


def episode(task: dict[str, Any]) -> float:
    """Process the ticket of a task, and return its reward."""
    done = planner.run(f"Ticket {task['index']}: it is late.")
    # Half for the solver's reply, which the planner observed, and half for the planner's final answer.
    seen = "".join(getattr(step, "observations", None) or "" for step in planner.memory.steps)
    return ("thanks" in seen) / 2 + ("thanks" in str(done)) / 2
