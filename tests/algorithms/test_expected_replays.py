"""The expected update of algorithms that play episodes on with something changed, or share their beginnings: enumerated.

Where an episode is played on, each continuation pays its expectation, exactly: the update is linear in what is subtracted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from experiments.tables import Words
from tests.algorithms.test_expected_gradient import CHAIN, CHAIN_OF_ARMS, EVEN, UNALIKE, worth
from tests.support.episodes import group, turn
from tests.support.expected import ARMS, Game, Run, Tables, multiples, right_values

from kapelle.algorithm import Algorithm, Change, algorithm_class
from kapelle.rollout.interventions import affordable, moment_of
from kapelle.rows import Signals
from kapelle.types import Episode, Group, Intervention, Task


def row(name: str, **settings: Any) -> Algorithm:
    kind: Any = algorithm_class(name)
    algorithm: Algorithm = kind.model_validate({"name": name, **settings}).build()
    return algorithm


def ends(
    game: Game, said: list[tuple[str, Words]], absent: Sequence[str], swapped: Sequence[str] = ()
) -> list[tuple[list[tuple[str, Words]], int]]:
    """Return how an episode may continue from what was said, with how often it does.

    Those who are `swapped` say the last word three times as often as each other one, whatever the policies do.
    """
    speaker = game.speaker([words for _, words in said])
    if speaker is None:
        return [(said, 1)]
    if speaker in absent:
        return ends(game, [*said, (speaker, ())], absent, swapped)
    others = (*(1 for _ in game.words[1:]), 3)
    return [
        (whole, count * times)
        for words, count in zip(game.words, others if speaker in swapped else game.counts, strict=True)
        for whole, times in ends(game, [*said, (speaker, words)], absent, swapped)
    ]


def expectation(game: Game, episode: Episode, change: Change, returns: Any) -> Mapping[str, float]:
    """Return each agent's mean return over all that may follow a change."""
    past, beside = moment_of(episode, change)
    assert not beside, "these games are chains"
    said = [(one.agent, one.completion_ids) for one in past]
    absent = change.agents if change.what == "remove" else ()
    swapped = change.agents if change.what == "swap" else ()
    if change.what == "replace":
        assert change.by is not None
        assert not isinstance(change.by, str)
        said.append((change.by.agent, change.by.completion_ids))
    paid: list[Mapping[str, float]] = []
    for whole, count in ends(game, said, absent, swapped):
        turns = [
            turn(agent, k, len(words), completion_ids=words, trained=agent not in (*absent, *swapped))
            for k, (agent, words) in enumerate(whole)
        ]
        ended = Episode(
            Task("t", ""), 0, game.agents, tuple(turns), game.payoff([words for _, words in whole])
        )
        paid += [returns(ended)] * count
    return {agent: fmean(each[agent] for each in paid) for agent in paid[0]}


def played_on(game: Game, algorithm: Algorithm, groups: Sequence[Group]) -> list[Group]:
    """Return groups with what every change would have paid on average."""
    asked = algorithm.data.interventions
    assert asked is not None
    team = game.team(algorithm)
    found = []
    for one in groups:
        episodes = []
        for e, episode in enumerate(one.episodes):
            changes = affordable(one, e, asked, team, 1) if episode.error is None else ()
            made = [
                Intervention(
                    change.what,
                    change.agents,
                    change.turn,
                    (expectation(game, episode, change, asked.returns),),
                )
                for change in changes
            ]
            episodes.append(replace(episode, interventions=tuple(made)))
        found.append(group(*episodes))
    return found


def update(game: Game, algorithm: Algorithm, groups: Sequence[Group]) -> dict[str, float]:
    tables = Tables(game, None)
    before = dict(tables.logits)
    Run(algorithm, tables).step(groups)
    tables.logits = before
    return multiples(tables)


def together(said: Sequence[Words]) -> dict[str, float]:
    """What the team earns; words that are missing are worth nothing, and the second one's are worth more after the first."""
    first, second = (worth(words) if words else 0.0 for words in said)
    return {"b": second * (1.0 + first) + first}


TEAM = Game(("a", "b"), together, ARMS)
THREE = Game(
    ("a", "b", "c"),
    lambda said: {"c": math.prod(1.0 + (worth(words) if words else 0.0) for words in said)},
    **EVEN | {"words": ((0,), (2,))},
)


