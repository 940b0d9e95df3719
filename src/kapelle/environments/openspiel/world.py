"""One episode of an OpenSpiel game: chance and opponents move by themselves, agents by their words."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kapelle.environment import Outcome
from kapelle.environments.openspiel.games import spiel, walk
from kapelle.environments.openspiel.text import View, Wording, listed, match, plain_move, words_of
from kapelle.errors import ConfigError, EpisodeError
from kapelle.settings.base import Settings

# -------- Opponents that are no agents: random, scripted, tree search, and equilibria of small games
#
# An opponent plays a seat of its own by OpenSpiel's state, which holds more than a player may know: those that
# search are refused where moves or cards are hidden.

Choose = Callable[[Any, int], int]
"""State and seat → action, one of the legal ones."""


Chances = Mapping[str, Mapping[int, float]]
"""Information state → legal action → its probability."""


class RandomOpponent(Settings):
    """Draws evenly from the legal moves."""

    name: Literal["random"] = "random"

    def check(self, game: Any) -> None:
        """Can play every game."""

    def open(self, game: Any, seed: int) -> Choose:
        """Return the player of one episode."""
        draw = random.Random(seed)
        return lambda state, seat: int(draw.choice(state.legal_actions(seat)))


class ScriptedOpponent(Settings):
    """Plays the first of its moves that is legal, otherwise the first legal move."""

    name: Literal["scripted"] = "scripted"
    moves: tuple[str, ...] = ()
    """In order of preference, as OpenSpiel writes them (brackets and letter case aside)."""

    def check(self, game: Any) -> None:
        """Can play every game: illegal moves are skipped."""

    def open(self, game: Any, seed: int) -> Choose:
        """Return the player of one episode."""
        return self._choose

    def _choose(self, state: Any, seat: int) -> int:
        legal = state.legal_actions(seat)
        names = [(plain_move(state.action_to_string(seat, action)),) for action in legal]
        places = [match(move, names) for move in self.moves]
        return int(legal[next((place for place in places if place is not None), 0)])


class TreeSearchOpponent(Settings):
    """Monte Carlo tree search with random rollouts (UCT); for games in which everything is seen."""

    name: Literal["mcts"] = "mcts"
    simulations: int = Field(default=100, ge=1)
    """Simulated games for one move."""

    def check(self, game: Any) -> None:
        """Raise ConfigError for hidden information and simultaneous moves: the search would look at them."""
        kind, types = game.get_type(), spiel().GameType
        if (
            kind.information != types.Information.PERFECT_INFORMATION
            or kind.dynamics != types.Dynamics.SEQUENTIAL
        ):
            raise ConfigError(
                f"The opponent `mcts` sees the whole state, and {game} hides some of it from players. "
                "Take `random`, `cfr` or `nash`."
            )

    def open(self, game: Any, seed: int) -> Choose:
        """Return the player of one episode."""
        evaluator = spiel().RandomRolloutEvaluator(n_rollouts=1, seed=seed % 2**31)
        exploration, megabytes = 2.0, 64
        bot = spiel().MCTSBot(
            game, evaluator, exploration, self.simulations, megabytes, True, seed % 2**31, False
        )
        return lambda state, _seat: int(bot.step(state))


class RegretOpponent(Settings):
    """Plays the average policy of counterfactual regret minimisation, CFR+ (1407.5042), in a small game."""

    name: Literal["cfr"] = "cfr"
    iterations: int = Field(default=200, ge=1)
    """Iterations of the solver, once in a process."""

    def check(self, game: Any) -> None:
        """Raise ConfigError for a game that cannot be enumerated."""
        check_solvable(game, self.name)

    def open(self, game: Any, seed: int) -> Choose:
        """Return the player of one episode; the first one in a process solves the game."""
        return play_table(regret_policy(str(game), self.iterations), seed)


class EquilibriumOpponent(Settings):
    """Plays a Nash equilibrium of a small zero-sum game of two, up to a stated NashConv."""

    name: Literal["nash"] = "nash"
    tolerance: float = Field(default=0.01, gt=0)
    """Greatest NashConv: what both players together could still gain by deviating, in units of utility."""

    def check(self, game: Any) -> None:
        """Raise ConfigError unless the game is zero-sum, for two, and can be walked as a whole."""
        check_solvable(game, self.name)
        if game.num_players() != 2 or game.get_type().utility != spiel().GameType.Utility.ZERO_SUM:
            raise ConfigError(
                f"The opponent `nash` is for zero-sum games of two players, and {game} is none. Take `cfr`."
            )

    def open(self, game: Any, seed: int) -> Choose:
        """Return the player of one episode; the first one in a process solves the game."""
        return play_table(equilibrium(str(game), self.tolerance), seed)


_Kind = RandomOpponent | ScriptedOpponent | TreeSearchOpponent | RegretOpponent | EquilibriumOpponent


def _by_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


Opponent = Annotated[_Kind, Field(discriminator="name"), BeforeValidator(_by_name)]
"""Settings of an opponent: its name alone, or `{name: mcts, simulations: 200}`."""


def check_solvable(game: Any, opponent: str) -> None:
    """Raise ConfigError unless every decision of the game can be tabulated."""
    if not game.get_type().provides_information_state_string:
        raise ConfigError(
            f"The opponent `{opponent}` needs information states, and OpenSpiel has none for {game}. Take `random`."
        )
    count_decisions(str(game))


@cache
def count_decisions(written: str) -> int:
    """Return the number of histories of a game in which a player moves; ConfigError if there are too many.

    A game is given as OpenSpiel writes it, parameters included: its objects cannot be told apart otherwise.
    """
    return sum(1 for _ in walk(spiel().load_game(written)))


@cache
def regret_policy(written: str, iterations: int) -> Chances:
    """Return the average policy after so many iterations of CFR+; kept for the process."""
    solver = spiel().CFRPlusSolver(spiel().load_game(written))
    for _ in range(iterations):
        solver.evaluate_and_update_policy()
    return _table(written, solver)


@cache
def equilibrium(written: str, tolerance: float) -> Chances:
    """Return a policy whose NashConv is at most `tolerance`; kept for the process.

    Raises ConfigError if 20,000 iterations of CFR+ fail to reach it.
    """
    game = spiel().load_game(written)
    solver, done, burst = spiel().CFRPlusSolver(game), 0, 50
    while done < 20_000:
        for _ in range(burst):
            solver.evaluate_and_update_policy()
        done += burst
        if spiel().nash_conv(game, solver.average_policy()) <= tolerance:
            return _table(written, solver)
        burst = min(done, 2000)
    raise ConfigError(
        f"No policy of {written} with a NashConv of {tolerance} was found. Set a greater `tolerance`."
    )


def _table(written: str, solver: Any) -> Chances:
    """Return a solver's average policy as plain numbers: OpenSpiel's object dies with its solver."""
    policy = solver.average_policy()
    keys = {state.information_state_string() for state in walk(spiel().load_game(written))}
    return {key: dict(policy.action_probabilities(key)) for key in sorted(keys)}


def play_table(chances: Chances, seed: int) -> Choose:
    """Return a player that draws its moves from a table's probabilities."""
    draw = random.Random(seed)

    def choose(state: Any, seat: int) -> int:
        own = chances[state.information_state_string(seat)]
        return int(draw.choices(list(own), list(own.values()))[0])

    return choose


