"""Hanabi: a parser for the observation of a player, and a scripted player.

All functions read only the observation string that OpenSpiel gives to the player that moves (arXiv:1902.00506). A scripted player
therefore never knows its own cards.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLORS = "RYGWB"
"""The letters of the colours, in OpenSpiel's order."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a Hanabi game. For several games, each size is the maximum over the games."""

    colors: int
    ranks: int
    hand_size: int
    max_information_tokens: int
    max_life_tokens: int


def sizes_of(games: Sequence[Any]) -> Sizes:
    """Return sizes that are large enough for all of the given OpenSpiel games."""
    found = []
    for game in games:
        has = dict(game.get_parameters())
        colors, ranks = int(has.get("colors", 5)), int(has.get("ranks", 5))
        hand = int(has.get("hand_size", 5 if game.num_players() < 4 else 4))
        hints, lives = int(has.get("max_information_tokens", 8)), int(has.get("max_life_tokens", 3))
        found.append((colors, ranks, hand, hints, lives))
    return Sizes(*(max(each) for each in zip(*found, strict=True)))


@dataclass(frozen=True, slots=True)
class Card:
    """A card in a player's hand."""

    face: str
    """The card, such as `R1`, or `XX` for a card in the player's own hand."""
    told: str
    """What hints have revealed about the card: its rank (`X1`), its colour (`RX`) or nothing (`XX`)."""
    colors: str
    """The colours that are possible for the card according to the hints."""
    ranks: str
    """The ranks that are possible for the card according to the hints."""

    def fits(self, fireworks: Mapping[str, int]) -> bool:
        """Return whether the card can certainly be played: all cards that it may be fit on the fireworks."""
        return all(fireworks[color] == int(rank) - 1 for color in self.colors for rank in self.ranks)

    def may_fit(self, fireworks: Mapping[str, int]) -> bool:
        """Return whether the card can possibly be played: at least one card that it may be fits on the fireworks."""
        return any(fireworks[color] == int(rank) - 1 for color in self.colors for rank in self.ranks)

    @property
    def known(self) -> float:
        """The fraction of the card's two properties that are known: 0, 0.5 or 1."""
        return ((len(self.colors) == 1) + (len(self.ranks) == 1)) / 2


@dataclass(frozen=True, slots=True)
class Table:
    """A parsed observation of a player."""

    lives: str
    hints: str
    fireworks: str
    hands: tuple[tuple[str, ...], ...]
    """The player's own hand, followed by the hands of the other players in turn order. A card has the format `face ||
    hinted|possible`."""
    deck: str
    discards: str

    @property
    def stacks(self) -> Mapping[str, int]:
        """Mapping from a colour to the rank of the top card of its firework, or 0 if the firework is empty."""
        return {stack[0]: int(stack[1:]) for stack in self.fireworks.split()}

    def cards(self, player: int) -> list[Card]:
        """Return the hand of the player that moves `player` turns after the observing player."""
        return [read_card(written) for written in self.hands[player]]


def read_card(written: str) -> Card:
    """Parse a card in OpenSpiel's notation."""
    face, _, knowledge = written.partition(" || ")
    revealed, _, possible = knowledge.partition("|")
    letters = "".join(sign for sign in possible if sign.isalpha())
    return Card(face, revealed, letters, "".join(sign for sign in possible if sign.isdigit()))


def read_table(raw: str) -> Table:
    """Parse a player's observation string from OpenSpiel."""
    head, _, rest = raw.partition("Hands:\n")
    body, _, tail = rest.partition("Deck size:")
    values = dict(line.split(":", 1) for line in head.strip().splitlines())
    hands = [
        tuple(line.strip() for line in hand.strip().splitlines() if line.strip())
        for hand in body.split("-----")
    ]
    deck, _, discards = tail.partition("Discards:")
    return Table(
        values["Life tokens"].strip(),
        values["Info tokens"].strip(),
        values["Fireworks"].strip(),
        tuple(tuple(card for card in hand if card != "Cur player") for hand in hands),
        deck.strip(),
        discards.strip(),
    )


