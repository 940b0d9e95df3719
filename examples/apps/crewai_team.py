"""Two agents of a CrewAI program: a planner's task, and a solver's task that reads its result.

pip install crewai 'kapelle[serve]'
kapelle train examples/apps/recipe.yaml environment.entry=examples/apps/crewai_team.py:episode
"""

import os
from typing import Any

from crewai import LLM, Agent, Crew, Task


def agent(name: str, goal: str) -> Agent:
    llm = LLM(f"team/{name}", provider="openai", base_url=os.environ["OPENAI_BASE_URL"])
    return Agent(role=name, goal=goal, backstory="Kind.", llm=llm)


planner, solver = agent("planner", "Plan."), agent("solver", "Reply.")
plan = Task(description="Ticket {number}: it is late.", expected_output="Jobs.", agent=planner)
reply = Task(description="Reply to the customer.", expected_output="A reply.", agent=solver, context=[plan])
crew = Crew(agents=[planner, solver], tasks=[plan, reply])


def episode(task: dict[str, Any]) -> float:
    """Process the ticket of a task, and return its reward."""
    done = crew.kickoff({"number": task["index"]})
    return float("thanks" in done.raw)
