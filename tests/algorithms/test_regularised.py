"""Regularised dynamics: magnetic mirror descent and R-NaD, by hand, by enumeration, and in rock, paper, scissors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.tables import Words
from tests.algorithms.test_every_algorithm import learned, run_of
from tests.support.episodes import group, turn
from tests.support.expected import ARMS, Game, Run, Tables
from tests.support.tiny import frozen_copy, same_bits
from torch import Tensor

from kapelle import Trainer
from kapelle.algorithm import Outputs, Targets
from kapelle.algorithms.grpo import GRPO
from kapelle.algorithms.mmd import MMD
from kapelle.algorithms.rloo import RLOO
from kapelle.algorithms.rnad import RNaD, check_two_players
from kapelle.errors import ConfigError
from kapelle.rows import Column, Signals, TurnKey
from kapelle.team import Agent, Policy, Team, reference_name
from kapelle.types import Episode, Task

WINS = torch.tensor([[0.0, -1.0, 2.0], [1.0, 0.0, -1.0], [-2.0, 1.0, 0.0]], dtype=torch.float64)
"""Rock, paper, scissors in which rock beats scissors twice over; rows are one's own letter. At equilibrium (1/4, 1/2, 1/4)."""
NASH = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)


def targets(behaviour: Tensor, advantage: Tensor, reference: Tensor | None = None) -> Targets:
    columns = {Column.BEHAVIOUR: behaviour, Column.ADVANTAGE: advantage}
    if reference is not None:
        columns[Column.REFERENCE] = reference
    count = len(behaviour)
    return Targets(torch.arange(count), count, torch.ones(count), {str(k): v for k, v in columns.items()})


def nash_conv(one: Tensor, other: Tensor) -> float:
    """What both could gain."""
    return float((WINS @ other).max() + (WINS @ one).max())


class TestMirrorDescent:
    def test_the_loss_by_hand(self) -> None:
        # Two tokens: ρ = 2 and 1/2, A = 1 and −3, entropies 0.5 and 0.25 nats; α = 0.1, η = 2.
        behaviour = torch.tensor([math.log(0.25), math.log(0.5)])
        logp = torch.tensor([math.log(0.5), math.log(0.25)])
        algorithm = MMD(temperature=0.1, step_size=2.0).build()
        loss = algorithm.policy_loss(
            Outputs(logp, torch.tensor([0.5, 0.25])), targets(behaviour, torch.tensor([1.0, -3.0]))
        )
        step = (2 * math.log(2) - 1) + (-0.5 * math.log(2) + 0.5)
        assert float(loss.total) == pytest.approx(-2.0 + 1.5 + step / 2.0 - 0.1 * 0.75, rel=1e-6)
        assert float(loss.weight) == 2.0

    def test_a_moving_magnet_by_hand(self) -> None:
        behaviour, logp = torch.tensor([math.log(0.25)]), torch.tensor([math.log(0.5)])
        algorithm = MMD(temperature=0.1, step_size=2.0, magnet="moving").build()
        known = targets(behaviour, torch.tensor([1.0]), reference=torch.tensor([math.log(0.125)]))
        loss = algorithm.policy_loss(Outputs(logp), known)
        pull = 2 * math.log(4) - 1
        assert float(loss.total) == pytest.approx(-2.0 + 0.1 * pull + (2 * math.log(2) - 1) / 2, rel=1e-6)

    @pytest.mark.parametrize("magnet", [None, torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)])
    def test_its_minimum_is_the_mirror_step(self, magnet: Tensor | None) -> None:
        alpha, eta = 0.3, 0.8
        sampler = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
        worth = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
        algorithm = MMD(
            temperature=alpha, step_size=eta, magnet="uniform" if magnet is None else "moving"
        ).build()
        found = _minimised(algorithm.policy_loss, sampler, worth, magnet)
        towards = torch.full((3,), 1 / 3, dtype=torch.float64) if magnet is None else magnet
        expected = _mirror(sampler, worth, towards, alpha, eta)
        assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-5)

    def test_two_players_come_to_the_regularised_equilibrium_at_the_known_rate(self) -> None:
        # No letter changes another's worth by more than 2, so that L = 2.
        alpha = 1.0
        eta = alpha / 4.0
        algorithm = MMD(temperature=alpha, step_size=eta).build()
        at_rest = torch.full((3,), 1 / 3, dtype=torch.float64)
        for _ in range(2000):
            at_rest = 0.9 * at_rest + 0.1 * (WINS @ at_rest / alpha).softmax(0)
        one = torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64)
        other = torch.tensor([0.05, 0.05, 0.9], dtype=torch.float64)

        def away() -> float:
            return sum(float((at_rest * (at_rest / each).log()).sum()) for each in (one, other))

        began = away()
        for step in range(1, 26):
            one, other = (
                _minimised(algorithm.policy_loss, own, WINS @ theirs)
                for own, theirs in ((one, other), (other, one))
            )
            assert away() <= began / (1.0 + eta * alpha) ** step + 1e-6
        assert away() < 5e-3 * began

    def test_one_pass_is_rloo_with_an_entropy_bonus(self) -> None:
        game = Game(("a", "b"), lambda said: {"a": _paid(said), "b": -_paid(said)}, ARMS)
        mmd = MMD(group_size=2, temperature=0.1, epochs=1).build()
        rloo = RLOO.model_validate(
            {"group_size": 2, "team_reward": "individual", "loss": {"entropy_coefficient": 0.1}}
        ).build()
        moved = []
        for algorithm in (mmd, rloo):
            tables = Tables(game, None)
            Run(algorithm, tables).step(game.population(2))
            moved.append(tables.ascent)
        for name in game.policies:
            assert torch.allclose(moved[0][name], moved[1][name], atol=1e-6)


