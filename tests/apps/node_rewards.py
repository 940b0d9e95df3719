"""A LangGraph program with a reward in a node, and a node that fails."""

from __future__ import annotations

from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from openai import OpenAI


class Ticket(TypedDict):
    """What the nodes read and write."""

    text: str
    reply: str


planner, solver = ChatOpenAI(model="team/planner"), ChatOpenAI(model="team/solver")


def plan(ticket: Ticket) -> dict[str, str]:
    """Let the planner plan, and reward its turn."""
    said = planner.invoke([("user", ticket["text"])])
    OpenAI().post(f"/turns/{said.response_metadata['id']}/reward", body={"reward": 0.25}, cast_to=object)
    return {"text": said.text}


def solve(ticket: Ticket) -> dict[str, str]:
    """Let the solver reply; its tool fails for a ticket."""
    said = solver.invoke([("user", ticket["text"])])
    if "1" in ticket["text"]:
        raise LookupError("no such customer")
    return {"reply": said.text}


graph = StateGraph(Ticket)
graph.add_node("plan", plan)
graph.add_node("solve", solve)
graph.add_edge(START, "plan")
graph.add_edge("plan", "solve")
graph.add_edge("solve", END)


def episode(task: dict[str, Any]) -> Any:
    """Reward the reply of a ticket; a failed node is a reward of 0."""
    try:
        graph.compile().invoke({"text": f"Ticket {task['index']}", "reply": ""})
    except LookupError as error:
        return {"reward": 0.0, "failed": repr(error)}
    return 0.5
