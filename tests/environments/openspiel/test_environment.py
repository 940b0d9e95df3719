from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspiel")

from kapelle.environment import Answerable, Environment, Scripted, offers
from kapelle.environments.openspiel.environment import GameState, OpenSpiel, show
from kapelle.environments.openspiel.games import walk
from kapelle.environments.openspiel.hanabi import Table, read_short, read_table
from kapelle.environments.openspiel.text import read_listed
from kapelle.errors import ConfigError, EpisodeError
from kapelle.types import Message


def game(name: str = "kuhn_poker", **settings: Any) -> OpenSpiel:
    return OpenSpiel.model_validate({"game": name, **settings})


def start(environment: OpenSpiel, *agents: str, seed: int = 0, index: int = 0) -> GameState:
    return environment.start(environment.task("train", index), agents, seed)


def state_after(environment: OpenSpiel, history: Sequence[int | Sequence[int]]) -> Any:
    state = environment.loaded.new_initial_state()
    for action in history:
        if isinstance(action, int):
            state.apply_action(action)
        else:
            state.apply_actions(list(action))
    return state


# A game, two histories that differ in private information, a player without it, and one with it.
SECRETS: list[tuple[str, Mapping[str, Any], Sequence[Any], Sequence[Any], int, int]] = [
    ("kuhn_poker", {}, [1, 0], [1, 2], 0, 1),
    ("kuhn_poker", {}, [0, 1, 0, 1], [2, 1, 0, 1], 1, 0),
    ("kuhn_poker", {"players": 3}, [1, 0, 2, 0], [1, 0, 3, 0], 1, 2),
    ("leduc_poker", {}, [0, 1], [0, 2], 0, 1),
    ("leduc_poker", {}, [0, 1, 1, 1, 4], [0, 2, 1, 1, 4], 0, 1),
    ("liars_dice", {}, [0, 1, 3], [2, 1, 3], 1, 0),
    ("tiny_hanabi", {}, [0, 0], [0, 1], 0, 1),
    ("tiny_hanabi", {}, [0, 0, 2], [1, 0, 2], 1, 0),
    # In Hanabi only the others see a player's hand.
    ("hanabi_very_small", {}, [0, 0, 1, 2], [3, 4, 1, 2], 0, 1),
    ("hanabi_small", {"players": 3}, [0, 1, 2, 3, 4, 5], [0, 1, 7, 8, 4, 5], 1, 0),
    ("hanabi_full", {"players": 5}, [*range(20)], [*range(8), 20, 21, 22, 23, *range(12, 20)], 2, 3),
    ("trade_comm", {}, [3, 7], [4, 7], 0, 1),
    ("coin_game", {}, [0, 1], [0, 2], 0, 1),
    ("phantom_ttt", {}, [0, 1], [0, 2], 0, 1),
    ("dark_hex", {}, [0, 1], [0, 2], 0, 1),
    ("goofspiel", {"imp_info": True, "points_order": "descending"}, [(0, 1)], [(0, 2)], 0, 1),
]


WORDED = [
    (secret, wording)
    for secret in SECRETS
    for wording in ("full", "short", "columns")
    if wording != "columns" or secret[0].startswith("hanabi")
]


@pytest.mark.parametrize(("secret", "wording"), WORDED)
def test_private_information_of_another_player_does_not_change_an_observation(
    secret: Any, wording: str
) -> None:
    name, parameters, one, other, outsider, insider = secret
    environment = game(name, parameters=parameters, wording=wording)
    rules = environment.conduct
    first, second = state_after(environment, one), state_after(environment, other)
    assert show(first, outsider, rules) == show(second, outsider, rules)
    assert show(first, insider, rules) != show(second, insider, rules)