class TestRegularisedNash:
    def test_each_move_costs_its_player_and_rewards_the_opponent(self) -> None:
        # a, b, b and a speak in turn; b is paid 1, a −1. log(π/π_reg) is log 2, log 4, log 8 and log 16; η = 0.5.
        known = [math.log(2), math.log(4), math.log(8), math.log(16)]
        task = Task("t", "")
        turns = tuple(turn(name, k, completion_ids=(1,), logprobs=(-0.5,)) for k, name in enumerate("abba"))
        episode = Episode(task, 0, ("a", "b"), turns, {"a": -1.0, "b": 1.0})
        signals = Signals(
            reference={TurnKey(0, 0, k): torch.tensor([-0.5 - far]) for k, far in enumerate(known)}
        )
        reward = RNaD(eta=0.5).rewards([group(episode)], signals)
        assert [reward[TurnKey(0, 0, k)] for k in range(4)] == pytest.approx(
            [
                -0.5 * known[0] + 0.5 * (known[1] + known[2]),
                -0.5 * known[1],
                1.0 - 0.5 * known[2] + 0.5 * known[3],
                -1.0 - 0.5 * known[3],
            ],
            rel=1e-5,
        )

    def test_the_tokens_of_a_move_add_up(self) -> None:
        one = turn("a", 0, completion_ids=(1, 2), logprobs=(-0.5, -1.0))
        episode = Episode(Task("t", ""), 0, ("a", "b"), (one,), {"a": 0.0, "b": 0.0})
        signals = Signals(reference={TurnKey(0, 0, 0): torch.tensor([-1.5, -3.0])})
        assert RNaD(eta=1.0).rewards([group(episode)], signals)[TurnKey(0, 0, 0)] == pytest.approx(-3.0)

    def test_in_one_move_each_it_is_a_penalty_to_the_reference(self) -> None:
        """The expected update, enumerated, from weights that have left their reference."""
        paid: dict[tuple[int, ...], float] = {(0,): 1.0, (1,): -0.5, (2,): 2.0}
        game = Game(("a",), lambda said: {"a": paid[said[0]]}, ARMS)
        penalty = GRPO.model_validate(
            {
                "group_size": 2,
                "scale": "none",
                "team_reward": "individual",
                "loss": {"kl_coefficient": 0.15, "kl_estimator": "k2"},
            }
        ).build()
        # One agent, for whom there is no other's term: the row without its check of two players. GRPO's mean holds the attempt
        # itself, which halves what it gives in groups of two, so that its penalty is half of η.
        settings = RNaD(group_size=2, eta=0.3)
        rnad = settings.row("rnad", judge=settings.credit, reference=True)
        moved = []
        for algorithm in (penalty, rnad):
            tables = Tables(game, None)
            run = Run(algorithm, tables)
            reference = run.engine.weights(reference_name("a"))
            drawn = torch.randn(reference["table"].shape, generator=torch.Generator().manual_seed(3))
            run.engine.load_weights(reference_name("a"), {"table": drawn})
            run.step(game.population(2))
            moved.append(tables.ascent["a"])
        assert float(moved[0].norm()) > 0.01
        assert torch.allclose(2.0 * moved[0], moved[1], atol=1e-5)

    def test_rock_paper_scissors_converges_to_its_equilibrium(self) -> None:
        """Exact gradients of the transformed returns; the game itself sends the same steps round."""
        regularised, plain = _dynamics(0.5, 400), _dynamics(0.0, 400, 2000)
        assert nash_conv(*regularised) < 0.01
        assert regularised[0].tolist() == pytest.approx(NASH.tolist(), abs=0.01)
        assert nash_conv(*plain) > 0.3
        # With a reference that stays, play rests where the pull leaves it.
        assert nash_conv(*_dynamics(0.5, 10_000, 2000)) > 0.1

    def test_it_is_for_two_players(self) -> None:
        for count in (1, 3):
            names = [f"agent_{k}" for k in range(count)]
            team = Team(
                tuple(Agent(name) for name in names),
                {"base": Policy("base")},
                dict.fromkeys(names, "base"),
            )
            with pytest.raises(ConfigError, match="two players"):
                check_two_players(team)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "rnad", "group_size": 2, "reference_every": 2},
        {"name": "mmd", "group_size": 2, "magnet": "moving", "reference_every": 2, "temperature": 0.5},
    ],
    ids=lambda settings: str(settings["name"]),
)
def test_a_moving_reference_is_in_the_checkpoint(algorithm: dict[str, Any], tmp_path: Path) -> None:
    settings = run_of("grpo")
    settings |= {"algorithm": algorithm, "training": {"steps": 5, "tasks_per_step": 2}}

    def references(trainer: Trainer) -> dict[str, Any]:
        return {
            name: frozen_copy(trainer.engine.weights(reference_name(name))) for name in trainer.team.trained
        }

    with Trainer(**settings) as whole:
        start = references(whole)
        whole.train()
        expected, held = learned(whole), references(whole)
    # Two steps after it moved, and one before it moves again: neither the start nor the policy.
    with Trainer(**settings, run_dir=tmp_path / "run") as first:
        first.train(3)
        then = references(first)
    with Trainer(**settings, run_dir=tmp_path / "run", resume=True) as second:
        for name, weights in references(second).items():
            assert same_bits(weights, then[name])
            assert not same_bits(weights, start[name])
            assert not same_bits(weights, frozen_copy(second.engine.weights(name)))
        second.train()
        assert same_bits(learned(second), expected)
        assert all(same_bits(held[name], weights) for name, weights in references(second).items())


