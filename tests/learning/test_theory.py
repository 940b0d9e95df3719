"""What theory says of the algorithms with a critic, on games small enough to be known exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any, cast

import pytest
import torch
from tests.learning.local_view import LocalMAPPO
from tests.support.episodes import episode, group, turn
from tests.support.tiny import learners_of, same_bits, sections, team_of
from torch import Tensor

from kapelle.algorithm import Algorithm, Outputs, Targets, UpdateSamples
from kapelle.algorithms.happo import HAPPO
from kapelle.algorithms.mappo import MAPPO
from kapelle.algorithms.ppo import IPPO, PPO
from kapelle.algorithms.signals.critic_values import value_samples
from kapelle.engines.train.protocol import Objective, TrainEngine
from kapelle.rows import Sample, Signals, TurnKey
from kapelle.training.loop import update_in_order
from kapelle.training.trainer import Trainer
from kapelle.types import Episode, Group

SEEDS = range(10)
ACTIONS = (0, 1)
PAYOFF = torch.tensor([[0.0, 1.0], [1.0, -3.0]], dtype=torch.float64)
"""Whoever deviates alone earns 1 for both; deviating together costs 3."""


class Tables:
    """A train engine whose policies are tables: one logit per action, and plain gradient steps.

    The token of a sample after its prompt is its action.
    """

    def __init__(self, logits: Mapping[str, Tensor], rate: float) -> None:
        self.logits = {name: values.clone().requires_grad_() for name, values in logits.items()}
        self.rate = rate

    def log_probs(self, name: str) -> Tensor:
        return self.logits[name].log_softmax(-1)

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        return [self.log_probs(s.learner)[[s.tokens[k] for k in s.targets]].detach() for s in samples]

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        learners = sorted({sample.learner for sample in samples})
        for _ in range(objective.epochs):
            for name in learners:
                own = [sample for sample in samples if sample.learner == name]
                gradient = torch.autograd.grad(self.loss(name, own, objective), self.logits[name])[0]
                with torch.no_grad():
                    self.logits[name] -= self.rate * gradient
        return {}

    def loss(self, name: str, own: Sequence[Sample], objective: Objective) -> Tensor:
        action_K = torch.tensor([sample.tokens[-1] for sample in own])
        columns = {column: torch.cat([sample.columns[column] for sample in own]) for column in own[0].columns}
        targets = Targets(torch.arange(len(own)), len(own), torch.ones(len(own)), columns)
        loss = objective.policy_loss(Outputs(self.log_probs(name)[action_K]), targets)
        return loss.total / loss.weight


def exact_return(engine: Tables) -> float:
    """The team's expected return, from the probabilities of all joint actions."""
    first_A, second_A = (engine.log_probs(name).detach().exp() for name in "ab")
    return float((first_A.outer(second_A) * PAYOFF).sum())


def expected_step(engine: Tables) -> tuple[list[Group], dict[TurnKey, Sample]]:
    """Every joint action once, its advantage times its probability: a step without sampling noise.

    A clipped surrogate is homogeneous in positive factors of the advantage, so this is its expectation.
    """
    base = exact_return(engine)
    log_probs = {name: engine.log_probs(name).detach() for name in "ab"}
    episodes: list[Episode] = []
    samples: dict[TurnKey, Sample] = {}
    for e, joint in enumerate(itertools.product(ACTIONS, ACTIONS)):
        weight = torch.stack([log_probs[n][a] for n, a in zip("ab", joint, strict=True)]).sum().exp()
        advantage = (PAYOFF[joint] - base) * weight * 4
        episodes.append(episode(*(turn(name, k, 1) for k, name in enumerate("ab"))))
        for k, (name, action) in enumerate(zip("ab", joint, strict=True)):
            columns = {"behaviour": log_probs[name][[action]], "advantage": advantage[None]}
            samples[TurnKey(0, e, k)] = Sample(name, (9, action), (1,), columns)
    return [group(*episodes)], samples


