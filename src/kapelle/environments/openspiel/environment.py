"""Any game of OpenSpiel (1908.09453): sequential or simultaneous, with chance, for any number of players."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import Field, FiniteFloat, PrivateAttr

from kapelle.environment import (
    Decision,
    Enumerable,
    KnowsMoves,
    ListsMoves,
    Opposed,
    Outcome,
    PlaysSeats,
    Progressive,
    Scripted,
)
from kapelle.environments.base import RULES, GameSettings, need_movers
from kapelle.environments.openspiel.games import (
    Choose,
    Demonstrator,
    Opponent,
    Value,
    as_played,
    in_turns,
    load_game,
    opponent_named,
    rules_of,
    spiel,
    walk,
)
from kapelle.environments.openspiel.hanabi import Colours, advise, read_short
from kapelle.environments.openspiel.measures import tally_of
from kapelle.environments.openspiel.text import (
    GameText,
    View,
    Wording,
    listed,
    match,
    open_words,
    plain_move,
    read_listed,
    words_of,
)
from kapelle.environments.openspiel.tree import MOST_HISTORIES, GameTree, tree_of
from kapelle.errors import ConfigError, EpisodeError
from kapelle.runtime.randomness import derive_seed
from kapelle.settings.base import Settings
from kapelle.types import Json, Message, Split, Task


class Level(Settings):
    """A game that is easier, or only other, than the one that is to be learned: the first tasks of a run are played as it."""

    tasks: int = Field(ge=1)
    """How many tasks, `training.tasks_per_step` in each step, are played with these parameters."""
    parameters: Mapping[str, Value]
    """Of the game, laid over `environment.parameters`."""


class OpenSpiel(GameSettings, Enumerable, ListsMoves, Opposed, PlaysSeats, Progressive, Scripted):
    """A game by name; agents take the seats that no opponent has, in order.

    One agent per free seat, or one agent for all of them. A player sees OpenSpiel's string of what it may
    know, and writes a legal move's own text; of several lines the last one counts.
    """

    name: Literal["openspiel"] = "openspiel"
    game: str = "kuhn_poker"
    """OpenSpiel's name, with or without parameters in brackets, or `hanabi_very_small`, `hanabi_small`,
    `hanabi_full`."""
    parameters: Mapping[str, Value] = Field(default={})
    """Of the game, such as `players: 3`."""
    curriculum: tuple[Level, ...] = ()
    """What is played before the game itself, in order; the test split is always the game itself."""
    wording: Wording = "full"
    """`full`: sentences; `short`: one line of few bytes, for tiny models; `columns`: Hanabi in one line in which every fact
    stands at a place of its own, the same in all levels of a curriculum, which tiny models learn to read much sooner."""
    view: View | None = None
    """`information` (all that the player saw so far) or `observation` (what it sees now); null takes the
    first where the game hides anything and has it."""
    list_moves: bool = True
    """Whether the legal moves are shown to whoever is to move."""
    invalid: Literal["random", "forfeit"] = "random"
    """What happens on an invalid move: a random legal one is made, or the game is lost. A player who forfeits gets the
    game's least utility; in a constant-sum game the others share the rest, in a common-payoff game all get the least,
    and in any other game the others keep what they had."""
    penalty: FiniteFloat | None = Field(default=None, le=0.0)
    """Cost of each invalid move. Null charges the difference of greatest and least utility for a random
    move, so that even a winning one ends at or below the least utility, and 0 for a forfeit."""
    step_rewards: bool | None = None
    """True pays what a move changes at once; false pays all at the end; null pays at once in the games that
    OpenSpiel says have rewards during play, such as Hanabi, and at the end in all others."""
    rotate: bool = False
    """True shifts all agents by a number of seats drawn from the episode's seed."""
    other_play: bool = False
    """Whether every seat but the first calls Hanabi's colours by other names, in all that it reads and says, drawn in each episode: with such a
    partner no colour can have a meaning of its own (other-play, 2003.02979)."""
    chance: Literal["episode", "task"] = "episode"
    """Whose seed draws chance: with `task` all episodes of a group are dealt the same cards as long as they go
    the same way."""
    opponents: Mapping[int, Opponent] = Field(default={})
    """Seat (from 1) → who plays it in place of an agent: `random`, `scripted`, `hanabi`, `mcts`, `cfr`, `nash`."""
    demonstrator: Demonstrator | None = None
    """Who shows a warm-up its moves, in Hanabi in one line; null shows the form of a move and not its sense."""

    _reader: str = PrivateAttr(default="")
    """The agent that is a person."""

    def read_by(self, person: str) -> OpenSpiel:
        """Return the game in which one agent reads sentences, with the rules and its moves, and the others what they always read."""
        copy = self.model_copy()
        copy._reader = person  # noqa: SLF001 - its own class
        return copy

    @property
    def loaded(self) -> Any:
        """OpenSpiel's game."""
        return load_game(self.game, self.parameters)

    @property
    def conduct(self) -> Rules:
        """How the game is shown and invalid moves are treated."""
        return self._conduct(self.loaded)

    def _conduct(self, game: Any) -> Rules:
        span = float(game.max_utility() - game.min_utility())
        forfeit = self.invalid == "forfeit"
        penalty = self.penalty if self.penalty is not None else 0.0 if forfeit else -span
        kind, types = game.get_type(), spiel().GameType
        steps = kind.reward_model == types.RewardModel.REWARDS
        # What a player sees now says everything in a game that hides nothing.
        open_game = kind.information == types.Information.PERFECT_INFORMATION
        seen_now = open_game and kind.provides_observation_string
        unset = "full" if self.wording == "full" else "none"
        view = self.view or (
            "information" if kind.provides_information_state_string and not seen_now else "observation"
        )
        # Columns have room for the game itself and for all of its levels, so that a place means the same in each of them.
        games = [self.loaded, *self._levels()] if self.wording == "columns" else [game]
        return Rules(
            self.wording,
            view,
            words_of(games, self.wording, view),
            self.list_moves,
            forfeit,
            penalty,
            steps if self.step_rewards is None else self.step_rewards,
            self.head(*rules_of(game), unset),
            self.move_in,
        )

    @property
    def constant_sum(self) -> bool:
        """Whether the agents' rewards add up to the same number at every end."""
        utility, kinds = self.loaded.get_type().utility, spiel().GameType.Utility
        return not self.opponents and utility in {kinds.ZERO_SUM, kinds.CONSTANT_SUM}

    @property
    def reward_range(self) -> tuple[float, float]:
        """The game's utilities, less the penalty for as many invalid moves as a game can have."""
        ranges = []
        for game in (self.loaded, *self._levels()):
            rules = self._conduct(game)
            most = 1 if rules.forfeit else game.max_game_length()
            ranges.append((float(game.min_utility()) + rules.penalty * most, float(game.max_utility())))
        return min(low for low, _ in ranges), max(high for _, high in ranges)

    @property
    def sources(self) -> Mapping[Split, str]:
        """The game itself; only its chance differs between the splits."""
        return {
            "train": f"games of {self.game}, dealt from seeds",
            "test": f"games of {self.game}, dealt from other seeds",
        }

    def task(self, split: Split, index: int) -> Task:
        """Return one match of the game itself."""
        return Task(f"{split}-{index}", "", {"level": len(self.curriculum) + 1} if self.curriculum else {})

    def task_after(self, played: int, index: int) -> Task:
        """Return one match, of the game that the `curriculum` has reached after so many."""
        for number, level in enumerate(self.curriculum, start=1):
            if played < level.tasks:
                return Task(f"train-{index}", "", {"level": number, "parameters": dict(level.parameters)})
            played -= level.tasks
        return self.task("train", index)

    def _levels(self) -> list[Any]:
        """Return the games of the curriculum; ConfigError names the level that is none."""
        games = []
        for number, level in enumerate(self.curriculum):
            try:
                games.append(load_game(self.game, {**self.parameters, **level.parameters}))
            except ConfigError as error:
                raise ConfigError(f"environment.curriculum.{number}: {error}") from error
        return games

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError for an unknown game, and for agents, opponents or a curriculum that do not fit it."""
        game = self.loaded
        players = game.num_players()
        for number, easier in enumerate(self._levels()):
            if easier.num_players() != players:
                raise ConfigError(
                    f"environment.curriculum.{number} is a game for {easier.num_players()} players, and {self.game} has {players}. "
                    "Leave `players` out of its parameters."
                )
        kind = game.get_type()
        if self.view == "information" and not kind.provides_information_state_string:
            raise ConfigError(f"{self.game} has no information states. Set `environment.view: observation`.")
        if self.view == "observation" and not kind.provides_observation_string:
            raise ConfigError(f"{self.game} has no observations. Set `environment.view: information`.")
        if self.wording == "columns" and kind.short_name != "hanabi":
            raise ConfigError(
                f"`environment.wording: columns` is for Hanabi, and this is {self.game}. Set it to short."
            )
        if self.other_play and kind.short_name != "hanabi":
            raise ConfigError(
                f"`environment.other_play` exchanges Hanabi's colours, and this is {self.game}, of which no symmetry is known. Remove it."
            )
        if self.demonstrator is not None:
            self.demonstrator.check(game)
            if self.wording == "full" or self.conduct.view != "observation" or not self.list_moves:
                raise ConfigError(
                    "`environment.demonstrator` reads what a player sees in one line. Set `environment.wording: short` or `columns`, "
                    "`environment.view: observation` and `environment.list_moves: true`."
                )
        for seat, opponent in self.opponents.items():
            if not 1 <= seat <= players:
                raise ConfigError(
                    f"environment.opponents names seat {seat}; {self.game} has seats 1 to {players}."
                )
            opponent.check(game)
        free = players - len(self.opponents)
        if len(agents) not in {1, free} or not free:
            raise ConfigError(
                f"{self.game} has {players} players, {len(self.opponents)} of them in environment.opponents, and the "
                f"team has {len(agents)} agents ({', '.join(agents)}). Set `team.agents` to {free or 1} (or to 1 agent "
                "for all free seats), or change `environment.opponents`."
            )
        if len(agents) == free:
            return
        agent = agents[0]
        if kind.dynamics == spiel().GameType.Dynamics.SIMULTANEOUS:
            raise ConfigError(
                f"In {self.game} players move at once, and '{agent}' alone can say one move at a time. "
                "Set `team.agents` to one for each player, with `team.sharing: shared`."
            )
        if self.constant_sum:
            raise ConfigError(
                f"In {self.game} one player wins what the others lose: '{agent}' in all seats would earn the same "
                "whatever it does. Set `team.agents` to one for each player, with `team.sharing: shared`, or name "
                "`environment.opponents`."
            )

    def check_player(self, player: str) -> None:
        """Raise ConfigError for a player that is no opponent of `environment.opponents`, or does not play this game."""
        opponent_named(player).check(self.loaded)

    @property
    def players(self) -> int:
        """Number of seats, opponents' included."""
        return int(self.loaded.num_players())

    def decisions(self) -> Iterator[Decision]:
        """Yield every information state once, as a player reads it; ConfigError if they cannot be listed."""
        rules, seen, game = self.conduct, set(), self.loaded
        if not game.get_type().provides_information_state_string:
            raise ConfigError(
                f"OpenSpiel has no information states for {self.game}, so that a policy of it is no table. Exact values "
                "are known for games such as kuhn_poker, leduc_poker and tiny_hanabi."
            )
        tree_of(str(game))  # raises for a game that is too large before any of it is shown
        for state in walk(game, MOST_HISTORIES):
            seat = state.current_player()
            key = state.information_state_string(seat)
            if key in seen:
                continue
            seen.add(key)
            before, past = [], in_turns(game).new_initial_state()
            for action in state.history():
                if past.current_player() == seat:
                    before.append((past.information_state_string(seat), action))
                past.apply_action(action)
            seen_as = as_played(game, state)
            actions, moves = tuple(state.legal_actions()), tuple(legal_moves(seen_as, seat, rules))
            yield Decision(key, seat, show(seen_as, seat, rules), actions, moves, tuple(before))

    def exact_values(self, policy: Mapping[str, Mapping[int, float]]) -> tuple[tuple[float, ...], float]:
        """Return expected returns and NashConv of a policy in all seats, by enumerating the game."""
        tree = self._tree
        returns = tree.values(policy)
        best = [tree.best_response(policy, seat)[0] for seat in range(tree.players)]
        return returns, sum(max(0.0, most - own) for most, own in zip(best, returns, strict=True))

    def best_response(
        self, policy: Mapping[str, Mapping[int, float]], seat: int
    ) -> tuple[float, Mapping[str, int]]:
        """Return the most that a seat (from 0) can earn against the others' policy, and the move in each of its states that does."""
        return self._tree.best_response(policy, seat)

    def visits(self, policy: Mapping[str, Mapping[int, float]]) -> Mapping[str, float]:
        """Return how often each information state is met in a game on average."""
        return self._tree.visits(policy)

    @property
    def _tree(self) -> GameTree:
        return tree_of(str(self.loaded))

    def start(self, task: Task, agents: Sequence[str], seed: int) -> GameWorld:
        """Open one match for these agents."""
        self.check(agents)
        chance = derive_seed("chance", task.id if self.chance == "task" else seed)
        game = load_game(self.game, {**self.parameters, **task.data.get("parameters", {})}, chance)
        count = game.num_players()
        shift = derive_seed("seats", seed) % count if self.rotate else 0
        free = [seat for seat in range(count) if seat + 1 not in self.opponents]
        owners = list(agents) if len(agents) == len(free) else [agents[0]] * len(free)
        seats: dict[str, tuple[int, ...]] = dict.fromkeys(agents, ())
        for owner, seat in zip(owners, free, strict=True):
            seats[owner] = tuple(sorted((*seats[owner], (seat + shift) % count)))
        opponents: dict[int, Choose] = {}
        names: dict[int, str] = {}
        for given, opponent in self.opponents.items():
            seat = (given - 1 + shift) % count
            opponents[seat] = opponent.open(game, derive_seed("opponent", seat, seed))
            names[seat] = opponent.name
        for agent, player in task.seats_of_world.items():
            for seat in seats[agent]:
                opponents[seat] = opponent_named(player).open(game, derive_seed("opponent", seat, seed))
                names[seat] = player
        players = Players(seats, opponents, names, self.rotate)
        level = task.data.get("level")
        conduct = self._conduct(game)
        read = seats.get(self._reader, ())  # by a person
        own = dict.fromkeys(read, self._in_sentences._conduct(game)) if read else {}  # noqa: SLF001 - its own class
        for seat in range(1, count) if self.other_play else ():
            colours = Colours.drawn(game, derive_seed("other-play", seat, seed))
            own[seat] = replace(own.get(seat, conduct), colours=colours)
        return GameWorld(game, players, conduct, random.Random(chance), seed, level, own)

    @property
    def _in_sentences(self) -> OpenSpiel:
        """The game as a person reads it: in full, with a rule text of the user's own, and without thoughts to be marked."""
        rules = None if self.rules in RULES else self.rules
        return self.model_copy(
            update={"wording": "full", "rules": rules, "list_moves": True, "thinking": False}
        )

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return a listed move: the `demonstrator`'s or, without one, half the time any, else the one that a hash of the view prefers.

        The latter demonstrates only the form of a move, but a model that imitates it has to read the view.
        Raises EpisodeError where `list_moves` is off: the script knows no more than a player.
        """
        seen = messages[-1].content if messages else ""
        moves = read_listed(seen)
        if not moves:
            raise EpisodeError(
                f"The script of {self.game} reads the legal moves from what a player sees, and there are none. "
                "Set `environment.list_moves: true`, or remove `warmup`."
            )
        draw = random.Random(f"{seed}/{agent}")
        if self.demonstrator is not None:
            if draw.random() < self.demonstrator.slips:
                return draw.choice(moves)
            written = {open_words(move): move for move in moves}
            return written[advise(read_short(seen), list(written), draw, bold=False)]
        return draw.choice(
            moves if draw.random() < 0.5 else [moves[derive_seed("script", seen) % len(moves)]]
        )


# -------- One episode: chance and opponents move by themselves, agents by their words


@dataclass(frozen=True, slots=True)
class Rules:
    """How a game is shown, and what invalid moves cost."""

    wording: Wording
    view: View
    words: GameText
    """The views and moves of that wording."""
    list_moves: bool
    forfeit: bool
    """Whether an invalid move ends the game; a random legal one is made otherwise."""
    penalty: float
    step_rewards: bool
    head: str = ""
    """What stands before every view: the rules, in words."""
    move_in: Callable[[str], str | None] = str
    """A text → the part in which a move is looked for, None where there is none."""
    colours: Colours | None = None
    """What the seat calls Hanabi's colours; None takes OpenSpiel's names."""


def show(state: Any, seat: int, rules: Rules) -> str:
    """Return what the player in a seat may see of a state, and its legal moves when it is to move."""
    game = state.get_game()
    raw = (
        state.information_state_string(seat)
        if rules.view == "information"
        else state.observation_string(seat)
    )
    moves = ""
    if rules.list_moves and seat in _moving(state):
        names = _named_moves(state, seat, rules)
        moves = listed(list(map(rules.words.move, Colours.listed(names) if rules.colours else names)))
    view = rules.words.view(rules.colours.view(raw) if rules.colours else raw)
    if rules.wording != "full":
        line = " ".join(part for part in (f"{seat + 1}/{game.num_players()}", view, moves) if part)
        return "\n".join(part for part in (rules.head, line) if part)
    title = f"You are player {seat + 1} of {game.num_players()} in {game.get_type().long_name}."
    return "\n".join(part for part in (rules.head, title, view, moves and f"Legal moves: {moves}") if part)


def legal_moves(state: Any, seat: int, rules: Rules) -> list[str]:
    """Return the legal moves of a seat in the words of these rules, in OpenSpiel's order of actions."""
    return [rules.words.move(name) for name in _named_moves(state, seat, rules)]


