"""Two agents of a LangGraph program: a planner lists the jobs of a ticket, and a solver is called once for each job.

    pip install langgraph langchain-openai openai 'kapelle[serve]'
    kapelle train examples/apps/recipe.yaml environment.entry=examples/apps/langgraph_team.py:episode

The graph contains no code for kapelle: the models are named `team/planner` and `team/solver`, and the client reads the address and
the key from the environment. A program only adds one function, which runs an episode.
"""

import operator
from typing import Annotated, Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send


class Ticket(TypedDict):
    """The state that the nodes read and write."""

    text: str
    jobs: list[str]
    replies: Annotated[list[str], operator.add]


planner, solver = ChatOpenAI(model="team/planner"), ChatOpenAI(model="team/solver")


def plan(ticket: Ticket) -> dict[str, list[str]]:
    """Let the planner list the ticket's jobs, one per line."""
    said = planner.invoke([("system", "List the jobs."), ("user", ticket["text"])])
    return {"jobs": said.text.splitlines()[:3]}


def solve(job: str) -> dict[str, list[str]]:
    """Let the solver write the reply to one job."""
    return {"replies": [solver.invoke([("system", "Reply."), ("user", job)]).text]}


def each_job(ticket: Ticket) -> list[Send]:
    return [Send("solve", job) for job in ticket["jobs"]]


graph = StateGraph(Ticket)
graph.add_node("plan", plan)
graph.add_node("solve", solve)
graph.add_edge(START, "plan")
graph.add_conditional_edges("plan", each_job, ["solve"])
graph.add_edge("solve", END)


def episode(task: dict[str, Any]) -> float:
    """Process the ticket of a task, and return its reward."""
    done = graph.compile().invoke({"text": f"Ticket {task['index']}: it is late.", "replies": []})
    return sum("thanks" in reply for reply in done["replies"]) / max(1, len(done["replies"]))
