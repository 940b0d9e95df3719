"""Implements `kapelle play`, in which the user takes a role in a game against a script, a solver or a trained team."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kapelle.cli.named import environment_named, is_recipe
from kapelle.cli.parser import split_words
from kapelle.cli.quiet import hush
from kapelle.engines.rollout.protocol import Completion, Request, RolloutEngine
from kapelle.engines.rollout.scripted import ByteRenderer
from kapelle.environment import Mixed, Scripted, has_comparable_answers, offers
from kapelle.errors import ConfigError, EngineError, did_you_mean
from kapelle.runs.findings import keep_exact
from kapelle.runs.named_checkpoint import split_run
from kapelle.runtime.console import printable, say
from kapelle.runtime.deadlines import Patience

if TYPE_CHECKING:
    from kapelle.environment import Environment
    from kapelle.rollout.setup import RolloutSetup
    from kapelle.team import Agent
    from kapelle.types import Episode, Split, Task
    from kapelle.workflow import Workflow


YOU = "you"
SCRIPT = "script"
MOST_PLAYERS = 10
WIDTH = 60
"""The maximum number of characters of a move in the summary of a game without a list of moves."""
SOLVERS = ("mcts", "cfr", "nash")
"""The opponents that exist only for OpenSpiel games."""

Read = Callable[[str], str]
"""A function that shows a prompt and returns the line that the user typed. The function raises EOFError at the end of the input."""


@dataclass(frozen=True, slots=True)
class GameTable:
    """A game and the players of the other roles."""

    environment: Environment
    workflow: Workflow
    trained: RolloutSetup | None
    """The trained run that plays the other roles, or None for scripts and solvers."""
    in_sentences: bool = True
    """Whether the user reads full sentences, even if the team reads a shorter wording."""
    agents: tuple[Agent, ...] = ()
    """The team of a recipe, with its roles and prompts; empty if the environment determines the number of players."""


def run(arguments: argparse.Namespace) -> int:
    """Play one game in the terminal and print the outcome."""
    hush()
    if arguments.exact:
        return _exact(arguments)
    from kapelle.rollout.episodes import roll_out_episode
    from kapelle.runtime.event_loop import run_async

    table = _open(arguments)
    setup, person = with_person(table, arguments.role, input)
    test, train = (_task(setup.environment, split, arguments.seed) for split in ("test", "train"))
    episode = run_async(lambda: roll_out_episode(setup, test, arguments.seed))
    if episode.error is None and YOU not in {turn.policy for turn in episode.turns}:
        # A role without turns in tests, such as the proposer of problems.
        episode = run_async(lambda: roll_out_episode(setup, train, arguments.seed))
    if episode.error is not None:
        raise EngineError(f"The game ended with an error: {episode.error}")
    for line in ending(episode, person):
        say(line)
    return 0


def _task(environment: Environment, split: Split, seed: int) -> Task:
    """Return the task for a seed. If the split is empty, a training task is returned."""
    size = environment.size(split)
    if size == 0:
        split, size = "train", environment.size("train")
    return environment.task(split, seed % size if size else seed)


def _exact(arguments: argparse.Namespace) -> int:
    named, settings = split_words(arguments.words)
    if len(named) != 1 or not (Path(named[0]) / "config.yaml").is_file():
        place = f" '{named[0]}' has no config.yaml." if named else ""
        raise ConfigError(f"--exact takes one run directory: `kapelle play RUN --exact`.{place}")
    report(Path(named[0]), settings)
    return 0


def _open(arguments: argparse.Namespace) -> GameTable:
    """Return the game that the arguments name, together with its other players."""
    named, settings = split_words(arguments.words)
    if len(named) != 1:
        raise ConfigError("Give one environment, recipe, OpenSpiel game or run directory to play.")
    name, against = named[0], arguments.against
    sentences, run = not _words(settings), split_run(name)[0]
    if (run / "config.yaml").is_file() and against is None:
        return _from_run(name, settings)
    if against in (None, "random") and is_recipe(name):
        from kapelle.setup.recipe import load_recipe, load_stages
        from kapelle.setup.team_builder import build_algorithm, build_team

        stages = load_stages(name, (), settings)
        config = (stages[-1][1] if stages else load_recipe(name, (), settings)).config
        # Nothing trains here, so the things that only training needs (such as a verifier) may be missing.
        team = build_team(config, replace(build_algorithm(config), needs=()))
        return GameTable(config.environment, config.workflow, None, sentences, team.agents)
    if (run / "config.yaml").is_file():
        from kapelle.training.provenance import config_of_run

        environment = _with_opponents(config_of_run(run, settings).environment, {})
    else:
        environment = environment_named(name, settings)
    if against in SOLVERS:
        environment = _against_solver(environment, against, arguments.role)
    elif against not in (None, "random"):
        if not (split_run(against)[0] / "config.yaml").is_file():
            hint = did_you_mean(against, ("random", *SOLVERS))
            raise ConfigError(f"--against '{against}' is neither a run directory nor a known opponent.{hint}")
        table = _from_run(against, ())
        worded = _worded_like(environment, table.environment)
        return replace(table, environment=worded, in_sentences=sentences)
    return GameTable(environment, _workflow(environment), None, sentences)


def _against_solver(environment: Environment, solver: str, role: int) -> Environment:
    """Return an OpenSpiel game in which a solver plays all roles except one."""
    from kapelle.environments.openspiel.environment import OpenSpiel

    if not isinstance(environment, OpenSpiel):
        raise ConfigError(
            f"--against {solver} works only in OpenSpiel games. Play '{environment.name}' with --against random."
        )
    players = environment.loaded.num_players()
    if role > players:
        raise ConfigError(
            f"--role {role}: {environment.game} has {players} players. Choose one of their roles."
        )
    return _with_opponents(environment, {k: solver for k in range(1, players + 1) if k != role})


def _from_run(path: str, settings: Sequence[str]) -> GameTable:
    from kapelle.training.trainer import Trainer

    trainer = Trainer.from_run(path, *settings)
    environment, workflow = trainer.setup.environment, trainer.setup.workflow
    return GameTable(_with_opponents(environment, {}), workflow, trainer.setup, not _words(settings))


def _words(settings: Sequence[str]) -> bool:
    """Return whether the settings choose the wording. A wording in the settings is also shown to the user."""
    return any(re.match(r"environment(\.parts\.\w+\.environment)?\.wording=", each) for each in settings)


def _read_by(environment: Environment, person: str) -> Environment:
    """Return a game, or a mixture of games, with full sentences for a human player."""
    from kapelle.environments.mixture import Mixture
    from kapelle.environments.openspiel.environment import OpenSpiel

    if isinstance(environment, OpenSpiel):
        return environment.read_by(person)
    if isinstance(environment, Mixture):
        parts = {
            name: part.model_copy(update={"environment": _read_by(part.environment, person)})
            for name, part in environment.parts.items()
        }
        return environment.model_copy(update={"parts": parts})
    return environment


def _workflow(environment: Environment) -> Workflow:
    from kapelle.workflows.parallel import Parallel
    from kapelle.workflows.play import PlayWorkflow

    return Parallel() if has_comparable_answers(environment) else PlayWorkflow()


def _with_opponents(environment: Environment, opponents: Mapping[int, object]) -> Environment:
    from kapelle.environments.openspiel.environment import OpenSpiel

    if not isinstance(environment, OpenSpiel):
        return environment
    return type(environment).model_validate({**environment.model_dump(), "opponents": opponents})


def _worded_like(environment: Environment, learned: Environment) -> Environment:
    """Return a game with the wording with which a team was trained, unless the settings choose another wording."""
    from kapelle.comparison.contestants import WORDS
    from kapelle.environments.openspiel.environment import OpenSpiel

    if not (isinstance(environment, OpenSpiel) and isinstance(learned, OpenSpiel)):
        return environment
    words = set(WORDS) - environment.model_fields_set
    return type(environment).model_validate({**environment.model_dump(), **learned.model_dump(include=words)})


def with_person(table: GameTable, role: int, read: Read) -> tuple[RolloutSetup, str]:
    """Return the game with the user in the given role (numbered from 1), and the name of the agent that the user replaces."""
    from kapelle.engines.rollout.compose import ComposedEngine
    from kapelle.engines.rollout.scripted import ScriptedEngine
    from kapelle.rollout.setup import RolloutSetup
    from kapelle.team import Agent, Policy, Team

    team = table.trained.team if table.trained else None
    names = tuple(agent.name for agent in table.agents) or _names(
        table.environment, team.names if team else ()
    )
    table.environment.check(names)
    place = role - 1 if len(names) > 1 else 0  # with solvers, only the person's role remains
    if not 0 <= place < len(names):
        raise ConfigError(f"--role {role}: there are roles 1 to {len(names)} ({', '.join(names)}).")
    person = names[place]
    alone = team is None and not offers(table.environment, Scripted) and bool(table.agents)
    filled_by: dict[str, tuple[Team, str]] = {}
    for k, name in enumerate(names):
        if team is not None and k != place:
            filled_by[name] = team, team.agent_for_role(k, len(names))
        else:
            policy = Policy(YOU if k == place or alone else SCRIPT, base="", trained=False)
            agent = table.agents[k] if table.agents else Agent(name)
            filled_by[name] = Team.alone(agent, policy), name
    filled = Team.filling(filled_by)
    engines: list[RolloutEngine] = [
        Person(read, names=bool(table.agents), moves=not has_comparable_answers(table.environment))
    ]
    if table.trained is not None:
        engines.append(table.trained.engine)
    elif SCRIPT in filled.policies:
        engines.append(ScriptedEngine({SCRIPT: _speaker(table.environment)}))
    setup = RolloutSetup(
        filled,
        _read_by(table.environment, person) if table.in_sentences else table.environment,
        table.workflow,
        ComposedEngine(engines),
        patience=Patience(episode=math.inf, engine=math.inf),  # people take their time
    )
    table.workflow.check(setup.team.agents, table.environment)
    return setup, person


def _names(environment: Environment, known: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the agents, which are the agents of a run or one name for each player of the environment."""
    from kapelle.environments.openspiel.environment import OpenSpiel

    counts = [1] if has_comparable_answers(environment) else [*range(2, MOST_PLAYERS + 1), 1]
    if isinstance(environment, OpenSpiel):
        counts = [environment.loaded.num_players() - len(environment.opponents)]
    if known:
        counts = [len(known), *counts]
    reasons = []
    for count in counts:
        names = tuple(known) if count == len(known) else tuple(f"player_{k + 1}" for k in range(count))
        try:
            environment.check(names)
        except ConfigError as error:
            reasons.append(error)
        else:
            if count > 1 or not isinstance(environment, OpenSpiel) or environment.opponents:
                return names
    raise reasons[-1] if reasons else ConfigError(f"'{environment.name}' has no role for a person.")