@pytest.mark.parametrize("alternatives", ["resampled", "siblings"])
@pytest.mark.parametrize(
    "game", [CHAIN, pytest.param(UNALIKE["answers"], marks=pytest.mark.slow)], ids=["chain", "answers"]
)
def test_counterfactual_credit_follows_the_gradient(game: Game, alternatives: str) -> None:
    if game is not CHAIN:
        game = replace(game, on_the_way=lambda said: {})
    algorithm = row("counterfactual", group_size=2, alternatives=alternatives)
    groups = played_on(game, algorithm, game.population(2))
    assert all(factor > 0 for factor in update(game, algorithm, groups).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "alternatives"), [(0.4, "siblings"), (0.8, "resampled"), (1.2, "siblings")]
)
def test_a_budget_keeps_the_update_unbiased(budget: float, alternatives: str) -> None:
    """In a game whose length depends on what is said, some turns are judged by continuations, others by other attempts."""
    game = replace(UNALIKE["answers"], on_the_way=lambda said: {})
    algorithm = row("counterfactual", group_size=3, budget=budget, alternatives=alternatives)
    groups = played_on(game, algorithm, game.population(3))
    judged = [len(episode.interventions) for one in groups for episode in one.episodes]
    turns = [len(episode.turns) for one in groups for episode in one.episodes]
    assert 0 < sum(judged) < sum(turns) * (1 + (alternatives == "siblings"))
    assert all(factor > 0 for factor in update(game, algorithm, groups).values())


def test_a_budget_spent_where_the_policy_is_uncertain_keeps_the_update_unbiased() -> None:
    """The other episode's log-probs decide which turn is judged by continuations: in a part of the episodes, either of them."""
    unlike = CHAIN_OF_ARMS  # one token with probability 1/2 or 1/4: the entropies differ
    algorithm = row("counterfactual", group_size=2, budget=0.5, priority="entropy")
    groups = played_on(unlike, algorithm, unlike.population(2))
    judged = {tuple(each.turn for each in e.interventions) for one in groups for e in one.episodes}
    assert {(0,), (1,)} <= judged
    assert all(factor > 0 for factor in update(unlike, algorithm, groups).values())


@pytest.mark.parametrize(
    ("name", "settings"),
    [("ccpo", {}), ("sharp", {}), ("sharp", {"absent": "reference"})],
    ids=["ccpo", "sharp", "sharp, the base model speaks"],
)
@pytest.mark.parametrize("game", [TEAM, pytest.param(THREE, marks=pytest.mark.slow)], ids=["two", "three"])
def test_the_return_without_an_agent_is_a_baseline(name: str, settings: dict[str, Any], game: Game) -> None:
    algorithm = row(name, group_size=2, **settings)
    groups = played_on(game, algorithm, game.population(2))
    assert all(factor > 0 for factor in update(game, algorithm, groups).values())


@pytest.mark.slow
def test_some_coalitions_are_a_baseline_too() -> None:
    algorithm = row("sharp", group_size=2, exact=1, permutations=2)
    groups = played_on(THREE, algorithm, THREE.population(2))
    assert all(factor > 0 for factor in update(THREE, algorithm, groups).values())


def test_a_turn_without_continuations_is_compared_with_other_episodes() -> None:
    """Half of the turns, chosen by what others earned, are judged by continuations: still the gradient."""
    algorithm = row("counterfactual", group_size=2)
    groups = played_on(CHAIN, algorithm, CHAIN.population(2))
    some = []
    for one in groups:
        episodes = []
        for e, episode in enumerate(one.episodes):
            other = one.episodes[1 - e].total("b")
            kept = tuple(each for each in episode.interventions if (each.turn == 0) == (other > 1.0))
            episodes.append(replace(episode, interventions=kept))
        some.append(group(*episodes))
    assert all(factor > 0 for factor in update(CHAIN, algorithm, some).values())


def test_a_baseline_with_the_own_return_would_be_biased() -> None:
    algorithm = row("counterfactual", group_size=2)
    groups = played_on(CHAIN, algorithm, CHAIN.population(2))
    some = []
    for one in groups:
        episodes = []
        for episode in one.episodes:
            kept = tuple(
                each for each in episode.interventions if (each.turn == 0) == (episode.total("b") > 1.0)
            )
            episodes.append(replace(episode, interventions=kept))
        some.append(group(*episodes))
    assert any(math.isnan(factor) for factor in update(CHAIN, algorithm, some).values())


def misled(said: Sequence[Words]) -> dict[str, float]:
    """With a partner (0,) is the better word of both; alone, (1,) pays far more."""
    first, second = said
    if first and second:
        return {"b": float(first == (0,)) + float(second == (0,))}
    return {"b": 8.0 * ((1,) in (first, second))}