@dataclass(frozen=True, slots=True)
class Rules:
    """How a game is shown, and what invalid moves cost."""

    wording: Wording
    view: View
    list_moves: bool
    forfeit: bool
    """Whether an invalid move ends the game; a random legal one is made otherwise."""
    penalty: float
    step_rewards: bool
    head: str = ""
    """What stands before every view: the rules, in words."""
    move_in: Callable[[str], str | None] = str
    """A text → the part in which a move is looked for, None where there is none."""


def show(state: Any, seat: int, rules: Rules) -> str:
    """Return what the player in a seat may see of a state, and its legal moves when it is to move."""
    game = state.get_game()
    words = words_of(game, rules.wording, rules.view)
    raw = (
        state.information_state_string(seat)
        if rules.view == "information"
        else state.observation_string(seat)
    )
    view = words.view(raw)
    moves = listed(legal_moves(state, seat, rules)) if rules.list_moves and _to_move(state, seat) else ""
    if rules.wording == "short":
        line = " ".join(part for part in (f"{seat + 1}/{game.num_players()}", view, moves) if part)
        return "\n".join(part for part in (rules.head, line) if part)
    title = f"You are player {seat + 1} of {game.num_players()} in {game.get_type().long_name}."
    return "\n".join(part for part in (rules.head, title, view, moves and f"Legal moves: {moves}") if part)