def _paid(said: Sequence[Words]) -> float:
    one, other = ((0,), (1,), (2,)).index(tuple(said[0])), ((0,), (1,), (2,)).index(tuple(said[1]))
    return float(WINS[one, other])


def _mirror(own: Tensor, worth: Tensor, magnet: Tensor, alpha: float, eta: float) -> Tensor:
    """The closed form of a mirror step: 2206.05825, (π·μ^{αη}·e^{ηQ})^{1/(1 + αη)}, normalised."""
    return ((own.log() + alpha * eta * magnet.log() + eta * worth) / (1.0 + alpha * eta)).softmax(0)


def _minimised(policy_loss: Any, sampler: Tensor, worth: Tensor, magnet: Tensor | None = None) -> Tensor:
    """Return the policy with the least expected loss: every letter counts as often as the sampling policy says it."""
    each = [
        targets(
            sampler.log()[k : k + 1], worth[k : k + 1], None if magnet is None else magnet.log()[k : k + 1]
        )
        for k in range(len(sampler))
    ]
    logits = sampler.log().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=100, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        logp = logits.log_softmax(0)
        entropy = -(logp.exp() * logp).sum()[None]
        total = torch.zeros((), dtype=torch.float64)
        for k, known in enumerate(each):
            total = total + sampler[k] * policy_loss(Outputs(logp[k : k + 1], entropy), known).total
        total.backward()
        return total

    optimizer.step(closure)
    return logits.detach().softmax(0)


def _dynamics(eta: float, every: int, steps: int = 8000, rate: float = 0.05) -> tuple[Tensor, Tensor]:
    """Follow the exact gradient of what R-NaD makes of rock, paper, scissors; both say a letter at the same moment."""
    settings = RNaD(eta=eta or 1e-12)
    logits = [
        torch.tensor([1.0, 0.0, -0.5], dtype=torch.float64),
        torch.tensor([-0.5, 0.5, 0.0], dtype=torch.float64),
    ]
    kept = [each.clone() for each in logits]
    # The transformed rewards are linear in the payoffs and in each move's log-ratio: their coefficients are read off the library once.
    own, other = _coefficients(settings)
    for step in range(1, steps + 1):
        logp, before = [each.log_softmax(0) for each in logits], [each.log_softmax(0) for each in kept]
        strayed = [now - then for now, then in zip(logp, before, strict=True)]
        for seat, rest in ((0, 1), (1, 0)):
            worth = (
                WINS @ logp[rest].exp()
                + own * strayed[seat]
                + other * (logp[rest].exp() * strayed[rest]).sum()
            )
            chance = logp[seat].exp()
            logits[seat] = logits[seat] + rate * chance * (worth - (chance * worth).sum())
        if step % every == 0:
            kept = [each.clone() for each in logits]
    return logits[0].softmax(0), logits[1].softmax(0)


def _coefficients(settings: RNaD) -> tuple[float, float]:
    """What a nat of one's own, and of the other's, distance from the reference adds to a's return."""
    found = []
    for far in ((1.0, 0.0), (0.0, 1.0)):
        turns = tuple(
            turn(name, k, completed_before=0, completion_ids=(1,), logprobs=(-0.5,))
            for k, name in enumerate("ab")
        )
        episode = Episode(Task("t", ""), 0, ("a", "b"), turns, {"a": 0.0, "b": 0.0})
        reference = {TurnKey(0, 0, k): torch.tensor([-0.5 - far[k]]) for k in range(2)}
        found.append(settings.rewards([group(episode)], Signals(reference=reference))[TurnKey(0, 0, 0)])
    return found[0], found[1]
