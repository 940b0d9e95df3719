"""The expected update of every policy-gradient algorithm is a positive multiple of ∇J: enumerated, not sampled.

Settings take out what is *meant* to change the direction (clipping, division by a group's spread, λ < 1); everything
else must leave it as it is: lengths of completions, rounds, who speaks last, and weights that have moved on since.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from experiments.tables import Words
from pydantic import ValidationError
from tests.support.expected import (
    ARMS,
    LONG_AND_SHORT,
    Game,
    Run,
    Tables,
    expected_update,
    multiples,
    right_values,
)

from kapelle.algorithm import algorithm_class
from kapelle.algorithms.coma import COMA
from kapelle.types import Episode, Task

OPEN = {"clip_low": 0.999, "clip_high": 1e9}
MONTE_CARLO: dict[str, Any] = {"lam": 1.0, "normalise": "none"}
UNBENT: dict[str, Any] = {"scale": "none", "gamma": 1.0, "alone": "episode", "omega": 2.0}
"""GiGPO without what bends its update."""


def worth(words: Words) -> float:
    """A completion's worth that has to do with its length and with what it says."""
    return {(0,): 1.0, (1, 0): 0.0, (1, 1): 2.5, (1,): -0.5, (2,): 2.0}[words]


def chain(said: Sequence[Words]) -> dict[str, float]:
    """The second agent is paid, for both: it should say the opposite of what the first found out."""
    first, second = said
    return {"b": worth(second) * (2.0 if first == second else -1.0) + worth(first)}


SOLO = Game(("a",), lambda said: {"a": worth(said[0])})
BANDIT = Game(("a",), lambda said: {"a": worth(said[0])}, ARMS)
CHAIN = Game(("a", "b"), chain)
CHAIN_OF_ARMS = Game(("a", "b"), chain, ARMS)
TWO: dict[str, Any] = {"words": ((0,), (1,)), "counts": (2, 1)}
"""Two words of unlike chances, for games of many turns: there are few groups of such outcomes."""
UNEVEN = Game(("a", "a", "b"), lambda said: {"b": worth(said[1]) * worth(said[2]) + worth(said[0])}, **TWO)
"""b speaks once and last: its turn is of round 0, and what it is paid for follows a's second one too."""


def update(name: str, game: Game, seed: int | None = None, **settings: Any) -> dict[str, float]:
    kind: Any = algorithm_class(name)
    one = {"epochs": 1} if "epochs" in kind.model_fields else {}
    algorithm = kind.model_validate({"name": name, **one, **settings}).build()
    return multiples(expected_update(algorithm, game, seed)[0])


def positive(found: dict[str, float]) -> bool:
    return all(factor > 0 for factor in found.values())  # NaN is not


SAMPLED_NOW: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"group_size": 2, "scale": "none"}),
    ("grpo", {"group_size": 2, "scale": "none", "compare": "episode"}),
    ("grpo", {"group_size": 2, "scale": "none", "loss": {"level": "turn"}}),
    ("grpo", {"group_size": 2, "scale": "none", "loss": {"aggregation": "sequence_sum"}}),
    ("grpo", {"group_size": 2, "scale": "none", "loss": {"kind": "cispo"}}),
    ("grpo", {"group_size": 2, "scale": "none", "loss": {"kind": "sapo", "sequence_mask": 0.1}}),
    ("grpo", {"group_size": 2, "scale": "none", "loss": {"kind": "dppo"}}),
    ("rloo", {"group_size": 2}),
    ("remax", {"group_size": 1}),
    ("reinforce_plus_plus", {}),
    ("reinforce_plus_plus", {"group_size": 2, "baseline": "group"}),
    ("reinforce_plus_plus", {"group_size": 2, "baseline": "group", "whiten": "tokens"}),
    ("magrpo", {"group_size": 2}),
    ("at_grpo", {"group_size": 2, "scale": "none"}),
    ("gigpo", {"group_size": 2, **UNBENT}),
    ("gigpo", {"group_size": 2, "scale": "none", "omega": 0.0}),
    ("optimistic", {"group_size": 2, "scale": "none", "best_share": 1.0}),
    ("m_grpo", {"group_size": 2, "scale": "none"}),
    ("a2c", {"gae": MONTE_CARLO, "entropy_coefficient": 0.0}),
    ("ippo", {"gae": MONTE_CARLO}),
    ("ippo", {"gae": {**MONTE_CARLO, "vtrace": True}}),
    ("ippo", {"gae": {**MONTE_CARLO, "unit": "turn"}, "loss": {"level": "turn"}}),
    ("mappo", {"gae": MONTE_CARLO}),
    ("coma", {"group_size": 2, "normalise": "none"}),
    ("marft", {"gae": MONTE_CARLO}),
    ("marft", {"gae": MONTE_CARLO, "level": "token"}),
    ("vdn_token", {"gae": MONTE_CARLO}),
]