def legal_moves(state: Any, seat: int, rules: Rules) -> list[str]:
    """Return the legal moves of a seat in the words of these rules, in OpenSpiel's order of actions."""
    words = words_of(state.get_game(), rules.wording, rules.view)
    return [words.move(state.action_to_string(seat, action)) for action in state.legal_actions(seat)]


def understand(state: Any, seat: int, text: str, rules: Rules) -> int | None:
    """Return the legal action that a text names, in the words of these rules or of OpenSpiel, else None."""
    said = rules.move_in(text)
    if said is None:
        return None
    legal = state.legal_actions(seat)
    own = legal_moves(state, seat, rules)
    names = [(name, state.action_to_string(seat, action)) for name, action in zip(own, legal, strict=True)]
    place = match(said, names)
    return None if place is None else int(legal[place])


def _to_move(state: Any, seat: int) -> bool:
    if state.is_terminal() or state.is_chance_node():
        return False
    if state.is_simultaneous_node():
        return bool(state.legal_actions(seat))
    return bool(state.current_player() == seat)


@dataclass(slots=True)
class Players:
    """Who sits where: every seat is an agent's or an opponent's."""

    seats: Mapping[str, tuple[int, ...]]
    """Agent → its seats."""
    opponents: Mapping[int, Choose]
    names: Mapping[int, str] = field(default_factory=dict)
    """Seat → name of its opponent."""
    drawn: bool = False
    """Whether seats are drawn anew for each episode."""

    def agent(self, seat: int) -> str | None:
        """Return the agent in a seat, None for an opponent's."""
        return next((agent for agent, seats in self.seats.items() if seat in seats), None)


