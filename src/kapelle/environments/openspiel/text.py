"""Convert observations and moves of OpenSpiel games to text, in three wordings.

The wording `full` consists of a few lines for a language model. The wording `short` is a single short line. The wording `columns`,
for Hanabi, is one line in which every fact has a fixed position. All wordings contain exactly the information in the player's
information state string or observation string of OpenSpiel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kapelle.environments.base import without_tags
from kapelle.environments.openspiel.hanabi import COLORS, Card, read_card, read_table, sizes_of

Wording = Literal["full", "short", "columns"]
View = Literal["information", "observation"]

Show = Callable[[str], str]
"""A function that takes a player's string in OpenSpiel's notation and returns the text that the player reads."""

Move = Callable[[str], str]
"""A function that takes a move in OpenSpiel's notation and returns the move as players write it."""


def plain_view(raw: str) -> str:
    """Remove the spaces at the ends of lines. Spaces inside a line are kept, because they may be part of a board."""
    return "\n".join(line.rstrip() for line in raw.strip("\n").splitlines())


def one_line(raw: str) -> str:
    """Join the lines of a string into one line, separated by `/`."""
    return "/".join(plain_view(raw).splitlines())


_WHOSE = re.compile(r"\[P[0-9]+\]")


def plain_move(raw: str) -> str:
    """Return a move without the player's name, outer brackets and punctuation at its ends."""
    text = _WHOSE.sub("", raw, count=1).strip(" ,;")
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


_KUHN = {"p": "pass", "b": "bet"}


def _kuhn_view(raw: str) -> str:
    if not raw:
        return "No card yet."
    past = ", ".join(_KUHN[letter] for letter in raw[1:])
    return f"Your card: {raw[0]}\nMoves so far: {past or 'none'}"


_LEDUC = {"0": "fold", "1": "call", "2": "raise"}


def _leduc_fields(raw: str) -> dict[str, str]:
    return {key: value.strip() for key, value in re.findall(r"\[(\w+):? ?([^\]]*)\]", raw)}


def _leduc_view(raw: str) -> str:
    known = _leduc_fields(raw)
    lines = [f"Your card: {known['Private']}", f"Public card: {known.get('Public', 'none yet')}"]
    lines += [f"Pot: {known['Pot']}", f"Chips left: {known['Money']}"]
    for number in (1, 2):
        moves = ", ".join(_LEDUC[code] for code in known.get(f"Round{number}", "").split())
        if moves or number == 1:
            lines.append(f"Round {number}: {moves or 'no moves yet'}")
    return "\n".join(lines)


def _leduc_short(raw: str) -> str:
    known = _leduc_fields(raw)
    past = ["".join(_LEDUC[code][0] for code in known.get(name, "").split()) for name in ("Round1", "Round2")]
    return f"{known['Private']} {known.get('Public', '-')} {past[0]}/{past[1]}"


def _dice_view(raw: str) -> str:
    dice, *bids = raw.split()
    return f"Your dice: {' '.join(dice)}\nBids so far (count-face): {', '.join(bids) or 'none'}"


def _hanabi_view(raw: str) -> str:
    seen = read_table(raw)
    lines = [
        f"Lives: {seen.lives}, hints: {seen.hints}, cards in the deck: {seen.deck}",
        f"Fireworks: {seen.fireworks}",
        f"Discarded: {seen.discards or 'nothing'}",
    ]
    for k, hand in enumerate(seen.hands):
        cards = [_card(card, own=k == 0) for card in hand]
        owner = (
            "Your hand (unseen; what each card may be)" if k == 0 else f"Player +{k} (what they may think)"
        )
        lines.append(f"{owner}: {', '.join(cards)}")
    return "\n".join(lines)


def _card(card: str, *, own: bool) -> str:
    face, _, knowledge = card.partition(" || ")
    may = knowledge.partition("|")[2]
    return may if own else f"{face} ({may})"


def _hanabi_short(raw: str) -> str:
    seen = read_table(raw)
    hands = ";".join(
        ",".join(_card(card, own=k == 0).replace(" (", "=").rstrip(")") for card in hand)
        for k, hand in enumerate(seen.hands)
    )
    fireworks, discards = seen.fireworks.replace(" ", ""), seen.discards.replace(" ", "")
    return f"L{seen.lives} I{seen.hints} D{seen.deck} F{fireworks} X{discards} {hands}"