@pytest.mark.parametrize(("name", "settings"), SAMPLED_NOW)
@pytest.mark.parametrize("game", [SOLO, CHAIN], ids=["solo", "chain"])
def test_on_fresh_samples(name: str, settings: dict[str, Any], game: Game) -> None:
    assert positive(update(name, game, **settings))


def likelihood_up_to(order: int, rate: float) -> float:
    """−Σ_{k ≤ order} (1 − p)^k / k, by which log p is approximated: its slope, of p."""
    return sum((1 - rate) ** (k - 1) for k in range(1, order + 1))


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("arm", [0, 1], ids=["half", "quarter"])
def test_maxrl_follows_the_likelihood_of_success(group_size: int, arm: int) -> None:
    """Exactly, as far as the group goes: up to order N − 1, as a group of failures alone gives nothing."""
    game = Game(("a",), lambda said: {"a": float(said[0] == (arm,))}, ARMS)
    found = update("grpo", game, group_size=group_size, scale="mean")
    assert found == pytest.approx({"a": likelihood_up_to(group_size - 1, game.counts[arm] / 4)})


def test_maxrl_without_its_baseline_goes_one_order_further() -> None:
    """The mean log-prob of the successes, where there are any: the paper's own estimator, of order N."""
    game = Game(("a",), lambda said: {"a": float(said[0] == (1,))}, ARMS)
    tables, groups = Tables(game, None), game.population(3)
    total = torch.zeros((), dtype=torch.float64)
    for each in groups:
        successes = [tables.turns(one)[0].sum() for one in each.episodes if one.total("a")]
        if successes:
            total = total + torch.stack(successes).mean() / len(groups)
    (tables.ascent["a"],) = torch.autograd.grad(total, tables.logits["a"])
    assert multiples(tables) == pytest.approx({"a": likelihood_up_to(3, 0.25)})


class Siblings(Game):
    """Who speaks later reads what the first one reads: answers to one question."""

    def prompt(self, said: Sequence[Words]) -> Words:
        """Return what every agent reads."""
        return super().prompt(())


def own_pay(said: Sequence[Words]) -> dict[str, float]:
    """Each is paid for its own word, b twice as much and 3 more."""
    return {"a": worth(said[0]), "b": 2.0 * worth(said[1]) + 3.0}


@pytest.mark.parametrize("words", [LONG_AND_SHORT, ARMS], ids=["long", "arms"])
def test_agents_with_equal_prompts_are_compared(words: tuple[Words, ...]) -> None:
    game = Siblings(("a", "b"), own_pay, words, shared=True)
    settings: dict[str, Any] = {"scale": "none", "team_reward": "individual", "compare": "prompt"}
    assert positive(update("grpo", game, group_size=2, **settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("magrpo", {"group_size": 2}),
        ("grpo", {"group_size": 2, "scale": "none"}),
        ("grpo", {"group_size": 2, "scale": "none", "compare": "episode"}),
        ("marft", {"gae": MONTE_CARLO}),
        ("mappo", {"gae": MONTE_CARLO}),
    ],
)
def test_agents_with_unequal_numbers_of_turns(name: str, settings: dict[str, Any]) -> None:
    assert positive(update(name, UNEVEN, **settings))


def b_alone(said: Sequence[Words]) -> dict[str, float]:
    """b, who speaks last, is paid at once, for what a's second turn made of it."""
    return {"b": worth(said[2]) * worth(said[1])} if len(said) == 3 else {}