class GameWorld:
    """One game from its first move to its end."""

    def __init__(self, game: Any, players: Players, rules: Rules, chance: random.Random, seed: int) -> None:
        self._game = game
        self._state = game.new_initial_state()
        self._players = players
        self._rules = rules
        self._chance = chance
        self._fallback = random.Random(f"{seed}/invalid")
        self._invalid: Counter[str] = Counter()
        self._made: list[str] = []
        self._forfeited: set[int] = set()
        self._acted: set[str] = set()
        self._paid = [0.0] * game.num_players()
        self._owed = dict.fromkeys(players.seats, 0.0)
        self._go_on()

    @property
    def state(self) -> Any:
        """OpenSpiel's state: everything, hidden things included."""
        return self._state

    def observe(self, agent: str) -> str:
        """Return what the agent may see from the seat that it moves in now, else from its first one."""
        seats = self._players.seats[agent]
        seat = next((seat for seat in seats if _to_move(self._state, seat)), seats[0])
        return show(self._state, seat, self._rules)

    def movers(self) -> tuple[str, ...]:
        """Return the agents to move; empty when the game is over."""
        if self._forfeited:
            return ()
        return tuple(
            agent
            for agent, seats in self._players.seats.items()
            if any(_to_move(self._state, seat) for seat in seats)
        )

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Make the moves that the texts name; EpisodeError unless exactly the movers moved.

        An agent that names no legal move is charged the penalty at once.
        """
        if set(actions) != set(self.movers()) or not actions:
            raise EpisodeError(f"It is the turn of {self.movers()}, not of {tuple(actions)}.")
        charged: Counter[str] = Counter()
        moving = [seat for seat in range(self._game.num_players()) if _to_move(self._state, seat)]
        joint: dict[int, int] = {}
        for seat in moving:
            agent = self._players.agent(seat)
            if agent is None:
                joint[seat] = self._players.opponents[seat](self._state, seat)
                continue
            self._acted.add(agent)
            action = understand(self._state, seat, actions[agent], self._rules)
            if action is None:
                charged[agent] += 1
                action = self._fallback.choice(self._state.legal_actions(seat))
                if self._rules.forfeit:
                    self._forfeited.add(seat)
            joint[seat] = int(action)
        self._invalid.update(charged)
        if not self._forfeited:
            self._move(joint)
            self._go_on()
        paid = {agent: self._rules.penalty * times for agent, times in charged.items()}
        if self._rules.step_rewards:
            self._book()
            for agent in sorted(self._acted):
                paid[agent] = paid.get(agent, 0.0) + self._owed[agent]
                self._owed[agent] = 0.0
        return paid

    def _move(self, joint: Mapping[int, int]) -> None:
        for seat, action in joint.items():
            self._made.append(f"{seat + 1}: {plain_move(self._state.action_to_string(seat, action))}")
        if self._state.is_simultaneous_node():
            idle = 0  # what OpenSpiel takes for a player without a choice
            self._state.apply_actions([joint.get(seat, idle) for seat in range(self._game.num_players())])
        else:
            self._state.apply_action(next(iter(joint.values())))

    def _go_on(self) -> None:
        """Draw chance and let opponents move until an agent is to move or the game is over."""
        while not self._state.is_terminal():
            if self._state.is_chance_node():
                actions, chances = zip(*self._state.chance_outcomes(), strict=True)
                self._state.apply_action(self._chance.choices(actions, chances)[0])
            elif self.movers():
                return
            else:
                moving = [seat for seat in self._players.opponents if _to_move(self._state, seat)]
                self._move({seat: self._players.opponents[seat](self._state, seat) for seat in moving})

    def _returns(self) -> list[float]:
        """Return what every seat has earned; see `OpenSpiel.invalid` for a forfeited game."""
        returns = [float(value) for value in self._state.returns()]
        lost, count = len(self._forfeited), self._game.num_players()
        if not lost:
            return returns
        least, total = float(self._game.min_utility()), self._game.utility_sum()
        if lost == count or self._game.get_type().utility.name == "IDENTICAL":
            return [least] * count
        if total is not None:
            returns = [(total - lost * least) / (count - lost)] * count
        return [least if seat in self._forfeited else returns[seat] for seat in range(count)]

    def _book(self) -> None:
        """Credit agents with what their seats earned since last time; agents that have yet to move are paid later."""
        returns = self._returns()
        for agent, earned in self._shares([a - b for a, b in zip(returns, self._paid, strict=True)]).items():
            self._owed[agent] += earned
        self._paid = returns

    def _shares(self, by_seat: Sequence[float]) -> dict[str, float]:
        return {
            agent: sum(by_seat[seat] for seat in seats) / len(seats)
            for agent, seats in self._players.seats.items()
        }

    def outcome(self) -> Outcome:
        """Return what agents earned; `success` is the share of the greatest score where all play together."""
        returns = self._returns()
        self._book()
        together = self._game.get_type().utility.name == "IDENTICAL"
        greatest = self._game.max_utility()
        return Outcome(
            rewards=dict(self._owed),
            success=min(1.0, max(0.0, returns[0] / greatest)) if together and greatest > 0 else None,
            info={
                "moves": list(self._made),
                "returns": returns,
                "seats": {
                    agent: [seat + 1 for seat in seats] for agent, seats in self._players.seats.items()
                },
                "opponents": {str(seat + 1): name for seat, name in sorted(self._players.names.items())},
                "invalid": {agent: self._invalid[agent] for agent in self._players.seats},
                "forfeited": [seat + 1 for seat in sorted(self._forfeited)],
            },
            truncated=not self._forfeited and not self._state.is_terminal(),
            roles={
                agent: "+".join(f"seat_{seat + 1}" for seat in seats)
                for agent, seats in self._players.seats.items()
            }
            if self._players.drawn
            else {},
        )

    async def close(self) -> None:
        """Hold nothing."""
