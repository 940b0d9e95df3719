"""Which turn called for a call of an outside program: found in what the called agent reads, since programs do not say it.

Frameworks pass work on in three ways, and each leaves a sign:

1. a handoff: the other agent's answer stands in the conversation, as an assistant's message;
2. a tool call: the other agent's answer calls tools and has not been continued yet. Of several such answers it is the one whose
   arguments are read, and none where that decides nothing;
3. a message: whole lines of the other agent's answer are read, with its name before them perhaps.

An agent that reads the answer to its own call has been called by nobody: its call goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from kapelle.environments.grading.text.tool_call import Form, NotCalls, ReadCall, parse_calls
from kapelle.types import Json, Message, Turn

FORMS: tuple[Form, ...] = ("hermes", "llama", "mistral", "deepseek", "glm", "qwen_coder", "harmony")
"""How agents' tool calls are read here. Clients send them back in the first form, whatever the model's own is."""


class Callers:
    """The calls of one episode, in the order in which they are asked."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._open: dict[int, Sequence[str]] = {}
        """Index of a turn that calls tools and was not continued yet → the texts among its arguments."""
        self._begins: dict[int, str] = {}
        """Index of such a turn → how its conversation begins."""
        self._lines: list[frozenset[str]] = []
        """The lines of each turn."""
        self._squeezed: list[str] = []
        """The text of each turn, as it is compared."""

    def record(self, turn: Turn, heard: Sequence[Message] = (), after: int | None = None) -> None:
        """Learn of a turn, and of what it was asked; all turns of the episode, in their order."""
        assert turn.index == len(self._turns), "turns are recorded in their order"
        self._turns.append(turn)
        self._lines.append(frozenset(_lines(turn.text)))
        self._squeezed.append(_squeezed(turn.text))
        if (texts := _arguments(turn.text)) is not None:
            self._open[turn.index] = texts
            if after is None:
                self._begins[turn.index] = _opening(heard)

    def find(self, agent: str, heard: Sequence[Message], after: int | None) -> int | None:
        """Return the index of the turn that called for what `agent` is asked now; None where there is no sign of one.

        `heard` are the messages that it reads since its own turn `after`, all of them where it begins.
        """
        turns = self._turns
        said = {_squeezed(message.content) for message in heard if message.role == "assistant"}
        for index in list(self._open):
            # Closed by what continues it, or by a conversation that begins as its own did: some clients write their history anew.
            own = turns[index].agent == agent
            anew = after is None and said and self._begins.get(index) == _opening(heard)
            if index == after or (own and (anew or self._squeezed[index] in said)):
                del self._open[index]

        goes_on = after is not None and _arguments(turns[after].text) is not None
        found = next(self._handoffs(agent, said), None)
        if found is None and not goes_on:
            found = self._tool(agent, heard)
        if found is None and not goes_on:
            found = next(self._messages(agent, heard), None)
        if found is None:
            return None if after is None else turns[after].caller
        # The answer to its own call: what called for that one called for this one too.
        above: int | None = found
        while above is not None:
            if turns[above].agent == agent:
                return turns[above].caller
            above = turns[above].caller
        return found

    def _handoffs(self, agent: str, said: set[str]) -> Iterator[int]:
        for turn in reversed(self._turns):
            if turn.agent != agent and self._squeezed[turn.index] in said:
                yield turn.index

    def _tool(self, agent: str, heard: Sequence[Message]) -> int | None:
        others = [index for index in reversed(self._open) if self._turns[index].agent != agent]
        read = "\n".join(message.content for message in heard)
        named = [index for index in others if any(text in read for text in self._open[index])]
        return named[0] if named else others[0] if len(others) == 1 else None

    def _messages(self, agent: str, heard: Sequence[Message]) -> Iterator[int]:
        read = {
            line
            for message in heard
            if message.role in ("user", "assistant")
            for whole in _lines(message.content)
            for line in (whole, whole.partition(": ")[2])
        } - {""}
        for turn in reversed(self._turns):
            if turn.agent != agent and not read.isdisjoint(self._lines[turn.index]):
                yield turn.index


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _opening(heard: Sequence[Message]) -> str:
    return next((message.content for message in heard if message.role == "user"), "")


def _squeezed(text: str) -> str:
    """Return a text as it is compared: its tool calls, if it has any, since clients write them anew, or else its letters."""
    calls = _calls(text)
    return (
        repr([(call.name, sorted(call.arguments.items())) for call in calls])
        if calls
        else "".join(text.split())
    )


def _calls(text: str) -> Sequence[ReadCall]:
    for form in FORMS:  # several begin with the same mark: what breaks one of them may be another
        with suppress(NotCalls):
            if calls := parse_calls(text, (form,)):
                return calls
    return ()


def _arguments(text: str) -> Sequence[str] | None:
    """Return the texts among the arguments of a turn's tool calls; None for a turn that calls none."""
    calls = _calls(text)
    return [each for call in calls for each in _texts(dict(call.arguments))] if calls else None


def _texts(value: Json) -> Iterator[str]:
    if isinstance(value, str) and value.strip():
        yield value.strip()
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(each)