def both(said: Sequence[Words]) -> dict[str, float]:
    """From the second move on, every move pays both players, as in Hanabi."""
    if len(said) < 2:
        return {}
    paid = worth(said[-1]) * worth(said[-2])
    return {"a": paid, "b": paid}


PAID_AT_ONCE = Game(("a", "a", "b"), lambda said: {}, on_the_way=b_alone, **TWO)
PAID_TOGETHER = Game(("a", "b", "a"), lambda said: {}, on_the_way=both, **TWO)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sum", "mean"])
@pytest.mark.parametrize("game", [PAID_AT_ONCE, PAID_TOGETHER], ids=["one", "both"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("a2c", {"gae": MONTE_CARLO, "entropy_coefficient": 0.0}),
        ("ippo", {"gae": MONTE_CARLO}),
        ("mappo", {"gae": MONTE_CARLO}),
        ("marft", {"gae": MONTE_CARLO}),
        ("marft", {"gae": MONTE_CARLO, "level": "token"}),
        ("reinforce_plus_plus", {}),
        ("mars", {}),
        ("vdn_token", {"gae": MONTE_CARLO}),
    ],
)
def test_rewards_on_the_way(name: str, settings: dict[str, Any], game: Game, how: str) -> None:
    assert positive(update(name, game, team_reward=how, **settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [("magrpo", {"scale": "none"}), ("at_grpo", {"scale": "none"}), ("gigpo", UNBENT)],
    ids=lambda each: str(each)[:8],
)
def test_rewards_on_the_way_within_groups(name: str, settings: dict[str, Any]) -> None:
    assert positive(update(name, PAID_TOGETHER, team_reward="sum", group_size=2, **settings))


@pytest.mark.long
@pytest.mark.slow
def test_a_state_met_twice_is_compared_with_other_episodes() -> None:
    """Nothing is heard in these games, so that all turns of an agent meet one state."""
    assert positive(
        update("gigpo", PAID_TOGETHER, team_reward="sum", group_size=2, state="new_messages", **UNBENT)
    )


def test_the_mean_of_an_action_s_returns_leads_where_the_returns_do() -> None:
    """`best_share: 1`: equal actions have equal gradients, so that AT-GRPO's update is the same for either."""
    settings = {"group_size": 2, "scale": "none"}
    kinds: list[Any] = [algorithm_class(name) for name in ("optimistic", "at_grpo")]
    given = [{**settings, "best_share": 1.0}, settings]
    one, other = (
        expected_update(kind.model_validate(each).build(), CHAIN_OF_ARMS)[0].ascent
        for kind, each in zip(kinds, given, strict=True)
    )
    assert all(torch.allclose(one[agent], other[agent], atol=1e-6) for agent in "ab")


def test_states_that_are_seldom_met_weigh_less_in_gigpo() -> None:
    """With `alone: zero` the update at a state is (1 + ω·P(another attempt meets it))·½ times ∇J there."""
    kind: Any = algorithm_class("gigpo")
    settings = {"group_size": 2, "scale": "none", "gamma": 1.0, "omega": 2.0}
    tables = expected_update(kind.model_validate(settings).build(), CHAIN_OF_ARMS)[0]
    true, factors = tables.gradient(), {}
    for k, words in enumerate(CHAIN_OF_ARMS.words):
        row = tables.model.row(CHAIN_OF_ARMS.prompt([words]))
        moved, gradient = tables.ascent["b"][row], true["b"][row]
        factors[k] = float((moved * gradient).sum() / gradient.square().sum())
        assert torch.allclose(moved, factors[k] * gradient, atol=1e-6)
    # One other attempt, whose first agent says the words with ½, ¼ and ¼.
    assert [factors[k] / factors[0] for k in factors] == pytest.approx([1.0, 1.5 / 2.0, 1.5 / 2.0], rel=1e-4)
    assert math.isnan(multiples(tables)["b"])
    assert multiples(tables)["a"] > 0


def stops_early(said: Sequence[Words]) -> str | None:
    """a speaks once or twice; its word (0,) ends the episode."""
    return "a" if len(said) < 2 and (0,) not in said else None


def answers_or_not(said: Sequence[Words]) -> str | None:
    """a and b take turns up to three times; b's word (0,) ends the episode."""
    return ("a", "b", "a")[len(said)] if len(said) < 3 and said[1:2] != [(0,)] else None


def routed(said: Sequence[Words]) -> str | None:
    """r picks by its word who answers, b or c, and b's answer is checked by c unless it is (1,)."""
    if not said:
        return "r"
    if len(said) == 1:
        return "b" if said[0] == (0,) else "c"
    return "c" if len(said) == 2 and said[0] == said[1] == (0,) else None


def in_all(said: Sequence[Words]) -> float:
    """What the last word makes of all before it; 8 on average, so that a raw return stands out."""
    return 8.0 + worth(said[-1]) * sum(worth(words) for words in said) - len(said)


def at_once(said: Sequence[Words]) -> dict[str, float]:
    """Every word is paid for on its own as well."""
    return {("a", "b", "a")[len(said) - 1]: 3.0 * worth(said[-1])}


EVEN: dict[str, Any] = {"words": ((0,), (1,)), "counts": (1, 1)}
UNALIKE = {
    "stops": Game(
        stops_early,
        lambda said: {"a": in_all(said)},
        on_the_way=lambda said: {"a": 3.0 * worth(said[-1])},
        seats=("a",),
        **EVEN,
    ),
    "answers": Game(
        answers_or_not, lambda said: {"a": in_all(said)}, on_the_way=at_once, seats=("a", "b"), **EVEN
    ),
    "routed": Game(routed, lambda said: {"c": in_all(said)}, seats=("r", "b", "c"), **EVEN),
    "fails": Game(("a", "b"), lambda said: {"b": in_all(said)}, failing=1, **EVEN),
}
"""Games whose comparison sets differ in size: who has a turn depends on what was said, or every third attempt fails."""


def gamble(said: Sequence[Words]) -> dict[str, float]:
    """The first word is worth 1; the second 4 or −4, by chance: 0 on average."""
    return {"a": 1.0 if said[0] == (0,) else 4.0 if said[1] == (0,) else -4.0}


@pytest.mark.parametrize(("best_share", "prefers"), [(1.0, 0), (0.5, 1)])
def test_optimism_overrates_a_gamble(best_share: float, prefers: int) -> None:
    """Where it is wrong: what chance paid in the better half counts as what one can earn."""
    game = Game(("a", "chance"), gamble, **EVEN)
    kind: Any = algorithm_class("optimistic")
    settings = {"group_size": 4, "scale": "none", "best_share": best_share}
    moved = expected_update(kind.model_validate(settings).build(), game)[0].ascent["a"]
    assert int(moved[0].argmax()) == prefers
    # The better one of two gambles pays 2 on average: 4 in three cases of four.
    assert float(moved[0].abs().max()) > 1e-3


def delegates(said: Sequence[Words]) -> str | None:
    """m hands to s, reads the answer, and hands to it once more unless it says (1,)."""
    if len(said) < 3:
        return ("m", "s", "m")[len(said)]
    return "s" if len(said) == 3 and said[2] == (0,) else None


DELEGATES = Game(delegates, lambda said: {"s": in_all(said)}, seats=("m", "s"), **EVEN)


def test_calls_of_a_sub_agent_that_all_weigh_the_same_lead_along_the_gradient() -> None:
    settings: dict[str, Any] = {"group_size": 2, "scale": "none", "team_reward": "sum", "align": "none"}
    assert positive(update("m_grpo", DELEGATES, **settings))
    assert positive(update("m_grpo", DELEGATES, compare="main", **settings))


def test_an_episode_counts_once_for_a_sub_agent_with_any_number_of_calls() -> None:
    """The weights are not ∇J: they are the gradient of attempts that are averaged over their k calls, exactly."""
    kind: Any = algorithm_class("m_grpo")
    settings = {"group_size": 2, "scale": "none", "team_reward": "sum"}
    tables = expected_update(kind.model_validate(settings).build(), DELEGATES)[0]
    found = multiples(tables)
    assert found["m"] > 0
    assert math.isnan(found["s"])
    outcomes = [(DELEGATES.episode(places, Task("t", "")), count) for places, count in DELEGATES.outcomes()]
    total = sum(count for _, count in outcomes)
    mean = sum(count * one.total("s") for one, count in outcomes) / total
    whole = torch.zeros((), dtype=torch.float64)
    for one, count in outcomes:
        own = [
            logp.sum() for turn, logp in zip(one.turns, tables.turns(one), strict=True) if turn.agent == "s"
        ]
        # Two attempts: R − mean is half of R less the other's. The mean number of calls cancels with that of the tokens.
        whole = whole + count / total * 0.5 * (one.total("s") - mean) * torch.stack(own).mean()
    (expected,) = torch.autograd.grad(whole, tables.logits["s"])
    torch.testing.assert_close(tables.ascent["s"], expected, rtol=1e-5, atol=1e-6)


SETS: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"scale": "none"}),
    ("grpo", {"scale": "none", "compare": "episode"}),
    ("rloo", {}),
    ("magrpo", {}),
    ("at_grpo", {"scale": "none"}),
    ("gigpo", UNBENT),
    ("optimistic", {"scale": "none", "best_share": 1.0}),
    ("m_grpo", {"scale": "none", "align": "none"}),
    ("remax", {}),
]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), SETS, ids=str)
@pytest.mark.parametrize(
    ("kind", "size", "shared"),
    [
        ("stops", 3, False),
        ("answers", 2, False),
        ("answers", 2, True),
        ("routed", 2, False),
        ("routed", 2, True),
        ("fails", 2, True),
        ("fails", 3, False),
    ],
)
def test_sets_of_every_size_weigh_alike(
    name: str, settings: dict[str, Any], kind: str, size: int, *, shared: bool
) -> None:
    """One alone is compared with earlier returns: from the second step on the whole is an exact multiple of ∇J."""
    game = replace(UNALIKE[kind], shared=shared)
    found = second_step(name, game, group_size=size, team_reward="sum", **settings)
    assert positive(found), found


