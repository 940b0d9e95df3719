"""`kapelle chat`: talk with a run's team in the terminal, and hear each agent as it speaks."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kapelle.cli.lines import Lines
from kapelle.cli.output import say, words_only
from kapelle.cli.parser import split_words
from kapelle.cli.progress import Watch
from kapelle.cli.quiet import hush
from kapelle.errors import ConfigError, need_known
from kapelle.runs.reader import read_config

if TYPE_CHECKING:
    from kapelle.services.policy.agents import Agents
    from kapelle.services.policy.teams import Spoken

ANEW = "/new"


def run(arguments: argparse.Namespace) -> int:
    """Answer each line of the input until it ends."""
    named, settings = split_words(arguments.words)
    if len(named) != 1 or settings:
        raise ConfigError("Name one run directory: `kapelle chat RUN`.")
    folder = Path(named[0])
    read_config(folder)  # raises when there is no run
    hush()
    from kapelle.engines.rollout.protocol import ServesCallers
    from kapelle.services.policy.agents import Agents
    from kapelle.services.policy.engine_thread import EngineThread
    from kapelle.training.served import open_served

    served = open_served(folder, Watch(Lines(sys.stderr)))
    need_known("--agent", "agent", arguments.agent, served.play.team.names)
    if isinstance(served.play.engine, ServesCallers):
        served.play.engine.serve()
    say(
        f"Talk with {arguments.agent or ', '.join(served.play.team.names)}. {ANEW} begins anew, Ctrl-D ends.",
        sys.stderr,
    )
    with EngineThread() as thread:
        messages: list[dict[str, Any]] = []
        for line in _lines():
            if line == ANEW:
                messages = []
                continue
            messages.append({"role": "user", "content": line})
            text = asyncio.run(_answer(Agents(served.play, thread), arguments.agent, messages))
            if text is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": text})
    return 0


def _lines() -> Iterator[str]:
    """Yield what people type, without empty lines."""
    while True:
        if sys.stdin.isatty():
            print("you: ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


async def _answer(agents: Agents, agent: str | None, messages: list[dict[str, Any]]) -> str | None:
    """Print an answer as it comes and return it; None for a question that cannot be answered, which is said."""
    from kapelle.services.http.refusals import Refusal
    from kapelle.services.policy.chat_form import read_request

    request = read_request({"model": "team", "messages": messages})
    try:
        return await (_of_team(agents, request) if agent is None else _of_agent(agents, agent, request))
    except Refusal as refusal:
        say(f"kapelle: {refusal.message}", sys.stderr)
        return None


async def _of_team(agents: Agents, request: Any) -> str:
    from secrets import randbits

    from kapelle.services.policy.teams import Played, Teams

    teams, final, turns = Teams(agents), "", _Turns()
    teams.check(request)
    async for each in teams.answers(request, randbits(62), listening=True):
        if isinstance(each, Played):
            final = each.text
        else:
            turns.hear(each)
    say(f"team: {words_only(final)}")
    return final


class _Turns:
    """Prints turns one after another, the first one as it comes: agents that speak at the same moment wait for it."""

    def __init__(self) -> None:
        self._open: list[tuple[str, list[str]]] = []
        self._ended: set[int] = set()

    def hear(self, said: Spoken) -> None:
        """Print what it is time for."""
        if said.begins:
            self._open.append((said.agent, []))
            if len(self._open) == 1:
                print(f"{said.agent}: ", end="", flush=True)
        turn = next(each for each in reversed(self._open) if each[0] == said.agent)
        turn[1].append(words_only(said.text))
        if turn is self._open[0]:
            print(turn[1].pop(), end="", flush=True)
        if said.ends:
            self._ended.add(id(turn))
        while self._open and id(self._open[0]) in self._ended:
            self._ended.discard(id(self._open.pop(0)))
            say()
            if self._open:
                agent, words = self._open[0]
                print(f"{agent}: {''.join(words)}", end="", flush=True)
                words.clear()


async def _of_agent(agents: Agents, agent: str, request: Any) -> str:
    from kapelle.services.policy.chats import prompted, read_chat

    chat, messages = read_chat(agents, agent, agent, request)
    chat = await prompted(chat, agents, messages, None)
    print(f"{agent}: ", end="", flush=True)
    said = ""
    async for piece in chat.chunks(agents.answers(chat.prompt, listening=True)):
        if not isinstance(piece, str):
            text = piece["choices"][0]["delta"].get("content", "")
            said += text
            print(words_only(text), end="", flush=True)
    say()
    return said
