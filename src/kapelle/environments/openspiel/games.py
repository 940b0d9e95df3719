"""OpenSpiel's games by name: loaded once, with the presets of the literature, and walked where they are small.

OpenSpiel (1908.09453) is an optional package; it is imported when the first game is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from kapelle.errors import ConfigError, did_you_mean

Value = bool | int | float | str
"""A parameter of a game."""

PRESETS: Mapping[str, tuple[str, Mapping[str, Value]]] = {
    "hanabi_very_small": (
        "hanabi",
        {"colors": 1, "ranks": 5, "hand_size": 2, "max_information_tokens": 3, "max_life_tokens": 1},
    ),
    "hanabi_small": (
        "hanabi",
        {"colors": 2, "ranks": 5, "hand_size": 2, "max_information_tokens": 3, "max_life_tokens": 1},
    ),
    "hanabi_full": ("hanabi", {}),
}
"""Sizes of Hanabi as in 1902.00506; `players` (2 to 5) and any other parameter may be set on top."""

MOST_NODES = 500_000
"""Most nodes of a game tree that is enumerated."""


def spiel() -> Any:
    """Return the module of OpenSpiel's games; ConfigError if it is missing."""
    try:
        import pyspiel
    except ImportError as error:
        raise ConfigError(
            "The environment `openspiel` needs the package open_spiel, which is not installed. "
            "Install it with `pip install 'kapelle[games]'`."
        ) from error
    return pyspiel


def load_game(name: str, parameters: Mapping[str, Value], seed: int = 0) -> Any:
    """Return a game by OpenSpiel's name or a preset's.

    A name, a preset's too, may carry parameters as OpenSpiel writes them, `kuhn_poker(players=3)`; those of `parameters` go
    before them. `seed` matters to games whose chance OpenSpiel draws by itself. Raises ConfigError for an
    unknown game or parameter, with the closest known ones, and for invalid combinations of parameters.
    """
    try:
        written = spiel().game_parameters_from_string(name)
    except spiel().SpielError as error:
        raise ConfigError(f"environment.game '{name}' cannot be read: {error}") from error
    named = written.pop("name")
    short, preset = PRESETS.get(named, (named, {}))
    given = {**preset, **written, **parameters}
    kind = _kinds().get(short)
    if kind is None:
        raise ConfigError(
            f"environment.game names the unknown game '{short}'.{did_you_mean(short, [*_kinds(), *PRESETS])}"
        )
    for key in given:
        if key not in kind.parameter_specification:
            raise ConfigError(
                f"The game '{short}' has no parameter '{key}' (environment.parameters)."
                f"{did_you_mean(key, kind.parameter_specification)}"
            )
    if kind.chance_mode == spiel().GameType.ChanceMode.SAMPLED_STOCHASTIC:
        given["rng_seed"] = (int(given.get("rng_seed", 0)) + seed) % 2**31
    return _checked(short, given)


@cache
def _kinds() -> Mapping[str, Any]:
    return {kind.short_name: kind for kind in spiel().registered_games()}


def _checked(short: str, parameters: Mapping[str, Any]) -> Any:
    try:
        game = spiel().load_game(short, dict(parameters))
    except spiel().SpielError as error:
        raise ConfigError(
            f"OpenSpiel makes no game '{short}' with environment.parameters {dict(parameters)}: {error}."
        ) from error
    kind = game.get_type()
    if kind.dynamics == spiel().GameType.Dynamics.MEAN_FIELD:
        raise ConfigError(f"'{short}' is a mean-field game: it has a population, no players. Take another.")
    if not (kind.provides_information_state_string or kind.provides_observation_string):
        raise ConfigError(f"OpenSpiel has no words for what players of '{short}' see. Take another game.")
    return game