def second_step(name: str, game: Game, **settings: Any) -> dict[str, float]:
    """What multiple of ∇J the update is that knows the returns of an earlier step."""
    kind: Any = algorithm_class(name)
    algorithm = kind.model_validate({"name": name, **settings}).build()
    tables = Tables(game, None)
    before, groups = dict(tables.logits), game.population(algorithm.data.group_size)
    run = Run(algorithm, tables)
    run.step(groups)
    run.go_back(before)
    run.step(groups)
    tables.logits = before
    return multiples(tables)


@pytest.mark.parametrize("name", ["grpo", "at_grpo", "remax", "opo", "reinforce_plus_plus", "rae"])
def test_a_resumed_loop_has_the_earlier_returns(name: str) -> None:
    """b's and c's turns are alone among the attempts at their tasks: what is remembered decides what they are worth."""
    settings: dict[str, Any] = {"baseline": "group"} if name == "reinforce_plus_plus" else {}
    if name != "rae":
        settings["group_size"] = 2
    kind: Any = algorithm_class(name)
    algorithm = kind.model_validate({"name": name, **settings}).build()
    game = UNALIKE["routed"]
    every = game.population(algorithm.data.group_size)
    groups = [each for each in every if sum(len(one.turns) == 3 for one in each.episodes) == 1]
    first, then = groups[0::2][:1], groups[1::2]

    def begun(tables: Tables) -> Run:
        return Run(
            algorithm, tables, greedy=lambda task: game.episode((1, 0), task)
        )  # c answers, b is silent

    moved = []
    for resumed in (False, True):
        tables = Tables(game, None)
        before = dict(tables.logits)
        run = begun(tables)
        run.step(first)
        run.go_back(before)
        if resumed:
            kept = run.loop.state()
            run = begun(tables)
            run.loop.load_state(kept)
        run.step(then)
        moved.append(tables.ascent)
    assert all(torch.equal(moved[0][agent], moved[1][agent]) for agent in game.agents)
    assert any(float(each.abs().max()) > 0 for each in moved[0].values())
    anew = Tables(game, None)
    begun(anew).step(then)
    assert not all(torch.equal(moved[0][agent], anew.ascent[agent]) for agent in game.agents)


