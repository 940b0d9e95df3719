"""Implements `kapelle chat`, a chat in the terminal with the team of a run or with a model. Tokens are printed as they are sampled."""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kapelle.cli.parser import split_words
from kapelle.cli.quiet import hush
from kapelle.errors import ConfigError, need_known
from kapelle.runs.named_checkpoint import named_checkpoint, split_run
from kapelle.runs.reader import read_config
from kapelle.runtime.characters import cleaned
from kapelle.runtime.console import say
from kapelle.setup.team_file import is_team
from kapelle.team import ANY_TEAM, own_name
from kapelle.training.console import Lines, Watch

if TYPE_CHECKING:
    from kapelle.rollout.setup import RolloutSetup
    from kapelle.services.policy.agents import Agents
    from kapelle.services.policy.teams import Spoken

RESET = ("/reset", "/new")
QUIT = ("/quit", "/exit")
COMMANDS = "/reset starts over, /quit or Ctrl-D ends, Ctrl-C interrupts an answer"
STYLES = ("bold cyan", "bold magenta", "bold green", "bold yellow", "bold blue")
ANY_QUESTION = "arithmetic"
"""An environment for one agent that needs no data. Chats do not use the questions of this environment."""
EMPTY = "(an empty answer)"
_COMMAND = re.compile(r"/[a-z]+")


def run(arguments: argparse.Namespace) -> int:
    """Answer each line of the input until the input ends."""
    setup = _of_model(arguments) or _of_run(arguments)
    from kapelle.engines.rollout.protocol import ServesCallers
    from kapelle.runtime.event_loop import LoopThread
    from kapelle.services.policy.agents import Agents
    from kapelle.services.policy.service import spokesman

    if isinstance(setup.engine, ServesCallers):
        setup.engine.serve()
    if arguments.agent is None and (first := spokesman(setup)) is not None:
        arguments.agent = first
        others = " or ".join(f"--agent {name}" for name in setup.team.names[1:])
        hint = f"; to talk with another agent: {others}" if others else ""
        say(f"An external program ran this team. Here {first} answers{hint}.", sys.stderr)
    say(
        f"Chat with {arguments.agent or ', '.join(setup.team.names)}. {COMMANDS}.",
        sys.stderr,
    )
    with LoopThread() as thread:
        messages: list[dict[str, Any]] = []
        for line in _lines():
            if line in QUIT:
                break
            if line in RESET:
                messages = []
                say("started over", sys.stderr)
                continue
            if _COMMAND.fullmatch(line):
                say(f"Unknown command {line}: {COMMANDS}.", sys.stderr)
                continue
            messages.append({"role": "user", "content": line})
            text = asyncio.run(_unless_stopped(_answer(Agents(setup, thread), arguments.agent, messages)))
            if text is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": text})
                if not text.strip():
                    say(EMPTY, sys.stderr)
    return 0


def _of_run(arguments: argparse.Namespace) -> RolloutSetup:
    """Load the team of the run that the arguments name."""
    named, settings = split_words(arguments.words)
    if len(named) != 1 or settings or arguments.environment is not None or arguments.real:
        raise ConfigError(
            "Give one run directory: `kapelle chat RUN`; or a model: `kapelle chat --model PATH [--environment NAME]`."
        )
    folder, which = split_run(named[0])
    exported = is_team(folder)
    if not exported:
        read_config(folder)  # raises when there is no run
    hush()
    from kapelle.setup.team_builder import agent_configs
    from kapelle.training.provenance import config_of_run

    config = config_of_run(folder)
    names = [role.name for role in agent_configs(config.team)]
    arguments.agent = _agent(arguments.agent, names, config.name)  # before anything is loaded
    if not exported:
        named_checkpoint(folder, which)
    from kapelle.training.served import open_served

    return open_served(folder, Watch(Lines(sys.stderr)), which=which).setup