class Colours:
    """A player's own names for the colours. The player reads and writes these names as if they were the colours of the game.

    No rule of Hanabi depends on a colour, so the renamed game has the same probability and the same rewards.
    """

    _RUN = re.compile(r"(?<![A-Za-z])[RYGWB]+(?![a-z])")

    def __init__(self, names: Mapping[str, str]) -> None:
        """Take a mapping from every colour of the game to the name that the player uses for it."""
        self._names = str.maketrans(dict(names))

    @classmethod
    def drawn(cls, game: Any, seed: int) -> Colours:
        """Return random names for the colours of a game."""
        colors = COLORS[: sizes_of([game]).colors]
        names = list(colors)
        random.Random(seed).shuffle(names)
        return cls(dict(zip(colors, names, strict=True)))

    def view(self, raw: str) -> str:
        """Return an observation string of OpenSpiel in which colours are replaced by the player's names."""
        renamed = self._RUN.sub(lambda run: _in_order(run[0].translate(self._names)), raw)
        # Sort the colours, because their original order would reveal the renaming.
        return re.sub(
            r"(?<=Fireworks: )[^\n]*[^\n ]",
            lambda found: " ".join(sorted(found[0].split(), key=_place)),
            renamed,
        )

    def move(self, raw: str) -> str:
        """Return a move in OpenSpiel's notation in which colours are replaced by the player's names."""
        return re.sub(r"(?<=color )[RYGWB]", lambda color: color[0].translate(self._names), raw)

    @staticmethod
    def listed(moves: Sequence[str]) -> list[str]:
        """Return legal moves in OpenSpiel's order, with colour hints sorted by the player's names for the colours."""
        hints: dict[str, list[str]] = {}
        for move in moves:
            before, found, color = move.partition("color ")
            hints.setdefault(before, []).extend([color] if found else [])
        left = {before: iter(sorted(colors, key=_place)) for before, colors in hints.items()}
        split = [move.partition("color ") for move in moves]
        return [f"{before}{found}{next(left[before])}" if found else before for before, found, _ in split]


def _place(color: str) -> int:
    return COLORS.index(color[0])


def _in_order(colors: str) -> str:
    return "".join(sorted(colors, key=_place))


_SHORT = re.compile(r"L(\d+) I(\d+) D(\d+) F((?:[A-Z][\d-])+) X(\S*) (\S+)")
"""A regular expression for the line of an observation in the wording `short` or `columns`. See the module `text`."""


def read_short(seen: str) -> Table:
    """Parse the line that a model observes. Raises ValueError if the text contains no such line.

    The line does not contain the hints themselves, but it shows the possible colours and ranks of each card.
    """
    found = _SHORT.search(seen)
    if found is None:
        raise ValueError(f"no view of Hanabi: {seen[:80]!r}")
    lives, hints, deck, fireworks, discards, hands = found.groups()
    stacks = [fireworks[at : at + 2] for at in range(0, len(fireworks), 2)]
    if discards.isdigit():  # as in `text.hanabi_columns`: the count of each card, one colour after another
        ranks = len(discards) // len(stacks)
        counted = enumerate(map(int, discards))
        discards = "".join(f"{stacks[at // ranks][0]}{at % ranks + 1}" * count for at, count in counted)

    def card(written: str) -> str:
        face, _, may = written.rpartition("=")
        return f"{face or 'XX'} || XX|{may}"

    return Table(
        lives,
        hints,
        " ".join(stack for stack in stacks if stack[1] != "-"),
        tuple(tuple(card(each) for each in hand.split(",") if each.strip(".=")) for hand in hands.split(";")),
        deck,
        discards,
    )


def choose(state: Any, player: int, draw: random.Random, *, bold: bool) -> int:
    """Return the action of a simple scripted player. See `advise`."""
    moves = {
        state.action_to_string(player, action).strip("()"): int(action)
        for action in state.legal_actions(player)
    }
    return moves[advise(read_table(state.observation_string(player)), list(moves), draw, bold=bold)]


def advise(table: Table, moves: Sequence[str], draw: random.Random, *, bold: bool) -> str:
    """Return the move of a simple player: play a card that fits, otherwise hint at a card that fits, otherwise discard the oldest card.

    `moves` are the legal moves in OpenSpiel's notation, without brackets. A player with `bold` also plays a hinted card that may
    fit, as long as a mistake does not end the game. A hint goes to the first of the following players that holds a card that fits
    and does not know that it fits. The hint names the rank of this card, or the colour of the card if the rank is already known.
    """
    stacks, own = table.stacks, table.cards(0)
    for place, card in enumerate(own):
        if card.fits(stacks):
            return f"Play {place}"
    if bold and int(table.lives) > 1:
        for place, card in enumerate(own):
            if card.told != "XX" and card.may_fit(stacks):
                return f"Play {place}"
    for player in range(1, len(table.hands)):
        for card in table.cards(player):
            if stacks[card.face[0]] != int(card.face[1]) - 1 or card.fits(stacks):
                continue
            for unknown, hint in (
                (card.ranks, f"rank {card.face[1]}"),
                (card.colors, f"color {card.face[0]}"),
            ):
                written = f"Reveal player +{player} {hint}"
                if len(unknown) > 1 and written in moves:
                    return written
    if "Discard 0" in moves:
        return "Discard 0"
    return draw.choice([written for written in moves if "Reveal" in written] or list(moves))