STALE: list[tuple[str, dict[str, Any]]] = [
    ("a2c", {"gae": MONTE_CARLO, "entropy_coefficient": 0.0}),
    ("a2c", {"gae": {**MONTE_CARLO, "vtrace": True}, "entropy_coefficient": 0.0}),
    ("ippo", {"gae": MONTE_CARLO, "loss": OPEN}),
    ("ippo", {"gae": {**MONTE_CARLO, "vtrace": True}, "loss": OPEN}),
    ("ippo", {"gae": MONTE_CARLO, "loss": {**OPEN, "importance_cap": 1e9}}),
    ("ippo", {"gae": {**MONTE_CARLO, "vtrace": True}, "loss": {**OPEN, "importance_cap": 1e9}}),
    ("marft", {"gae": {**MONTE_CARLO, "vtrace": True}, "loss": OPEN}),
]


@pytest.mark.parametrize(("name", "settings"), STALE)
@pytest.mark.parametrize("seed", range(3))
def test_on_samples_of_older_weights(name: str, settings: dict[str, Any], seed: int) -> None:
    # One action, so that the ratio of its one token is all there is to correct: then ∇J itself, not a multiple.
    assert update(name, BANDIT, seed, **settings) == pytest.approx({"a": 1.0})


@pytest.mark.parametrize("cap", [None, 1e9])
@pytest.mark.parametrize("seed", range(3))
def test_a_turn_of_older_weights_is_corrected_as_one_action(cap: float | None, seed: int) -> None:
    loss = {**OPEN, "level": "turn", "importance_cap": cap}
    settings = {"gae": {**MONTE_CARLO, "unit": "turn", "vtrace": True}, "loss": loss}
    assert update("ippo", SOLO, seed, **settings) == pytest.approx({"a": 1.0})