def _named_moves(state: Any, seat: int, rules: Rules) -> list[str]:
    """Return the legal moves of a seat as OpenSpiel writes them, in its order of actions, colours by the seat's own names."""
    names = [state.action_to_string(seat, action) for action in state.legal_actions(seat)]
    return names if rules.colours is None else [rules.colours.move(name) for name in names]


def understand(state: Any, seat: int, text: str, rules: Rules) -> int | None:
    """Return the legal action that a text names, in the words of these rules or of OpenSpiel, else None."""
    said = rules.move_in(text)
    if said is None:
        return None
    legal = state.legal_actions(seat)
    names = [(rules.words.move(name), name) for name in _named_moves(state, seat, rules)]
    place = match(said, names)
    return None if place is None else int(legal[place])


def _moving(state: Any) -> tuple[int, ...]:
    """Return the seats that are to move: none at chance's turn and at the end, several where moves are simultaneous."""
    if state.is_terminal() or state.is_chance_node():
        return ()
    if not state.is_simultaneous_node():
        return (state.current_player(),)
    return tuple(each for each in range(state.num_players()) if state.legal_actions(each))


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


class GameWorld(KnowsMoves):
    """One game from its first move to its end."""

    def __init__(
        self,
        game: Any,
        players: Players,
        rules: Rules,
        chance: random.Random,
        seed: int,
        level: int | None = None,
        own: Mapping[int, Rules] | None = None,
    ) -> None:
        self._game = game
        self._tally = tally_of(game)
        self._level = level
        self.state = game.new_initial_state()
        """OpenSpiel's: everything, hidden things included."""
        self._players = players
        self._rules = rules
        self._own = own or {}
        self._chance = chance
        self._fallback = random.Random(f"{seed}/invalid")
        self._invalid: Counter[str] = Counter()
        self._made: list[str] = []
        self._forfeited: set[int] = set()
        self._acted: set[str] = set()
        self._paid = [0.0] * game.num_players()
        self._owed = dict.fromkeys(players.seats, 0.0)
        self._go_on()

    def observe(self, agent: str) -> str:
        """Return what the agent may see from the seat that it moves in now, else from its first one."""
        seats = self._players.seats[agent]
        seat = next((seat for seat in _moving(self.state) if seat in seats), seats[0])
        return show(self.state, seat, self.rules_of(seat))

    def rules_of(self, seat: int) -> Rules:
        """Return how a seat (from 0) is shown the game: as all are, by its own names of colours, or as a person reads it."""
        return self._own.get(seat, self._rules)

    def legal(self, agent: str) -> Sequence[str]:
        """Return the legal moves of the seat that the agent moves in now, in the words of the rules."""
        if agent not in self.movers():
            return ()
        seat = next(seat for seat in _moving(self.state) if seat in self._players.seats[agent])
        return legal_moves(self.state, seat, self._rules)

    def movers(self) -> tuple[str, ...]:
        """Return the agents to move; empty when the game is over."""
        if self._forfeited:
            return ()
        moving = [seat for seat in _moving(self.state) if seat not in self._players.opponents]
        return tuple(
            agent for agent, seats in self._players.seats.items() if not set(seats).isdisjoint(moving)
        )

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Make the moves that the texts name; EpisodeError unless exactly the movers moved.

        An agent that names no legal move is charged the penalty at once.
        """
        need_movers(actions, self.movers())
        charged: Counter[str] = Counter()
        joint: dict[int, int] = {}
        for seat in _moving(self.state):
            agent = next((name for name, seats in self._players.seats.items() if seat in seats), None)
            if agent is None or seat in self._players.opponents:
                joint[seat] = self._players.opponents[seat](self.state, seat)
                continue
            self._acted.add(agent)
            action = understand(self.state, seat, actions[agent], self.rules_of(seat))
            if action is None:
                charged[agent] += 1
                action = self._fallback.choice(self.state.legal_actions(seat))
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
            self._made.append(f"{seat + 1}: {plain_move(self.state.action_to_string(seat, action))}")
            self._tally.note(self.state, seat, action)
        if self.state.is_simultaneous_node():
            idle = 0  # what OpenSpiel takes for a player without a choice
            self.state.apply_actions([joint.get(seat, idle) for seat in range(self._game.num_players())])
        else:
            self.state.apply_action(next(iter(joint.values())))

    def _go_on(self) -> None:
        """Draw chance and let opponents move until an agent is to move or the game is over."""
        while not self.state.is_terminal():
            if self.state.is_chance_node():
                actions, chances = zip(*self.state.chance_outcomes(), strict=True)
                self.state.apply_action(self._chance.choices(actions, chances)[0])
            elif self.movers():
                return
            else:
                moving = [seat for seat in _moving(self.state) if seat in self._players.opponents]
                self._move({seat: self._players.opponents[seat](self.state, seat) for seat in moving})

    def _returns(self) -> list[float]:
        """Return what every seat has earned; see `OpenSpiel.invalid` for a forfeited game."""
        returns = [float(value) for value in self.state.returns()]
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
        for agent, seats in self._players.seats.items():
            self._owed[agent] += sum(returns[seat] - self._paid[seat] for seat in seats) / len(seats)
        self._paid = returns

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
                **self._measured(returns, together=together),
            },
            truncated=not self._forfeited and not self.state.is_terminal(),
            roles={
                agent: "+".join(f"seat_{seat + 1}" for seat in seats)
                for agent, seats in self._players.seats.items()
            }
            if self._players.drawn
            else {},
        )

    def _measured(self, returns: Sequence[float], *, together: bool) -> Mapping[str, Json]:
        """Return what this game measures, each agent's part as the sum or, for shares, the mean of its seats'."""
        seats = self._players.seats
        found: dict[str, Json] = {} if self._level is None else {"level": self._level}
        found["lost_by_form"] = {
            agent: float(any(seat in self._forfeited for seat in own)) for agent, own in seats.items()
        }
        if not together and len(returns) > 1 and (self._forfeited or self.state.is_terminal()):
            best = max(returns)
            alone = returns.count(best) == 1
            found["won"] = {
                agent: float(alone and any(returns[seat] == best for seat in own))
                for agent, own in seats.items()
            }
            found["draw"] = float(min(returns) == best)
        game, by_seat = self._tally.found(self.state)
        found |= game
        for name, each in by_seat.items():
            for agent, own in seats.items():
                known = [each[seat] for seat in own if seat in each]
                if name in self._tally.shares:
                    value = sum(known) / len(known) if known else None
                else:
                    value = float(sum(known))
                if value is not None:
                    found.setdefault(name, {})[agent] = value
        return found

    async def close(self) -> None:
        """Hold nothing."""