def _speaker(environment: Environment) -> Callable[[Request], str]:
    if not offers(environment, Scripted):
        raise ConfigError(
            f"'{environment.name}' has no script for the other roles. Give a run with --against."
        )
    scripted = environment
    return lambda r: scripted.script(r.agent, r.task, r.messages, r.seed)


class Person:
    """A rollout engine with a single policy, which is the user at the terminal."""

    def __init__(self, read: Read, *, names: bool = False, moves: bool = True) -> None:
        """Create the engine.

        If `names` is true, the name of the agent is printed before its prompt. If `moves` is true, only a listed move
        is accepted.
        """
        self._read = read
        self._moves = moves
        self._names = names

    @property
    def policies(self) -> Sequence[str]:
        """The names of the engine's policies, which contain only the user."""
        return (YOU,)

    def renderer(self, policy: str) -> ByteRenderer:
        """Return a renderer that encodes text as bytes."""
        return ByteRenderer()

    async def generate(self, request: Request) -> Completion:
        """Print the prompt of the agent and return the line that the user types.

        The first letters of a listed move are sufficient. After any other line, the user is prompted again. Raises
        EngineError at the end of the input.
        """
        from kapelle.environments.openspiel.text import match, read_listed

        seen = request.messages[-1].content
        say()
        if self._names:
            say(f"{request.agent} reads:")
        say("\n".join(printable(line) for line in seen.splitlines()))
        moves = [(move,) for move in read_listed(seen)] if self._moves else []
        while True:
            try:
                text = self._read("you> ")
            except EOFError as error:
                raise EngineError("The input ended before the game.") from error
            if not moves or match(text, moves) is not None:
                break
            typed = text.strip().casefold()
            begun = [move for (move,) in moves if typed and move.casefold().startswith(typed)]
            if len(begun) == 1:  # `p` is Pass
                text = begun[0]
                break
            legal = ", ".join(printable(move) for (move,) in moves)
            say(
                f"'{printable(text)}' is not one of the legal moves: {legal}. Type one of them, or its first letters."
            )
        ids = ByteRenderer().completion(text) or (0,)
        return Completion(ids, (0.0,) * len(ids), "stop", text, version=0, weights_hash="person")

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Raise EngineError, because a human player has no weights."""
        raise EngineError("A person has no weights to load.")

    def release_caches(self) -> None:
        """Do nothing, because this engine holds no caches."""

    def close(self) -> None:
        """Do nothing, because this engine holds no resources."""


def ending(episode: Episode, person: str) -> list[str]:
    """Return the moves of a game and the return of each agent as lines of text. The argument `person` is the agent of the user."""
    names = {agent: YOU if agent == person else agent for agent in episode.agents}
    players = {str(k): names[agent] for agent, own in episode.info.get("seats", {}).items() for k in own}
    players |= episode.info.get("opponents", {})
    moves = [each.partition(": ") for each in episode.info.get("moves", ())]
    moves = moves or [(turn.agent, ": ", printable(turn.text, WIDTH)) for turn in episode.turns]
    done = ", ".join(f"{players.get(who) or names.get(who, who)}: {move}" for who, _, move in moves)
    lines = ["", f"moves   {done}"]
    for agent in episode.agents:
        who = YOU if agent == person else agent
        lines.append(f"{who:7} {episode.total(agent):+g}")
    if len(episode.agents) == 1 and "returns" in episode.info:
        lines.append(f"roles   {', '.join(f'{value:+g}' for value in episode.info['returns'])}")
    if episode.success is not None:
        lines.append(f"success {episode.success:.2f}")
    return lines


# -------- `kapelle play RUN --exact`: exact values of a run's checkpoints in a game small enough to enumerate

if TYPE_CHECKING:
    from kapelle.rollout.evaluation.exploitability import Exact
    from kapelle.rollout.setup import RolloutSetup
    from kapelle.training.trainer import Trainer

    Row = tuple[str, Exact]

TITLES = ("policy", "NashConv", "exploitability", "legal moves", "at least", "expected returns by role")
COLUMNS = "{:12}  {:>8}  {:>14}  {:>11}  {:>8}  {}"


def report(path: Path, settings: Sequence[str]) -> None:
    """Print the exact values of the checkpoints of a run and of their averages.

    The values are NashConv, exploitability, the share of legal moves (mean and minimum) and returns. For a mixture, the
    values of each game that can be enumerated are printed, and the other games are listed with the reason. Raises
    ConfigError if no game can be enumerated; see `exploitability.language_table`.
    """
    from kapelle.training.trainer import Trainer

    trainer = Trainer.from_run(path, *settings)
    environment = trainer.setup.environment
    games = environment.members if offers(environment, Mixed) else {"": environment}
    reasons = []
    found: dict[str, list[Row]] = {}
    for part, game in games.items():
        try:
            for row in _rows(path, trainer, replace(trainer.setup, environment=game)):
                if part not in found:
                    say("\n".join([*([part] if part else []), COLUMNS.format(*TITLES)]))
                say(_line(*row))
                found.setdefault(part, []).append(row)
        except ConfigError as error:
            if not part:
                raise
            reasons.append(f"{part}: {error}")
    for reason in reasons:
        say(reason)
    if len(reasons) == len(games):
        raise ConfigError(f"No game of the mixture in {path} has exact values.")
    _keep(path, found)


def _keep(path: Path, found: Mapping[str, Sequence[Row]]) -> None:
    """Save the values of each checkpoint in the run directory, for `kapelle view`."""
    rows = [
        {"part": part, "step": int(name), "nash_conv": exact.nash_conv, "exploitability": exact.exploitability, "legal": exact.legal, "legal_mean": exact.legal_mean, "returns": list(exact.returns)}
        for part, own in found.items()
        for name, exact in own
        if name.isdecimal()
    ]  # fmt: skip
    keep_exact(path, rows)


def _rows(path: Path, trainer: Trainer, setup: RolloutSetup) -> Iterator[Row]:
    """Yield the policies of one game with their values. Raises ConfigError if the game cannot be enumerated or has no checkpoint."""
    from kapelle.rollout.evaluation.exploitability import (
        average,
        checkpoint_tables,
        evaluate_table,
        uniform_table,
    )

    game = setup.environment
    yield ("uniform", evaluate_table(game, uniform_table(game)))
    tables = []
    saved = checkpoint_tables(setup, trainer.engine, path / "checkpoints", lambda line: say(line, sys.stderr))
    for name, table in saved:
        tables.append(table)
        yield (name.lstrip("0") or "0", evaluate_table(game, table))
    if not tables:
        raise ConfigError(
            f"{path} has no complete checkpoint of a step. Train longer, or lower `checkpoint.every`."
        )
    if len(tables) > 1:
        yield ("average", evaluate_table(game, average(game, tables)))
    if len(tables) > 3:  # the first policies are the weakest and bias the average for long
        yield ("later half", evaluate_table(game, average(game, tables[len(tables) // 2 :])))


def _line(name: str, exact: Exact) -> str:
    returns = ", ".join(f"{value:+.3f}" for value in exact.returns)
    return COLUMNS.format(
        name,
        f"{exact.nash_conv:.3f}",
        f"{exact.exploitability:.3f}",
        f"{exact.legal_mean:.3f}",
        f"{exact.legal:.3f}",
        returns,
    )