def test_it_is_the_average_over_turns_and_not_over_tokens() -> None:
    # The case: ∇J itself, where a mean over tokens gives E[T·A·∇log π] / E[T].
    assert update("marft", SOLO, gae=MONTE_CARLO) == pytest.approx({"a": 1.0})


def test_an_action_has_one_advantage() -> None:
    # A value after some of its tokens depends on the action itself: as its baseline it would bias the update.
    with pytest.raises(ValidationError, match=r"set `gae\.unit: turn`"):
        update("ippo", SOLO, gae=MONTE_CARLO, loss={"level": "turn"})
    with pytest.raises(ValidationError, match=r"loss\.level: token"):
        update("reinforce_plus_plus", SOLO, gamma=0.9, loss={"level": "sequence"})


def test_a_wrong_direction_is_seen() -> None:
    # GRPO's own mean over each completion's tokens weighs long completions less: that is its known bias.
    found = update("grpo", SOLO, group_size=2, scale="none", loss={"aggregation": "sequence_mean"})
    assert math.isnan(found["a"])


class AtOnce(Game):
    """b answers at the same moment as a, and reads nothing of it."""

    def prompt(self, said: Sequence[Words]) -> Words:
        """Return what every agent reads."""
        return super().prompt(())

    def episode(self, outcome: Sequence[int], task: Task) -> Episode:
        """Return one outcome with both turns at one moment."""
        played = super().episode(outcome, task)
        return replace(played, turns=tuple(replace(each, completed_before=0) for each in played.turns))


def opposites(said: Sequence[Words]) -> dict[str, float]:
    """What a word is worth depends on the other's."""
    return {"a": worth(said[0]) * worth(said[1]) + worth(said[0])}


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("how", ["one after another", "at once"])
def test_coma_follows_its_critic(how: str, right: bool) -> None:
    """With the values of its own policies it is a multiple of ∇J, and with another critic's it is not."""
    game = CHAIN_OF_ARMS if how == "one after another" else AtOnce(("a", "b"), opposites, ARMS)
    algorithm = COMA(group_size=2, normalise="none", worth="value").build()
    tables = Tables(game, None)
    before, groups = dict(tables.logits), game.population(2)
    run = Run(algorithm, tables)
    if right:
        run.engine.load_weights("critic", right_values(game, tables))
    run.step(groups)
    tables.logits = before
    found_multiples = multiples(tables)
    assert positive(found_multiples) == right, found_multiples
