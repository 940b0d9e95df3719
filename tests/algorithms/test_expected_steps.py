"""The optimiser steps of an update, from definitions: epochs, minibatches, passes, ranks, references, orders, critics.

Whole populations go through the loop and the train engine (`tests/support/expected.py`), and plain gradient descent on tables
takes their steps. Where they lead is worked out here from the objective's definition, in float64.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from experiments.tables import Words
from tests.support.expected import ARMS, MARK, Game, Run, Tables
from torch import Tensor

from kapelle.algorithm import Algorithm, Credit, algorithm_class
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.ranks import ALONE, Peers, Ranks
from kapelle.team import reference_name
from kapelle.types import Group

OPEN = {"clip_low": 0.999, "clip_high": 1e9}
MONTE_CARLO: dict[str, Any] = {"lam": 1.0, "normalise": "none"}


def worth(words: Words) -> float:
    return {(0,): 1.0, (1, 0): 0.0, (1, 1): 2.5, (1,): -0.5, (2,): 2.0}[words]


def chain(said: Sequence[Words]) -> dict[str, float]:
    first, second = said
    return {"b": worth(second) * (2.0 if first == second else -1.0) + worth(first)}


SOLO = Game(("a",), lambda said: {"a": worth(said[0])})
BANDIT = Game(("a",), lambda said: {"a": worth(said[0])}, ARMS)
CHAIN = Game(("a", "b"), chain)
CHAIN_OF_ARMS = Game(("a", "b"), chain, ARMS)
THREE = Game(
    ("a", "b", "c"),
    lambda said: {"c": worth(said[0]) * worth(said[1]) * worth(said[2])},
    words=((0,), (2,)),
    counts=(2, 1),
)


def built(name: str, **settings: Any) -> Algorithm:
    kind: Any = algorithm_class(name)
    one = {"epochs": 1} if "epochs" in kind.model_fields else {}
    algorithm: Algorithm = kind.model_validate({"name": name, **one, **settings}).build()
    return algorithm


def close(one: Tensor, other: Tensor, within: float = 1e-5) -> bool:
    """Whether two gradients are the same, relative to their length."""
    return float((one - other).detach().norm()) <= within * float(other.detach().norm())


# -------- One policy and three words: what an objective says of each word is all there is

SAMPLED = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
BETTER = torch.tensor([0.0, -1.5, 1.0], dtype=torch.float64)
"""What each word earns above the greedy one, the first."""


def word_log_probs(tables: Tables, logits: Tensor) -> Tensor:
    """log π of the three words by a table."""
    row = tables.model.row((MARK,))
    return (logits[row] + tables.model.starts([row])[0]).log_softmax(-1)


def ascended(logits: Tensor, objective: Callable[[Tensor], Tensor], rate: float) -> Tensor:
    """A table after a step up an objective."""
    leaf = logits.detach().clone().requires_grad_()
    (up,) = torch.autograd.grad(objective(leaf), leaf)
    return logits.detach() + rate * up


def clipped(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * BETTER, ratio.clamp(1 - low, 1 + high) * BETTER)


@pytest.mark.parametrize("cap", [None, 1e9])
@pytest.mark.parametrize("loss", [OPEN, {"clip_low": 0.2, "clip_high": 0.3}], ids=["open", "clipped"])
def test_every_epoch_is_a_step_up_the_surrogate(loss: dict[str, float], cap: float | None) -> None:
    """The ratio's denominator is what it was before the first one: new weights, old log-probs."""
    tables = Tables(BANDIT, seed=2)
    start, rate = tables.logits["a"].detach(), 0.4
    run = Run(built("remax", epochs=4, loss={**loss, "importance_cap": cap}), tables, rate=rate)
    before = word_log_probs(tables, start)
    denominator = SAMPLED.log() if cap is None else before
    weight = SAMPLED if cap is None else before.exp()

    def objective(logits: Tensor) -> Tensor:
        ratio = (word_log_probs(tables, logits) - denominator).exp()
        return (weight * clipped(ratio, loss["clip_low"], loss["clip_high"])).sum()

    expected = start
    for _ in range(4):
        expected = ascended(expected, objective, rate)
    run.step(BANDIT.population(1))
    assert close(run.weights("a") - start, expected - start)
    once = 4 * (ascended(start, objective, rate) - start)
    assert not close(once, expected - start, 0.05), "four steps are not one of four times the size"


