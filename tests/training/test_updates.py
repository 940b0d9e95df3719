"""Orders of updates: who moves when, and HAPPO's factor by hand on an engine that keeps a diary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from tests.support.episodes import episode, group, turn
from tests.support.tiny import (
    draw_samples,
    first_gradient,
    lora_policies,
    same_bits,
    train_engine,
    with_behaviour,
)
from torch import Tensor

from kapelle.algorithm import Order, UpdateSamples
from kapelle.algorithms.happo import HAPPO
from kapelle.algorithms.mappo import MAPPO
from kapelle.algorithms.shared.orders import (
    Alternate,
    Probability,
    Sequential,
    rounds_of,
)
from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.algorithms.signals.proximal import ProximalLogProbs
from kapelle.engines.train.protocol import Objective, TrainEngine
from kapelle.rows import Sample, TurnKey
from kapelle.training.loop import update_in_order
from kapelle.types import Group

LOSS = SurrogateConfig().build()
SEQUENTIAL = Sequential(name="sequential").build()


class TestOrders:
    def test_alternate_gives_each_its_interval(self) -> None:
        choose = Alternate(name="alternate", interval=2).build().choose
        assert [choose("abc", step, 0)[0] for step in range(1, 9)] == list("aabbccaa")

    def test_unequal_intervals_are_siirls_clocks(self) -> None:
        # siiRL counts steps from 0: a moves where ⌊step / 2⌋ is even, b where ⌊step / 3⌋ is odd, c has no `train_cycle`.
        choose = Alternate(name="alternate", interval={"a": 2, "b": 3}).build().choose
        moved = ["".join(choose(("a", "b"), step, 0)) for step in range(1, 13)]
        assert moved == ["a", "a", "", "b", "ab", "ab", "", "", "a", "ab", "b", "b"]
        assert "".join(choose(("a", "b", "c"), 3, 0)) == "c"
        same = Alternate(name="alternate", interval={"a": 2, "b": 2, "c": 2}).build().choose
        one = Alternate(name="alternate", interval=2).build().choose
        assert all(same("abc", step, 0) == one("abc", step, 0) for step in range(1, 30))

    def test_probability_moves_at_least_one_and_repeats_by_seed(self) -> None:
        choose = Probability(name="probability", probability=0.3).build().choose
        drawn = [choose("abc", step, 5) for step in range(1, 2001)]
        assert all(drawn)
        assert drawn == [choose("abc", step, 5) for step in range(1, 2001)]
        # 0.3, and a third of the 0.7³ of steps in which no one was drawn.
        share = sum("a" in chosen for chosen in drawn) / 2000
        assert share == pytest.approx(0.3 + 0.343 / 3, abs=0.04)

    def test_sequential_draws_a_fresh_order_each_step(self) -> None:
        orders = {SEQUENTIAL.choose("abc", step, 0) for step in range(1, 60)}
        assert len(orders) == 6


class Diary:
    """A train engine that notes what it is given and whose scores after each update are told in advance."""

    def __init__(self, after: Mapping[str, Sequence[float]]) -> None:
        self.after = after
        self.given: list[dict[str, list[float]]] = []

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        noted: dict[str, list[float]] = {}
        for sample in samples:
            noted.setdefault(sample.learner, []).extend(sample.columns["advantage"].tolist())
        self.given.append(noted)
        return {f"grad_norm/{name}": 1.0 for name in noted} | {"parity/max": float(len(self.given))}

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        return [torch.tensor(self.after[s.learner][: len(s.targets)]) for s in samples]


def step_of(*speakers: str) -> tuple[list[Group], dict[TurnKey, Sample]]:
    """One episode in which each speaker says two tokens at log-prob −1, with advantages 1, 2, …"""
    turns = [turn(name, k) for k, name in enumerate(speakers)]
    samples = {}
    for k, one in enumerate(turns):
        columns = {"behaviour": torch.full((2,), -1.0), "advantage": torch.full((2,), float(k + 1))}
        samples[TurnKey(0, 0, k)] = Sample(one.agent, (5, 6, 20, 21), (2, 3), columns)
    return [group(episode(*turns))], samples


def one_after_another(diary: Diary, chosen: Sequence[str], *speakers: str) -> dict[str, float]:
    groups, samples = step_of(*speakers)
    engine = cast("TrainEngine", diary)
    return update_in_order(engine, Objective(LOSS), SEQUENTIAL, chosen, UpdateSamples(samples, [], groups))


class TestFactor:
    def test_two_agents_by_hand(self) -> None:
        # After its update a says its two tokens at −0.5 and −0.7: ρ = exp(0.5 + 0.3) for the whole turn.
        diary = Diary({"a": [-0.5, -0.7]})
        one_after_another(diary, ("a", "b"), "a", "b")
        rho = math.exp(0.8)
        assert diary.given[0] == {"a": [1.0, 1.0]}
        assert diary.given[1]["b"] == pytest.approx([2.0 * rho, 2.0 * rho])

    def test_it_follows_the_order_of_updates_and_not_of_time(self) -> None:
        diary = Diary({"b": [-1.0, -1.5]})
        one_after_another(diary, ("b", "a"), "a", "b")
        assert diary.given[0] == {"b": [2.0, 2.0]}
        assert diary.given[1]["a"] == pytest.approx([math.exp(-0.5)] * 2)

    def test_three_agents_multiply_and_rounds_stay_apart(self) -> None:
        # a moves in rounds 0 and 1, b and c in round 0 alone: c's factor is ρ_a·ρ_b.
        diary = Diary({"a": [-0.9, -1.0], "b": [-1.2, -1.0]})
        one_after_another(diary, ("a", "b", "c"), "a", "b", "c", "a")
        assert diary.given[1]["b"] == pytest.approx([2 * math.exp(0.1)] * 2)
        assert diary.given[2]["c"] == pytest.approx([3 * math.exp(0.1 - 0.2)] * 2)

    def test_observations_are_learned_in_the_update_of_their_policy(self) -> None:
        groups, samples = step_of("a", "b")
        zero = {"behaviour": torch.zeros(1), "advantage": torch.zeros(1)}
        observed = [Sample(name, (5, 6), (1,), zero, mask=torch.zeros(1), observed=True) for name in "abc"]
        batch = UpdateSamples(samples, [], groups, observed)
        for order, given in (
            (SEQUENTIAL, [{"a": [1.0, 1.0, 0.0]}, {"b": [2.0, 2.0, 0.0]}]),
            (Order(), [{"a": [1.0, 1.0, 0.0], "b": [2.0, 2.0, 0.0]}]),
        ):
            diary = Diary({"a": [-1.0, -1.0]})
            update_in_order(cast("TrainEngine", diary), Objective(LOSS), order, ("a", "b"), batch)
            assert diary.given == given

    def test_an_agent_without_a_turn_in_the_round_contributes_one(self) -> None:
        diary = Diary({"b": [0.0, 0.0]})
        one_after_another(diary, ("b", "a"), "a", "b", "a")
        assert diary.given[1]["a"] == pytest.approx([math.exp(2.0)] * 2 + [3.0, 3.0])

    def test_a_ratio_is_clamped(self) -> None:
        diary = Diary({"a": [30.0, 30.0]})
        one_after_another(diary, ("a", "b"), "a", "b")
        assert diary.given[1]["b"] == pytest.approx([2 * math.exp(20.0)] * 2)

    def test_metrics_are_those_of_all_updates(self) -> None:
        row = one_after_another(Diary({"a": [-1.0, -1.0]}), ("a", "b"), "a", "b")
        assert row == {
            "grad_norm/a": 1.0, "grad_norm/b": 1.0, "parity/max": 2.0, "happo_factor": 1.0, "happo_factor_spread": 0.0
        }  # fmt: skip


class TestManyEpisodes:
    def test_each_episode_has_its_own_factor(self) -> None:
        # Three episodes; after its update a says its one token at −1 + 0.1, + 0.2 and + 0.4.
        groups = [group(*(episode(turn("a", 0, 1), turn("b", 1, 1)) for _ in range(3)))]
        samples = {
            TurnKey(0, e, k): Sample(
                name, (5, 6, 20 + e), (2,), {"behaviour": torch.tensor([-1.0]), "advantage": torch.ones(1)}
            )
            for k, name in ((1, "b"), (0, "a"))
            for e in (2, 0, 1)
        }
        gain = {20: 0.1, 21: 0.2, 22: 0.4}

        class ByToken(Diary):
            def score(self, samples: Sequence[Sample]) -> list[Tensor]:
                return [torch.tensor([-1.0 + gain[s.tokens[-1]]]) for s in samples]

        diary = ByToken({})
        update_in_order(
            cast("TrainEngine", diary),
            Objective(LOSS),
            SEQUENTIAL,
            ("a", "b"),
            UpdateSamples(samples, [], groups),
        )
        # In the order of the samples: episodes 2, 0, 1.
        assert diary.given[1]["b"] == pytest.approx([math.exp(0.4), math.exp(0.1), math.exp(0.2)])

    @pytest.mark.parametrize(("loss", "expected"), [({}, 0.5), ({"importance_cap": 2.0}, 0.3)])
    def test_the_old_policy_is_that_of_the_loss(self, loss: dict[str, Any], expected: float) -> None:
        # V-trace asks for the trainer's own log-probs too: they are there in both cases.
        algorithm = HAPPO.model_validate({"loss": loss, "gae": {"vtrace": True}}).build()
        assert algorithm.need(ProximalLogProbs)
        columns = {
            "behaviour": torch.tensor([-1.0]),
            "proximal": torch.tensor([-0.8]),
            "advantage": torch.ones(1),
        }
        samples = {TurnKey(0, 0, k): Sample(name, (5, 6, 20), (2,), columns) for k, name in enumerate("ab")}
        groups = [group(episode(turn("a", 0, 1), turn("b", 1, 1)))]
        diary = Diary({"a": [-0.5]})
        update_in_order(
            cast("TrainEngine", diary),
            Objective(LOSS),
            algorithm.update.order,
            ("a", "b"),
            UpdateSamples(samples, [], groups),
        )
        assert diary.given[1]["b"] == pytest.approx([math.exp(expected)])


def test_rounds_count_each_agents_own_turns() -> None:
    rounds = rounds_of([group(episode(turn("a", 0), turn("b", 1), turn("a", 2)))])
    assert [place[2] for place in rounds.values()] == [0, 0, 1]


class TestOnTheEngine:
    def test_who_was_not_chosen_stays_bit_for_bit(self) -> None:
        engine = train_engine(lora_policies("a", "b"))
        groups, _ = step_of("a", "b")
        drawn = with_behaviour(engine, draw_samples(["a", "b"], [(4, 3)]))
        samples = {TurnKey(0, 0, k): sample for k, sample in enumerate(drawn)}
        before = engine.learners["b"].state()
        held = {key: value.clone() for key, value in before["weights"].items()}
        order = Alternate(name="alternate").build()
        update_in_order(
            engine, Objective(LOSS), order, order.choose(("a", "b"), 1, 0), UpdateSamples(samples, [], groups)
        )
        assert (engine.learners["a"].steps, engine.learners["b"].steps) == (1, 0)
        assert same_bits(dict(engine.learners["b"].state()["weights"]), held)

    def test_one_agents_happo_is_its_mappo(self) -> None:
        rows: list[Any] = []
        for order in (SEQUENTIAL, HAPPO().build().update.order, MAPPO().build().update.order):
            engine = train_engine(lora_policies("a"))
            drawn = with_behaviour(engine, draw_samples(["a"], [(4, 3), (5, 2)]))
            samples = {TurnKey(0, e, 0): sample for e, sample in enumerate(drawn)}
            groups = [group(episode(turn("a", 0)), episode(turn("a", 0)))]
            update_in_order(
                engine, Objective(LOSS), order, order.choose(("a",), 1, 0), UpdateSamples(samples, [], groups)
            )
            rows.append(first_gradient(engine, "a"))
        assert same_bits(rows[0], rows[2])
        assert same_bits(rows[1], rows[2])

    def test_the_factor_on_the_engine_is_the_ratio_of_its_own_log_probs(self) -> None:
        engine = train_engine(lora_policies("a", "b"))
        drawn = with_behaviour(engine, draw_samples(["a", "b"], [(4, 3)]))
        samples = {TurnKey(0, 0, k): sample for k, sample in enumerate(drawn)}
        groups = [group(episode(turn("a", 0, 3), turn("b", 1, 3)))]
        row = update_in_order(
            engine, Objective(LOSS), SEQUENTIAL, ("a", "b"), UpdateSamples(samples, [], groups)
        )
        # b went last: the factor that it saw is a's ratio, which the engine still gives.
        moved = (engine.score([drawn[0]])[0] - drawn[0].columns["behaviour"]).double().sum()
        assert abs(float(moved)) > 1e-4
        assert row["happo_factor"] == pytest.approx(math.exp(float(moved)), rel=1e-5)
