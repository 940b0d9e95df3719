"""OpenSpiel games (arXiv:1908.09453) as environments: sequential or simultaneous, with or without chance, for any number of players."""

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
    HasPlayers,
    KnowsMoves,
    ListsMoves,
    Outcome,
    Progressive,
    Reporting,
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
    """A variant of the game, usually an easier variant, for the first tasks of a run."""

    tasks: int = Field(ge=1)
    """The number of tasks with these parameters. Each training step has `training.tasks_per_step` tasks."""
    parameters: Mapping[str, Value]
    """Parameters of the game in this level, which override `environment.parameters`."""


class OpenSpiel(GameSettings, Enumerable, ListsMoves, Reporting, HasPlayers, Progressive, Scripted):
    """A game of OpenSpiel. Agents play, in order, the players that have no entry in `opponents`.

    The team has either one agent for each of these players or a single agent for all of them. A player observes the string of its
    information that OpenSpiel provides, and writes a legal move. If the player writes several lines, the last line is the move.
    """

    name: Literal["openspiel"] = "openspiel"
    game: str = "kuhn_poker"
    """The name of the game in OpenSpiel, with or without parameters in brackets, or one of the presets `hanabi_very_small`,
    `hanabi_small` and `hanabi_full`."""
    parameters: Mapping[str, Value] = Field(default={})
    """Parameters of the game, such as `players: 3`."""
    curriculum: tuple[Level, ...] = ()
    """Levels with other parameters that precede the game itself, in order. The test split always uses the game itself."""
    wording: Wording = "full"
    """The language of observations. `full`: sentences. `short`: one short line, for very small models. `columns`: one line for Hanabi
    in which every fact has a fixed position in all levels of a curriculum; very small models learn to read this format much faster."""
    view: View | None = None
    """What a player observes, which is `information` (everything that the player has observed so far) or `observation` (the current
    state). If null, `information` is used for games with hidden information that provide it, and `observation` otherwise."""
    list_moves: bool = True
    """Whether the observation of a player that may move lists the legal moves."""
    invalid: Literal["random", "forfeit"] = "random"
    """What happens after an invalid move: a random legal move replaces it (`random`), or the player loses the game (`forfeit`). A
    player that forfeits receives the minimum utility of the game. In a constant-sum game, the other players share the rest of the
    sum. In a common-payoff game, all players receive the minimum utility. In any other game, the other players keep their returns."""
    penalty: FiniteFloat | None = Field(default=None, le=0.0)
    """The reward for each invalid move. If null, the reward is 0 with `forfeit`; with `random`, the reward is the minimum utility
    minus the maximum utility, so that even a winner ends with at most the minimum utility."""
    step_rewards: bool | None = None
    """Whether rewards are given immediately after each move. If false, all rewards are given at the end. If null, rewards are given
    immediately in games for which OpenSpiel declares rewards during play, such as Hanabi, and at the end in all other games."""
    rotate: bool = False
    """Whether the assignment of agents to players is rotated by a random number of positions in each episode."""
    other_play: bool = False
    """Whether the colours of Hanabi are renamed at random in each episode for every player except the first. If colours are renamed,
    players cannot use a colour as a code (other-play, arXiv:2003.02979)."""
    chance: Literal["episode", "task"] = "episode"
    """What determines the seed of chance events. With `task`, all episodes of a group have the same cards as long as their moves are
    the same."""
    opponents: Mapping[int, Opponent] = Field(default={})
    """Mapping from a player (numbered from 1) to the opponent that replaces the agent, which is `random`, `scripted`, `hanabi`,
    `mcts`, `cfr` or `nash`."""
    demonstrator: Demonstrator | None = None
    """The expert that writes demonstrations, which requires Hanabi in one line. If null, demonstrations show only the format of a
    move."""

    _reader: str = PrivateAttr(default="")
    """The name of the agent that is a human."""

    def read_by(self, person: str) -> OpenSpiel:
        """Return a copy of the game in which the agent `person` is a human, who reads full sentences, the rules and the legal moves."""
        copy = self.model_copy()
        copy._reader = person  # noqa: SLF001 - its own class
        return copy

    @property
    def loaded(self) -> Any:
        """The game object of OpenSpiel."""
        return load_game(self.game, self.parameters)

    @property
    def conduct(self) -> Rules:
        """The rules of an episode: how observations are written and how invalid moves are handled."""
        return self._conduct(self.loaded)

    def _conduct(self, game: Any) -> Rules:
        span = float(game.max_utility() - game.min_utility())
        forfeit = self.invalid == "forfeit"
        penalty = self.penalty if self.penalty is not None else 0.0 if forfeit else -span
        kind, types = game.get_type(), spiel().GameType
        steps = kind.reward_model == types.RewardModel.REWARDS
        # With perfect information, the current observation is complete.
        open_game = kind.information == types.Information.PERFECT_INFORMATION
        seen_now = open_game and kind.provides_observation_string
        unset = "full" if self.wording == "full" else "none"
        view = self.view or (
            "information" if kind.provides_information_state_string and not seen_now else "observation"
        )
        # Columns have room for the game and all of its levels, so that each position has the same meaning in all of them.
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
        """Whether the rewards of the agents have the same sum in every outcome."""
        utility, kinds = self.loaded.get_type().utility, spiel().GameType.Utility
        return not self.opponents and utility in {kinds.ZERO_SUM, kinds.CONSTANT_SUM}

    @property
    def reward_range(self) -> tuple[float, float]:
        """The range of the game's utilities, with the minimum lowered by the penalty for as many invalid moves as a game can have.

        The maximum includes the share of a player if others forfeit.
        """
        ranges = []
        for game in (self.loaded, *self._levels()):
            rules = self._conduct(game)
            most = 1 if rules.forfeit else game.max_game_length()
            low, high = float(game.min_utility()) + rules.penalty * most, float(game.max_utility())
            if rules.forfeit and game.num_players() > 1 and game.utility_sum() is not None:
                # All but one can forfeit at the same moment if moves are simultaneous.
                at_once = game.get_type().dynamics == spiel().GameType.Dynamics.SIMULTANEOUS
                high = max(high, _share_of_others(game, game.num_players() - 1 if at_once else 1))
            ranges.append((low, high))
        return min(low for low, _ in ranges), max(high for _, high in ranges)

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the train and test games. The splits differ only in the seeds of chance events."""
        return {
            "train": f"games of {self.game}, dealt from seeds",
            "test": f"games of {self.game}, dealt from different seeds",
        }

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index. A task is one episode of the game itself."""
        return Task(f"{split}-{index}", "", {"level": len(self.curriculum) + 1} if self.curriculum else {})

    def task_after(self, played: int, index: int) -> Task:
        """Return a task for one episode of the level that the curriculum reaches after `played` tasks."""
        for number, level in enumerate(self.curriculum, start=1):
            if played < level.tasks:
                return Task(f"train-{index}", "", {"level": number, "parameters": dict(level.parameters)})
            played -= level.tasks
        return self.task("train", index)

    def _levels(self) -> list[Any]:
        """Return the games of all levels of the curriculum. Raises ConfigError if a level cannot be loaded."""
        games = []
        for number, level in enumerate(self.curriculum):
            try:
                games.append(load_game(self.game, {**self.parameters, **level.parameters}))
            except ConfigError as error:
                raise ConfigError(f"environment.curriculum.{number}: {error}") from error
        return games

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if the game is unknown, or if the agents, the opponents or the curriculum do not fit the game."""
        game = self.loaded
        players = game.num_players()
        for number, easier in enumerate(self._levels()):
            if easier.num_players() != players:
                raise ConfigError(
                    f"environment.curriculum.{number} is a game for {easier.num_players()} players, but {self.game} has {players}. "
                    "Remove `players` from its parameters."
                )
        kind = game.get_type()
        if self.view == "information" and not kind.provides_information_state_string:
            raise ConfigError(f"{self.game} has no information states. Set `environment.view: observation`.")
        if self.view == "observation" and not kind.provides_observation_string:
            raise ConfigError(f"{self.game} has no observations. Set `environment.view: information`.")
        if self.wording == "columns" and kind.short_name != "hanabi":
            raise ConfigError(
                f"`environment.wording: columns` supports only Hanabi, but the game is {self.game}. Set `environment.wording: short`."
            )
        if self.other_play and kind.short_name != "hanabi":
            raise ConfigError(
                f"`environment.other_play` supports only Hanabi, but the game is {self.game}. Remove the setting."
            )
        if self.demonstrator is not None:
            self.demonstrator.check(game)
            if self.wording == "full" or self.conduct.view != "observation" or not self.list_moves:
                raise ConfigError(
                    "`environment.demonstrator` needs observations in one line. Set `environment.wording: short` or `columns`, "
                    "`environment.view: observation` and `environment.list_moves: true`."
                )
        for player, opponent in self.opponents.items():
            if not 1 <= player <= players:
                raise ConfigError(
                    f"environment.opponents names player {player}, but {self.game} has only players 1 to {players}."
                )
            opponent.check(game)
        free = players - len(self.opponents)
        if len(agents) not in {1, free} or not free:
            raise ConfigError(
                f"{self.game} has {players} players, of which {len(self.opponents)} are in environment.opponents, but the "
                f"team has {len(agents)} agents ({', '.join(agents)}). Set `team.agents` to {free or 1} (or to 1 agent "
                "for all players), or change `environment.opponents`."
            )
        if len(agents) == free:
            return
        agent = agents[0]
        if kind.dynamics == spiel().GameType.Dynamics.SIMULTANEOUS:
            raise ConfigError(
                f"In {self.game} players move simultaneously, but the only agent, '{agent}', can make only one move at a time. "
                "Set `team.agents` to one agent for each player, with `team.sharing: shared`."
            )
        if self.constant_sum:
            raise ConfigError(
                f"{self.game} is a constant-sum game, so an agent that plays all players ('{agent}') always receives the same reward. "
                "Set `team.agents` to one agent for each player, with `team.sharing: shared`, or set `environment.opponents`."
            )

    def check_player(self, player: str) -> None:
        """Raise ConfigError if an opponent is unknown or cannot play this game."""
        opponent_named(player).check(self.loaded)

    @property
    def players(self) -> int:
        """The number of players, including opponents."""
        return int(self.loaded.num_players())

    def decisions(self) -> Iterator[Decision]:
        """Yield every information state once, with its observation. Raises ConfigError if the states cannot be listed."""
        rules, seen, game = self.conduct, set(), self.loaded
        if not game.get_type().provides_information_state_string:
            raise ConfigError(
                f"OpenSpiel has no information states for {self.game}, so it has no exact values. Use a game such as kuhn_poker, "
                "leduc_poker or tiny_hanabi."
            )
        tree_of(str(game))  # raises ConfigError if the game is too large
        for state in walk(game, MOST_HISTORIES):
            player = state.current_player()
            key = state.information_state_string(player)
            if key in seen:
                continue
            seen.add(key)
            before, past = [], in_turns(game).new_initial_state()
            for action in state.history():
                if past.current_player() == player:
                    before.append((past.information_state_string(player), action))
                past.apply_action(action)
            seen_as = as_played(game, state)
            actions, moves = tuple(state.legal_actions()), tuple(legal_moves(seen_as, player, rules))
            yield Decision(key, player, show(seen_as, player, rules), actions, moves, tuple(before))

    def exact_values(self, policy: Mapping[str, Mapping[int, float]]) -> tuple[tuple[float, ...], float]:
        """Return the expected return of each player and the NashConv of a policy, computed by enumerating the game."""
        tree = self._tree
        returns = tree.values(policy)
        best = [tree.best_response(policy, player)[0] for player in range(tree.players)]
        return returns, sum(max(0.0, most - own) for most, own in zip(best, returns, strict=True))

    def best_response(
        self, policy: Mapping[str, Mapping[int, float]], player: int
    ) -> tuple[float, Mapping[str, int]]:
        """Return the value of a player's best response to the policies of the other players, and its move in each information state.

        The argument `player` is numbered from 0.
        """
        return self._tree.best_response(policy, player)

    def visits(self, policy: Mapping[str, Mapping[int, float]]) -> Mapping[str, float]:
        """Return the expected number of visits to each information state per game."""
        return self._tree.visits(policy)

    @property
    def _tree(self) -> GameTree:
        return tree_of(str(self.loaded))

    def start(self, task: Task, agents: Sequence[str], seed: int) -> GameState:
        """Start a game with these agents and return its state."""
        self.check(agents)
        chance = derive_seed("chance", task.id if self.chance == "task" else seed)
        game = load_game(self.game, {**self.parameters, **task.data.get("parameters", {})}, chance)
        count = game.num_players()
        shift = derive_seed("seats", seed) % count if self.rotate else 0
        free = [player for player in range(count) if player + 1 not in self.opponents]
        owners = list(agents) if len(agents) == len(free) else [agents[0]] * len(free)
        owned: dict[str, tuple[int, ...]] = dict.fromkeys(agents, ())
        for owner, player in zip(owners, free, strict=True):
            owned[owner] = tuple(sorted((*owned[owner], (player + shift) % count)))
        opponents: dict[int, Choose] = {}
        names: dict[int, str] = {}
        for given, opponent in self.opponents.items():
            player = (given - 1 + shift) % count
            opponents[player] = opponent.open(game, derive_seed("opponent", player, seed))
            names[player] = opponent.name
        for agent, opponent_name in task.environment_players.items():
            for player in owned[agent]:
                opponents[player] = opponent_named(opponent_name).open(
                    game, derive_seed("opponent", player, seed)
                )
                names[player] = opponent_name
        players = Players(owned, opponents, names, self.rotate)
        level = task.data.get("level")
        conduct = self._conduct(game)
        own: dict[int, Rules] = {}
        if human := owned.get(self._reader, ()):
            # Without hidden information a person may see all moves; with hidden information, the observations show what the game reveals.
            seen = game.get_type().information.name == "PERFECT_INFORMATION"
            own = dict.fromkeys(human, replace(self._in_sentences._conduct(game), last_moves=seen))  # noqa: SLF001 - its own class
        for player in range(1, count) if self.other_play else ():
            colours = Colours.drawn(game, derive_seed("other-play", player, seed))
            own[player] = replace(own.get(player, conduct), colours=colours)
        return GameState(game, players, conduct, random.Random(chance), seed, level, own)

    @property
    def _in_sentences(self) -> OpenSpiel:
        """The settings for a human: full sentences, with the rules and the legal moves, and without `<think>` tags."""
        rules = None if self.rules in RULES else self.rules
        return self.model_copy(
            update={"wording": "full", "rules": rules, "list_moves": True, "thinking": False}
        )

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return one of the listed legal moves as a demonstration.

        If there is a `demonstrator`, the move is usually chosen by the demonstrator. Without a `demonstrator`, the move is either a
        random move or a move selected by a hash of the observation, with equal probability. A move selected by a hash demonstrates
        only the format of a move, but a model that imitates it must read the observation. Raises EpisodeError if the observation
        lists no moves (`list_moves`), because the script knows only the observation.
        """
        seen = messages[-1].content if messages else ""
        moves = read_listed(seen)
        if not moves:
            raise EpisodeError(
                f"The script of {self.game} needs a list of legal moves. Set `environment.list_moves: true`, or remove `warmup`."
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


# -------- One episode: chance and opponents move automatically, and agents move by writing texts


@dataclass(frozen=True, slots=True)
class Rules:
    """How observations are written, and how invalid moves are handled."""

    wording: Wording
    view: View
    words: GameText
    """Functions that convert observations and moves to this wording."""
    list_moves: bool
    forfeit: bool
    """Whether an invalid move ends the game. If false, a random legal move replaces an invalid move."""
    penalty: float
    step_rewards: bool
    head: str = ""
    """The rules of the game, which precede every observation."""
    move_in: Callable[[str], str | None] = str
    """A function that takes a text and returns the part after the player's thinking, or None if a `<think>` tag is not closed."""
    colours: Colours | None = None
    """The player's names for the colours of Hanabi, or None to use the names of OpenSpiel."""
    last_moves: bool = False
    """Whether the last move of each player is shown before the observation."""


def show(state: Any, player: int, rules: Rules) -> str:
    """Return a player's observation of a state. If the player may move, the observation can list its legal moves."""
    game = state.get_game()
    raw = (
        state.information_state_string(player)
        if rules.view == "information"
        else state.observation_string(player)
    )
    moves = ""
    if rules.list_moves and player in _moving(state):
        names = _named_moves(state, player, rules)
        moves = listed(list(map(rules.words.move, Colours.listed(names) if rules.colours else names)))
    view = rules.words.view(rules.colours.view(raw) if rules.colours else raw)
    if rules.wording != "full":
        line = " ".join(part for part in (f"{player + 1}/{game.num_players()}", view, moves) if part)
        return "\n".join(part for part in (rules.head, line) if part)
    title = f"You are player {player + 1} of {game.num_players()} in {game.get_type().long_name}."
    return "\n".join(part for part in (rules.head, title, view, moves and f"Legal moves: {moves}") if part)


def legal_moves(state: Any, player: int, rules: Rules) -> list[str]:
    """Return the legal moves of a player as strings, in the order of OpenSpiel's actions."""
    return [rules.words.move(name) for name in _named_moves(state, player, rules)]


def _named_moves(state: Any, player: int, rules: Rules) -> list[str]:
    """Return the legal moves of a player in OpenSpiel's notation, but with the player's names for colours."""
    names = [state.action_to_string(player, action) for action in state.legal_actions(player)]
    return names if rules.colours is None else [rules.colours.move(name) for name in names]


def understand(state: Any, player: int, text: str, rules: Rules) -> int | None:
    """Return the legal action that a text names, or None if the text names no legal action.

    The move may be written in the wording of `rules` or in OpenSpiel's notation.
    """
    written = rules.move_in(text)
    if written is None:
        return None
    legal = state.legal_actions(player)
    names = [(rules.words.move(name), name) for name in _named_moves(state, player, rules)]
    place = match(written, names)
    return None if place is None else int(legal[place])


def _moving(state: Any) -> tuple[int, ...]:
    """Return the players that move in a state.

    The result is empty at a chance event and at the end of the game, and contains several players if moves are simultaneous.
    """
    if state.is_terminal() or state.is_chance_node():
        return ()
    if not state.is_simultaneous_node():
        return (state.current_player(),)
    return tuple(each for each in range(state.num_players()) if state.legal_actions(each))


def _share_of_others(game: Any, lost: int) -> float:
    """Return the return of each other player of a constant-sum game if `lost` players forfeit."""
    return float((game.utility_sum() - lost * game.min_utility()) / (game.num_players() - lost))


@dataclass(slots=True)
class Players:
    """The assignment of agents and opponents to the players of a game."""

    owned: Mapping[str, tuple[int, ...]]
    """Mapping from an agent to the players (numbered from 0) that it plays."""
    opponents: Mapping[int, Choose]
    names: Mapping[int, str] = field(default_factory=dict)
    """Mapping from a player to the name of the opponent that plays it."""
    drawn: bool = False
    """Whether the assignment is random in each episode."""


class GameState(KnowsMoves):
    """The state of one episode of a game."""

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
        """The state object of OpenSpiel, which includes hidden information."""
        self._players = players
        self._rules = rules
        self._own = own or {}
        self._chance = chance
        self._fallback = random.Random(f"{seed}/invalid")
        self._invalid: Counter[str] = Counter()
        self._moves: list[str] = []
        self._forfeited: set[int] = set()
        self._acted: set[str] = set()
        self._paid = [0.0] * game.num_players()
        self._pending = dict.fromkeys(players.owned, 0.0)
        self._advance()

    def observe(self, agent: str) -> str:
        """Return the observation of the player for which the agent may move. If the agent may not move, use the agent's first player."""
        owned = self._players.owned[agent]
        player = next((player for player in _moving(self.state) if player in owned), owned[0])
        seen = show(self.state, player, self.rules_of(player))
        if self.rules_of(player).last_moves and self._moves:
            return f"Last moves: {', '.join(self._moves[-self._game.num_players() :])}\n{seen}"
        return seen

    def rules_of(self, player: int) -> Rules:
        """Return the rules for a player (numbered from 0). The rules can differ between players in the names of colours and for a human."""
        return self._own.get(player, self._rules)

    def legal(self, agent: str) -> Sequence[str]:
        """Return the legal moves of the player for which the agent may move, or an empty tuple if the agent may not move."""
        if agent not in self.movers():
            return ()
        player = next(player for player in _moving(self.state) if player in self._players.owned[agent])
        return legal_moves(self.state, player, self._rules)

    def movers(self) -> tuple[str, ...]:
        """Return the agents that may move, or an empty tuple after the end of the game."""
        if self._forfeited:
            return ()
        moving = [player for player in _moving(self.state) if player not in self._players.opponents]
        return tuple(
            agent for agent, owned in self._players.owned.items() if not set(owned).isdisjoint(moving)
        )

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Make the moves that the texts name, and return the rewards.

        Raises EpisodeError if the agents that act are not exactly the movers.

        The penalty for an invalid move is given immediately.
        """
        need_movers(actions, self.movers())
        charged: Counter[str] = Counter()
        joint: dict[int, int] = {}
        for player in _moving(self.state):
            agent = next((name for name, owned in self._players.owned.items() if player in owned), None)
            if agent is None or player in self._players.opponents:
                joint[player] = self._players.opponents[player](self.state, player)
                continue
            self._acted.add(agent)
            action = understand(self.state, player, actions[agent], self.rules_of(player))
            if action is None:
                charged[agent] += 1
                action = self._fallback.choice(self.state.legal_actions(player))
                if self._rules.forfeit:
                    self._forfeited.add(player)
            joint[player] = int(action)
        self._invalid.update(charged)
        if not self._forfeited:
            self._move(joint)
            self._advance()
        rewards = {agent: self._rules.penalty * times for agent, times in charged.items()}
        if self._rules.step_rewards:
            self._add_rewards()
            for agent in sorted(self._acted):
                rewards[agent] = rewards.get(agent, 0.0) + self._pending[agent]
                self._pending[agent] = 0.0
        return rewards

    def _move(self, joint: Mapping[int, int]) -> None:
        for player, action in joint.items():
            self._moves.append(f"{player + 1}: {plain_move(self.state.action_to_string(player, action))}")
            self._tally.note(self.state, player, action)
        if self.state.is_simultaneous_node():
            # OpenSpiel expects 0 for a player without a choice.
            self.state.apply_actions([joint.get(player, 0) for player in range(self._game.num_players())])
        else:
            self.state.apply_action(next(iter(joint.values())))

    def _advance(self) -> None:
        """Sample chance events and make the moves of opponents until an agent may move or the game ends."""
        while not self.state.is_terminal():
            if self.state.is_chance_node():
                actions, chances = zip(*self.state.chance_outcomes(), strict=True)
                self.state.apply_action(self._chance.choices(actions, chances)[0])
            elif self.movers():
                return
            else:
                moving = [player for player in _moving(self.state) if player in self._players.opponents]
                self._move({player: self._players.opponents[player](self.state, player) for player in moving})

    def _returns(self) -> list[float]:
        """Return the total reward of each player. The setting `OpenSpiel.invalid` describes the rewards of forfeited games."""
        returns = [float(value) for value in self.state.returns()]
        lost, count = len(self._forfeited), self._game.num_players()
        if not lost:
            return returns
        least = float(self._game.min_utility())
        if lost == count or self._game.get_type().utility.name == "IDENTICAL":
            return [least] * count
        if self._game.utility_sum() is not None:
            returns = [_share_of_others(self._game, lost)] * count
        return [least if player in self._forfeited else returns[player] for player in range(count)]

    def _add_rewards(self) -> None:
        """Add new rewards of the players to the pending rewards of their agents. Agents receive pending rewards with their next move."""
        returns = self._returns()
        for agent, owned in self._players.owned.items():
            self._pending[agent] += sum(returns[player] - self._paid[player] for player in owned) / len(owned)
        self._paid = returns

    def outcome(self) -> Outcome:
        """Return the outcome with the rewards that have not been given yet.

        In a common-payoff game, `success` is the score divided by the maximum score.
        """
        returns = self._returns()
        self._add_rewards()
        together = self._game.get_type().utility.name == "IDENTICAL"
        greatest = self._game.max_utility()
        return Outcome(
            rewards=dict(self._pending),
            success=min(1.0, max(0.0, returns[0] / greatest)) if together and greatest > 0 else None,
            info={
                "moves": list(self._moves),
                "returns": returns,
                "seats": {
                    agent: [player + 1 for player in owned] for agent, owned in self._players.owned.items()
                },
                "opponents": {str(player + 1): name for player, name in sorted(self._players.names.items())},
                "invalid": {agent: self._invalid[agent] for agent in self._players.owned},
                "forfeited": [player + 1 for player in sorted(self._forfeited)],
                **self._measured(returns, together=together),
            },
            truncated=not self._forfeited and not self.state.is_terminal(),
            roles={
                agent: "+".join(f"seat_{player + 1}" for player in owned)
                for agent, owned in self._players.owned.items()
            }
            if self._players.drawn
            else {},
        )

    def _measured(self, returns: Sequence[float], *, together: bool) -> Mapping[str, Json]:
        """Return the measurements of this game for `info`.

        The value of an agent is the sum over its players or, for fractions, the mean over its players.
        """
        owned = self._players.owned
        found: dict[str, Json] = {} if self._level is None else {"level": self._level}
        found["lost_by_form"] = {
            agent: float(any(player in self._forfeited for player in own)) for agent, own in owned.items()
        }
        if not together and len(returns) > 1 and (self._forfeited or self.state.is_terminal()):
            best = max(returns)
            alone = returns.count(best) == 1
            found["won"] = {
                agent: float(alone and any(returns[player] == best for player in own))
                for agent, own in owned.items()
            }
            found["draw"] = float(min(returns) == best)
        game, by_seat = self._tally.found(self.state)
        found |= game
        for name, each in by_seat.items():
            for agent, own in owned.items():
                known = [each[player] for player in own if player in each]
                if name in self._tally.shares:
                    value = sum(known) / len(known) if known else None
                else:
                    value = float(sum(known))
                if value is not None:
                    found.setdefault(name, {})[agent] = value
        return found

    async def close(self) -> None:
        """Do nothing, because the game holds no resources."""