class TestColumns:
    """Hanabi in one line in which every fact has a fixed place."""

    HALF: Final = {"players": 2, "colors": 2, "ranks": 3, "hand_size": 2, "max_life_tokens": 3}
    LEVELS: Final = [
        {"tasks": 1, "parameters": {"ranks": 2, "max_life_tokens": 12}},
        {"tasks": 1, "parameters": {"colors": 1}},
    ]

    @staticmethod
    def views(environment: OpenSpiel, played: int) -> Iterator[tuple[Table, str]]:
        """Yield OpenSpiel's observation of the player that moves, parsed, and the line that it reads."""
        for seed in range(3):
            agents = [f"p{k}" for k in range(environment.players)]
            world, draw = (
                environment.start(environment.task_after(played, seed), agents, seed),
                random.Random(seed),
            )
            while world.movers():
                player = world.state.current_player()
                yield read_table(world.state.observation_string(player)), world.observe(agents[player])
                asyncio.run(
                    world.step({agents[player]: draw.choice(read_listed(world.observe(agents[player])))})
                )

    @pytest.mark.parametrize("parameters", [HALF, {"players": 3, "hand_size": 4}, {"players": 5}])
    def test_they_contain_openspiels_observation(self, parameters: Mapping[str, int]) -> None:
        environment = game("hanabi", parameters=parameters, wording="columns")
        count = 0
        for raw, read in self.views(environment, 0):
            seen = read_short(read)
            assert (int(seen.lives), int(seen.hints), int(seen.deck)) == (
                int(raw.lives),
                int(raw.hints),
                int(raw.deck),
            )
            assert seen.stacks == raw.stacks
            discarded = zip(seen.discards[::2], seen.discards[1::2], strict=True)
            assert sorted(map("".join, discarded)) == sorted(raw.discards.split())
            for player in range(len(raw.hands)):
                assert [(card.face, card.colors, card.ranks) for card in seen.cards(player)] == [
                    (card.face, card.colors, card.ranks) for card in raw.cards(player)
                ]
            count += 1
        assert count > 20

    def test_places_are_equal_in_all_levels(self) -> None:
        environment = game("hanabi", parameters=self.HALF, curriculum=self.LEVELS, wording="columns")
        signs = {
            "".join(sign if sign in " /,;=LIDFX" else "?" for sign in read.partition(" <")[0])
            for played in range(3)
            for _, read in self.views(environment, played)
        }
        assert signs == {"?/? L?? I? D?? F???? X?????? ?????,?????;??=?????,??=?????"}

    def test_a_game_in_columns_by_hand(self) -> None:
        environment = game("hanabi", parameters=self.HALF, curriculum=self.LEVELS, wording="columns")
        easier = environment.start(environment.task_after(0, 0), ["a", "b"], 1)
        assert read_listed(easier.observe("a")) == ["P0", "P1", "1R", "11", "12"]
        assert easier.observe("a").startswith("1/2 L12 I8 D04 FR0Y0 X000000 RY12.,RY12.;R1=RY12.,R2=RY12. <")
        asyncio.run(easier.step({"a": "11"}))
        assert easier.observe("b").startswith("2/2 L12 I7 D04 FR0Y0 X000000 RY1..,RY.2.;")
        one_color = environment.start(environment.task_after(1, 0), ["a", "b"], 1)
        assert " FR0Y- X000000 R.123,R.123;" in one_color.observe("a")

    def test_other_games_have_no_columns(self) -> None:
        with pytest.raises(ConfigError, match="columns"):
            game(wording="columns").check(["a", "b"])


@pytest.mark.parametrize("wording", ["full", "short"])
@pytest.mark.parametrize(("name", "states"), [("kuhn_poker", 12), ("leduc_poker", 936), ("tiny_hanabi", 8)])
def test_each_information_state_has_its_own_text(name: str, states: int, wording: str) -> None:
    """The number of information states is that of the literature."""
    environment = game(name, wording=wording)
    texts: dict[str, set[str]] = {}
    for state in walk(environment.loaded):
        player = state.current_player()
        texts.setdefault(state.information_state_string(player), set()).add(
            show(state, player, environment.conduct)
        )
    assert len(texts) == states
    assert all(len(shown) == 1 for shown in texts.values())
    assert len({text for shown in texts.values() for text in shown}) == states


async def test_a_hand_of_kuhn_poker_in_both_wordings() -> None:
    full, short = start(game(), "a", "b", seed=2), start(game(wording="short"), "a", "b", seed=2)
    assert full.observe("a") == (
        "Kuhn poker: each of the 2 players puts 1 chip into the pot and gets one card of 3, numbered 0 to 2. In turn players "
        "pass or bet 1 chip. After a bet each other player acts once more at most: Bet calls it, Pass folds. The highest "
        "card among those who bet, or among all if nobody did, wins the pot.\n"
        "You are player 1 of 2 in Kuhn Poker.\nYour card: 2\nMoves so far: none\nLegal moves: <Pass | Bet>"
    )
    assert short.observe("a") == "1/2 2 <Pass | Bet>"
    assert short.observe("b") == "2/2 1"
    assert short.movers() == ("a",)
    assert await short.step({"a": "Bet"}) == {}
    assert short.observe("b") == "2/2 1b <Pass | Bet>"
    await short.step({"b": "bet"})
    outcome = short.outcome()
    assert outcome.rewards == {"a": 2.0, "b": -2.0}
    assert outcome.success is None
    assert outcome.info["moves"] == ["1: Bet", "2: Bet"]
    assert not outcome.truncated


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("Bet", True),
        ("bet", True),
        (" BET \n", True),
        ("`Bet`.", True),
        ("I hold the king.\n\nBet", True),
        ("Bet, I think", False),
        ("<Bet>", False),
        ("", False),
        ("Fold", False),
        ("Веt", False),
    ],
)
async def test_a_move_is_exactly_its_text(text: str, valid: bool) -> None:
    world = start(game(), "a", "b")
    assert (await world.step({"a": text}) == {}) == valid
    assert world.outcome().info["invalid"] == {"a": 0 if valid else 1, "b": 0}


