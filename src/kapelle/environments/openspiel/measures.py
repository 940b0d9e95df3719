"""Measurements of games in addition to their results, such as the moves of players and their knowledge at each move.

`GameState` counts every move before it is made, including the moves of opponents, and reports the counts in `Outcome.info`: as a
number for the game, and as a mapping for its agents. Training and evaluations log each count as the metric `info/<name>` or
`info/<name>/<agent>`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from kapelle.environments.openspiel.hanabi import read_table

Found = tuple[Mapping[str, float], Mapping[str, Mapping[int, float]]]
"""The measurements of a game, by name, and the measurements of each player (numbered from 0), by name."""


class GameTally(Protocol):
    """A protocol for objects that measure one game."""

    shares: frozenset[str]
    """The names of measurements that are averaged over the players of an agent. All other measurements are summed."""

    def note(self, state: Any, player: int, action: int) -> None:
        """Record a move before it is made."""
        ...

    def found(self, state: Any) -> Found:
        """Return the measurements of the game in its current state."""
        ...


def tally_of(game: Any) -> GameTally:
    """Return an object that computes the measurements of a game."""
    match game.get_type().short_name:
        case "hanabi":
            return HanabiTally()
        case "kuhn_poker" | "leduc_poker":
            return PokerTally()
        case _:
            return MoveTally()


class MoveTally:
    """Counts the moves of any game."""

    shares: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._moves = 0

    def note(self, state: Any, player: int, action: int) -> None:
        """Record a move. See `GameTally`."""
        self._moves += 1

    def found(self, state: Any) -> Found:
        """Return the number of moves, including the moves of opponents."""
        return {"made": float(self._moves)}, {}


class PokerTally:
    """Measures Kuhn poker and Leduc poker: the pot, the bet of each player, and the number of times that each player raised or folded."""

    shares: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._moves = 0
        self._bets: dict[int, float] = {}
        self._raised: Counter[int] = Counter()
        self._folded: Counter[int] = Counter()

    def note(self, state: Any, player: int, action: int) -> None:
        """Record a move. See `GameTally`."""
        self._moves += 1
        bets = self._antes(state)
        highest = max(bets.values())
        match state.action_to_string(player, action), bets[player] < highest:
            case "Raise", _:
                first = "[Round 1]" in state.information_state_string(player)
                self._raised[player] += 1
                bets[player] = highest + (
                    2.0 if first else 4.0
                )  # how much a raise adds in each round in OpenSpiel
            case "Bet", False:
                self._raised[player] += 1
                bets[player] += 1.0
            case ("Call", _) | ("Bet", True):
                bets[player] = highest
            case ("Fold", _) | ("Pass", True):
                self._folded[player] += 1

    def found(self, state: Any) -> Found:
        """Return the pot and the bet of each player in chips, and the counts of moves, raises and folds."""
        bets = self._antes(state)
        game = {"made": float(self._moves), "pot": sum(bets.values())}
        return game, {"bet": bets, "raised": self._raised, "folded": self._folded}

    def _antes(self, state: Any) -> dict[int, float]:
        self._bets = self._bets or dict.fromkeys(range(state.num_players()), 1.0)
        return self._bets


class HanabiTally:
    """Measures Hanabi: the stacks, the remaining lives and hints, and the moves and knowledge of each player."""

    shares = frozenset({"knowledge"})

    def __init__(self) -> None:
        self._did: dict[str, Counter[int]] = {
            name: Counter() for name in ("played", "fitted", "misplayed", "known", "discarded", "hinted")
        }
        self._knowledge: dict[int, list[float]] = {}

    def note(self, state: Any, player: int, action: int) -> None:
        """Record a move. See `GameTally`."""
        written = state.action_to_string(player, action).strip("()").split()
        table = read_table(state.observation_string(player))
        own = table.cards(0)
        self._knowledge.setdefault(player, []).append(
            sum(card.known for card in own) / len(own) if own else 0.0
        )
        if written[0] == "Play":
            place = int(written[1])
            # The next player sees the card.
            count = len(table.hands)
            others = read_table(state.observation_string((player + 1) % count))
            face = others.cards(count - 1)[place].face
            fits = table.stacks[face[0]] == int(face[1]) - 1
            self._did["played"][player] += 1
            self._did["fitted" if fits else "misplayed"][player] += 1
            self._did["known"][player] += own[place].fits(table.stacks)
        else:
            self._did["discarded" if written[0] == "Discard" else "hinted"][player] += 1

    def found(self, state: Any) -> Found:
        """Return the measurements. See `GameTally`."""
        table = read_table(state.observation_string(0))
        game = {
            "score": float(sum(table.stacks.values())),
            "lives": float(table.lives),
            "hints_left": float(table.hints),
            "deck": float(table.deck),
        }
        by_player: dict[str, Mapping[int, float]] = {name: did for name, did in self._did.items()}  # noqa: C416
        by_player["knowledge"] = {player: sum(each) / len(each) for player, each in self._knowledge.items()}
        return game, by_player
