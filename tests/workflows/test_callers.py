"""Callers of outside programs' calls, inferred from the messages of the called agent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kapelle.environments.grading.text.tool_call import Form, ReadCall, write_calls
from kapelle.types import Message, Turn
from kapelle.workflows.callers import FORMS, Callers

BLANK = Turn("", "", 0, "", 0, 0, (), (), (), "stop", "")


def tool(name: str, **arguments: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def _messages(new_messages: Sequence[str | Message]) -> list[Message]:
    return [Message("user", each) if isinstance(each, str) else each for each in new_messages]


class Told:
    """A program's calls, one after the other."""

    def __init__(self) -> None:
        self.callers = Callers()
        self.turns: list[Turn] = []

    def asks(self, agent: str, *new_messages: str | Message, after: int | None = None) -> int | None:
        """Return who calls for this, as it is found before the answer."""
        return self.callers.find(agent, _messages(new_messages), after)

    def says(
        self, agent: str, text: str, *new_messages: str | Message, after: int | None = None
    ) -> int | None:
        """Let an agent answer, and return who called for it."""
        caller = self.asks(agent, *new_messages, after=after)
        self.turns.append(replace(BLANK, agent=agent, text=text, index=len(self.turns), caller=caller))
        self.callers.record(self.turns[-1], _messages(new_messages), after)
        return caller


def test_a_handoff_is_the_answer_that_stands_in_the_conversation() -> None:
    told = Told()
    assert told.says("planner", tool("transfer_to_solver"), "Ticket 1") is None
    rewritten = '<tool_call>\n{"name":"transfer_to_solver","arguments":{}}\n</tool_call>'
    history = (Message("user", "Ticket 1"), Message("assistant", rewritten), Message("tool", "ok"))
    assert told.says("solver", "Sent.", *history) == 0
    # And back: the planner's own work continues, which no one called for.
    assert (
        told.says("planner", "Good.", Message("tool", "ok"), Message("assistant", "Sent."), after=0) is None
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_tool_call_is_known_in_every_form(form: Form) -> None:
    told = Told()
    told.says("planner", write_calls([ReadCall("ask", {"job": "pay"})], form), "Ticket 1")
    assert told.says("solver", "Paid.", "Your job: pay") == 0


def test_a_tool_call_is_open_until_its_agent_goes_on() -> None:
    told = Told()
    told.says("planner", tool("ask", job="pay"), "Ticket 1")
    assert told.says("solver", "Paid.", "Your job: pay") == 0
    assert told.says("planner", tool("ask", job="mail"), Message("tool", "Paid."), after=0) is None
    assert told.says("solver", tool("look"), "Your job: mail") == 2
    assert told.says("solver", "Mailed.", Message("tool", "found"), after=3) == 2, "the same call"
    assert told.says("planner", "Done.", Message("tool", "Mailed."), after=2) is None
    assert told.asks("critic", "Was it good?") is None, "nothing is open"


def test_of_several_open_calls_the_one_with_matching_arguments() -> None:
    told = Told()
    told.says("planner", tool("ask", job="pay the bill"), "Ticket 1")
    told.says("buyer", tool("ask", job="buy the stamp"), "Ticket 2")
    assert told.asks("solver", "Please pay the bill.") == 0
    assert told.asks("solver", "Please buy the stamp.") == 1
    assert told.asks("solver", "Please hurry.") is None, "either could be meant"


def test_a_call_without_arguments_is_the_only_open_one() -> None:
    told = Told()
    told.says("planner", tool("ask"), "Ticket 1")
    assert told.asks("solver", "Whatever the program says") == 0


@pytest.mark.parametrize("new_messages", ["Call", "planner: Call", "Do this now:\nCall\nQuickly."])
def test_a_message_has_lines_of_the_caller(new_messages: str) -> None:
    told = Told()
    told.says("planner", "Call\nPay", "Ticket 1")
    assert told.asks("solver", new_messages) == 0
    assert told.asks("solver", "Recall") is None


def test_a_message_that_comes_back_is_no_call() -> None:
    told = Told()
    told.says("planner", "Pay it.", "Ticket 1")
    assert told.says("solver", "It is paid.", "planner: Pay it.") == 0
    assert told.says("planner", "Now mail it.", "solver: It is paid.", after=0) is None
    assert told.says("solver", "It is mailed.", "planner: Now mail it.", after=1) == 2


def test_called_agents_can_call_others() -> None:
    told = Told()
    told.says("planner", tool("lead", job="all"), "Ticket 1")
    assert told.says("lead", tool("work", job="half"), "Do all") == 0
    assert told.says("worker", "Half done.", "Do half") == 1
    assert told.says("lead", "All done.", Message("tool", "Half done."), after=1) == 0


def test_an_edited_history_closes_its_call_too() -> None:
    told = Told()
    told.says("planner", tool("ask", job="pay"), "Ticket 1")
    history = (
        Message("user", "Summary"),
        Message("assistant", tool("ask", job="pay")),
        Message("tool", "ok"),
    )
    assert told.says("planner", "Done.", *history) is None
    assert told.asks("critic", "Was it good?") is None


def test_a_rewritten_history_closes_its_call() -> None:
    """As smolagents does: its own tool calls come back as words, and results as a user's messages."""
    told = Told()
    told.says("planner", tool("ask", job="pay"), "Ticket 1")
    told.says("solver", "Paid.", "Do this: pay")
    again = ("Ticket 1", Message("assistant", "Calling tools: ask(pay)"), "Observation:\nPaid.")
    assert told.says("planner", tool("ask", job="pay"), *again) is None
    assert told.asks("solver", "Now what?") == 2, "the first call is closed"


def test_a_text_that_only_looks_like_a_call_is_words() -> None:
    told = Told()
    told.says("planner", "<tool_call>{broken</tool_call>", "Ticket 1")
    assert told.asks("solver", "Hello") is None
