"""Language policies of small games as tables: every decision's probabilities, and what follows from them exactly.

A language policy plays a move by writing its text, so the probability of a move is that of the text's tokens, end
of turn included, after the prompt that the player reads. `language_table` takes them for every information
state of a game and normalises them over the legal moves; what the policy writes otherwise is left out and
reported as `legal`. From a table follow, by enumeration, expected returns, NashConv and exploitability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kapelle import checkpoint
from kapelle.batch import Sample
from kapelle.checkpoint_folder import step_of
from kapelle.engines.rollout import WritingRenderer
from kapelle.engines.train import TrainEngine
from kapelle.environment import Environment
from kapelle.environments.openspiel import OpenSpiel
from kapelle.environments.openspiel_games import spiel, walk
from kapelle.environments.openspiel_opponents import count_decisions
from kapelle.environments.openspiel_world import legal_moves, show
from kapelle.errors import CheckpointError, ConfigError
from kapelle.rollout import Play
from kapelle.team import Agent
from kapelle.types import Message, Sampling
from kapelle.workflow import fill
from kapelle.workflows.play import Play as PlayWorkflow

if TYPE_CHECKING:
    from torch import Tensor

Score = Callable[[Sequence[Sample]], Sequence["Tensor"]]
"""Samples → the log-prob of each of their target tokens; `TrainEngine.score`."""

Chances = Mapping[int, float]
"""Legal action → its probability."""


@dataclass(frozen=True, slots=True)
class Table:
    """A policy for all players of a game."""

    chances: Mapping[str, Chances]
    """Information state → probabilities of its legal actions."""
    legal: Mapping[str, float]
    """Information state → probability that the policy writes any legal move as it is listed, in [0, 1]."""


@dataclass(frozen=True, slots=True)
class Exact:
    """What is known exactly of a policy in all seats of a game."""

    returns: tuple[float, ...]
    """Expected return of each seat."""
    nash_conv: float
    """Sum over seats of what each could gain by deviating alone (1711.00832, section 4); 0 at an equilibrium."""
    exploitability: float
    """NashConv by number of seats."""
    legal: float
    """Least probability, over information states, of writing a legal move."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """One information state as its player meets it."""

    key: str
    seat: int
    text: str
    actions: tuple[int, ...]
    moves: tuple[str, ...]


def language_table(play: Play, score: Score) -> Table:
    """Return the policy of a team in its game as a table, every seat played by the agent that sits there.

    With one agent it plays all seats, whatever opponents the environment has; seats are not rotated. `score` is
    asked about all prompts and moves at once. Raises ConfigError for anything but a small game of `openspiel`
    under the workflow `play` without memory, and for sampling that cuts the distribution.
    """
    environment = _game_of(play)
    decisions = list(_decisions(environment))
    agents = _agents(play, environment)
    questions: dict[tuple[int, str, str], Sample] = {}
    for decision in decisions:
        for move in decision.moves:
            key = (decision.seat if len(play.team.agents) > 1 else 0, decision.text, move)
            if key not in questions:
                sample = _question(play, agents[decision.seat], decision.text, move)
                if sample is not None:
                    questions[key] = sample
    answers = dict(zip(questions, score(list(questions.values())), strict=True))
    likely: dict[str, list[float]] = {}
    for decision in decisions:
        owner = decision.seat if len(play.team.agents) > 1 else 0
        found = (answers.get((owner, decision.text, move)) for move in decision.moves)
        likely[decision.key] = [
            0.0 if logp is None else math.exp(float(logp.double().sum())) for logp in found
        ]
    return Table(
        {d.key: dict(zip(d.actions, _normal(likely[d.key]), strict=True)) for d in decisions},
        {d.key: min(1.0, sum(likely[d.key])) for d in decisions},
    )


def uniform_table(environment: Environment) -> Table:
    """Return the policy that draws evenly from the legal moves."""
    decisions = list(_decisions(_openspiel(environment)))
    return Table(
        {d.key: dict.fromkeys(d.actions, 1.0 / len(d.actions)) for d in decisions},
        {d.key: 1.0 for d in decisions},
    )


def checkpoint_tables(
    play: Play, engine: TrainEngine, checkpoints: Path, say: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[str, Table]]:
    """Yield the name of every checkpoint of a trained policy in a folder, oldest first, with its policy as a table.

    The start of a run is none: an average over training does not count the policy that has not learned yet.
    The engine's weights change with each one and are the last one's afterwards. One that is damaged is left out, and
    `say` hears why.
    """
    for folder in checkpoint.list_checkpoints(checkpoints):
        if step_of(folder) == 0:
            continue
        try:
            state = checkpoint.load(folder)
        except CheckpointError as error:
            say(f"left out: {error}")
            continue
        engine.load_state(state["train"])
        yield folder.name, language_table(play, engine.score)


def average(environment: Environment, tables: Sequence[Table]) -> Table:
    """Return the policy that draws one of these tables for a whole game, evenly, seat by seat.

    In an information state each table counts by how likely its own moves lead there, as in fictitious play
    and CFR: averaging the probabilities alone would be another policy.
    """
    totals: dict[str, dict[int, float]] = {}
    game = _openspiel(environment).loaded
    for state in walk(game):
        seat = state.current_player()
        key = state.information_state_string(seat)
        if key in totals:
            continue
        reach = [_own_reach(game, state, table) for table in tables]
        weight = sum(reach)
        shares = [each / weight for each in reach] if weight > 0 else [1.0 / len(tables)] * len(tables)
        totals[key] = {
            action: sum(
                share * table.chances[key][action] for share, table in zip(shares, tables, strict=True)
            )
            for action in state.legal_actions()
        }
    legal = {key: sum(table.legal[key] for table in tables) / len(tables) for key in totals}
    return Table(totals, legal)


def evaluate_table(environment: Environment, table: Table) -> Exact:
    """Return expected returns and NashConv of a table by enumerating the game."""
    game = _openspiel(environment).loaded
    policy = spiel().TabularPolicy({key: list(chances.items()) for key, chances in table.chances.items()})
    everything = -1
    returns = spiel().expected_returns(game.new_initial_state(), policy, everything, True)
    gain = max(0.0, float(spiel().nash_conv(game, policy)))
    return Exact(
        tuple(map(float, returns)), gain, gain / game.num_players(), min(table.legal.values(), default=1.0)
    )


def _openspiel(environment: Environment) -> OpenSpiel:
    if not isinstance(environment, OpenSpiel):
        raise ConfigError(
            f"Exact values are known for small games of `openspiel`, not for '{environment.name}'. "
            "Set `environment.name: openspiel`."
        )
    return environment


def _game_of(play: Play) -> OpenSpiel:
    environment, workflow = _openspiel(play.environment), play.workflow
    if not isinstance(workflow, PlayWorkflow) or workflow.memory != "observation":
        raise ConfigError(
            "A policy is a table only where a move depends on what the player sees alone. Set "
            "`workflow: {name: play, memory: observation}`."
        )
    if environment.thinking:
        raise ConfigError(
            "What a policy plays after thinking has no exact probability: it is a sum over all thoughts. Set "
            "`environment.thinking: false`."
        )
    return environment


def _agents(play: Play, environment: OpenSpiel) -> list[Agent]:
    """Return who plays each seat."""
    players, agents = environment.loaded.num_players(), play.team.agents
    if len(agents) not in {1, players}:
        raise ConfigError(
            f"{environment.game} has {players} seats and the team {len(agents)} agents: which policy plays the other "
            f"seats? Evaluate a team of 1 agent (all seats) or {players}."
        )
    for agent in agents:
        sampling = _sampling(play, agent)
        if sampling.temperature <= 0 or sampling.top_p < 1 or sampling.top_k > 0 or sampling.stop:
            raise ConfigError(
                f"Agent '{agent.name}' samples with {sampling}: the probabilities of whole moves are known for "
                "`temperature` above 0, `top_p: 1`, `top_k: 0` and no `stop`."
            )
        if play.team.policy(agent.name).endpoint is not None:
            raise ConfigError(f"Agent '{agent.name}' is an endpoint: its probabilities are not known.")
        if agent.name in play.team.turns_of:
            raise ConfigError(
                f"Agent '{agent.name}' has weights per turn, and a state of the game does not say which turn it is. Give it "
                "one adapter (`weights: lora`)."
            )
    return [agents[seat] if len(agents) > 1 else agents[0] for seat in range(players)]


def _sampling(play: Play, agent: Agent) -> Sampling:
    return (play.sampling or {}).get(agent.name, agent.sampling)


def _decisions(environment: OpenSpiel) -> Iterator[_Decision]:
    """Yield every information state once, as the adapter shows it; ConfigError where they cannot be listed."""
    rules, seen, game = environment.conduct, set(), environment.loaded
    if not game.get_type().provides_information_state_string:
        raise ConfigError(
            f"OpenSpiel has no information states for {environment.game}, so that a policy of it is no table. Exact values "
            "are known for games such as kuhn_poker, leduc_poker and tiny_hanabi."
        )
    count_decisions(str(game))
    for state in walk(game):
        seat = state.current_player()
        key = state.information_state_string(seat)
        if key not in seen:
            seen.add(key)
            moves = tuple(legal_moves(state, seat, rules))
            yield _Decision(key, seat, show(state, seat, rules), tuple(state.legal_actions()), moves)


def _question(play: Play, agent: Agent, text: str, move: str) -> Sample | None:
    """Return the tokens of a move after its prompt; None for a move longer than the agent may speak."""
    policy = play.team.policy(agent.name).name
    renderer = cast("WritingRenderer", play.engine.renderer(policy))
    sampling = _sampling(play, agent)
    opening = [Message("system", agent.system)] if agent.system else []
    asked = fill(agent.prompt or "{question}", {"question": text})
    prompt = renderer.start([*opening, Message("user", asked)])
    said = renderer.said(move)
    room = min(sampling.max_tokens, renderer.context - len(prompt))
    if len(said) - 1 > room:
        return None
    said = said[:room]  # a move that is complete when the limit cuts off its end of turn
    places = tuple(range(len(prompt), len(prompt) + len(said)))
    return Sample(policy, prompt + said, places, temperature=sampling.temperature)


def _normal(likely: Sequence[float]) -> list[float]:
    total = sum(likely)
    return [each / total for each in likely] if total > 0 else [1.0 / len(likely)] * len(likely)


def _own_reach(game: Any, state: Any, table: Table) -> float:
    """Return the product of a table's probabilities of the mover's own earlier moves in a history."""
    seat, reach, past = state.current_player(), 1.0, game.new_initial_state()
    for action in state.history():
        if past.current_player() == seat:
            reach *= table.chances[past.information_state_string(seat)][action]
        past.apply_action(action)
    return reach