def walk(game: Any) -> Iterator[Any]:
    """Yield every state in which a player moves, once for each history.

    Raises ConfigError for games with simultaneous moves, unstated chance, or more than
    `MOST_NODES` nodes.
    """
    kind = game.get_type()
    types = spiel().GameType
    if kind.dynamics != types.Dynamics.SEQUENTIAL or kind.chance_mode == types.ChanceMode.SAMPLED_STOCHASTIC:
        raise ConfigError(
            f"The game {game} cannot be solved exactly: only games in which players move one at a time and "
            "chance is stated can. Take kuhn_poker, leduc_poker, tiny_hanabi or liars_dice."
        )
    waiting, seen = [game.new_initial_state()], 0
    while waiting:
        state = waiting.pop()
        seen += 1
        if seen > MOST_NODES:
            raise ConfigError(
                f"The game {game} has more than {MOST_NODES} nodes, too many to solve exactly. Take a smaller one, "
                "or the opponents `random` or `mcts`."
            )
        if state.is_terminal():
            continue
        if not state.is_chance_node():
            yield state
        waiting.extend(state.child(action) for action in reversed(state.legal_actions()))


# -------- The rules of OpenSpiel's games in a few plain sentences, for the head of what a player reads
#
# Each text is true of the parameters that the game was loaded with. `full` is for language models, `short` for models
# that read few tokens. A game without a text of its own is named, and what OpenSpiel knows of its results is said.

Say = Callable[[Any], str]
"""A game → its rules."""


def full_rules(game: Any) -> str:
    """Return a game's rules in full, or `unknown_rules` if it has none."""
    if "MatrixGame" in type(game).__name__:
        return _matrix(game)
    return _FULL.get(game.get_type().short_name, unknown_rules)(game)


def short_rules(game: Any) -> str:
    """Return a game's rules in one short sentence, or `unknown_rules` if it has none."""
    if "MatrixGame" in type(game).__name__:
        return "Both choose at once."
    return _SHORT.get(game.get_type().short_name, unknown_rules)(game)


def unknown_rules(game: Any) -> str:
    """Return what is known of any game: its name, its players, and how results are shared."""
    kind = game.get_type()
    shared = {
        "ZERO_SUM": "What one player wins the others lose.",
        "CONSTANT_SUM": "What one player wins the others lose.",
        "IDENTICAL": "All players play together and get the same result.",
    }.get(kind.utility.name, "Each player has a result of its own.")
    return (
        f"{kind.long_name} is a game for {game.num_players()} player{'s' * (game.num_players() != 1)}. {shared} "
        f"Results go from {game.min_utility():g} to {game.max_utility():g}."
    )


