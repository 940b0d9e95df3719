"""Find out which agent's turn caused a call from an external program.

Programs do not state which turn caused a call, so this turn is inferred from the messages of the call. Frameworks delegate work in
three ways:

1. A handoff: the conversation contains the other agent's completion as an assistant message.
2. A tool call: the other agent's completion calls tools and has not been continued yet. If there are several such turns, the caller
   is the turn whose arguments occur in the messages. If there is no such turn, the caller is unknown.
3. A message: the messages contain whole lines of the other agent's completion, possibly after the name of this agent.

If an agent reads the result of its own tool call, the call has no new caller, because the agent's earlier call continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from kapelle.environments.grading.text.tool_call import Form, NotCalls, ReadCall, parse_calls
from kapelle.types import Json, Message, Turn

FORMS: tuple[Form, ...] = ("hermes", "llama", "mistral", "deepseek", "glm", "qwen_coder", "harmony")
"""Formats in which agents' tool calls are parsed. Clients return tool calls in the first format, regardless of the format of the model."""


class Callers:
    """The turns of one episode, in which the caller of the next request is searched."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._open: dict[int, Sequence[str]] = {}
        """Mapping from the index of a turn with tool calls that has not been continued yet to the strings among the arguments of these
        calls."""
        self._first_message: dict[int, str] = {}
        """Mapping from the index of such a turn to the first user message of its conversation."""
        self._lines: list[frozenset[str]] = []
        """The lines of each turn's text."""
        self._normalised: list[str] = []
        """The text of each turn in normalised form, for comparison."""

    def record(self, turn: Turn, messages: Sequence[Message] = (), after: int | None = None) -> None:
        """Add a turn and the messages of its request.

        This method must be called for all turns of the episode in order.
        """
        assert turn.index == len(self._turns), "turns are recorded in order"
        self._turns.append(turn)
        self._lines.append(frozenset(_lines(turn.text)))
        self._normalised.append(_normalised(turn.text))
        if (texts := _arguments(turn.text)) is not None:
            self._open[turn.index] = texts
            if after is None:
                self._first_message[turn.index] = _first_user_message(messages)

    def find(self, agent: str, messages: Sequence[Message], after: int | None) -> int | None:
        """Return the index of the turn that caused the current call of `agent`, or None if the turn cannot be found.

        The argument `messages` contains the messages after the agent's own turn `after`, or all messages of a new conversation.
        """
        turns = self._turns
        answers = {_normalised(message.content) for message in messages if message.role == "assistant"}
        for index in list(self._open):
            # A turn is continued by its follow-up, or by a new conversation with its first message: some clients rewrite
            # their history.
            rewritten = (
                after is None and answers and self._first_message.get(index) == _first_user_message(messages)
            )
            is_own = turns[index].agent == agent
            if index == after or (is_own and (rewritten or self._normalised[index] in answers)):
                del self._open[index]

        continues = after is not None and _arguments(turns[after].text) is not None
        found = self._handoff(agent, answers)
        if found is None and not continues:
            found = self._tool(agent, messages)
        if found is None and not continues:
            found = self._message(agent, messages)
        if found is None:
            return None if after is None else turns[after].caller
        # If the agent reads the result of its own call, the caller of that turn is also the caller of this turn.
        above: int | None = found
        while above is not None:
            if turns[above].agent == agent:
                return turns[above].caller
            above = turns[above].caller
        return found

    def _handoff(self, agent: str, answers: set[str]) -> int | None:
        for turn in reversed(self._turns):
            if turn.agent != agent and self._normalised[turn.index] in answers:
                return turn.index
        return None

    def _tool(self, agent: str, messages: Sequence[Message]) -> int | None:
        others = [index for index in reversed(self._open) if self._turns[index].agent != agent]
        text = "\n".join(message.content for message in messages)
        matching = [index for index in others if any(argument in text for argument in self._open[index])]
        if matching:
            return matching[0]
        return others[0] if len(others) == 1 else None

    def _message(self, agent: str, messages: Sequence[Message]) -> int | None:
        lines: set[str] = set()
        for message in messages:
            if message.role in ("user", "assistant"):
                for line in _lines(message.content):
                    lines |= {line, line.partition(": ")[2]}
        lines.discard("")
        for turn in reversed(self._turns):
            if turn.agent != agent and not lines.isdisjoint(self._lines[turn.index]):
                return turn.index
        return None


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _first_user_message(messages: Sequence[Message]) -> str:
    return next((message.content for message in messages if message.role == "user"), "")


def _normalised(text: str) -> str:
    """Return a text in normalised form for comparison.

    The result consists of the tool calls if there are any, because clients reformat them, or else of the letters of the text.
    """
    calls = _calls(text)
    if calls:
        return repr([(call.name, sorted(call.arguments.items())) for call in calls])
    return "".join(text.split())


def _calls(text: str) -> Sequence[ReadCall]:
    for form in FORMS:  # several forms begin with the same marker
        with suppress(NotCalls):
            if calls := parse_calls(text, (form,)):
                return calls
    return ()


def _arguments(text: str) -> Sequence[str] | None:
    """Return the strings among the arguments of a turn's tool calls, or None if the turn has no tool calls."""
    calls = _calls(text)
    return [argument for call in calls for argument in _texts(dict(call.arguments))] if calls else None


def _texts(value: Json) -> Iterator[str]:
    if isinstance(value, str) and value.strip():
        yield value.strip()
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