def _of_model(arguments: argparse.Namespace) -> RolloutSetup | None:
    """Load the model or adapter that the arguments name, either alone or as the team of a recipe.

    Returns None if the arguments name a run.
    """
    from kapelle.cli.named import is_model

    named, settings = split_words(arguments.words)
    if arguments.model is None and len(named) == 1 and is_model(named[0], arguments.environment):
        arguments.model, named = named[0], ()
    if arguments.model is None:
        return None
    if named:
        raise ConfigError("--model and a run directory cannot be combined. Remove one of them.")
    hush()
    from kapelle.rollout.evaluation.playing import model_config, open_rollout_setup
    from kapelle.setup.team_builder import agent_configs

    alone = arguments.environment is None
    config = model_config(
        arguments.model,
        ANY_QUESTION if alone else arguments.environment,
        settings,
        real=arguments.real,
        report=lambda note: say(note, sys.stderr),
    )
    names = [role.name for role in agent_configs(config.team)]
    arguments.agent = _agent(arguments.agent, names, config.name)
    if alone and len(names) == 1:  # it reads the whole conversation
        arguments.agent = names[0]
    return open_rollout_setup(config)


def _agent(given: str | None, names: Sequence[str], team: str) -> str | None:
    """Return the agent with the given name, in any form that a server accepts, or None for the whole team."""
    if given is None or (given in (ANY_TEAM, team) and given not in names):
        return None
    found = own_name(given, team)
    need_known("--agent", "agent", found, names)
    return found


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, except empty lines."""
    while sys.stdin is not None:  # closed by the shell: `<&-`
        if sys.stdin.isatty():
            print("you: ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


async def _unless_stopped(answer: Coroutine[Any, Any, str | None]) -> str | None:
    """Return the answer, or None if Ctrl-C interrupted the answer. The chat continues after Ctrl-C."""
    task, before = asyncio.ensure_future(answer), signal.getsignal(signal.SIGINT)
    handles = before is not signal.SIG_IGN and threading.current_thread() is threading.main_thread()
    if handles:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        say()
        say("interrupted; the question is discarded", sys.stderr)
        return None
    finally:
        if handles:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)


def _name(agent: str) -> None:
    """Print the name of an agent, in the agent's colour if the output is a terminal."""
    if not sys.stdout.isatty():
        print(f"{agent}: ", end="", flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    style = STYLES[sum(agent.encode()) % len(STYLES)]
    Console(highlight=False, soft_wrap=True).print(Text(f"{cleaned(agent)}: ", style=style), end="")


async def _answer(agents: Agents, agent: str | None, messages: list[dict[str, Any]]) -> str | None:
    """Print an answer while it is generated, and return the answer. If there is no answer, the reason is printed and None is returned."""
    from kapelle.services.policy.chat_form import read_request
    from kapelle.services.request_errors import RequestError

    request = read_request({"model": "team", "messages": messages})
    try:
        return await (_of_team(agents, request) if agent is None else _of_agent(agents, agent, request))
    except RequestError as error:
        say(f"kapelle: {error.message}", sys.stderr)
        return None


async def _of_team(agents: Agents, request: Any) -> str:
    from kapelle.services.policy.teams import TeamAnswer, team_answers

    final, turns = "", _Turns()
    async for each in team_answers(agents, request, listening=True):
        if isinstance(each, TeamAnswer):
            final = each.text
        else:
            turns.add(each)
    _name("team")
    say(cleaned(final))
    return final


class _Turns:
    """Prints turns one after another.

    The first turn is printed while it is sampled, and turns that are sampled at the same time wait for it.
    """

    def __init__(self) -> None:
        self._open: list[tuple[str, list[str]]] = []
        self._ended: set[int] = set()

    def add(self, piece: Spoken) -> None:
        """Add a piece of a turn, and print the text that is next in order."""
        if piece.begins:
            self._open.append((piece.agent, []))
            if len(self._open) == 1:
                _name(piece.agent)
        turn = next(each for each in reversed(self._open) if each[0] == piece.agent)
        turn[1].append(cleaned(piece.text))
        if turn is self._open[0]:
            print(turn[1].pop(), end="", flush=True)
        if piece.ends:
            self._ended.add(id(turn))
        while self._open and id(self._open[0]) in self._ended:
            self._ended.discard(id(self._open.pop(0)))
            say()
            if self._open:
                agent, words = self._open[0]
                _name(agent)
                print("".join(words), end="", flush=True)
                words.clear()


async def _of_agent(agents: Agents, agent: str, request: Any) -> str:
    from kapelle.services.policy.agents import read_chat

    chat = await read_chat(agents, agent, agent, request).prompted()
    _name(agent)
    answer = ""
    async for piece in chat.pieces(agents.answers(chat.prompt, listening=True)):
        answer += piece.words
        print(cleaned(piece.words), end="", flush=True)
    say()
    return answer