def hanabi_columns(games: Sequence[Any]) -> Show:
    """Return a function that writes observations of Hanabi in which every fact has a fixed position in all of the games.

    For example, `L3 I2 D04 FR0Y1 X012000 R.1..,.Y123;R2=RY.23,R2=RY123` contains the lives, the hints, the deck size, the
    fireworks, the number of discarded copies of each card (one colour after another), and the hands, beginning with the player's
    own hand. A dot stands for a colour or rank that a card cannot have, or for a missing card.
    """
    sizes = sizes_of(games)
    colors = COLORS[: sizes.colors]
    ranks = "".join(str(rank + 1) for rank in range(sizes.ranks))
    digits = {
        name: len(str(most))
        for name, most in (("L", sizes.max_life_tokens), ("I", sizes.max_information_tokens))
    }

    def may(card: Card | None) -> str:
        possible = "" if card is None else card.colors + card.ranks
        return "".join(sign if sign in possible else "." for sign in colors + ranks)

    def view(raw: str) -> str:
        seen = read_table(raw)
        stacks, gone, hands = seen.stacks, seen.discards.split(), []
        for player, written in enumerate(seen.hands):
            cards = [read_card(each) for each in written]
            known = [may(card) if player == 0 else f"{card.face}={may(card)}" for card in cards]
            none = may(None) if player == 0 else f"..={may(None)}"
            hands.append(",".join([*known, *[none] * (sizes.hand_size - len(cards))]))
        fireworks = "".join(f"{color}{stacks.get(color, '-')}" for color in colors)
        discards = "".join(str(gone.count(color + rank)) for color in colors for rank in ranks)
        counts = f"L{seen.lives:0>{digits['L']}} I{seen.hints:0>{digits['I']}} D{seen.deck:0>2}"
        return f"{counts} F{fireworks} X{discards} {';'.join(hands)}"

    return view


def _hanabi_move(raw: str) -> str:
    """Return a Hanabi move in short form.

    `P0` plays card 0, `D1` discards card 1, `1R` hints at colour R to the next player, and `23` hints at rank 3 to the player after
    the next.
    """
    words = plain_move(raw).split()
    return f"{words[2][1:]}{words[-1]}" if words[0] == "Reveal" else f"{words[0][0]}{words[1]}"


def open_words(short: str) -> str:
    """Convert a Hanabi move from the short form of `_hanabi_move` to OpenSpiel's notation."""
    if short[0] in "PD":
        return f"{'Play' if short[0] == 'P' else 'Discard'} {short[1:]}"
    return f"Reveal player +{short[:-1]} {'rank' if short[-1].isdigit() else 'color'} {short[-1]}"


def _tiny_move(raw: str) -> str:
    """Return a move without the player. For example, `p0a1` becomes `a1`."""
    return f"a{raw.partition('a')[2]}"


def _tiny_short(raw: str) -> str:
    """Return the player's own card and the moves so far, in order."""
    return re.sub(r"p[0-9]+:?", "", raw)


@dataclass(frozen=True, slots=True)
class GameText:
    """Functions that write the observations and moves of a game as text."""

    view: Show = plain_view
    move: Move = plain_move


_FULL: Mapping[tuple[str, View], GameText] = {
    ("kuhn_poker", "information"): GameText(_kuhn_view),
    ("leduc_poker", "information"): GameText(_leduc_view),
    ("liars_dice", "information"): GameText(_dice_view),
    ("hanabi", "observation"): GameText(_hanabi_view),
    ("tiny_hanabi", "information"): GameText(move=_tiny_move),
}
_SHORT: Mapping[tuple[str, View], GameText] = {
    ("leduc_poker", "information"): GameText(_leduc_short),
    ("hanabi", "observation"): GameText(_hanabi_short, _hanabi_move),
    ("tiny_hanabi", "information"): GameText(_tiny_short, _tiny_move),
}


def words_of(games: Sequence[Any], wording: Wording, view: View) -> GameText:
    """Return the functions that write the observations and moves of a game in a wording. The default is OpenSpiel's own text.

    `games` contains the game and its levels, which must be of the same kind.
    """
    key = (games[0].get_type().short_name, view)
    if wording == "columns":
        return GameText(hanabi_columns(games), _hanabi_move)
    if wording == "short":
        return _SHORT.get(key, GameText(one_line))
    return _FULL.get(key, GameText())


def normal(text: str) -> str:
    """Normalise a move for comparison: return its last line without whitespace and punctuation at its ends."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return plain_move(" ".join(lines[-1].split()).strip("`\"'.*")) if lines else ""


def match(text: str, moves: Sequence[Sequence[str]]) -> int | None:
    """Return the index of the move that a text names, or None if the text names no move or several moves.

    Each move is given by a sequence of names. Letter case matters only if two moves differ in nothing else.
    """
    written = normal(text)
    found = [k for k, names in enumerate(moves) if written in {normal(name) for name in names}]
    if not found:
        folded = written.casefold()
        found = [k for k, names in enumerate(moves) if folded in {normal(name).casefold() for name in names}]
    return found[0] if len(found) == 1 else None


_LISTED = re.compile(r"<(.*)>")


def listed(moves: Sequence[str]) -> str:
    """Return a list of legal moves as a string."""
    return f"<{' | '.join(moves)}>"


def read_listed(text: str) -> list[str]:
    """Return the moves in the last list of a text, or an empty list if the text contains no list of moves."""
    found = _LISTED.findall(without_tags(text))
    return found[-1].split(" | ") if found else []