@pytest.mark.parametrize(
    "loss",
    [
        {"kind": "sapo", "tau_positive": 3.0},
        {**OPEN, "sequence_mask": 0.4},
        {"kind": "dppo", "divergence": 0.2},
    ],
    ids=str,
)
def test_every_epoch_is_a_step_up_the_gated_or_masked_objective(loss: dict[str, Any]) -> None:
    tables = Tables(BANDIT, seed=0)
    start, rate = tables.logits["a"].detach(), 0.4
    run = Run(built("remax", epochs=4, loss=loss), tables, rate=rate)

    def objective(logits: Tensor) -> Tensor:
        log_ratio = word_log_probs(tables, logits) - SAMPLED.log()
        if "tau_positive" in loss:
            tau = torch.tensor([1.05, 1.05, 3.0], dtype=torch.float64)
            return (SAMPLED * 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)) * BETTER).sum()
        kept = (BETTER >= 0) | (log_ratio.detach() >= -0.4)
        if "divergence" in loss:
            kept = BETTER.sign() * (log_ratio.detach().exp() - 1) * SAMPLED <= 0.2
        seen.append(bool(kept.all()))
        return (SAMPLED * log_ratio.exp() * BETTER * kept).sum()

    seen: list[bool] = []
    expected = start
    for _ in range(4):
        expected = ascended(expected, objective, rate)
    run.step(BANDIT.population(1))
    assert close(run.weights("a") - start, expected - start)
    assert "tau_positive" in loss or set(seen) == {True, False}, "a word is left out from some epoch on"


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("every", [0, 1, 2])
def test_references_are_the_policy_as_it_was_after_every_so_many_steps(every: int, estimator: str) -> None:
    tables = Tables(BANDIT, seed=2)
    rate, beta = 0.4, 0.7
    loss = {**OPEN, "kl_coefficient": beta, "kl_estimator": estimator}
    run = Run(built("remax", loss=loss, reference_every=every), tables, rate=rate)
    reference = run.weights(reference_name("a"))
    now = tables.logits["a"].detach()
    assert not torch.equal(reference, now)
    for number in range(1, 6):
        held = word_log_probs(tables, reference)

        def objective(logits: Tensor, held: Tensor = held) -> Tensor:
            log_ratio = held - word_log_probs(tables, logits)
            penalty = {"k2": log_ratio.square() / 2, "k3": log_ratio.exp() - 1 - log_ratio}[estimator]
            ratio = (word_log_probs(tables, logits) - SAMPLED.log()).exp()
            return (SAMPLED * (ratio * BETTER - beta * penalty)).sum()

        expected = ascended(now, objective, rate)
        run.step(BANDIT.population(1))
        assert close(run.weights("a") - now, expected - now, 1e-4), number
        now = run.weights("a")
        if every and number % every == 0:
            reference = now


def test_each_policy_has_its_own_reference() -> None:
    run = Run(
        built("remax", loss={"kl_coefficient": 0.7}, reference_every=1),
        Tables(CHAIN_OF_ARMS, seed=2),
        rate=0.4,
    )
    run.step(CHAIN_OF_ARMS.population(1))
    assert not torch.equal(run.weights("a"), run.weights("b"))
    for name in "ab":
        assert torch.equal(run.weights(reference_name(name)), run.weights(name))


def test_an_entropy_bonus_goes_up_the_entropy() -> None:
    tables = Tables(BANDIT, seed=2)
    start = tables.logits["a"].detach()
    run = Run(built("remax", loss={**OPEN, "entropy_coefficient": 0.6}), tables)

    def objective(logits: Tensor) -> Tensor:
        logp = word_log_probs(tables, logits)
        return (logp.exp() * BETTER).sum() - 0.6 * (logp.exp() * logp).sum()

    run.step(BANDIT.population(1))
    assert close(run.weights("a") - start, ascended(start, objective, 1.0) - start)