def returns(algorithm: Algorithm, seed: int, steps: int = 5, rate: float = 1.0) -> list[float]:
    """The exact return before every step and after the last, from rarely deviating agents."""
    generator = torch.Generator().manual_seed(seed)
    rare_2 = 0.03 + 0.12 * torch.rand(2, generator=generator, dtype=torch.float64)
    logits = {name: torch.stack([1 - p, p]).log() for name, p in zip("ab", rare_2, strict=True)}
    engine = Tables(logits, rate)
    seen = [exact_return(engine)]
    for step in range(1, steps + 1):
        groups, samples = expected_step(engine)
        chosen = algorithm.update.order.choose(("a", "b"), step, seed)
        objective = Objective(algorithm.policy_loss, epochs=algorithm.update.epochs)
        update_in_order(
            cast("TrainEngine", engine),
            objective,
            algorithm.update.order,
            chosen,
            UpdateSamples(samples, [], groups),
        )
        seen.append(exact_return(engine))
    return seen


def large(settings: type[HAPPO | MAPPO]) -> Algorithm:
    """Many passes over one step's data, and a wide clip that hardly holds them."""
    return settings.model_validate({"epochs": 60, "loss": {"clip_low": 0.8, "clip_high": 5.0}}).build()


def worst_change(seen: Sequence[float]) -> float:
    return min(after - before for before, after in itertools.pairwise(seen))


class TestSimultaneousSteps:
    """Both agents see that deviating alone would pay. Moving at once they do it together.

    In a game of one round the second agent's surrogate E[min(ρM, clip(ρ)M)], M = ρ of the first times the
    advantage, is nowhere above the joint return and equal to it at ρ = 1: what raises one raises the other.
    """

    @pytest.mark.sample(6)
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", SEEDS)
    def test_large_ones_lower_the_joint_return(self, seed: int) -> None:
        assert worst_change(returns(large(MAPPO), seed)) < -0.05

    @pytest.mark.sample(6)
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", SEEDS)
    def test_one_after_another_they_never_do(self, seed: int) -> None:
        seen = returns(large(HAPPO), seed)
        assert worst_change(seen) > -1e-6
        assert seen[-1] > seen[0] + 0.3

    @pytest.mark.parametrize("seed", SEEDS)
    def test_small_ones_do_no_harm(self, seed: int) -> None:
        small = MAPPO.model_validate({"epochs": 1}).build()
        assert worst_change(returns(small, seed, steps=20, rate=0.1)) > 0.0


class TestHiddenState:
    """b is told a bit that a is not; they speak at once, and the team earns 10 for the bit and 1 for a's word."""

    GROUPS = (
        group(
            *(
                episode(
                    turn("a", 0, 1, completed_before=0, prompt_ids=(5, 6), completion_ids=(20 + word,)),
                    turn("b", 1, 1, completed_before=0, prompt_ids=(5, 7 + bit), completion_ids=(30,)),
                    rewards={"a": 10.0 * bit + word},
                )
                for bit, word in itertools.product((0, 1), (0, 1))
            )
        ),
    )

    def advantages(self, settings: type[IPPO | MAPPO], agent: str) -> Tensor:
        """Advantages of an agent's turns where the critic is exact: the mean return over all that look alike."""
        algorithm = settings.model_validate({"gae": {"lam": 1.0, "normalise": "none"}}).build()
        assert algorithm.critic is not None
        assert algorithm.credit is not None
        team = team_of("a", "b", critics={"a": "va", "b": "vb"})
        asked, _ = value_samples(self.GROUPS, team, algorithm.critic)
        alike: dict[tuple[object, ...], list[float]] = {}
        seen = {key: (s.learner, s.tokens[: s.targets[0]]) for key, s in asked.items()}
        for key in asked:
            alike.setdefault(seen[key], []).append(self.GROUPS[0].episodes[key.episode].rewards["a"])
        values = {k: torch.tensor([sum(alike[seen[k]]) / len(alike[seen[k]])]) for k in asked}
        given = algorithm.credit(self.GROUPS, Signals(values))
        number = "ab".index(agent)
        return torch.cat([given[TurnKey(0, e, number)].advantage_T for e in range(4)])

    def test_a_central_critic_takes_it_out_of_the_advantage(self) -> None:
        # Returns 0, 1, 10, 11: around 5.5, or around 0.5 and 10.5 once the bit is known.
        assert self.advantages(IPPO, "a").tolist() == [-5.5, -4.5, 4.5, 5.5]
        assert self.advantages(MAPPO, "a").tolist() == [-0.5, 0.5, -0.5, 0.5]

    def test_the_variance_falls_by_that_of_the_hidden_state(self) -> None:
        # Var R = E Var(R | bit) + Var E(R | bit) = ¼ + 25.
        local, central = (self.advantages(s, "a").var(correction=0) for s in (IPPO, MAPPO))
        assert (float(local), float(central)) == (25.25, 0.25)

    def test_who_knows_the_state_gains_nothing(self) -> None:
        assert torch.equal(self.advantages(IPPO, "b"), self.advantages(MAPPO, "b"))

    def test_neither_critic_changes_what_an_action_is_worth_beside_another(self) -> None:
        for settings in (IPPO, MAPPO):
            worth = self.advantages(settings, "a")
            assert float(worth[1::2].mean() - worth[::2].mean()) == 1.0


