"""Any game of OpenSpiel (1908.09453): sequential or simultaneous, with chance, for any number of players."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, FiniteFloat

from kapelle.environment import Decision, Enumerable, Opposed, Scripted
from kapelle.environments.base import GameSettings
from kapelle.environments.openspiel.games import Value, full_rules, load_game, short_rules, spiel, walk
from kapelle.environments.openspiel.text import View, Wording, read_listed
from kapelle.environments.openspiel.world import (
    GameWorld,
    Opponent,
    Players,
    Rules,
    count_decisions,
    legal_moves,
    show,
)
from kapelle.errors import ConfigError, EpisodeError
from kapelle.runtime.randomness import derive_seed
from kapelle.types import Message, Split, Task


class OpenSpiel(GameSettings, Enumerable, Opposed, Scripted):
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
    wording: Wording = "full"
    """`full`: sentences; `short`: one line of few bytes, for tiny models."""
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
    chance: Literal["episode", "task"] = "episode"
    """Whose seed draws chance: with `task` all episodes of a group are dealt the same cards as long as they go
    the same way."""
    opponents: Mapping[int, Opponent] = Field(default={})
    """Seat (from 1) → who plays it in place of an agent: `random`, `scripted`, `mcts`, `cfr`, `nash`."""

    @property
    def loaded(self) -> Any:
        """OpenSpiel's game."""
        return load_game(self.game, self.parameters)

    @property
    def conduct(self) -> Rules:
        """How the game is shown and invalid moves are treated."""
        game = self.loaded
        span = float(game.max_utility() - game.min_utility())
        forfeit = self.invalid == "forfeit"
        penalty = self.penalty if self.penalty is not None else 0.0 if forfeit else -span
        steps = game.get_type().reward_model == spiel().GameType.RewardModel.REWARDS
        unset = "full" if self.wording == "full" else "none"
        return Rules(
            self.wording,
            self.view or _best_view(game),
            self.list_moves,
            forfeit,
            penalty,
            steps if self.step_rewards is None else self.step_rewards,
            self.head(full_rules(game), short_rules(game), unset),
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
        game, rules = self.loaded, self.conduct
        most = 1 if rules.forfeit else game.max_game_length()
        return (float(game.min_utility()) + rules.penalty * most, float(game.max_utility()))

    @property
    def sources(self) -> Mapping[Split, str]:
        """The game itself; only its chance differs between the splits."""
        return {
            "train": f"games of {self.game}, dealt from seeds",
            "test": f"games of {self.game}, dealt from other seeds",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError for an unknown game, and for agents or opponents that do not fit it."""
        game = self.loaded
        players = game.num_players()
        kind = game.get_type()
        if self.view == "information" and not kind.provides_information_state_string:
            raise ConfigError(f"{self.game} has no information states. Set `environment.view: observation`.")
        if self.view == "observation" and not kind.provides_observation_string:
            raise ConfigError(f"{self.game} has no observations. Set `environment.view: information`.")
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
        if len(agents) < free:
            self._check_alone(agents[0], game)

    def _check_alone(self, agent: str, game: Any) -> None:
        kind, types = game.get_type(), spiel().GameType
        if kind.dynamics == types.Dynamics.SIMULTANEOUS:
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
        count_decisions(str(game))  # raises for a game that is too large before any of it is shown
        for state in walk(game):
            seat = state.current_player()
            key = state.information_state_string(seat)
            if key in seen:
                continue
            seen.add(key)
            before, past = [], game.new_initial_state()
            for action in state.history():
                if past.current_player() == seat:
                    before.append((past.information_state_string(seat), action))
                past.apply_action(action)
            actions, moves = tuple(state.legal_actions()), tuple(legal_moves(state, seat, rules))
            yield Decision(key, seat, show(state, seat, rules), actions, moves, tuple(before))

    def check_moves(self) -> None:
        """Raise ConfigError where players think before they move."""
        if self.thinking:
            raise ConfigError(
                "What a policy plays after thinking has no exact probability: it is a sum over all thoughts. Set "
                "`environment.thinking: false`."
            )

    def exact_values(self, policy: Mapping[str, Mapping[int, float]]) -> tuple[tuple[float, ...], float]:
        """Return expected returns and NashConv of a policy in all seats, by enumerating the game."""
        game = self.loaded
        table = spiel().TabularPolicy({key: list(chances.items()) for key, chances in policy.items()})
        everything = -1
        returns = spiel().expected_returns(game.new_initial_state(), table, everything, True)
        return tuple(map(float, returns)), max(0.0, float(spiel().nash_conv(game, table)))

    def start(self, task: Task, agents: Sequence[str], seed: int) -> GameWorld:
        """Open one match for these agents."""
        self.check(agents)
        chance = derive_seed("chance", task.id if self.chance == "task" else seed)
        game = load_game(self.game, self.parameters, chance)
        return GameWorld(game, self._players(agents, seed), self.conduct, random.Random(chance), seed)

    def _players(self, agents: Sequence[str], seed: int) -> Players:
        count = self.loaded.num_players()
        shift = derive_seed("seats", seed) % count if self.rotate else 0
        free = [seat for seat in range(count) if seat + 1 not in self.opponents]
        owners = list(agents) if len(agents) == len(free) else [agents[0]] * len(free)
        seats: dict[str, tuple[int, ...]] = dict.fromkeys(agents, ())
        for owner, seat in zip(owners, free, strict=True):
            seats[owner] = tuple(sorted((*seats[owner], (seat + shift) % count)))
        moved = {(seat - 1 + shift) % count: opponent for seat, opponent in self.opponents.items()}
        return Players(
            seats,
            {
                seat: each.open(self.loaded, derive_seed("opponent", seat, seed))
                for seat, each in moved.items()
            },
            {seat: each.name for seat, each in moved.items()},
            self.rotate,
        )

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return a listed move: half the time any, else the one that a hash of the view prefers.

        It demonstrates only the form of a move, but a model that imitates it has to read the view.
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
        return draw.choice(
            moves if draw.random() < 0.5 else [moves[derive_seed("script", seen) % len(moves)]]
        )


def _best_view(game: Any) -> View:
    kind = game.get_type()
    open_game = kind.information == spiel().GameType.Information.PERFECT_INFORMATION
    if kind.provides_information_state_string and not (open_game and kind.provides_observation_string):
        return "information"
    return "observation"