TINY = 1e-5
"""A rate at which the steps of an update do not move what the next one sees."""


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("remax", {"loss": {"entropy_coefficient": 0.3}}),
        ("remax", {"loss": {"aggregation": "sequence_mean"}}),
        ("remax", {"loss": {"aggregation": "sequence_sum"}}),
        ("remax", {"loss": {"level": "turn"}}),
        ("a2c", {"gae": MONTE_CARLO, "entropy_coefficient": 0.3}),
        ("mmd", {"group_size": 2, "temperature": 0.3}),
    ],
)
def test_a_turn_counts_as_often_as_its_weight_says(name: str, settings: dict[str, Any]) -> None:
    row = built(name, **settings)
    groups = CHAIN_OF_ARMS.population(row.attempts)

    def weighed(some: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        assert row.credit is not None
        return {
            key: replace(given, weight=1.0 + key.group % 3)
            for key, given in row.credit(some, signals).items()
        }

    moved = []
    for algorithm, played in (
        (replace(row, credit=weighed, memory=None), groups),
        (replace(row, memory=None), [each for k, each in enumerate(groups) for _ in range(1 + k % 3)]),
    ):
        tables = Tables(CHAIN_OF_ARMS, seed=2)
        Run(algorithm, tables).step(played)
        moved.append(tables.ascent)
    for policy in CHAIN_OF_ARMS.policies:
        assert float(moved[1][policy].norm()) > 0
        assert close(moved[0][policy], moved[1][policy], 1e-4)


# -------- Parts of an update


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 4), (3, 1), (2, 2)])
@pytest.mark.parametrize("name", ["remax", "mappo"])
def test_minibatches_are_steps_of_their_own_over_all_samples(
    name: str, epochs: int, minibatches: int
) -> None:
    """16 turns of each agent in equal parts: every part's mean is a step, so all are as many times the whole mean."""
    more = {"gae": MONTE_CARLO} if name == "mappo" else {}
    moved = []
    for settings in ({}, {"epochs": epochs, "minibatches": minibatches}):
        tables = Tables(CHAIN_OF_ARMS, None)
        run = Run(built(name, **more, **settings), tables, rate=TINY)
        run.step(CHAIN_OF_ARMS.population(1))
        moved.append(tables.ascent)
    whole, parts = moved
    for policy in whole:
        assert close(parts[policy], epochs * minibatches * whole[policy], 1e-3)


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"group_size": 2, "loss": {"kl_coefficient": 0.3}}),
    ("grpo", {"group_size": 2, "loss": {"aggregation": "sequence_mean"}}),
    ("grpo", {"group_size": 2, "loss": {"aggregation": "sequence_sum"}}),
    ("grpo", {"group_size": 2, "loss": {"level": "turn"}}),
    ("grpo", {"group_size": 2, "epochs": 2, "minibatches": 3, "loss": {"level": "sequence"}}),
    ("a2c", {}),
    ("ippo", {"epochs": 2}),
    ("marft", {"epochs": 1, "minibatches": 2}),
    ("happo", {"epochs": 2}),
]