@cache
def weights_after(agents: int, **algorithm: Any) -> dict[str, Any]:
    """Every learner's state after two steps of a tiny run, to read only."""
    return states_after(agents, algorithm)


def states_after(agents: int, algorithm: Mapping[str, Any]) -> dict[str, Any]:
    made = sections(
        algorithm=algorithm,
        workflow={"name": "solo" if agents == 1 else "debate"},
        team={"agents": agents, "lora": {"rank": 2, "alpha": 4.0}, "sampling": {"max_tokens": 4}},
        training={"steps": 2, "tasks_per_step": 2},
    )
    with Trainer(**made) as run:
        list(run.steps())
        return {name: deepcopy(one.state()) for name, one in learners_of(run.engine).items()}


def nearly(one: Any, other: Any) -> bool:
    """Whether two states are the same to rounding: their tensors, and what else they hold."""
    if isinstance(one, torch.Tensor):
        return bool(torch.allclose(one.float(), other.float(), rtol=1e-4, atol=1e-6))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(nearly(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(nearly, one, other))
    return bool(one == other)


class TestIdentities:
    """Whole runs, bitwise: sampling, critics, advantages, updates."""

    @pytest.mark.slow
    @pytest.mark.parametrize("settings", [PPO, MAPPO, HAPPO])
    def test_alone_an_agent_learns_the_same_by_any_of_them(
        self, settings: Callable[[], PPO | MAPPO | HAPPO]
    ) -> None:
        expected = weights_after(1, name="ippo")
        states = weights_after(1, name=settings().name)
        assert len(expected) == 2  # the policy and its critic
        assert same_bits(states, expected)

    def test_ppo_that_learns_once_from_each_sample_is_a2c(self) -> None:
        plain = {
            "name": "ippo",
            "gae": {"lam": 1.0, "normalise": "none"},
            "loss": {"entropy_coefficient": 0.01},
        }
        states = states_after(2, {"name": "a2c"})
        assert len(states) == 4
        assert nearly(states, states_after(2, {**plain, "epochs": 1}))
        assert not nearly(states, states_after(2, {**plain, "epochs": 2}))

    def test_with_a_local_view_mappo_is_ippo(self) -> None:
        name = LocalMAPPO().name
        expected = weights_after(2, name="ippo")
        states = weights_after(2, name=name)
        assert len(expected) == 4
        assert same_bits(states, expected)

    def test_with_its_central_view_it_is_not(self) -> None:
        local = weights_after(2, name="ippo")
        central = weights_after(2, name="mappo")
        assert not same_bits(central, local)