async def test_an_invalid_move_costs_more_than_a_random_one_can_win() -> None:
    environment = game()
    totals, made = [], set()
    for seed in range(40):
        world = start(environment, "a", "b", seed=seed)
        rewards = await world.step({"a": "I win"})
        assert rewards == {"a": -4.0}
        while world.movers():
            await world.step(dict.fromkeys(world.movers(), "Pass"))
        totals.append(rewards["a"] + world.outcome().rewards["a"])
        assert environment.reward_range == (-14.0, 2.0)
        made.add(world.outcome().info["moves"][0])
    assert max(totals) <= -2.0
    assert made == {"1: Pass", "1: Bet"}


async def test_each_invalid_move_receives_the_penalty_at_once() -> None:
    world = start(game("tic_tac_toe", penalty=-0.25), "a", "b")
    assert await world.step({"a": "middle"}) == {"a": -0.25}
    assert await world.step({"b": "?"}) == {"b": -0.25}
    assert await world.step({"a": "x(9,9)"}) == {"a": -0.25}
    assert world.outcome().info["invalid"] == {"a": 2, "b": 1}


async def test_a_forfeit_receives_the_least_and_the_others_share_the_rest() -> None:
    world = start(game(invalid="forfeit"), "a", "b")
    assert await world.step({"a": "?"}) == {"a": 0.0}
    assert world.movers() == ()
    outcome = world.outcome()
    assert outcome.rewards == {"a": -2.0, "b": 2.0}
    assert outcome.info["forfeited"] == [1]
    assert not outcome.truncated
    three = start(game(invalid="forfeit", penalty=-1, parameters={"players": 3}), "a", "b", "c")
    assert await three.step({"a": "?"}) == {"a": -1.0}
    assert three.outcome().rewards == {"a": -2.0, "b": 1.0, "c": 1.0}
    # Bids are made at the same time, so that two can forfeit together; what the third gets is in the declared range.
    bids = game("goofspiel", invalid="forfeit", parameters={"players": 3, "num_cards": 3})
    alone = start(bids, "a", "b", "c")
    await alone.step({"a": "?", "b": "?", "c": "Bid: 1"})
    assert alone.outcome().rewards == {"a": -1.0, "b": -1.0, "c": 2.0}
    assert bids.reward_range == (-1.0, 2.0)
    assert game(invalid="forfeit").reward_range == (-2.0, 2.0)
    together = start(game("tiny_hanabi", invalid="forfeit"), "a", "b")
    await together.step({"a": "a1"})
    await together.step({"b": "?"})
    assert together.outcome().rewards == {"a": 0.0, "b": 0.0}
    assert together.outcome().success == 0.0


async def test_simultaneous_moves_come_together() -> None:
    world = start(game("matrix_pd"), "a", "b")
    assert world.movers() == ("a", "b")
    with pytest.raises(EpisodeError, match="turn"):
        await world.step({"a": "Defect"})
    await world.step({"a": "Defect", "b": "Cooperate"})
    assert world.outcome().rewards == {"a": 10.0, "b": 0.0}


def hand(world: GameState) -> list[str]:
    """Return the first player's cards in Hanabi, which only the others see."""
    text: str = world.state.to_string()
    return text.split("-----", maxsplit=1)[0].partition("Cur player\n")[2].splitlines()


def test_cards_have_their_probabilities() -> None:
    """Of ten cards in very small Hanabi three are ones and one is a five."""
    environment = game("hanabi_very_small")
    cards = [hand(start(environment, "a", "b", seed=seed))[0][:2] for seed in range(800)]
    assert cards.count("R1") / 800 == pytest.approx(0.3, abs=0.05)
    assert cards.count("R5") / 800 == pytest.approx(0.1, abs=0.04)


async def test_one_agent_can_be_all_players_of_a_common_payoff_game() -> None:
    world = start(game("tiny_hanabi", wording="short"), "solo")
    assert world.observe("solo").startswith("1/2 ")
    await world.step({"solo": "a1"})
    assert world.observe("solo").startswith("2/2 ")
    await world.step({"solo": "p1a1"})
    outcome = world.outcome()
    assert outcome.rewards["solo"] in {8.0, 0.0, 4.0, 10.0}
    assert outcome.success == outcome.rewards["solo"] / 10
    assert outcome.info["seats"] == {"solo": [1, 2]}