def test_a_shapley_reward_optimises_returns_of_coalitions() -> None:
    game = Game(("a", "b"), misled, **EVEN)
    for use, better in (("baseline", True), ("reward", False)):
        algorithm = row("sharp", group_size=2, use=use)
        tables = Tables(game, None)
        Run(algorithm, tables).step(played_on(game, algorithm, game.population(2)))
        first = tables.ascent["a"][tables.model.row(game.prompt(()))]
        assert (float(first[0]) > float(first[1])) is better, use


# -------- Nested trees


def trees(game: Game, widths: tuple[int, ...]) -> list[Group]:
    """Return every nested tree of a game in which all episodes have so many turns, as often as it occurs."""
    weights = list(enumerate(game.counts))

    def below(depth: int) -> list[tuple[list[list[int]], int]]:
        """Return the ways of all episodes under a node, with how often they occur."""
        if depth == len(widths):
            return [([[]], 1)]
        one = [
            ([[k, *rest] for rest in ways], count * times)
            for k, count in weights
            for ways, times in below(depth + 1)
        ]
        return [
            ([way for ways, _ in chosen for way in ways], math.prod(times for _, times in chosen))
            for chosen in itertools.product(one, repeat=widths[depth])
        ]

    groups: list[Group] = []
    for ways, times in below(0):
        for _ in range(times):
            task = Task(f"t{len(groups)}", "")
            groups.append(group(*(game.episode(way, task) for way in ways)))
    return groups


PAIR = Game(
    ("a", "b"),
    lambda said: {"b": worth(said[1]) * (2.0 if said[0] == said[1] else -1.0) + worth(said[0])},
    **EVEN,
)


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "one policy"])
@pytest.mark.parametrize("widths", [(2, 2), (3, 1), pytest.param((1, 3), marks=pytest.mark.slow), (2, 3)])
def test_a_nested_tree_follows_the_gradient(widths: tuple[int, ...], shared: bool) -> None:
    game = replace(PAIR, shared=shared)
    algorithm = row("c3", widths=widths)
    found = update(game, algorithm, trees(game, widths))
    if widths == (1, 3):  # the first moment has nothing to be compared with, and does not learn
        assert shared or found["b"] > 0
    else:
        assert all(factor > 0 for factor in found.values())


@pytest.mark.parametrize("widths", [(2, 2), (3, 1)])
@pytest.mark.parametrize(
    ("settings", "right", "follows"),
    [
        ({"variant": "value_assisted"}, False, True),
        ({"variant": "value_assisted", "alpha": 0.25}, False, True),
        ({"variant": "value_only"}, True, True),
        ({"variant": "value_only"}, False, False),
    ],
    ids=["assisted", "mixed", "values alone, right", "values alone, wrong"],
)
def test_a_critic_sets_a_baseline_or_is_followed(
    widths: tuple[int, ...], settings: dict[str, Any], right: bool, follows: bool
) -> None:
    """As a baseline any critic will do; where its values stand in for what was earned, only the right one does."""
    algorithm = row("c3", widths=widths, team_reward="sum", **settings)
    tables = Tables(PAIR, None)
    before = dict(tables.logits)
    run = Run(algorithm, tables)
    if right:
        run.engine.load_weights("critic", right_values(PAIR, tables))
    run.step(trees(PAIR, widths))
    tables.logits = before
    found = multiples(tables)
    assert all(factor > 0 for factor in found.values()) == follows, found


def test_a_turn_s_credit_is_its_exact_advantage_on_average() -> None:
    """Not only the update: whatever an agent has read and says, its credit's mean is what the team may expect after that, less before."""
    widths = (2, 3)
    algorithm = row("c3", widths=widths, team_reward="sum")
    assert algorithm.credit is not None
    groups = trees(PAIR, widths)
    found: dict[tuple[Words, Words], list[float]] = {}
    for key, each in algorithm.credit(groups, Signals()).items():
        said = groups[key.group].episodes[key.episode].turns[key.turn]
        if each.weight:
            place = (said.prompt_ids, said.completion_ids)
            found.setdefault(place, []).append(float(each.advantage_T[0]))
    words, shares = PAIR.words, [count / sum(PAIR.counts) for count in PAIR.counts]
    pays = {(a, b): PAIR.earned((a, b)) for a in words for b in words}
    after = {a: sum(share * pays[a, b] for share, b in zip(shares, words, strict=True)) for a in words}
    start = sum(share * after[a] for share, a in zip(shares, words, strict=True))
    exact = {(PAIR.prompt(()), a): after[a] - start for a in words}
    exact |= {(PAIR.prompt((a,)), b): pays[a, b] - after[a] for a, b in pays}
    assert {place: fmean(each) for place, each in found.items()} == pytest.approx(exact, abs=1e-5)