def _parameters(game: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = game.get_parameters()
    return found


def _kuhn(game: Any) -> str:
    players = game.num_players()
    return (
        f"Kuhn poker: each of the {players} players puts 1 chip into the pot and gets one card of {players + 1}, numbered 0 "
        f"to {players}. In turn players pass or bet 1 chip. After a bet each other player acts once more at most: Bet "
        "calls it, Pass folds. The highest card among those who bet, or among all if nobody did, wins the pot."
    )


def _leduc(game: Any) -> str:
    given = _parameters(game)
    ranks = game.num_players() + 1
    deck = (
        f"two cards each of the ranks 0 to {ranks - 1}"
        if given["suit_isomorphism"]
        else f"{2 * ranks} cards numbered from 0, of which 0 and 1, 2 and 3 and so on have the same rank"
    )
    return (
        f"Leduc poker: the deck has {deck}. Each player puts 1 chip into the pot and gets one private card. There are two "
        "rounds of betting, with a raise of 2 chips in the first and 4 in the second and two raises a round at most; "
        "then one public card is shown between them. Who folds loses what it has put in. At the end a card of the public "
        "card's rank wins, else the higher rank; equal ranks share the pot."
    )


def _tic_tac_toe(game: Any) -> str:
    return (
        "Tic-tac-toe on a board of three rows and three columns: player 1 sets x, player 2 o, in turn, on an empty cell. "
        "x(0,2) is the first row's last cell. Three of one's own in a row, a column or a diagonal win; a full board is "
        "a draw."
    )


def _connect_four(game: Any) -> str:
    given = _parameters(game)
    return (
        f"Connect four on {given['rows']} rows and {given['columns']} columns: player 1 drops x, player 2 o, in turn, into a "
        f"column (from 0), where it falls to the lowest free cell. {given['x_in_row']} of one's own in a line, straight or "
        "diagonal, win; a full board is a draw."
    )


def _hanabi_sizes(game: Any) -> dict[str, int]:
    given, players = _parameters(game), game.num_players()
    usual = {"colors": 5, "ranks": 5, "max_information_tokens": 8, "max_life_tokens": 3}
    usual["hand_size"] = 5 if players < 4 else 4
    return {key: int(given.get(key, value)) for key, value in usual.items()}


def _hanabi(game: Any) -> str:
    has = _hanabi_sizes(game)
    return (
        f"Hanabi, played together by {game.num_players()} players: build one firework for each of {has['colors']} "
        f"colour{'s' * (has['colors'] != 1)}, its cards in order from 1 to {has['ranks']}. A colour has three 1s, one "
        f"{has['ranks']} and two of each rank between. Each player holds {has['hand_size']} cards and sees all hands but its "
        "own. In turn a player plays a card, discards one, or tells another player all its cards of one colour or rank. "
        f"A hint costs one of {has['max_information_tokens']} hint tokens; a discard or a finished firework gives one back. "
        f"A played card that does not fit costs one of {has['max_life_tokens']} lives. Cards are drawn again while there are "
        "any; after the last one each player moves once more. Everybody scores 1 for each card that fits, and 0 in all "
        "when the last life is lost."
    )


def _tiny_hanabi(game: Any) -> str:
    given = _parameters(game)
    cards, moves = int(given["num_chance"]), int(given["num_actions"])
    table = ""
    if game.num_players() == 2:
        pays = str(given["payoff"]).split(";")
        rows = [pays[k : k + moves] for k in range(0, len(pays), moves)]
        table = " Rows are the first player's move, columns the second's: " + "; ".join(
            f"cards {one} and {other} pay {' / '.join(' '.join(row) for row in rows[(one * cards + other) * moves :][:moves])}"
            for one in range(cards)
            for other in range(cards)
        )
    return (
        f"Tiny Hanabi, played together: each player holds one of {cards} cards (from 0), which only it sees. In turn each "
        f"makes one of {moves} moves (from a0), which all see. All are paid the same, by the cards and the moves.{table}"
        + "."
        * bool(table)
    )


def _goofspiel(game: Any) -> str:
    given = _parameters(game)
    order = {"random": "a random", "descending": "descending", "ascending": "ascending"}[
        given["points_order"]
    ]
    hidden = " Bids stay hidden; only who won is told." if given["imp_info"] else ""
    ends = {
        "win_loss": "Most points win.",
        "point_difference": "The result is one's points less the mean of all.",
        "total_points": "The result is one's points.",
    }[given["returns_type"]]
    cards = given["num_cards"]
    return (
        f"Goofspiel: there are point cards from 1 to {cards}, shown one at a time in {order} order, and each player holds "
        f"cards from 1 to {cards}. All bid one card at once, each card once in the game; the highest bid alone wins the "
        f"point card's value, and equal highest bids win nothing.{hidden} {ends}"
    )


def _liars_dice(game: Any) -> str:
    given = _parameters(game)
    dice, sides = given["numdice"], given["dice_sides"]
    raised = (
        "more dice, or as many of a higher face"
        if given["bidding_rule"] == "reset-face"
        else "a higher face, or more dice of the same face"
    )
    return (
        f"Liar's dice: each player rolls {dice} {'die' if dice == 1 else 'dice'} with {sides} sides in secret. In turn players "
        f"bid how many dice of all show a face: 2-3 says two threes at least. A new bid is {raised}. Face {sides} counts as "
        "every face. Liar challenges the last bid: if it is true the bidder wins, else the challenger."
    )


def _nim(game: Any) -> str:
    given = _parameters(game)
    last = "loses" if given["is_misere"] else "wins"
    piles = ", ".join(str(given["pile_sizes"]).split(";"))
    return (
        f"Nim: there are piles of {piles} objects. In turn players take one or more objects from one pile. Who takes the very "
        f"last object {last}."
    )


def _pig(game: Any) -> str:
    given = _parameters(game)
    return (
        f"Pig: in its turn a player rolls a die with {given['diceoutcomes']} sides as often as it likes. A 1 ends the turn and "
        "loses what the turn has gathered; any other roll is added to the turn's total. Stop adds the total to one's score "
        f"and passes the turn. The first to reach {given['winscore']} wins."
    )


def _negotiation(game: Any) -> str:
    given = _parameters(game)
    talk = (
        f" With each proposal a player says {given['utterance_dim']} symbols, which have no meaning but what players give them."
        if given["enable_utterances"]
        else ""
    )
    return (
        f"Negotiation: two players share a pool of {given['num_items']} kinds of items, which each values in its own, secret "
        "way. In turn a player proposes how many of each kind it takes itself, or agrees to the other's last proposal; the "
        f"rest goes to the other.{talk} Agreement pays both the value of what they get; without one before the steps end "
        "both get nothing."
    )


def _bargaining(game: Any) -> str:
    given = _parameters(game)
    ends = f" After {given['max_turns']} turns without agreement both get nothing."
    return (
        "Bargaining: two players share a pool of books, hats and basketballs, which each values in its own, secret way. In turn "
        "a player offers a split, stating what it takes itself, or agrees to the other's last offer; the rest goes to the "
        f"other. Agreement pays both the value of what they get.{ends}"
    )


def _trade_comm(game: Any) -> str:
    items = _parameters(game)["num_items"]
    return (
        f"Trading and communication, played together: each player gets one of {items} items (from 0) in secret. Each says one "
        "symbol, which the other hears. Then each offers a trade: 2:5 gives item 2 for item 5. If each gives what it has "
        "for what the other has, both win 1; else 0."
    )


def _matrix(game: Any) -> str:
    rows = [game.row_action_name(k) for k in range(game.num_rows())]
    columns = [game.col_action_name(k) for k in range(game.num_cols())]
    pays = "; ".join(
        f"{one} and {other}: {game.row_utility(r, c):g}, {game.col_utility(r, c):g}"
        for r, one in enumerate(rows)
        for c, other in enumerate(columns)
    )
    return (
        f"{game.get_type().long_name}: both players choose at once, once. What player 1 and player 2 choose, and what they are "
        f"paid: {pays}."
    )


_FULL: Mapping[str, Say] = {
    "kuhn_poker": _kuhn,
    "leduc_poker": _leduc,
    "tic_tac_toe": _tic_tac_toe,
    "connect_four": _connect_four,
    "hanabi": _hanabi,
    "tiny_hanabi": _tiny_hanabi,
    "goofspiel": _goofspiel,
    "liars_dice": _liars_dice,
    "nim": _nim,
    "pig": _pig,
    "negotiation": _negotiation,
    "bargaining": _bargaining,
    "trade_comm": _trade_comm,
}
_SHORT: Mapping[str, Say] = {
    "kuhn_poker": lambda game: "Highest card wins; Pass folds to a Bet.",
    "leduc_poker": lambda game: "A pair with the public card wins, else the higher rank; Fold gives up.",
    "tic_tac_toe": lambda game: "Three in a line win.",
    "connect_four": lambda game: f"{_parameters(game)['x_in_row']} in a line win.",
    "hanabi": lambda game: f"Play 1 to {_hanabi_sizes(game)['ranks']} in order; a wrong play costs a life.",
    "tiny_hanabi": lambda game: "Both are paid by both cards and moves.",
    "goofspiel": lambda game: "Highest bid wins the point card.",
    "liars_dice": lambda game: f"Bid count-face; face {_parameters(game)['dice_sides']} counts as all.",
    "nim": lambda game: f"Who takes the last object {'loses' if _parameters(game)['is_misere'] else 'wins'}.",
    "pig": lambda game: f"A 1 loses the turn's total; {_parameters(game)['winscore']} wins.",
    "negotiation": lambda game: "Propose what you take; the other gets the rest.",
    "bargaining": lambda game: "Offer what you take; the other gets the rest.",
    "trade_comm": lambda game: "Say your item; give it for the other's.",
}