async def test_rotation_keeps_the_cyclic_order() -> None:
    environment = game(rotate=True, parameters={"players": 3})
    seen = set()
    for seed in range(40):
        seats = start(environment, "a", "b", "c", seed=seed).outcome().info["seats"]
        assert (seats["b"][0] - seats["a"][0]) % 3 == 1
        seen.add(seats["a"][0])
    assert seen == {1, 2, 3}


async def test_chance_depends_on_the_episode_or_the_task() -> None:
    def hands(environment: OpenSpiel) -> set[str]:
        return {start(environment, "a", "b", seed=seed).observe("a") for seed in range(30)}

    assert len(hands(game())) == 3
    assert len(hands(game(chance="task"))) == 1


GAMES = [
    "kuhn_poker",
    "kuhn_poker(players=4)",
    "leduc_poker",
    "tic_tac_toe",
    "connect_four",
    "liars_dice",
    "negotiation",
    "tiny_hanabi",
    "hanabi_very_small",
    "hanabi_small(players=5)",
    "hanabi_full",
    "goofspiel(num_cards=4)",
    "matrix_rps",
    "coin_game",
    "trade_comm",
    "pig(winscore=15)",
    "bargaining",
    "oshi_zumo(coins=6)",
    "repeated_game(stage_game=matrix_pd(),num_repetitions=3)",
]


async def wander(environment: OpenSpiel, seed: int, invalid: float) -> tuple[dict[str, float], GameState]:
    """Draw moves from the observations; return the total rewards and the episode."""
    agents = [f"p{k}" for k in range(environment.loaded.num_players())]
    world = start(environment, *agents, seed=seed)
    draw, totals = random.Random(seed), dict.fromkeys(agents, 0.0)
    while movers := world.movers():
        texts = {
            agent: "nonsense" if draw.random() < invalid else draw.choice(read_listed(world.observe(agent)))
            for agent in movers
        }
        for agent, reward in (await world.step(texts)).items():
            totals[agent] += reward
    for agent, reward in world.outcome().rewards.items():
        totals[agent] += reward
    return totals, world


@pytest.mark.slow
@given(
    st.sampled_from(GAMES),
    st.integers(0, 2**40),
    st.sampled_from(["full", "short"]),
    st.sampled_from(["random", "forfeit"]),
    st.sampled_from([0.0, 0.2]),
    st.booleans(),
)
def test_any_episode_stays_in_the_reward_range_and_repeats(
    name: str, seed: int, wording: str, invalid: str, share: float, steps: bool
) -> None:
    environment = game(name, wording=wording, invalid=invalid, step_rewards=steps)
    totals, world = asyncio.run(wander(environment, seed, share))
    low, high = environment.reward_range
    assert all(low - 1e-9 <= total <= high + 1e-9 for total in totals.values())
    outcome = world.outcome()
    assert not outcome.truncated
    whole = environment.loaded.utility_sum()
    if share == 0.0:
        assert not any(outcome.info["invalid"].values())
        if whole is not None:
            assert sum(totals.values()) == pytest.approx(whole)
    repeated_totals, repeated = asyncio.run(wander(environment, seed, share))
    assert repeated_totals == totals
    assert repeated.outcome().info["moves"] == outcome.info["moves"]


async def test_an_unfinished_game_is_truncated() -> None:
    world = start(game(), "a", "b")
    await world.step({"a": "Pass"})
    outcome = world.outcome()
    assert outcome.truncated
    assert outcome.rewards == {"a": 0.0, "b": 0.0}


def test_the_script_prefers_a_move_in_each_observation() -> None:
    environment: Environment = game()
    assert offers(environment, Scripted)
    assert not offers(environment, Answerable)
    task = environment.task("train", 0)
    messages = [Message("user", "Well? 1/2 2 <Pass | Bet>")]
    assert {environment.script("a", task, messages, seed) for seed in range(20)} == {"Pass", "Bet"}
    bets = {
        view: sum(environment.script("a", task, [Message("user", view)], k) == "Bet" for k in range(400))
        for view in (f"1/2 {card} <Pass | Bet>" for card in range(3))
    }
    assert all(250 < count < 350 or 50 < count < 150 for count in bets.values())  # 3/4 or 1/4 of 400
    assert min(bets.values()) < 200 < max(bets.values())
    with pytest.raises(EpisodeError, match="list_moves"):
        environment.script("a", task, [Message("user", "1/2 2")], 0)