def whole_update(kind: tuple[str, dict[str, Any]], ranks: Ranks = ALONE, **limits: Any) -> dict[str, Tensor]:
    """What every policy and critic is after two updates of a chain's population, of weights other than the sampling ones."""
    name, settings = kind
    tables = Tables(CHAIN, seed=4)
    run = Run(built(name, **settings), tables, rate=0.3, ranks=ranks, **limits)
    for _ in range(2):
        run.step(CHAIN.population(1) if name != "grpo" else CHAIN.population(2)[::7])
    return {name: run.weights(name) for name in run.engine.learners}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], within: float = 1e-6) -> bool:
    return one.keys() == other.keys() and all(
        float((one[name] - other[name]).abs().max()) < within for name in one
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_passes_and_ranks_of_a_step_add_up_to_it(kind: tuple[str, dict[str, Any]]) -> None:
    whole = whole_update(kind)
    assert same(whole_update(kind, microbatch_tokens=3), whole)
    assert same(whole_update(kind, microbatch_tokens=9), whole)
    for shared in among_threads(3, lambda ranks: whole_update(kind, ranks)):
        assert same(shared, whole)


class Threads(Ranks):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._table, self._barrier = table, barrier

    def gathered(self, own: Any) -> list[Any]:
        self._table[self.rank] = own
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        return found

    def all_gather(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        return [done for _, done in self.gathered((at, work()))]

    def store_barrier(self) -> Peers:
        return self

    def add(self, tensors: Sequence[Tensor]) -> None:
        for shares in zip(*self.gathered([tensor.clone() for tensor in tensors]), strict=True):
            tensors[0].copy_(sum(shares))
            tensors = tensors[1:]


def among_threads(size: int, program: Callable[[Ranks], Any]) -> list[Any]:
    """What a program returns in every rank."""
    table: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=60)

    def run(rank: int) -> Any:
        try:
            return program(Threads(rank, size, table, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_gradients_are_clipped_policy_by_policy() -> None:
    """a's gradient is 1.58 long and b's 3.6: a bound between them shortens b's alone."""
    free, bound = Tables(CHAIN_OF_ARMS, None), Tables(CHAIN_OF_ARMS, None)
    for tables, most in ((free, None), (bound, 0.5)):
        Run(built("mappo", gae=MONTE_CARLO), tables, max_grad_norm=most).step(CHAIN_OF_ARMS.population(1))
    lengths = sorted(float(moved.norm()) for moved in free.ascent.values())
    most = sum(lengths) / 2
    between = Tables(CHAIN_OF_ARMS, None)
    Run(built("mappo", gae=MONTE_CARLO), between, max_grad_norm=most).step(CHAIN_OF_ARMS.population(1))
    for name, moved in free.ascent.items():
        for tables, bounded in ((bound, 0.5), (between, most)):
            shorter = moved * min(1.0, bounded / float(moved.norm()))
            assert close(tables.ascent[name], shorter, 1e-4)
    assert lengths[0] < most < lengths[1]


# -------- One after another


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("unit", ["token", "turn"])
@pytest.mark.parametrize("game", [CHAIN_OF_ARMS, THREE], ids=["two", "three"])
def test_an_agent_of_happo_goes_up_what_those_before_it_have_left(game: Game, unit: str, epochs: int) -> None:
    """M makes the advantage that of the team as it is by then: each step is ∇J at the newest weights of all."""
    level = {"token": "token", "turn": "turn"}[unit]
    algorithm = built(
        "happo", gae={**MONTE_CARLO, "unit": unit}, loss={**OPEN, "level": level}, epochs=epochs
    )
    tables = Tables(game, None)
    start = {name: table.detach() for name, table in tables.logits.items()}
    rate, orders = 0.3, set()
    run = Run(algorithm, tables, rate=rate)
    for number in range(1, 5):
        run.go_back(start)
        order = algorithm.update.order.choose(game.policies, number, run.seed)
        orders.add(order)
        expected = Tables(game, None)
        for name in order:
            for _ in range(epochs):
                new = expected.logits[name].detach() + rate * expected.gradient()[name]
                expected.logits[name] = new.requires_grad_()
        run.step(game.population(1))
        for name in order:
            assert close(run.weights(name) - start[name], expected.logits[name] - start[name], 1e-4), order
    assert len(orders) > 1


def test_the_critic_of_happo_learns_once() -> None:
    """With the first agent in the order, however many follow: as it does where all move at once."""
    found = []
    for name in ("happo", "mappo"):
        tables = Tables(THREE, None)
        run = Run(built(name, gae=MONTE_CARLO, epochs=2), tables)
        run.step(THREE.population(1))
        found.append(run.weights("critic"))
    assert close(found[0], found[1], 1e-6)


@pytest.mark.parametrize(
    ("order", "movers"),
    [
        ({"name": "alternate"}, ["a", "b", "a", "b", "a"]),
        ({"name": "alternate", "interval": 2}, ["a", "a", "b", "b", "a"]),
        ({"name": "probability", "probability": 1.0}, ["ab"] * 5),
    ],
    ids=str,
)
def test_policies_that_are_not_chosen_stay_unchanged(order: dict[str, Any], movers: Sequence[str]) -> None:
    tables = Tables(CHAIN_OF_ARMS, seed=3)
    run = Run(built("mappo", gae=MONTE_CARLO, loss=OPEN, order=order), tables, rate=0.1)
    critic = run.weights("critic")
    for mover in movers:
        before = {name: run.weights(name) for name in "ab"}
        run.step(CHAIN_OF_ARMS.population(1))
        assert "".join(name for name in "ab" if not torch.equal(run.weights(name), before[name])) == mover
        assert not torch.equal(run.weights("critic"), critic), "critics learn at every step"
        critic = run.weights("critic")


# -------- Critics


def prospects(game: Game) -> dict[Words, float]:
    """What is earned on average after all that a central critic reads, by the sampling policies: prompts and words in time."""
    total: dict[Words, float] = {}
    often: dict[Words, int] = {}
    for outcome, count in game.outcomes():
        said = [game.words[k] for k in outcome]
        for place, words in enumerate(said):
            for k in range(len(words)):
                prefix = (*game.view(said[:place]), *words[:k])
                total[prefix] = total.get(prefix, 0.0) + count * game.earned(said)
                often[prefix] = often.get(prefix, 0) + count
    return {prefix: total[prefix] / often[prefix] for prefix in total}


@pytest.mark.parametrize("lam", [1.0, 0.5, 0.0])
@pytest.mark.parametrize(
    ("name", "game"),
    [("ippo", SOLO), ("mappo", SOLO), ("mappo", CHAIN), ("marft", CHAIN)],
    ids=["ippo alone", "mappo alone", "mappo", "marft"],
)
def test_an_exact_critic_does_not_change(name: str, game: Game, lam: float) -> None:
    """Whatever λ: the expected target of an exact value is that value. One that is off is drawn to it."""
    team_reward = {"team_reward": "sum"}
    algorithm = built(name, gae={"lam": lam, "normalise": "none"}, **team_reward)
    for off in (0.0, 0.5):
        tables = Tables(game, None)
        run = Run(algorithm, tables)
        [critic] = [learner for learner in run.engine.learners if learner not in game.policies]
        exact = torch.zeros_like(run.weights(critic)).float()
        for prefix, value in prospects(game).items():
            exact[tables.model.row(prefix), 0] = value + off
        head = {"value_head.weight": torch.ones(1, 3), "value_head.bias": torch.zeros(1)}
        run.engine.load_weights(critic, {"table": exact, **head})
        run.step(game.population(1))
        moved = run.weights(critic) - exact
        if off:
            assert float(moved.min()) < -0.01
        else:
            assert float(moved.abs().max()) < 1e-5


def test_a_critics_step_by_hand() -> None:
    """Two completions (0), one (1, 0), one (1, 1), worth 1, 1, 0, 2.5: six values, each ½·½(V − R)².

    V is 2 before the first token and 1 before the second: mean errors (4·2 − 4.5)/6 and (2·1 − 2.5)/6.
    """
    tables = Tables(SOLO, None)
    run = Run(built("ippo", gae=MONTE_CARLO, value_loss={"coefficient": 0.5}), tables)
    [critic] = [learner for learner in run.engine.learners if learner != "a"]
    table = torch.zeros_like(run.weights(critic)).float()
    first, second = tables.model.row((MARK,)), tables.model.row((MARK, 1))
    table[first, 0], table[second, 0] = 2.0, 1.0
    head = {"value_head.weight": torch.ones(1, 3), "value_head.bias": torch.zeros(1)}
    run.engine.load_weights(critic, {"table": table, **head})
    run.step(SOLO.population(1))
    moved = run.weights(critic) - table
    assert moved[first].tolist() == pytest.approx([-0.5 * 3.5 / 6] * 3, rel=1e-5)
    assert moved[second].tolist() == pytest.approx([0.5 * 0.5 / 6] * 3, rel=1e-5)
